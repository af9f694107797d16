"""Flags of older Megatron and DeepSpeed scripts. Some are accepted without effect; the others are refused with a remedy."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True)
class AcceptedFlag:
    """A flag that changes nothing. only: the values that are accepted; empty for all.

    num_values: words that follow it, 0 or 1; SEVERAL for one or more, SOME for any number.
    """

    num_values: int | str
    reason: str
    only: tuple[str, ...] = ()


SEVERAL, SOME = "+", "*"
NO_EXPERTS = "there are no experts"
NO_GRAPHS = "no step is recorded as a CUDA graph"
NO_TEACHER = "leave it out, there is no teacher"
ONE_RATE = "leave it out, embedding and output layer have the learning rate of the others"
OWN_BLANKS = "leave it out, the model's own rules say what becomes of blanks"
NO_METADATA = "use --tokenizer-type and --tokenizer-model, which say all that is in such a file"
UNPADDED = "use --make-vocab-size-divisible-by 1"
ROWS = "use --padded-vocab-size, the number of rows of the embedding"
TOKENIZER_JSON = "use --tokenizer-type HuggingFaceTokenizer with --tokenizer-model, a tokenizer.json on this machine"
NO_LATENTS = "leave it out, there is no latent attention"
NO_STAGES = "leave it out, there are no pipeline stages"
SAME_LENGTH = "use --context-parallel-size alone, all samples have the same length"
OVERLAPS = "backward always overlaps the link between ranks that share layers with its products"
# Those of a tokenizer, which preprocessing has too.
TOKENIZER_ACCEPTED: dict[str, AcceptedFlag] = {
    "--use-gigatoken": AcceptedFlag(0, "the fastest library that gives a tokenizer's ids is always used"),
    "--tokenizer-hf-no-use-fast": AcceptedFlag(0, "a tokenizer.json is always read by package tokenizers"),
    "--tokenizer-sentencepiece-ignore-extra-whitespaces": AcceptedFlag(0, "a SentencePiece model always treats blanks by its own rules"),
    "--null-tokenizer-pad-id": AcceptedFlag(1, "no sample is padded"),
    "--chat-template": AcceptedFlag(1, "documents are texts, not conversations"),
    "--pad-vocab-size": AcceptedFlag(0, "a run always pads its vocabulary, see --make-vocab-size-divisible-by"),
    "--trust-remote-code": AcceptedFlag(0, "tokenizers are read from files, no code of others runs"),
}
TOKENIZER_REFUSED: dict[str, str] = {
    "--tokenizer-sentencepiece-legacy": "use --legacy-tokenizer for the pieces that Megatron once added",
    "--no-tokenizer-sentencepiece-ignore-extra-whitespaces": OWN_BLANKS,
    "--disable-tokenizer-sentencepiece-ignore-extra-whitespaces": OWN_BLANKS,
    "--tokenizer-metadata": NO_METADATA,
    "--metadata-path": NO_METADATA,
    "--pad-vocab-size-to": ROWS,
    "--extra-vocab-size": ROWS,
    "--tokenizer-name-or-path": TOKENIZER_JSON,
    "--tokenizer-file": TOKENIZER_JSON,
    "--no-pad-vocab-size": UNPADDED,
    "--disable-pad-vocab-size": UNPADDED,
}

ACCEPTED: dict[str, AcceptedFlag] = {
    **TOKENIZER_ACCEPTED,
    "--local-rank": AcceptedFlag(1, "the launcher's LOCAL_RANK decides"),
    "--local_rank": AcceptedFlag(1, "the launcher's LOCAL_RANK decides"),
    "--deepspeed": AcceptedFlag(0, "--zero-stage alone chooses the sharding"),
    "--deepspeed-activation-checkpointing": AcceptedFlag(0, "--recompute-granularity turns recomputation on"),
    "--recompute-modules": AcceptedFlag(
        SEVERAL, "--recompute-granularity selective recomputes attention between its projections", only=("core_attn",)
    ),
    "--synchronize-each-layer": AcceptedFlag(0, "a block's kernels are in order on their stream"),
    "--no-pipeline-parallel": AcceptedFlag(0, "there is no pipeline engine"),
    "--DDP-impl": AcceptedFlag(1, "--zero-stage 0 is data parallelism"),
    "--deepscale": AcceptedFlag(0, "--zero-stage alone chooses the sharding"),
    "--deepspeed_mpi": AcceptedFlag(0, "the variables of MPI launchers are read without it"),
    "--zero-reduce-scatter": AcceptedFlag(0, "gradients are always exchanged and never all-reduced"),
    "--zero-contigious-gradients": AcceptedFlag(0, "the gradients of a unit are always one buffer"),
    "--zero-reduce-bucket-size": AcceptedFlag(1, "gradients are reduced by unit, there are no buckets"),
    "--zero-allgather-bucket-size": AcceptedFlag(1, "weights are gathered by unit, there are no buckets"),
    "--remote-device": AcceptedFlag(
        1, "weights at rest are the main weights, which --optimizer-cpu-offload keeps on the host", only=("none",)
    ),
    "--use-pin-memory": AcceptedFlag(0, "what a GPU copies to or from its host is always pinned"),
    "--no-pin-cpu-grads": AcceptedFlag(0, "two units of gradients are pinned, and copied while others are updated"),
    "--no-pin-cpu-params": AcceptedFlag(0, "two payloads of weights are pinned, main weights are not"),
    "--overlap-cpu-optimizer-d2h-h2d": AcceptedFlag(0, "copies to and from the host always run beside AdamW"),
    "--use-torch-optimizer-for-cpu-offload": AcceptedFlag(0, "AdamW on the host is always torch's"),
    "--optimizer-offload-fraction": AcceptedFlag(
        1, "--optimizer-cpu-offload keeps all of the optimizer's state on the host", only=("1", "1.0")
    ),
    "--cpu-offloading-num-layers": AcceptedFlag(
        1,
        "activations stay on the device, where --checkpoint-activations makes room, but for the inputs that --checkpoint-in-cpu moves",
        only=("0",),
    ),
    "--cpu_torch_adam": AcceptedFlag(0, "--optimizer-backend chooses the kernels of Adam"),
    "--ds_fused_adam": AcceptedFlag(0, "--optimizer-backend chooses the kernels of Adam"),
    "--overlap-grad-reduce": AcceptedFlag(0, "gradients always descend while backward goes on"),
    "--overlap-param-gather": AcceptedFlag(0, "weights are always gathered ahead, --zero-prefetch-units says how far"),
    "--overlap-param-gather-with-optimizer-step": AcceptedFlag(0, "the first weights are always gathered at the end of a step"),
    "--delay-grad-reduce": AcceptedFlag(0, "there are no pipeline stages to wait for"),
    "--no-align-grad-reduce": AcceptedFlag(0, "there are no pipeline stages to align"),
    "--ddp-bucket-size": AcceptedFlag(1, "gradients are reduced by unit, there are no buckets"),
    "--ddp-num-buckets": AcceptedFlag(1, "gradients are reduced by unit, there are no buckets"),
    "--ddp-average-in-collective": AcceptedFlag(0, "the mean of gradients is always taken in fp32"),
    "--no-contiguous-buffers-in-local-ddp": AcceptedFlag(0, "the gradients of a unit are always one buffer"),
    "--no-scatter-gather-tensors-in-pipeline": AcceptedFlag(0, "there are no pipeline stages"),
    "--no-overlap-p2p-communication": AcceptedFlag(0, "there are no pipeline stages"),
    "--lazy-mpu-init": AcceptedFlag(1, "process groups are made at the start"),
    "--use-ring-exchange-p2p": AcceptedFlag(0, "there are no pipeline stages"),
    "--tp-comm-overlap": AcceptedFlag(0, OVERLAPS),
    "--tp-comm-overlap-cfg": AcceptedFlag(1, OVERLAPS),
    "--tp-comm-overlap-rs-dgrad": AcceptedFlag(0, OVERLAPS),
    "--disable-tp-comm-overlap-ag": AcceptedFlag(0, OVERLAPS),
    "--disable-tp-comm-overlap-rs": AcceptedFlag(0, OVERLAPS),
    "--disable-tp-comm-bulk-dgrad": AcceptedFlag(0, OVERLAPS),
    "--disable-tp-comm-bulk-wgrad": AcceptedFlag(0, OVERLAPS),
    "--tp-comm-bootstrap-backend": AcceptedFlag(1, "--distributed-backend chooses the library of every link"),
    "--async-tensor-model-parallel-allreduce": AcceptedFlag(0, OVERLAPS),
    "--no-async-tensor-model-parallel-allreduce": AcceptedFlag(0, OVERLAPS),
    **{
        flag: AcceptedFlag(1, "main weights, their gradients and moments are fp32", only=("fp32",))
        for flag in ("--main-params-dtype", "--main-grads-dtype", "--exp-avg-dtype", "--exp-avg-sq-dtype")
    },
    "--pipeline-model-parallel-size": AcceptedFlag(1, "there is data and tensor parallelism but no pipeline parallelism", only=("1",)),
    "--encoder-tensor-model-parallel-size": AcceptedFlag(1, "there is no encoder", only=("0",)),
    "--encoder-pipeline-model-parallel-size": AcceptedFlag(1, "there is no encoder", only=("0",)),
    "--use-tp-pp-dp-mapping": AcceptedFlag(0, "ranks that share layers are always neighbours, and there are no pipeline stages"),
    "--force-ds-sequence-parallel": AcceptedFlag(0, "--context-parallel-size alone divides samples"),
    "--ds-sequence-parallel-overlap-comm": AcceptedFlag(0, "attention always waits for its exchange of heads"),
    "--expert-model-parallel-size": AcceptedFlag(1, "there are no experts", only=("1",)),
    "--expert-tensor-parallel-size": AcceptedFlag(1, "there are no experts", only=("1",)),
    "--num-experts": AcceptedFlag(SEVERAL, NO_EXPERTS, only=("1",)),
    "--ep-world-size": AcceptedFlag(1, NO_EXPERTS, only=("1",)),
    "--mlp-type": AcceptedFlag(1, NO_EXPERTS, only=("standard",)),
    "--topk": AcceptedFlag(1, NO_EXPERTS),
    "--expert-interval": AcceptedFlag(1, NO_EXPERTS),
    "--create-moe-param-group": AcceptedFlag(0, NO_EXPERTS),
    "--disable-moe-token-dropping": AcceptedFlag(0, NO_EXPERTS),
    "--disable-moe-top2-2nd-expert-sampling": AcceptedFlag(0, NO_EXPERTS),
    "--enable-expert-tensor-parallelism": AcceptedFlag(0, NO_EXPERTS),
    "--use-tutel": AcceptedFlag(0, NO_EXPERTS),
    "--enable-gloo-process-groups": AcceptedFlag(0, "start-up always has a group over gloo"),
    "--disable-gloo-process-groups": AcceptedFlag(0, "start-up always has a group over gloo"),
    "--high-priority-stream-groups": AcceptedFlag(1, "each link has a stream of its own in each direction"),
    "--use-cpu-initialization": AcceptedFlag(0, "weights are the same on every device and world size"),
    "--use-mcore-models": AcceptedFlag(0, "there is one model"),
    "--transformer-impl": AcceptedFlag(1, "there is one model"),
    "--use-flash-attn": AcceptedFlag(0, "attention uses the fastest kernel torch offers; --attention-backend flash insists on flash"),
    "--use-flash-attn-v1": AcceptedFlag(0, "there are torch's kernels, see --attention-backend"),
    "--use-flash-attn-v2": AcceptedFlag(0, "there are torch's kernels, see --attention-backend"),
    "--use-flash-attn-triton": AcceptedFlag(0, "there are torch's kernels, see --attention-backend"),
    "--no-bias-swiglu-fusion": AcceptedFlag(0, "there are no fused kernels of this kind"),
    "--no-rope-fusion": AcceptedFlag(0, "there are no fused kernels of this kind"),
    "--no-persist-layer-norm": AcceptedFlag(0, "there is one kernel per norm, see --norm-backend"),
    "--attention-softmax-in-fp32": AcceptedFlag(0, "the attention kernel accumulates in fp32"),
    "--no-query-key-layer-scaling": AcceptedFlag(0, "scaling by layer is always off"),
    "--abort-on-unmet-fused-kernel-constraints": AcceptedFlag(0, "there are no fused kernels of this kind"),
    "--no-masked-softmax-fusion": AcceptedFlag(0, "there are no fused kernels of this kind"),
    "--no-bias-dropout-fusion": AcceptedFlag(0, "there are no fused kernels of this kind"),
    "--no-gradient-accumulation-fusion": AcceptedFlag(0, "gradients always accumulate in fp32"),
    "--accumulate-allreduce-grads-in-fp32": AcceptedFlag(0, "gradients always accumulate in fp32, and their mean is taken in fp32"),
    "--grad-reduce-in-bf16": AcceptedFlag(0, "gradients always travel in the working precision, and their mean is taken in fp32"),
    "--apply-query-key-layer-scaling": AcceptedFlag(0, "the attention kernel accumulates in fp32 and needs no scaling by layer"),
    "--cross-entropy-loss-fusion": AcceptedFlag(0, "the loss is always computed in chunks, without a copy of the logits"),
    "--cross-entropy-fusion-impl": AcceptedFlag(1, "the loss is always computed in chunks, without a copy of the logits"),
    "--check-for-nan-in-loss-and-grad": AcceptedFlag(0, "loss and gradients of every step are looked at"),
    "--no-check-for-nan-in-loss-and-grad": AcceptedFlag(0, "loss and gradients of every step are looked at"),
    "--rerun-mode": AcceptedFlag(1, "no step is run twice"),
    "--enable-cuda-graph": AcceptedFlag(0, NO_GRAPHS),
    "--external-cuda-graph": AcceptedFlag(0, NO_GRAPHS),
    "--te-rng-tracker": AcceptedFlag(0, NO_GRAPHS),
    "--no-save-rng": AcceptedFlag(0, "randomness follows from --seed and the sample, there is no state to save"),
    "--no-load-rng": AcceptedFlag(0, "randomness follows from --seed and the sample, there is no state to load"),
    "--ckpt-format": AcceptedFlag(1, "there is one format, safetensors and a manifest"),
    "--use-dist-ckpt": AcceptedFlag(0, "checkpoints are always sharded"),
    "--universal-checkpoint": AcceptedFlag(0, "every checkpoint can be loaded at any world size and stage"),
    "--auto-detect-ckpt-format": AcceptedFlag(0, "there is one format, safetensors and a manifest"),
    "--dist-ckpt-format": AcceptedFlag(1, "there is one format, safetensors and a manifest"),
    "--dist-ckpt-strictness": AcceptedFlag(1, "a checkpoint that lacks a parameter is always refused"),
    "--ckpt-fully-parallel-save": AcceptedFlag(0, "every rank always writes its own share"),
    "--no-ckpt-fully-parallel-save": AcceptedFlag(0, "every rank always writes its own share"),
    "--ckpt-fully-parallel-load": AcceptedFlag(0, "every rank always reads its own share"),
    "--ckpt-assume-constant-structure": AcceptedFlag(0, "where a parameter lies follows from its shape, nothing is planned anew"),
    "--dist-ckpt-optim-fully-reshardable": AcceptedFlag(0, "every checkpoint can be loaded at any world size and stage"),
    "--use-persistent-ckpt-worker": AcceptedFlag(0, "--async-save writes from a thread of its own"),
    "--perform-initialization": AcceptedFlag(0, "weights are always initialized"),
    "--no-initialization": AcceptedFlag(0, "weights are always initialized, and a checkpoint then replaces them"),
    "--data-parallel-random-init": AcceptedFlag(0, "weights are the same on every rank, dropout differs by sample"),
    "--empty-unused-memory-level": AcceptedFlag(1, "buffers are allocated once, there is nothing to give back"),
    "--data-impl": AcceptedFlag(1, "data files are always read on demand"),
    "--mmap-warmup": AcceptedFlag(0, "data files are read where and when they are needed"),
    "--no-mmap-bin-files": AcceptedFlag(0, "data files are always read on demand"),
    "--num-dataset-builder-threads": AcceptedFlag(1, "each node builds an index once, and keeps it"),
    "--repeated-dataloader": AcceptedFlag(0, "data that ends always starts over"),
    "--no-create-attention-mask-in-dataloader": AcceptedFlag(0, "no mask is made that attention does not need"),
    "--log-optimizer-states-to-tensorboard": AcceptedFlag(0, "statistics of Adam's moments are not logged; --log-params-norm is near"),
    "--log-batch-size-to-tensorboard": AcceptedFlag(0, "the batch size is always among the points"),
    "--no-barrier-with-level-1-timing": AcceptedFlag(0, "timers never wait for other ranks"),
    "--barrier-with-L1-time": AcceptedFlag(0, "timers never wait for other ranks"),
    "--use-pytorch-profiler": AcceptedFlag(0, "--profile always uses torch's"),
}

REFUSED: dict[str, str] = {
    **TOKENIZER_REFUSED,
    "--model-parallel-size": "use --tensor-model-parallel-size",
    "--warmup": "use --lr-warmup-fraction",
    "--profile-backward": "leave it out, backward is measured with everything else",
    "--quick-geglu": "use --swiglu, which gates as well",
    "--apply-residual-connection-post-layernorm": "leave it out, norms come before attention and feed-forward layer",
    "--multi-latent-attention": "use --num-query-groups, which makes keys and values smaller as well",
    **dict.fromkeys(("--q-lora-rank", "--kv-lora-rank", "--qk-head-dim", "--qk-pos-emb-head-dim", "--v-head-dim"), NO_LATENTS),
    **dict.fromkeys(("--rotary-scaling-factor", "--mscale", "--mscale-all-dim"), NO_LATENTS),
    "--embed-layernorm": "leave it out, no norm follows the embedding",
    "--glu-activation": "use --swiglu",
    "--attention-head-type": "use --num-query-groups 1 for multiquery, or leave it out for multihead",
    "--kill-switch-path": "use --kill-switch-file",
    "--skip-train-iteration-range": "use --iterations-to-skip",
    "--pp-partition-method": NO_STAGES,
    "--save-wgrads-interval": "leave it out, gradients are not saved",
    "--save-dgrads-interval": "leave it out, gradients are not saved",
    "--onnx-safe": "leave it out, weights leave with tools/convert_to_hf.py",
    "--decoupled-lr": ONE_RATE,
    "--decoupled-min-lr": ONE_RATE,
    "--mos": NO_TEACHER,
    "--data-parallel-sharding-strategy": "use --zero-stage",
    "--use-megatron-fsdp": "use --zero-stage 3",
    "--use-custom-fsdp": "use --zero-stage 3",
    "--use-torch-fsdp2": "use --zero-stage 3",
    "--num-layers-per-virtual-pipeline-stage": NO_STAGES,
    "--num-virtual-stages-per-pipeline-rank": NO_STAGES,
    "--pipeline-model-parallel-split-rank": NO_STAGES,
    "--pipeline-model-parallel-layout": NO_STAGES,
    "--decoder-first-pipeline-num-layers": NO_STAGES,
    "--decoder-last-pipeline-num-layers": NO_STAGES,
    "--use-precision-aware-optimizer": "leave it out, main weights and moments are fp32",
    "--fp32-residual-connection": "leave it out, the residual stream has the working precision",
    "--fp16-lm-cross-entropy": "leave it out, the loss is computed in fp32",
    "--calculate-per-token-loss": "leave it out, a loss is the mean over the tokens of its micro-batch",
    "--load-tag": "use --ckpt-step with the iteration",
    "--reset-iteration": "use --finetune, which starts at iteration 0 with the weights alone",
    "--no-load-lr-state": "use --override-opt-param-scheduler, or --finetune to start at iteration 0",
    "--override-ckpt-iteration": "use --ckpt-step to choose a checkpoint, or --finetune to start at iteration 0",
    **dict.fromkeys(
        ("--non-persistent-ckpt-type", "--non-persistent-local-ckpt-dir", "--non-persistent-local-ckpt-algo"),
        "use --node-local-checkpoints with --save and --load, folders on each node's own disk",
    ),
    **dict.fromkeys(("--replication", "--replication-jump", "--replication-factor"), "use --save-copies, the nodes with each file"),
    "--non-persistent-save-interval": "use --save-interval and --keep-last, there is one folder of checkpoints",
    "--non-persistent-global-ckpt-dir": "use --save, --save-interval and --keep-last, there is one folder of checkpoints",
    "--train-data-exact-num-epochs": "use --train-samples",
    "--train-doc-idx-path": "use --data-cache-path, where indices are kept",
    "--train-sample-idx-path": "use --data-cache-path, where indices are kept",
    "--train-shuffle-idx-path": "use --data-cache-path, where indices are kept",
    "--return-data-index": "leave it out, samples are not objects of their own",
    "--hierarchical-context-parallel-sizes": "leave it out, one exchange joins all ranks that divide a sample",
    "--hybrid-context-parallel": SAME_LENGTH,
    "--dynamic-context-parallel": SAME_LENGTH,
    "--min-dynamic-context-parallel-size": SAME_LENGTH,
    "--max-seqlen-per-dp-cp-rank": SAME_LENGTH,
    "--nccl-communicator-config-path": "use NCCL's variables, such as NCCL_MAX_CTAS",
}

# By the first letters of the flag.
ACCEPTED_FAMILIES: dict[str, AcceptedFlag] = {
    "--moe-": AcceptedFlag(SOME, NO_EXPERTS),
    "--cuda-graph-": AcceptedFlag(SOME, NO_GRAPHS),
}
REFUSED_FAMILIES: dict[str, str] = {
    "--enable-zbh1-": NO_STAGES,
    "--fp8-": "use --bf16, fp8 is not available",
    "--fp4-": "use --bf16, fp4 is not available",
    "--train-weighted-split-paths": "use --train-data-path",
    "--valid-weighted-split-paths": "use --valid-data-path",
    "--test-weighted-split-paths": "use --test-data-path",
    "--fim-": "leave it out, a sample is always read from left to right",
    "--curriculum-": "leave it out, --seq-length is the same in every iteration",
    "--ds-sequence-parallel-fpdt": "leave it out, attention takes whole samples; --recompute-granularity full makes room",
    "--random-ltd": "leave it out, no layer drops tokens",
    "--bert-": "leave it out, the model is a GPT",
    "--retro-": "leave it out, the model is a GPT",
    "--biencoder-": "leave it out, the model is a GPT",
    "--ict-": "leave it out, the model is a GPT",
    "--vision-": "leave it out, the model is a GPT",
    "--dino-": "leave it out, the model is a GPT",
    "--swin-": "leave it out, the model is a GPT",
    "--hybrid-": "leave it out, the model is a GPT",
    "--mamba-": "leave it out, the model is a GPT",
    "--mtp-": "leave it out, one token is predicted at a time",
    "--kd": NO_TEACHER,
    "--sgd-": "leave it out, the optimizer is AdamW",
    "--lion-": "leave it out, the optimizer is AdamW",
    "--muon-": "leave it out, the optimizer is AdamW",
    "--one-logger": "use --log-jsonl or --tensorboard-dir",
    "--no-one-logger": "leave it out, nothing is sent anywhere",
    "--enable-one-logger": "use --log-jsonl or --tensorboard-dir",
    "--otel": "use --log-jsonl or --tensorboard-dir",
    "--log-straggler": "leave it out, --log-jsonl has the times of each iteration",
    "--log-energy": "leave it out, energy is not measured",
}


def remedy_of_refused(spelling: str) -> str | None:
    """The remedy for a flag that is refused; None for a flag that is unknown."""
    families = (remedy for prefix, remedy in REFUSED_FAMILIES.items() if spelling.startswith(prefix))
    return REFUSED.get(spelling) or (NO_TEACHER if spelling.endswith("-teacher") else next(families, None))


def accepted_flag(spelling: str) -> AcceptedFlag | None:
    """The declaration of an accepted flag, or of its family; None for every other flag."""
    families = (accepted for prefix, accepted in ACCEPTED_FAMILIES.items() if spelling.startswith(prefix))
    return ACCEPTED.get(spelling) or next(families, None)


def notice(spelling: str, accepted: AcceptedFlag) -> str:
    """The notice about an accepted flag that changes nothing."""
    return f"accepted, has no effect here: {spelling} ({accepted.reason})"
