"""Every key of a DeepSpeed JSON by its dotted path: what it is called here, what it must not ask for, or that it means nothing here.

Source: https://www.deepspeed.ai/docs/config-json and the configuration classes of DeepSpeed 0.17.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

# The field of the schema that a key sets. Keys of the batch stand apart, because the world decides with them.
FIELDS: Mapping[str, str] = {
    "zero_optimization.stage": "zero_stage",
    "zero_optimization.zero_quantized_weights": "zero_quantized_weights",
    "zero_optimization.zero_hpz_partition_size": "zero_hpz_partition_size",
    "zero_optimization.zero_quantized_gradients": "zero_quantized_gradients",
    "fp16.enabled": "fp16",
    "fp16.loss_scale": "loss_scale",
    "fp16.initial_scale_power": "initial_loss_scale",
    "fp16.loss_scale_window": "loss_scale_window",
    "fp16.hysteresis": "hysteresis",
    "fp16.min_loss_scale": "min_loss_scale",
    "bf16.enabled": "bf16",
    "gradient_clipping": "clip_grad",
    "steps_per_print": "log_interval",
}

MICRO_KEY, ACCUMULATION_KEY, GLOBAL_KEY = "train_micro_batch_size_per_gpu", "gradient_accumulation_steps", "train_batch_size"
BATCH_KEYS = (GLOBAL_KEY, MICRO_KEY, ACCUMULATION_KEY)

# Keys that change neither numbers nor what rests in memory here, whatever their value.
WITHOUT_MEANING: frozenset[str] = frozenset(
    """
    zero_optimization.allgather_bucket_size zero_optimization.allgather_partitions zero_optimization.contiguous_gradients
    zero_optimization.elastic_checkpoint zero_optimization.gather_16bit_weights_on_model_save
    zero_optimization.ignore_unused_parameters zero_optimization.load_from_fp32_weights zero_optimization.log_trace_cache_warnings
    zero_optimization.max_live_parameters zero_optimization.max_reuse_distance zero_optimization.memory_efficient_linear
    zero_optimization.model_persistence_threshold zero_optimization.module_granularity_threshold zero_optimization.overlap_comm
    zero_optimization.override_module_apply zero_optimization.param_persistence_threshold
    zero_optimization.pipeline_loading_checkpoint zero_optimization.prefetch_bucket_size zero_optimization.reduce_bucket_size
    zero_optimization.reduce_scatter zero_optimization.round_robin_gradients
    zero_optimization.stage3_gather_16bit_weights_on_model_save zero_optimization.stage3_gather_fp16_weights_on_model_save
    zero_optimization.stage3_max_live_parameters zero_optimization.stage3_max_reuse_distance
    zero_optimization.stage3_model_persistence_threshold zero_optimization.stage3_module_granularity_threshold
    zero_optimization.stage3_param_persistence_threshold zero_optimization.stage3_prefetch_bucket_size
    zero_optimization.stage3_use_all_reduce_for_fetch_params zero_optimization.sub_group_size
    zero_optimization.use_all_reduce_for_fetch_params zero_optimization.use_multi_rank_bucket_allreduce
    bf16.immediate_grad_update bf16.check_grad_overflow
    activation_checkpointing.number_checkpoints activation_checkpointing.profile
    activation_checkpointing.synchronize_checkpoint_boundary
    checkpoint.tag_validation checkpoint.parallel_write aio dataloader_drop_last dump_state memory_breakdown
    wall_clock_breakdown zero_allow_untested_optimizer zero_force_ds_cpu_optimizer
    """.split()
)

OFF: tuple[Any, ...] = (None, False)
NOTHING_TO_PUT = "leave the key out"

ABSENT_FEATURES = """
    autotuning compile compression_training curriculum_learning data_efficiency eigenvalue elasticity graph_harvesting hybrid_engine
    nebula pipeline progressive_layer_drop quantize_training sparse_attention tensor_parallel use_data_before_expert_parallelism
""".split()

# What changes memory, numbers or output and is not available: the values that ask for nothing, and what to do instead.
REFUSED: Mapping[str, tuple[tuple[Any, ...], str]] = {
    **{
        f"zero_optimization.{key}": (OFF, remedy)
        for key, remedy in {
            "offload_param": "weights stay on the device; leave the key out, and use more ranks",
            "offload_optimizer": "optimizer state stays on the device; leave the key out, and use more ranks",
            "cpu_offload": "optimizer state stays on the device; leave the key out, and use more ranks",
            "cpu_offload_param": "weights stay on the device; leave the key out, and use more ranks",
            "cpu_offload_use_pin_memory": NOTHING_TO_PUT,
            "zenflow": NOTHING_TO_PUT,
            "zero_quantized_nontrainable_weights": "every weight is trained; leave the key out",
            "zeropp_loco_param": "gradients carry no error feedback; leave the key out",
            "mics_hierarchical_params_gather": "use zero_hpz_partition_size",
            "legacy_stage1": NOTHING_TO_PUT,
            "leaf_module": NOTHING_TO_PUT,
        }.items()
    },
    "zero_optimization.mics_shard_size": ((*OFF, -1), "use zero_hpz_partition_size"),
    "fp16.auto_cast": (OFF, "the whole model is in fp16; leave the key out"),
    "fp16.consecutive_hysteresis": (OFF, "hysteresis starts anew when the scale grows; leave the key out"),
    "fp16.fp16_master_weights_and_grads": (OFF, "main weights and their gradients are fp32; leave the key out"),
    "bf16.bf16_master_weights_and_grads": (OFF, "main weights and their gradients are fp32; leave the key out"),
    "bf16.bf16_optimizer_states": (OFF, "optimizer state is fp32; leave the key out"),
    "data_types.grad_accum_dtype": ((None, "fp32"), "gradients are summed in fp32; leave the key out"),
    "activation_checkpointing.partition_activations": (OFF, "use --checkpoint-activations"),
    "activation_checkpointing.cpu_checkpointing": (OFF, "use --checkpoint-activations"),
    "activation_checkpointing.contiguous_memory_optimization": (OFF, "use --checkpoint-activations"),
    "checkpoint.load_universal": (OFF, "use --load, which takes a checkpoint of any number of ranks"),
    "checkpoint.use_node_local_storage": (OFF, "use --save with a path that every rank sees"),
    "amp": (OFF, "use --fp16 or --bf16"),
    "torch_autocast": (OFF, "use --fp16 or --bf16"),
    "optimizer": (OFF, "use --lr, --weight-decay, --adam-beta1, --adam-beta2 and --adam-eps"),
    "scheduler": (OFF, "use --lr-decay-style and --lr-warmup-iters"),
    "communication_data_type": (OFF, "gradients cross links in the working precision or as --zero-quantized-gradients says"),
    "seq_parallel_communication_data_type": (OFF, NOTHING_TO_PUT),
    "fp32_allreduce": (OFF, "gradients cross links in the working precision; leave the key out"),
    "prescale_gradients": (OFF, "each link divides by its own number of ranks; leave the key out"),
    "gradient_predivide_factor": ((*OFF, 1), "each link divides by its own number of ranks; leave the key out"),
    "sparse_gradients": (OFF, NOTHING_TO_PUT),
    "disable_allgather": (OFF, NOTHING_TO_PUT),
    "sequence_parallel_size": ((*OFF, 0, 1), "there is data parallelism only; choose 1"),
    "vocabulary_size": (OFF, "use --vocab-size"),
    "tensorboard": (OFF, "use --tensorboard-dir"),
    "csv_monitor": (OFF, "use --log-jsonl"),
    "wandb": (OFF, "use --tensorboard-dir or --log-jsonl"),
    "comet": (OFF, "use --tensorboard-dir or --log-jsonl"),
    "comms_logger": (OFF, "every training line has the bytes of each link; leave the key out"),
    "flops_profiler": (OFF, "every training line has the FLOP/s; leave the key out"),
    "timers": (OFF, "leave the key out; every training line has the times"),
    **dict.fromkeys(ABSENT_FEATURES, (OFF, NOTHING_TO_PUT)),
}

KEYS: frozenset[str] = frozenset([*FIELDS, *BATCH_KEYS, *WITHOUT_MEANING, *REFUSED])
SECTIONS: frozenset[str] = frozenset(key.split(".")[0] for key in KEYS if "." in key)


def asks_for_nothing(value: Any, neutral: tuple[Any, ...]) -> bool:
    """True for a neutral value, an empty object, and an object that says it is off."""
    if isinstance(value, dict):
        return not value or value.get("enabled") is False or value.get("device") == "none"
    return any(value == other and isinstance(value, bool) == isinstance(other, bool) for other in neutral)
