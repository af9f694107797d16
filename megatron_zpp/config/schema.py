"""The whole configuration: one frozen dataclass per group, one field per flag.

The flag of a field is its name with dashes: `num_layers` is `--num-layers`. A field is annotated with the type it has after
`validate.resolve`; before that, a field whose value depends on others or on the world holds None unless the user gave it.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Mapping
from dataclasses import dataclass, field, fields, replace
from typing import Any

from megatron_zpp.config.flag import COUNT, FRACTION, NOT_NEGATIVE, POSITIVE, POSITIVE_COUNT, REQUIRED, Bounds, flag


@dataclass(frozen=True)
class ModelConfig:
    """Shape and regularisation of the GPT."""

    num_layers: int = flag(None, help="Transformer blocks.", unit="blocks", allowed=POSITIVE_COUNT, otherwise=REQUIRED)
    hidden_size: int = flag(None, help="Width of the residual stream.", unit="values", allowed=POSITIVE_COUNT, otherwise=REQUIRED)
    num_attention_heads: int = flag(
        None,
        help="Attention heads of a block; they divide --hidden-size unless --kv-channels is given.",
        unit="heads",
        allowed=POSITIVE_COUNT,
        otherwise=REQUIRED,
    )
    ffn_hidden_size: int = flag(
        None, help="Width inside the feed-forward layer.", unit="values", allowed=POSITIVE_COUNT, otherwise="4 x --hidden-size"
    )
    kv_channels: int = flag(
        None, help="Width of one attention head.", unit="values", allowed=POSITIVE_COUNT, otherwise="--hidden-size / --num-attention-heads"
    )
    seq_length: int = flag(None, help="Length of a training sample.", unit="tokens", allowed=POSITIVE_COUNT, otherwise=REQUIRED)
    max_position_embeddings: int = flag(
        None, help="Learned positions; at least --seq-length.", unit="tokens", allowed=POSITIVE_COUNT, otherwise="--seq-length"
    )
    make_vocab_size_divisible_by: int = flag(
        128, help="The vocabulary is padded to a multiple of this.", unit="tokens", allowed=POSITIVE_COUNT
    )
    norm_epsilon: float = flag(
        1e-5, help="Added to the variance in LayerNorm.", unit="1", aliases=("--layernorm-epsilon",), allowed=POSITIVE
    )
    norm_backend: str = flag(
        "torch",
        help="Whose kernels normalize: torch's, or NVIDIA Apex's FusedLayerNorm (GPUs only, built from NVIDIA's sources).",
        allowed=("torch", "apex"),
    )
    untie_embeddings_and_output_weights: bool = flag(False, help="Give the output layer a weight of its own instead of the embedding's.")
    init_method_std: float = flag(
        0.02,
        help="Standard deviation of initial weights; output projections use it divided by sqrt(2 x layers).",
        unit="1",
        allowed=POSITIVE,
    )
    attention_dropout: float = flag(0.1, help="Dropout probability of attention weights.", unit="1", allowed=FRACTION)
    hidden_dropout: float = flag(0.1, help="Dropout probability of embeddings and block outputs.", unit="1", allowed=FRACTION)
    checkpoint_activations: bool = flag(False, help="Recompute every block in the backward pass instead of keeping its activations.")


@dataclass(frozen=True)
class TrainingConfig:
    """Batch, length and rhythm of the run."""

    micro_batch_size: int = flag(
        None,
        help="Samples in one forward pass of one rank.",
        unit="samples",
        aliases=("--batch-size",),
        allowed=POSITIVE_COUNT,
        otherwise="1",
    )
    global_batch_size: int = flag(
        None,
        help="Samples in one optimizer step of all ranks; a multiple of --micro-batch-size x ranks.",
        unit="samples",
        allowed=POSITIVE_COUNT,
        otherwise="--micro-batch-size x ranks",
    )
    train_iters: int = flag(
        None,
        help="Length of training in optimizer steps; excludes --train-samples.",
        unit="iterations",
        allowed=POSITIVE_COUNT,
        otherwise="--train-samples / --global-batch-size; 50 when neither data nor length is given",
    )
    train_samples: int | None = flag(
        None, help="Length of training in samples; excludes --train-iters.", unit="samples", allowed=POSITIVE_COUNT
    )
    exit_interval: int | None = flag(
        None, help="Leave the program at the first iteration that is a multiple of this.", unit="iterations", allowed=POSITIVE_COUNT
    )
    exit_duration_in_mins: int | None = flag(
        None, help="Leave the program at the first step after this time; --save saves then.", unit="minutes", allowed=POSITIVE_COUNT
    )
    exit_signal_handler: bool = flag(
        False, help="Save and leave the program, with exit code 0, at the step in which any rank gets --exit-signal or SIGUSR1."
    )
    exit_signal: str = flag(
        "SIGTERM", help="The signal of --exit-signal-handler beside SIGUSR1.", allowed=("SIGTERM", "SIGINT", "SIGUSR1", "SIGUSR2")
    )
    max_consecutive_bad_iterations: int = flag(
        100,
        help="After so many steps in a row with a NaN or infinite loss or gradient, save the state from before them and end with an error; "
        "0 goes on forever.",
        unit="iterations",
        allowed=COUNT,
    )
    seed: int = flag(1234, help="Seed of weights, dropout and data order.", unit="1", allowed=Bounds(at_least=0, at_most=2**32 - 1))
    eval_interval: int = flag(1000, help="Iterations from one validation to the next.", unit="iterations", allowed=POSITIVE_COUNT)
    eval_iters: int = flag(100, help="Global batches of one validation; 0 turns validation off.", unit="iterations", allowed=COUNT)
    deterministic_mode: bool = flag(False, help="Only kernels that give the same bits every time (CPU runs always do).")


@dataclass(frozen=True)
class OptimizerConfig:
    """AdamW and its learning-rate schedule."""

    lr: float = flag(None, help="Peak learning rate.", unit="1", allowed=NOT_NEGATIVE, otherwise="3e-4, with a notice")
    min_lr: float = flag(0.0, help="Learning rate at the end of the decay.", unit="1", allowed=NOT_NEGATIVE)
    lr_decay_style: str = flag(
        "linear",
        help="Shape of the decay; constant is assumed when neither data nor length is given.",
        allowed=("constant", "linear", "cosine"),
    )
    lr_decay_iters: int | None = flag(
        None, help="Horizon of the decay, warmup included.", unit="iterations", allowed=POSITIVE_COUNT, otherwise="--train-iters"
    )
    lr_decay_samples: int | None = flag(
        None, help="The same in samples, with --train-samples.", unit="samples", allowed=POSITIVE_COUNT, otherwise="--train-samples"
    )
    lr_warmup_iters: int = flag(0, help="Length of the linear warmup.", unit="iterations", allowed=COUNT)
    lr_warmup_samples: int = flag(0, help="The same in samples, with --train-samples.", unit="samples", allowed=COUNT)
    lr_warmup_fraction: float | None = flag(
        None, help="The same as a fraction of the decay's horizon; excludes the other two.", unit="1", allowed=FRACTION
    )
    lr_warmup_init: float = flag(0.0, help="Learning rate at the start of the warmup.", unit="1", allowed=NOT_NEGATIVE)
    weight_decay: float = flag(0.01, help="Decoupled weight decay; one-dimensional parameters have none.", unit="1", allowed=NOT_NEGATIVE)
    clip_grad: float = flag(1.0, help="Largest global L2 norm of the gradient; 0 turns clipping off.", unit="1", allowed=NOT_NEGATIVE)
    adam_beta1: float = flag(0.9, help="Decay of Adam's first moment.", unit="1", allowed=FRACTION)
    adam_beta2: float = flag(0.999, help="Decay of Adam's second moment.", unit="1", allowed=FRACTION)
    adam_eps: float = flag(1e-8, help="Added to the root of Adam's second moment.", unit="1", allowed=POSITIVE)
    optimizer: str = flag("adam", help="Optimizer (AdamW on fp32 main weights).", allowed=("adam",))
    optimizer_backend: str = flag(
        "torch",
        help="Whose kernels update weights and take gradient norms: torch's fused AdamW and fp64 sums, or NVIDIA Apex's FusedAdam and "
        "multi-tensor L2 norm (GPUs only, built from NVIDIA's sources).",
        allowed=("torch", "apex"),
    )


@dataclass(frozen=True)
class PrecisionConfig:
    """Number format of weights and activations; fp32 unless told otherwise. Main weights are fp32 always."""

    fp16: bool = flag(False, help="Train in fp16 with a loss scale; excludes --bf16.")
    bf16: bool = flag(False, help="Train in bf16; excludes --fp16.")
    loss_scale: float | None = flag(None, help="Constant loss scale for fp16; without it the scale is dynamic.", unit="1", allowed=POSITIVE)
    initial_loss_scale: float = flag(
        2.0**32,
        help="First dynamic loss scale; 65536 is assumed with --deepspeed-config, and when neither data nor length is given.",
        unit="1",
        allowed=POSITIVE,
    )
    min_loss_scale: float = flag(1.0, help="Smallest dynamic loss scale.", unit="1", allowed=POSITIVE)
    loss_scale_window: int = flag(
        1000, help="Steps without overflow before the loss scale doubles.", unit="iterations", allowed=POSITIVE_COUNT
    )
    hysteresis: int = flag(2, help="Overflows before the loss scale halves.", unit="iterations", allowed=POSITIVE_COUNT)


@dataclass(frozen=True)
class ZeroConfig:
    """Where weights, gradients and optimizer state rest."""

    zero_stage: int = flag(
        0,
        help="What is sharded: 0 nothing, 1 optimizer state, 2 gradients too, 3 weights too.",
        allowed=(0, 1, 2, 3),
    )
    deepspeed_config: str | None = flag(
        None, help="DeepSpeed JSON file, whose keys are read as flags.", unit="path", aliases=("--deepspeed_config",)
    )
    zero_quantized_weights: bool = flag(False, help="qwZ: weights cross links as blocks of integers; needs --zero-stage 1, 2 or 3.")
    zero_hpz_partition_size: int = flag(
        1,
        help="hpZ: ranks that share a secondary copy of the weights, so that backward gathers stay among them; the ranks of a node are "
        "the usual choice, 1 is off; needs --zero-stage 3.",
        unit="ranks",
        allowed=POSITIVE_COUNT,
    )
    zero_quantized_gradients: bool = flag(False, help="qgZ: gradients cross links as blocks of integers; needs --zero-stage 1, 2 or 3.")
    zero_quantized_weights_bits: int = flag(8, help="Bits of a weight under --zero-quantized-weights.", unit="bits", allowed=(4, 8))
    zero_quantized_gradients_intra_bits: int = flag(
        4,
        help="Bits of a gradient inside a node under --zero-quantized-gradients; 16 is the working precision.",
        unit="bits",
        allowed=(4, 8, 16),
    )
    zero_quantized_gradients_inter_bits: int = flag(
        4,
        help="The same between nodes.",
        unit="bits",
        allowed=(4, 8, 16),
    )
    zero_quantized_gradients_rotation: str = flag(
        "none",
        help="Transform of 32 neighbouring gradients before they are quantized; it spreads outliers and costs no byte.",
        allowed=("none", "hadamard"),
    )
    zero_quantized_gradients_rounding: str = flag(
        "nearest",
        help="Rounding of quantized gradients: to the nearest code, or up and down by chance so that errors have the mean 0.",
        allowed=("nearest", "stochastic"),
    )
    zero_full_precision_iters: int = flag(0, help="First iterations in which nothing is quantized.", unit="iterations", allowed=COUNT)
    quantization_block_size: int = flag(
        256,
        help="Values that share a scale, and the grain of the sharded layout.",
        unit="values",
        allowed=Bounds(at_least=32, multiple_of=32),
    )
    zero_prefetch_units: int = flag(2, help="Units gathered ahead over the link between nodes.", unit="units", allowed=COUNT)
    zero_prefetch_units_intra: int = flag(1, help="Units gathered ahead over the link inside a node.", unit="units", allowed=COUNT)


@dataclass(frozen=True)
class DistributedConfig:
    """Ranks, nodes and their communication."""

    tensor_model_parallel_size: int = flag(1, help="Ranks that share one layer; only 1 is available.", unit="ranks", allowed=POSITIVE_COUNT)
    pipeline_model_parallel_size: int = flag(1, help="Pipeline stages; only 1 is available.", unit="ranks", allowed=POSITIVE_COUNT)
    ranks_per_node: int = flag(
        None,
        help="Ranks of one node; they divide the world.",
        unit="ranks",
        allowed=POSITIVE_COUNT,
        otherwise="the launcher's LOCAL_WORLD_SIZE, LOCAL_SIZE or SLURM_NTASKS_PER_NODE",
    )
    distributed_timeout_minutes: int = flag(
        10,
        help="Within this time after a rank or a link is gone every rank has ended; a collective may take all of it but 15 seconds.",
        unit="minutes",
        allowed=POSITIVE_COUNT,
    )
    distributed_backend: str | None = flag(
        None, help="Communication library.", allowed=("nccl", "gloo"), otherwise="nccl with GPUs, gloo without"
    )
    local_rank: int | None = flag(
        None,
        help="Accepted from launchers that pass it; LOCAL_RANK decides.",
        unit="1",
        aliases=("--local_rank",),
        allowed=COUNT,
    )


TOKENIZER_TYPES = (
    "GPT2BPETokenizer",
    "SentencePieceTokenizer",
    "GPTSentencePieceTokenizer",
    "Llama2Tokenizer",
    "HuggingFaceTokenizer",
    "HFTokenizer",
    "TikTokenizer",
    "NullTokenizer",
)
TOKENIZER_FILES = ("tokenizer_model", "vocab_file", "merge_file")


@dataclass(frozen=True)
class DataConfig:
    """Text and tokenizer."""

    data_path: tuple[str, ...] = flag(
        (),
        help="Prefix of the .bin and .idx files of the corpus; several make a blend: weight prefix weight prefix ..., or prefix prefix ... "
        "in the shares of their samples.",
        unit="path",
    )
    train_data_path: tuple[str, ...] = flag((), help="The same for training alone, whole; excludes --data-path.", unit="path")
    valid_data_path: tuple[str, ...] = flag((), help="The same for validation alone, with --train-data-path.", unit="path")
    test_data_path: tuple[str, ...] = flag((), help="The same for the test alone, with --train-data-path.", unit="path")
    data_args_path: str | None = flag(None, help="Text file with the words of --data-path, for many corpora.", unit="path")
    per_split_data_args_path: str | None = flag(
        None, help="JSON file with the words of the three flags for one split each, under train, valid and test.", unit="path"
    )
    split: str = flag("969, 30, 1", help="Shares of documents for training, validation and test.", unit="parts")
    mock_data: bool = flag(False, help="Train on generated tokens instead of files; assumed without --data-path.")
    tokenizer_type: str = flag(
        None,
        help="Tokenizer of the corpus.",
        allowed=TOKENIZER_TYPES,
        otherwise="NullTokenizer with mock data, else required",
    )
    tokenizer_model: str | None = flag(
        None, help="SentencePiece .model, tokenizer.json (or its folder) of HuggingFaceTokenizer, .tiktoken of TikTokenizer.", unit="path"
    )
    vocab_file: str | None = flag(None, help="vocab.json of GPT2BPETokenizer.", unit="path", aliases=("--vocab",))
    merge_file: str | None = flag(None, help="merges.txt of GPT2BPETokenizer.", unit="path")
    vocab_extra_ids: int = flag(0, help="Pieces <extra_id_N> that SentencePieceTokenizer puts last.", unit="ids", allowed=COUNT)
    tiktoken_pattern: str | None = flag(
        None, help="How TikTokenizer cuts text into words, by Megatron's names.", allowed=("v1", "v2"), otherwise="required by TikTokenizer"
    )
    tiktoken_num_special_tokens: int = flag(1000, help="Ids of TikTokenizer before those of its file.", unit="ids", allowed=POSITIVE_COUNT)
    tokenizer_special_tokens: tuple[str, ...] = flag(
        (),
        help="Names of TikTokenizer's first ids, with <unk>, <s> and </s> among them.",
        unit="tokens",
        aliases=("--tiktoken-special-tokens",),
        otherwise="<unk> <s> </s>",
    )
    vocab_size: int | None = flag(
        None,
        help="Vocabulary before padding: NullTokenizer needs it, TikTokenizer cuts its file to it, every other must agree with it.",
        unit="tokens",
        allowed=POSITIVE_COUNT,
        otherwise="50257 for NullTokenizer with mock data",
    )
    data_cache_path: str | None = flag(None, help="Folder of the index cache.", unit="path", otherwise="a folder beside each corpus")
    mid_level_dataset_surplus: float = flag(
        0.005,
        help="Each corpus of a weighted blend is cut into this share of samples more than its weight asks for.",
        unit="1",
        allowed=FRACTION,
    )
    dataloader_type: str = flag("single", help="Samples in one shuffled order, the same at every number of ranks.", allowed=("single",))
    reset_position_ids: bool = flag(False, help="Positions start over after an end-of-document token.")
    reset_attention_mask: bool = flag(False, help="No token attends across an end-of-document token.")
    eod_mask_loss: bool = flag(False, help="What follows an end-of-document token is not predicted: the loss leaves it out.")
    num_workers: int = flag(2, help="Processes that read data, per rank; 0 reads in the training process.", unit="processes", allowed=COUNT)

    @property
    def names_corpora(self) -> bool:
        """Whether any flag names files to train on."""
        paths = (self.data_path, self.train_data_path, self.valid_data_path, self.test_data_path)
        return any(paths) or self.data_args_path is not None or self.per_split_data_args_path is not None


@dataclass(frozen=True)
class CheckpointConfig:
    """Saving and loading."""

    save: str | None = flag(None, help="Folder to save checkpoints in, of a file system that all ranks share.", unit="path")
    load: str | None = flag(None, help="Folder to load a checkpoint from; without one in it the run starts anew.", unit="path")
    save_interval: int | None = flag(
        None,
        help="Iterations from one checkpoint to the next; the end of training is always saved under --save.",
        unit="iterations",
        aliases=("--persistent-save-interval",),
        allowed=POSITIVE_COUNT,
    )
    async_save: bool = flag(False, help="Copy the state to host memory and write the checkpoint from there while training goes on.")
    keep_last: int | None = flag(
        None, help="Checkpoints to keep; older ones are deleted after a save.", unit="checkpoints", allowed=POSITIVE_COUNT, otherwise="all"
    )
    save_retain_interval: int | None = flag(
        None,
        help="Keep checkpoints at multiples of this, and the last one (or --keep-last); others are deleted after a save.",
        unit="iterations",
        allowed=POSITIVE_COUNT,
    )
    no_save_optim: bool = flag(False, help="Leave optimizer state out of checkpoints.")
    no_load_optim: bool = flag(False, help="Start with fresh optimizer state.")
    finetune: bool = flag(False, help="Load weights only: iteration, consumed samples and schedule start at 0.")
    pretrained_checkpoint: str | None = flag(
        None, help="Folder to load weights from, as --finetune does, where --load holds no checkpoint.", unit="path"
    )
    ckpt_step: int | None = flag(
        None, help="Iteration of the checkpoint to load.", unit="iterations", allowed=COUNT, otherwise="the latest"
    )
    load_last_good_checkpoint: bool = flag(
        False, help="Verify the checkpoint before loading it, and where it is damaged take the newest older one that is not."
    )
    exit_on_missing_checkpoint: bool = flag(False, help="End with an error where --load holds no checkpoint, instead of starting anew.")
    use_checkpoint_args: bool = flag(
        False, help="Take the shape of the model and the tokenizer from the checkpoint, where no flag gives them."
    )
    override_opt_param_scheduler: bool = flag(
        False,
        help="Where the schedule of learning rate and weight decay differs from the checkpoint's, use that of the flags.",
        aliases=("--override-opt_param-scheduler",),
    )
    use_checkpoint_opt_param_scheduler: bool = flag(
        False,
        help="Use the checkpoint's schedule of learning rate and weight decay, whatever the flags say.",
        aliases=("--use-checkpoint-opt_param-scheduler",),
    )


@dataclass(frozen=True)
class LoggingConfig:
    """What the run tells."""

    log_interval: int = flag(
        100,
        help="Iterations from one training line to the next; 10 is assumed when neither data nor length is given.",
        unit="iterations",
        allowed=POSITIVE_COUNT,
    )
    log_samples_per_source: bool = flag(False, help="Say with each training line how many samples of each corpus have been consumed.")
    log_jsonl: str | None = flag(None, help="File that gets one JSON object per training line.", unit="path")
    log_throughput: bool = flag(False, help="Say with each training line the model FLOPs that a rank makes per second.")
    device_peak_tflops: float | None = flag(
        None,
        help="Peak of one device at the precision of the run, which MFU and HFU are shares of.",
        unit="TFLOP/s",
        allowed=POSITIVE,
        otherwise="that of the GPU, where it is known and the run in fp16 or bf16",
    )
    log_params_norm: bool = flag(False, help="Say with each training line the L2 norm of all main weights.")
    log_num_zeros_in_grad: bool = flag(False, help="Say with each training line how many elements of the mean gradient are 0.")
    log_progress: bool = flag(False, help="Keep a progress.txt of starts and checkpoints in the folder of --save.")
    log_memory_interval: int | None = flag(
        None,
        help="Iterations from one line about memory to the next; the first training line is always followed by one.",
        unit="iterations",
        allowed=POSITIVE_COUNT,
    )
    timing_log_level: int = flag(
        0, help="Timers: 0 the time of an iteration, 1 parts that run once in it, 2 those that run more often too.", allowed=(0, 1, 2)
    )
    timing_log_option: str = flag(
        "minmax",
        help="What is said of each timer: its maximum, both extremes, or the times of all ranks.",
        allowed=("max", "minmax", "all"),
    )
    tensorboard_dir: str | None = flag(None, help="Folder for TensorBoard.", unit="path")
    tensorboard_log_interval: int = flag(1, help="Iterations between TensorBoard points.", unit="iterations", allowed=POSITIVE_COUNT)
    tensorboard_queue_size: int = flag(1000, help="Points TensorBoard holds before it writes.", unit="points", allowed=POSITIVE_COUNT)
    log_timers_to_tensorboard: bool = flag(False, help="Points of the timers that --timing-log-level lets run.")
    log_memory_to_tensorboard: bool = flag(False, help="Points of the memory allocated and reserved.")
    log_world_size_to_tensorboard: bool = flag(False, help="Points of the number of ranks.")
    log_validation_ppl_to_tensorboard: bool = flag(False, help="Points of the perplexity of each validation.")
    no_log_learnig_rate_to_tensorboard: bool = flag(
        False, help="No points of the learning rate.", aliases=("--no-log-learning-rate-to-tensorboard",)
    )
    no_log_loss_scale_to_tensorboard: bool = flag(False, help="No points of the loss scale.")
    wandb_project: str | None = flag(None, help="Project of Weights & Biases that gets what TensorBoard would get.")
    wandb_entity: str | None = flag(None, help="Its owner.", otherwise="the account that is logged in")
    wandb_exp_name: str | None = flag(None, help="Name of the run there.", otherwise="one that Weights & Biases makes up")
    wandb_save_dir: str | None = flag(
        None,
        help="Folder for what Weights & Biases keeps on this machine.",
        unit="path",
        otherwise="wandb in the folder of --save, or here",
    )


@dataclass(frozen=True)
class ProfilingConfig:
    """Looking into a few iterations."""

    profile: bool = flag(False, help="Write a Chrome trace of a few iterations, by torch.profiler.")
    profile_step_start: int = flag(10, help="Iterations that this process makes before it profiles.", unit="iterations", allowed=COUNT)
    profile_step_end: int = flag(
        12, help="Iterations after which it has profiled; above --profile-step-start.", unit="iterations", allowed=POSITIVE_COUNT
    )
    profile_ranks: tuple[str, ...] = flag((), help="Ranks that profile.", unit="ranks", otherwise="0")
    profile_dir: str | None = flag(None, help="Folder for the traces.", unit="path", otherwise="--tensorboard-dir")
    nvtx_ranges: bool = flag(False, help="Name units, hops and phases of every step for Nsight Systems, as NVTX ranges (GPUs only).")
    record_memory_history: bool = flag(
        False, help="Record every allocation on the GPU, and write a snapshot for pytorch.org/memory_viz at the end (GPUs only)."
    )
    memory_snapshot_path: str = flag("snapshot.pickle", help="File of that snapshot; the rank is put before its ending.", unit="path")


@dataclass(frozen=True)
class Config:
    """Every flag in its group, and what was said about them on the way.

    given: names of the fields the user set. notices: lines worth printing. assumptions: what the run assumes, one line each.
    sources: where the value of a field comes from, if not from the command line.
    """

    model: ModelConfig = field(default_factory=ModelConfig)
    training: TrainingConfig = field(default_factory=TrainingConfig)
    optimizer: OptimizerConfig = field(default_factory=OptimizerConfig)
    precision: PrecisionConfig = field(default_factory=PrecisionConfig)
    zero: ZeroConfig = field(default_factory=ZeroConfig)
    distributed: DistributedConfig = field(default_factory=DistributedConfig)
    data: DataConfig = field(default_factory=DataConfig)
    checkpoint: CheckpointConfig = field(default_factory=CheckpointConfig)
    logging: LoggingConfig = field(default_factory=LoggingConfig)
    profiling: ProfilingConfig = field(default_factory=ProfilingConfig)
    given: frozenset[str] = frozenset()
    notices: tuple[str, ...] = ()
    assumptions: tuple[str, ...] = ()
    sources: Mapping[str, str] = field(default_factory=dict)

    def with_values(self, **values: Any) -> Config:
        """The same configuration with these fields of its groups replaced; field names are unique among groups."""
        by_group: dict[str, dict[str, Any]] = defaultdict(dict)
        for name, value in values.items():
            by_group[GROUP_OF_FIELD[name]][name] = value
        changes: dict[str, Any] = {group: replace(getattr(self, group), **members) for group, members in by_group.items()}
        return replace(self, **changes)

    def with_notices(self, *lines: str) -> Config:
        return replace(self, notices=self.notices + lines)

    def value_of(self, name: str) -> Any:
        return getattr(getattr(self, GROUP_OF_FIELD[name]), name)


GROUPS: dict[str, type] = {
    "model": ModelConfig,
    "training": TrainingConfig,
    "optimizer": OptimizerConfig,
    "precision": PrecisionConfig,
    "zero": ZeroConfig,
    "distributed": DistributedConfig,
    "data": DataConfig,
    "checkpoint": CheckpointConfig,
    "logging": LoggingConfig,
    "profiling": ProfilingConfig,
}
GROUP_OF_FIELD: dict[str, str] = {member.name: group for group, members in GROUPS.items() for member in fields(members)}
