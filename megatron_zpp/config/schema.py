"""The whole configuration: one frozen dataclass per group, one field per flag.

The flag of a field is its name with dashes: `num_layers` is `--num-layers`. A field is annotated with the type it has after
`resolve.resolve`; before that, a field whose value depends on others or on the world holds None unless the user gave it.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Mapping
from dataclasses import dataclass, field, fields, replace
from typing import Any

from megatron_zpp.config.flag import (
    COUNT,
    FRACTION,
    LARGEST_NUMBER,
    LARGEST_WIDTH,
    NOT_NEGATIVE,
    POSITIVE,
    POSITIVE_COUNT,
    POSITIVE_LAYERS,
    POSITIVE_LENGTH,
    POSITIVE_MINUTES,
    POSITIVE_RANKS,
    POSITIVE_TOKENS,
    POSITIVE_VOCABULARY,
    POSITIVE_WIDTH,
    PROCESSES,
    REQUIRED,
    TOKENS,
    VOCABULARY,
    Bounds,
    flag,
    needs,
    unless,
    when,
)

POSITION_EMBEDDING_TYPES = ("learned_absolute", "rope", "none")
NORMALIZATIONS = ("LayerNorm", "RMSNorm")
ATTENTION_BACKENDS = ("auto", "flash", "fused", "unfused", "local")
WORKING_DTYPE_BITS = 16  # in flags of bits: values cross as they are, even if the working dtype is fp32

CHANGING_DECAY = ("linear", "cosine")  # of --weight-decay-incr-style

A_FOLDER_TO_SAVE_IN = needs("save", what="a folder to save in")
A_CHECKPOINT = needs("load", what="a checkpoint to load")
A_PLAN = needs("dry_run")
WITHOUT_ROPE = unless(position_embedding_type="rope")
WITHOUT_POINTS = unless("tensorboard_dir", "wandb_project")


@dataclass(frozen=True)
class ModelConfig:
    """Architecture and regularisation of the GPT."""

    num_layers: int = flag(None, help="Transformer blocks.", unit="blocks", allowed=POSITIVE_LAYERS, otherwise=REQUIRED)
    hidden_size: int = flag(None, help="Width of the residual stream.", unit="values", allowed=POSITIVE_WIDTH, otherwise=REQUIRED)
    num_attention_heads: int = flag(
        None,
        help="Attention heads of a block; they divide --hidden-size unless --kv-channels is given.",
        unit="heads",
        allowed=POSITIVE_WIDTH,
        otherwise=REQUIRED,
    )
    ffn_hidden_size: int = flag(
        None,
        help="Width inside the feed-forward layer.",
        unit="values",
        allowed=POSITIVE_WIDTH,
        otherwise="4 x --hidden-size; with --swiglu two thirds of that, rounded down to a multiple of 64",
    )
    kv_channels: int = flag(
        None, help="Width of one attention head.", unit="values", allowed=POSITIVE_WIDTH, otherwise="--hidden-size / --num-attention-heads"
    )
    group_query_attention: bool = flag(False, help="Heads share keys and values; --num-query-groups alone says the same.")
    num_query_groups: int = flag(
        None,
        help="Groups of attention heads that share one key and value head; they divide --num-attention-heads.",
        unit="groups",
        aliases=("--num-key-value-heads",),
        allowed=POSITIVE_WIDTH,
        otherwise="--num-attention-heads, each head its own; 1 with --group-query-attention",
    )
    seq_length: int = flag(None, help="Length of a training sample.", unit="tokens", allowed=POSITIVE_LENGTH, otherwise=REQUIRED)
    position_embedding_type: str = flag(
        "learned_absolute",
        help="How the model knows positions: a learned vector added to each token, rotation of queries and keys, or not at all.",
        allowed=POSITION_EMBEDDING_TYPES,
        shorthands=(("--use-rotary-position-embeddings", "rope"),),
    )
    no_position_embedding: bool = flag(False, help="Learn no positions: --position-embedding-type is none unless it is given.")
    max_position_embeddings: int = flag(
        None,
        help="Learned positions, at least --seq-length; other position embeddings have no limit.",
        unit="tokens",
        allowed=POSITIVE_LENGTH,
        otherwise="--seq-length",
    )
    rotary_base: float = flag(
        10000.0,
        help="Base of the wavelengths of rotary positions.",
        unit="1",
        aliases=("--rotary-position-embeddings-theta",),
        allowed=POSITIVE,
        without_effect=WITHOUT_ROPE,
    )
    rotary_percent: float = flag(
        1.0,
        help="Share of a head's channels that rotate; the others know no positions.",
        unit="1",
        allowed=Bounds(above=0, at_most=1),
        without_effect=WITHOUT_ROPE,
    )
    rotary_interleaved: bool = flag(
        False, help="Rotate neighbouring channels as pairs, instead of channel i with i + half of them.", without_effect=WITHOUT_ROPE
    )
    rotary_seq_len_interpolation_factor: float = flag(
        1.0, help="Rotary positions are divided by this (linear interpolation).", unit="1", allowed=POSITIVE, without_effect=WITHOUT_ROPE
    )
    use_rope_scaling: bool = flag(
        False, help="Stretch the long wavelengths of rotary positions as Llama 3.1 does.", without_effect=WITHOUT_ROPE
    )
    rope_scaling_factor: float = flag(
        8.0,
        help="How far --use-rope-scaling stretches them.",
        unit="1",
        allowed=Bounds(at_least=1, limit=LARGEST_NUMBER),
        without_effect=WITHOUT_ROPE + unless("use_rope_scaling"),
    )
    rope_scaling_low_freq_factor: float = flag(
        1.0,
        help="Wavelengths above --rope-scaling-original-max-position-embeddings / this are stretched in full.",
        unit="1",
        allowed=POSITIVE,
        without_effect=WITHOUT_ROPE + unless("use_rope_scaling"),
    )
    rope_scaling_high_freq_factor: float = flag(
        4.0,
        help="Wavelengths below --rope-scaling-original-max-position-embeddings / this stay as they are.",
        unit="1",
        allowed=POSITIVE,
        without_effect=WITHOUT_ROPE + unless("use_rope_scaling"),
    )
    rope_scaling_original_max_position_embeddings: int = flag(
        8192,
        help="Context length that the model had before --use-rope-scaling.",
        unit="tokens",
        allowed=POSITIVE_LENGTH,
        without_effect=WITHOUT_ROPE + unless("use_rope_scaling"),
    )
    make_vocab_size_divisible_by: int = flag(
        128, help="The vocabulary is padded to a multiple of this.", unit="tokens", allowed=POSITIVE_VOCABULARY
    )
    padded_vocab_size: int | None = flag(
        None,
        help="Rows of the embedding, at least as many as the tokenizer has ids.",
        unit="tokens",
        allowed=POSITIVE_VOCABULARY,
        otherwise="the next multiple of --make-vocab-size-divisible-by",
    )
    normalization: str = flag("LayerNorm", help="Kind of norm; RMSNorm has no mean and no bias.", allowed=NORMALIZATIONS)
    norm_epsilon: float = flag(
        1e-5, help="Added to the variance, or the mean square, in norms.", unit="1", aliases=("--layernorm-epsilon",), allowed=POSITIVE
    )
    apply_layernorm_1p: bool = flag(False, help="Norms store their gain minus 1, which keeps its digits in 16-bit formats.")
    norm_backend: str = flag(
        "torch",
        help="Kernels of the norms: torch's, or NVIDIA Apex's FusedLayerNorm and FusedRMSNorm (GPUs only, built from NVIDIA's sources).",
        allowed=("torch", "apex"),
    )
    qk_layernorm: bool = flag(False, help="Normalize the query and the key of every head, before positions rotate them.")
    swiglu: bool = flag(False, help="The feed-forward layer is gated: SiLU(gate) x value instead of GELU; excludes --squared-relu.")
    squared_relu: bool = flag(False, help="The feed-forward layer has the square of ReLU instead of GELU; excludes --swiglu.")
    disable_bias_linear: bool = flag(False, help="Linear layers have no biases.")
    add_qkv_bias: bool = flag(
        False,
        help="Query, key and value have biases also with --disable-bias-linear.",
        without_effect=unless("disable_bias_linear", why=", as every linear layer has a bias"),
    )
    attention_backend: str = flag(
        "auto",
        help="Attention kernel: torch's own choice, flash alone, memory-efficient or cuDNN (fused), or plain matrix products "
        "(unfused, local). One that cannot run is an error.",
        allowed=ATTENTION_BACKENDS,
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
    recompute_granularity: str | None = flag(
        None,
        help="Activations that backward recomputes instead of keeping them: of whole blocks, or of attention between its projections.",
        allowed=("full", "selective"),
        otherwise="nothing",
        shorthands=(("--checkpoint-activations", "full"), ("--recompute-activations", "selective")),
    )
    recompute_method: str | None = flag(
        None,
        help="Blocks that --recompute-granularity full recomputes: all, in chunks of --recompute-num-layers that keep their input alone "
        "(uniform), or the first --recompute-num-layers, one by one (block).",
        allowed=("uniform", "block"),
        otherwise="uniform with --recompute-granularity full",
        needs=needs(recompute_granularity="full"),
    )
    recompute_num_layers: int | None = flag(
        None,
        help="Blocks of a chunk with --recompute-method uniform, recomputed blocks with block; a chunk's weights stand in memory at once.",
        unit="blocks",
        aliases=("--checkpoint-num-layers",),
        allowed=POSITIVE_LAYERS,
        otherwise="1 with --recompute-granularity full",
        needs=needs(recompute_granularity="full"),
    )

    @property
    def key_value_heads(self) -> int:
        """Key and value heads of a block. Configurations older than --num-query-groups have one for each head."""
        return self.num_query_groups or self.num_attention_heads

    @property
    def heads_width(self) -> int:
        """Width of the queries of all heads together, and of attention's output."""
        return self.num_attention_heads * self.kv_channels

    @property
    def qkv_width(self) -> int:
        """Width of the queries, keys and values of all heads together."""
        return self.heads_width + 2 * self.key_value_heads * self.kv_channels

    @property
    def has_linear_bias(self) -> bool:
        return not self.disable_bias_linear

    @property
    def has_qkv_bias(self) -> bool:
        return self.has_linear_bias or self.add_qkv_bias

    @property
    def learns_positions(self) -> bool:
        return self.position_embedding_type == "learned_absolute"

    @property
    def rotary_channels(self) -> int:
        """Channels of a head that rotate. The rules make it an even number."""
        return int(self.kv_channels * self.rotary_percent)


@dataclass(frozen=True)
class TrainingConfig:
    """Batch size, length, evaluation and end of the run."""

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
    rampup_batch_size: tuple[str, ...] = flag(
        (),
        help="Start, increment and samples: the global batch grows from there to --global-batch-size in equal steps over these samples.",
        unit="samples",
    )
    step_batch_size_schedule: str | None = flag(
        None,
        help='Global batch sizes by consumed tokens, such as "0:768 250B:1536"; replaces --global-batch-size.',
        unit="tokens:samples",
    )
    decrease_batch_size_if_needed: bool = flag(
        False, help="Round a global batch down to a multiple of --micro-batch-size x ranks instead of refusing it."
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
    train_tokens: int | None = flag(
        None,
        help="Length of training in tokens, rounded up to samples of --seq-length; beside --train-samples the shorter of the two.",
        unit="tokens",
        allowed=POSITIVE_TOKENS,
    )
    iterations_to_skip: tuple[str, ...] = flag(
        (), help="Iterations, counted from 1 as they are printed, whose samples are passed over without a step.", unit="iterations"
    )
    skip_train: bool = flag(False, help="Evaluate what --load holds on the validation and test sets, train nothing and end.")
    exit_interval: int | None = flag(
        None, help="Exit at the first iteration that is a multiple of this.", unit="iterations", allowed=POSITIVE_COUNT
    )
    exit_duration_in_mins: int | None = flag(
        None,
        help="Exit at the first step that ends this long after the process began; with --save it saves first.",
        unit="minutes",
        allowed=POSITIVE_MINUTES,
    )
    exit_signal_handler: bool = flag(
        False,
        help="Save and exit, with exit code 0, at the step in which any rank gets --exit-signal or SIGUSR1.",
        needs=A_FOLDER_TO_SAVE_IN,
    )
    exit_signal: str = flag(
        "SIGTERM",
        help="The signal of --exit-signal-handler beside SIGUSR1.",
        allowed=("SIGTERM", "SIGINT", "SIGUSR1", "SIGUSR2"),
        needs=needs("exit_signal_handler"),
    )
    kill_switch_file: str | None = flag(None, help="Save and exit at the first step at which this file exists for rank 0.", unit="path")
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
    start_eval_at_iter: int = flag(0, help="First iteration that may be followed by a validation.", unit="iterations", allowed=COUNT)
    eval_micro_batch_size: int = flag(
        None,
        help="Samples in one forward pass of one rank in an evaluation.",
        unit="samples",
        allowed=POSITIVE_COUNT,
        otherwise="--micro-batch-size",
    )
    eval_global_batch_size: int = flag(
        None,
        help="Samples in one of --eval-iters, of all ranks; a multiple of --eval-micro-batch-size x ranks.",
        unit="samples",
        allowed=POSITIVE_COUNT,
        otherwise="--global-batch-size",
    )
    full_validation: bool = flag(
        False, help="Validate on every sample of every validation set, each once, instead of --eval-iters batches."
    )
    manual_gc: bool = flag(
        False, help="Collect Python's garbage only at --manual-gc-interval and at evaluations, on every rank at the same time."
    )
    manual_gc_interval: int = flag(
        0,
        help="Iterations from one collection to the next under --manual-gc; 0 collects at evaluations alone.",
        unit="iterations",
        allowed=COUNT,
        needs=needs("manual_gc"),
    )
    no_manual_gc_eval: bool = flag(False, help="Collect nothing before and after evaluations under --manual-gc.", needs=needs("manual_gc"))
    deterministic_mode: bool = flag(False, help="Only kernels that give the same bits every time (CPU runs always do).")
    compile: bool = flag(
        False, help="Let torch.compile make kernels of the blocks: the same loss within rounding; the first steps wait for a compiler."
    )


@dataclass(frozen=True)
class OptimizerConfig:
    """AdamW and its learning-rate schedule."""

    lr: float = flag(None, help="Peak learning rate.", unit="1", allowed=NOT_NEGATIVE, otherwise="3e-4, with a notice")
    min_lr: float = flag(0.0, help="Learning rate at the end of the decay.", unit="1", allowed=NOT_NEGATIVE)
    lr_decay_style: str = flag(
        "linear",
        help="Shape of the decay; constant is assumed when neither data nor length is given.",
        allowed=("constant", "linear", "cosine", "inverse-square-root", "WSD"),
    )
    lr_wsd_decay_style: str = flag(
        "exponential",
        help="Shape of the annealing that ends a WSD schedule.",
        allowed=("exponential", "linear", "cosine", "minus_sqrt"),
        needs=needs(lr_decay_style="WSD"),
    )
    lr_wsd_decay_iters: int | None = flag(
        None,
        help="Length of that annealing, at the end of the decay's horizon.",
        unit="iterations",
        allowed=POSITIVE_COUNT,
        needs=needs(lr_decay_style="WSD"),
    )
    lr_wsd_decay_samples: int | None = flag(
        None, help="The same in samples, with --train-samples.", unit="samples", allowed=POSITIVE_COUNT, needs=needs(lr_decay_style="WSD")
    )
    lr_decay_iters: int | None = flag(
        None, help="Horizon of the decay, warmup included.", unit="iterations", allowed=POSITIVE_COUNT, otherwise="--train-iters"
    )
    lr_decay_samples: int | None = flag(
        None, help="The same in samples, with --train-samples.", unit="samples", allowed=POSITIVE_COUNT, otherwise="--train-samples"
    )
    lr_decay_tokens: int | None = flag(
        None, help="The same in tokens, with --train-samples or --train-tokens.", unit="tokens", allowed=POSITIVE_TOKENS
    )
    lr_warmup_iters: int = flag(0, help="Length of the linear warmup.", unit="iterations", allowed=COUNT)
    lr_warmup_samples: int = flag(0, help="The same in samples, with --train-samples.", unit="samples", allowed=COUNT)
    lr_warmup_tokens: int = flag(0, help="The same in tokens, with --train-samples or --train-tokens.", unit="tokens", allowed=TOKENS)
    lr_warmup_fraction: float | None = flag(
        None, help="The same as a fraction of the decay's horizon; excludes the others.", unit="1", allowed=FRACTION
    )
    lr_warmup_init: float = flag(0.0, help="Learning rate at the start of the warmup.", unit="1", allowed=NOT_NEGATIVE)
    weight_decay: float = flag(
        0.01,
        help="Decoupled weight decay; one-dimensional parameters have none.",
        unit="1",
        allowed=NOT_NEGATIVE,
        without_effect=when(weight_decay_incr_style=CHANGING_DECAY),
    )
    weight_decay_incr_style: str = flag(
        "constant",
        help="How weight decay goes from --start-weight-decay to --end-weight-decay.",
        allowed=("constant", *CHANGING_DECAY),
    )
    start_weight_decay: float = flag(
        None,
        help="Weight decay at the start, if it changes.",
        unit="1",
        allowed=NOT_NEGATIVE,
        otherwise="--weight-decay",
        needs=needs(weight_decay_incr_style=CHANGING_DECAY, instead="--weight-decay"),
    )
    end_weight_decay: float = flag(
        None,
        help="Weight decay at the end, if it changes.",
        unit="1",
        allowed=NOT_NEGATIVE,
        otherwise="--weight-decay",
        needs=needs(weight_decay_incr_style=CHANGING_DECAY, instead="--weight-decay"),
    )
    weight_decay_incr_samples: int = flag(
        None,
        help="Samples over which it changes.",
        unit="samples",
        allowed=POSITIVE_COUNT,
        otherwise="the length of training",
        needs=needs(weight_decay_incr_style=CHANGING_DECAY, instead="--weight-decay"),
    )
    clip_grad: float = flag(1.0, help="Largest global L2 norm of the gradient; 0 turns clipping off.", unit="1", allowed=NOT_NEGATIVE)
    adam_beta1: float = flag(0.9, help="Decay of Adam's first moment.", unit="1", allowed=FRACTION)
    adam_beta2: float = flag(0.999, help="Decay of Adam's second moment.", unit="1", allowed=FRACTION)
    adam_eps: float = flag(1e-8, help="Added to the root of Adam's second moment.", unit="1", allowed=POSITIVE)
    optimizer: str = flag("adam", help="Optimizer (AdamW on fp32 main weights).", allowed=("adam",))
    optimizer_backend: str = flag(
        "torch",
        help="Kernels that update weights and compute gradient norms: torch's fused AdamW and fp64 sums, or NVIDIA Apex's FusedAdam and "
        "multi-tensor L2 norm (GPUs only, built from NVIDIA's sources).",
        allowed=("torch", "apex"),
    )


@dataclass(frozen=True)
class PrecisionConfig:
    """Number format of weights and activations, by default fp32. Main weights are always fp32."""

    fp16: bool = flag(False, help="Train in fp16 with a loss scale; excludes --bf16.")
    bf16: bool = flag(False, help="Train in bf16; excludes --fp16.")
    loss_scale: float | None = flag(
        None,
        help="Constant loss scale for fp16; without it the scale is dynamic.",
        unit="1",
        allowed=POSITIVE,
        without_effect=unless("fp16"),
    )
    initial_loss_scale: float = flag(
        2.0**32,
        help="First dynamic loss scale; 65536 is assumed with --deepspeed-config, and when neither data nor length is given.",
        unit="1",
        allowed=POSITIVE,
        without_effect=unless("fp16") + when("loss_scale"),
    )
    min_loss_scale: float = flag(
        1.0, help="Smallest dynamic loss scale.", unit="1", allowed=POSITIVE, without_effect=unless("fp16") + when("loss_scale")
    )
    loss_scale_window: int = flag(
        1000,
        help="Steps without overflow before the loss scale doubles.",
        unit="iterations",
        allowed=POSITIVE_COUNT,
        without_effect=unless("fp16") + when("loss_scale"),
    )
    hysteresis: int = flag(
        2,
        help="Overflows before the loss scale halves.",
        unit="iterations",
        allowed=POSITIVE_COUNT,
        without_effect=unless("fp16") + when("loss_scale"),
    )


@dataclass(frozen=True)
class ZeroConfig:
    """Sharding and quantization: ZeRO and ZeRO++."""

    zero_stage: int = flag(
        0,
        help="What is sharded: 0 nothing, 1 optimizer state, 2 gradients too, 3 weights too.",
        allowed=(0, 1, 2, 3),
        shorthands=(("--use-distributed-optimizer", 1),),
    )
    deepspeed_config: str | None = flag(
        None, help="DeepSpeed JSON file, whose keys are read as flags.", unit="path", aliases=("--deepspeed_config", "--deepscale_config")
    )
    zero_quantized_weights: bool = flag(False, help="qwZ: weights cross links as blocks of integers; needs --zero-stage 1, 2 or 3.")
    zero_hpz_partition_size: int = flag(
        1,
        help="hpZ: ranks that share a secondary copy of the weights, so that backward gathers stay among them; the ranks of a node are "
        "the usual choice, 1 is off; needs --zero-stage 3.",
        unit="ranks",
        allowed=POSITIVE_RANKS,
    )
    zero_quantized_gradients: bool = flag(False, help="qgZ: gradients cross links as blocks of integers; needs --zero-stage 1, 2 or 3.")
    zero_quantized_weights_bits: int = flag(
        8, help="Bits of a weight under --zero-quantized-weights.", unit="bits", allowed=(4, 8), needs=needs("zero_quantized_weights")
    )
    zero_quantized_gradients_intra_bits: int = flag(
        4,
        help="Bits of a gradient inside a partition, which is a node or what --zero-hpz-partition-size makes of it, under "
        "--zero-quantized-gradients; 16 is the working precision.",
        unit="bits",
        allowed=(4, 8, WORKING_DTYPE_BITS),
        needs=needs("zero_quantized_gradients"),
    )
    zero_quantized_gradients_inter_bits: int = flag(
        4, help="The same between partitions.", unit="bits", allowed=(4, 8, WORKING_DTYPE_BITS), needs=needs("zero_quantized_gradients")
    )
    zero_quantized_gradients_rotation: str = flag(
        "none",
        help="Transform of 32 neighbouring gradients before they are quantized; it spreads outliers and costs no byte.",
        allowed=("none", "hadamard"),
        needs=needs("zero_quantized_gradients"),
    )
    zero_quantized_gradients_rounding: str = flag(
        "nearest",
        help="Rounding of quantized gradients: to the nearest code, or up and down by chance so that errors have the mean 0.",
        allowed=("nearest", "stochastic"),
        needs=needs("zero_quantized_gradients"),
    )
    zero_full_precision_iters: int = flag(
        0,
        help="First iterations in which nothing is quantized.",
        unit="iterations",
        allowed=COUNT,
        needs=needs("zero_quantized_weights", "zero_quantized_gradients"),
    )
    quantization_block_size: int = flag(
        256,
        help="Values that share a scale, and the grain of the sharded layout.",
        unit="values",
        allowed=Bounds(at_least=32, multiple_of=32, limit=LARGEST_WIDTH),
    )
    zero_prefetch_units: int = flag(2, help="Units gathered ahead over the link between partitions.", unit="units", allowed=COUNT)
    zero_prefetch_units_intra: int = flag(1, help="Units gathered ahead over the link inside a partition.", unit="units", allowed=COUNT)


@dataclass(frozen=True)
class DistributedConfig:
    """Ranks, nodes and their communication."""

    tensor_model_parallel_size: int = flag(1, help="Ranks that share one layer; only 1 is available.", unit="ranks", allowed=POSITIVE_RANKS)
    pipeline_model_parallel_size: int = flag(1, help="Pipeline stages; only 1 is available.", unit="ranks", allowed=POSITIVE_RANKS)
    ranks_per_node: int = flag(
        None,
        help="Ranks of one node; they divide the world.",
        unit="ranks",
        allowed=POSITIVE_RANKS,
        otherwise="the launcher's LOCAL_WORLD_SIZE, LOCAL_SIZE or SLURM_NTASKS_PER_NODE",
    )
    distributed_timeout_minutes: int = flag(
        10,
        help="Every rank ends within this time after a rank or a link is lost; a collective may take up to 15 seconds less.",
        unit="minutes",
        allowed=POSITIVE_MINUTES,
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
    multiple_validation_sets: bool = flag(
        False, help="Validate on each corpus that has a validation split by itself, with a loss of its own; corpora without weights only."
    )
    validation_set_names: tuple[str, ...] = flag(
        (),
        help="Names of these sets in lines and logs, in the order of the corpora.",
        otherwise="the file names of the corpora",
        needs=needs("multiple_validation_sets"),
    )
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
        None,
        help="SentencePiece .model, tokenizer.json (or its folder) of HuggingFaceTokenizer, .tiktoken of TikTokenizer.",
        unit="path",
        without_effect=when(tokenizer_type=("NullTokenizer", "GPT2BPETokenizer")),
    )
    vocab_file: str | None = flag(
        None,
        help="vocab.json of GPT2BPETokenizer.",
        unit="path",
        aliases=("--vocab",),
        without_effect=unless(tokenizer_type="GPT2BPETokenizer"),
    )
    merge_file: str | None = flag(
        None, help="merges.txt of GPT2BPETokenizer.", unit="path", without_effect=unless(tokenizer_type="GPT2BPETokenizer")
    )
    vocab_extra_ids: int = flag(
        0,
        help="Pieces <extra_id_N> that SentencePieceTokenizer puts last.",
        unit="ids",
        allowed=VOCABULARY,
        without_effect=unless(tokenizer_type="SentencePieceTokenizer"),
    )
    tiktoken_pattern: str | None = flag(
        None,
        help="How TikTokenizer cuts text into words, by Megatron's names.",
        allowed=("v1", "v2"),
        otherwise="required by TikTokenizer",
        without_effect=unless(tokenizer_type="TikTokenizer"),
    )
    tiktoken_num_special_tokens: int = flag(
        1000,
        help="Ids of TikTokenizer before those of its file.",
        unit="ids",
        allowed=POSITIVE_VOCABULARY,
        without_effect=unless(tokenizer_type="TikTokenizer"),
    )
    tokenizer_special_tokens: tuple[str, ...] = flag(
        (),
        help="Names of TikTokenizer's first ids, with <unk>, <s> and </s> among them.",
        unit="tokens",
        aliases=("--tiktoken-special-tokens",),
        otherwise="<unk> <s> </s>",
        without_effect=unless(tokenizer_type="TikTokenizer"),
    )
    vocab_size: int | None = flag(
        None,
        help="Vocabulary before padding: NullTokenizer needs it, TikTokenizer cuts its file to it, every other must agree with it.",
        unit="tokens",
        allowed=POSITIVE_VOCABULARY,
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
    reset_position_ids: bool = flag(
        False, help="Positions start over after an end-of-document token.", without_effect=when(position_embedding_type="none")
    )
    reset_attention_mask: bool = flag(
        False, help="No token attends across an end-of-document token.", aliases=("--dataloader-inter-document-masking",)
    )
    eod_mask_loss: bool = flag(False, help="What follows an end-of-document token is not predicted: the loss leaves it out.")
    num_workers: int = flag(
        2, help="Processes that read data, per rank; 0 reads in the training process.", unit="processes", allowed=PROCESSES
    )

    @property
    def names_corpora(self) -> bool:
        """Whether any flag names files to train on."""
        paths = (self.data_path, self.train_data_path, self.valid_data_path, self.test_data_path)
        return any(paths) or self.data_args_path is not None or self.per_split_data_args_path is not None


@dataclass(frozen=True)
class CheckpointConfig:
    """Saving and loading."""

    save: str | None = flag(None, help="Folder to save checkpoints in, on a file system that all ranks share.", unit="path")
    load: str | None = flag(None, help="Folder to load a checkpoint from; without one in it the run starts anew.", unit="path")
    save_interval: int | None = flag(
        None,
        help="Iterations from one checkpoint to the next; the end of training is always saved under --save.",
        unit="iterations",
        aliases=("--persistent-save-interval",),
        allowed=POSITIVE_COUNT,
        needs=A_FOLDER_TO_SAVE_IN,
    )
    async_save: bool = flag(
        False, help="Copy the state to host memory and write the checkpoint from there while training goes on.", needs=A_FOLDER_TO_SAVE_IN
    )
    keep_last: int | None = flag(
        None,
        help="Checkpoints to keep; older ones are deleted after a save.",
        unit="checkpoints",
        allowed=POSITIVE_COUNT,
        otherwise="all",
        needs=A_FOLDER_TO_SAVE_IN,
    )
    save_retain_interval: int | None = flag(
        None,
        help="Keep checkpoints at multiples of this, and the last one (or --keep-last); others are deleted after a save.",
        unit="iterations",
        allowed=POSITIVE_COUNT,
        needs=A_FOLDER_TO_SAVE_IN,
    )
    no_save_optim: bool = flag(False, help="Leave optimizer state out of checkpoints.", needs=A_FOLDER_TO_SAVE_IN)
    no_load_optim: bool = flag(False, help="Start with fresh optimizer state.", needs=A_CHECKPOINT)
    finetune: bool = flag(False, help="Load weights only: iteration, consumed samples and schedule start at 0.", needs=A_CHECKPOINT)
    pretrained_checkpoint: str | None = flag(
        None, help="Folder to load weights from, as --finetune does, where --load holds no checkpoint.", unit="path"
    )
    ckpt_step: int | None = flag(
        None, help="Iteration of the checkpoint to load.", unit="iterations", allowed=COUNT, otherwise="the latest", needs=A_CHECKPOINT
    )
    load_last_good_checkpoint: bool = flag(
        False,
        help="Verify the checkpoint before loading it, and where it is damaged take the newest older one that is not.",
        needs=A_CHECKPOINT,
    )
    exit_on_missing_checkpoint: bool = flag(
        False, help="End with an error where --load holds no checkpoint, instead of starting anew.", needs=A_CHECKPOINT
    )
    use_checkpoint_args: bool = flag(
        False,
        help="Take the shape of the model and the tokenizer from the checkpoint, where no flag gives them.",
        needs=needs("load", "pretrained_checkpoint", what="a checkpoint"),
    )
    override_opt_param_scheduler: bool = flag(
        False,
        help="Where the schedule of learning rate and weight decay differs from the checkpoint's, use that of the flags.",
        aliases=("--override-opt_param-scheduler",),
        needs=A_CHECKPOINT,
    )
    use_checkpoint_opt_param_scheduler: bool = flag(
        False,
        help="Use the checkpoint's schedule of learning rate and weight decay, whatever the flags say.",
        aliases=("--use-checkpoint-opt_param-scheduler",),
        needs=A_CHECKPOINT,
    )


@dataclass(frozen=True)
class LoggingConfig:
    """Logs, metrics and their files."""

    log_interval: int = flag(
        100,
        help="Iterations from one training line to the next; 10 is assumed when neither data nor length is given.",
        unit="iterations",
        allowed=POSITIVE_COUNT,
    )
    log_samples_per_source: bool = flag(False, help="Log with each training line how many samples of each corpus have been consumed.")
    log_jsonl: str | None = flag(None, help="File that gets one JSON object per training line.", unit="path")
    log_throughput: bool = flag(False, help="Log with each training line the model FLOPs that a rank makes per second.")
    device_peak_tflops: float | None = flag(
        None,
        help="Peak of one device at the precision of the run; MFU and HFU are shares of it.",
        unit="TFLOP/s",
        allowed=POSITIVE,
        otherwise="the peak of the GPU, if it is known and the run is in fp16 or bf16",
    )
    log_params_norm: bool = flag(False, help="Log with each training line the L2 norm of all main weights.")
    log_num_zeros_in_grad: bool = flag(False, help="Log with each training line how many elements of the mean gradient are 0.")
    log_progress: bool = flag(
        False, help="Keep a progress.txt of starts and checkpoints in the folder of --save.", needs=A_FOLDER_TO_SAVE_IN
    )
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
        help="What is logged of each timer: its maximum, both extremes, or the times of all ranks.",
        allowed=("max", "minmax", "all"),
        without_effect=unless("timing_log_level"),
    )
    tensorboard_dir: str | None = flag(None, help="Folder for TensorBoard.", unit="path")
    tensorboard_log_interval: int = flag(
        1, help="Iterations between TensorBoard points.", unit="iterations", allowed=POSITIVE_COUNT, without_effect=WITHOUT_POINTS
    )
    tensorboard_queue_size: int = flag(
        1000,
        help="Points TensorBoard holds before it writes.",
        unit="points",
        allowed=POSITIVE_COUNT,
        without_effect=unless("tensorboard_dir"),
    )
    log_timers_to_tensorboard: bool = flag(
        False, help="Points of the timers that --timing-log-level lets run.", without_effect=WITHOUT_POINTS
    )
    log_memory_to_tensorboard: bool = flag(False, help="Points of the memory allocated and reserved.", without_effect=WITHOUT_POINTS)
    log_world_size_to_tensorboard: bool = flag(False, help="Points of the number of ranks.", without_effect=WITHOUT_POINTS)
    log_validation_ppl_to_tensorboard: bool = flag(
        False, help="Points of the perplexity of each validation.", without_effect=WITHOUT_POINTS
    )
    no_log_learnig_rate_to_tensorboard: bool = flag(
        False, help="No points of the learning rate.", aliases=("--no-log-learning-rate-to-tensorboard",), without_effect=WITHOUT_POINTS
    )
    no_log_loss_scale_to_tensorboard: bool = flag(False, help="No points of the loss scale.", without_effect=WITHOUT_POINTS)
    wandb_project: str | None = flag(None, help="Project of Weights & Biases that gets what TensorBoard would get.")
    wandb_entity: str | None = flag(
        None, help="Owner of that project.", otherwise="the account that is logged in", without_effect=unless("wandb_project")
    )
    wandb_exp_name: str | None = flag(
        None,
        help="Name of the run on Weights & Biases.",
        otherwise="one that Weights & Biases makes up",
        without_effect=unless("wandb_project"),
    )
    wandb_save_dir: str | None = flag(
        None,
        help="Folder for what Weights & Biases keeps on this machine.",
        unit="path",
        otherwise="wandb in the folder of --save, or here",
        without_effect=unless("wandb_project"),
    )


@dataclass(frozen=True)
class ProfilingConfig:
    """Profiles of a few iterations, and records of memory."""

    profile: bool = flag(
        False,
        help="Write a Chrome trace of a few iterations, by torch.profiler.",
        needs=needs("profile_dir", "tensorboard_dir", what="a folder for its traces"),
    )
    profile_step_start: int = flag(
        10,
        help="Iterations that this process makes before it profiles.",
        unit="iterations",
        allowed=COUNT,
        without_effect=unless("profile"),
    )
    profile_step_end: int = flag(
        12,
        help="Iterations after which it has profiled; above --profile-step-start.",
        unit="iterations",
        allowed=POSITIVE_COUNT,
        without_effect=unless("profile"),
    )
    profile_ranks: tuple[str, ...] = flag(
        (), help="Ranks that profile.", unit="ranks", otherwise="0", without_effect=unless("profile", "record_memory_history")
    )
    profile_dir: str | None = flag(
        None, help="Folder for the traces.", unit="path", otherwise="--tensorboard-dir", without_effect=unless("profile")
    )
    nvtx_ranges: bool = flag(False, help="Name units, hops and phases of every step for Nsight Systems, as NVTX ranges (GPUs only).")
    record_memory_history: bool = flag(
        False, help="Record every allocation on the GPU, and write a snapshot for pytorch.org/memory_viz at the end (GPUs only)."
    )
    memory_snapshot_path: str = flag(
        "snapshot.pickle",
        help="File of that snapshot; the rank is inserted before its extension.",
        unit="path",
        without_effect=unless("record_memory_history"),
    )


@dataclass(frozen=True)
class PlanConfig:
    """The plan that --dry-run prints, for any world. A run that is started does not have these arguments."""

    dry_run: bool = flag(
        False, help="Check every flag, print the plan of the run (memory per rank, bytes per link, tokens, time) and end; needs no GPU."
    )
    nodes: int | None = flag(
        None, help="Nodes of the planned world, of --ranks-per-node ranks each.", unit="nodes", allowed=POSITIVE_RANKS, needs=A_PLAN
    )
    world_size: int | None = flag(
        None,
        help="All ranks of the planned world; with --nodes or --ranks-per-node.",
        unit="ranks",
        allowed=POSITIVE_RANKS,
        otherwise="--nodes x --ranks-per-node, or the launcher's world",
        needs=A_PLAN,
    )
    device: str = flag(
        None,
        help="Kind of device that is planned for.",
        allowed=("gpu", "cpu"),
        otherwise="gpu; cpu with --distributed-backend gloo",
        needs=A_PLAN,
    )
    memory_gigabytes: float | None = flag(
        None,
        help="Memory of each rank; a run that needs more is refused, as it would be at its start.",
        unit="GB",
        allowed=POSITIVE,
        needs=A_PLAN,
    )
    teraflops: float | None = flag(
        None,
        help="What a rank sustains while it computes, recomputation counted; needed for a time.",
        unit="TFLOP/s",
        allowed=POSITIVE,
        needs=A_PLAN,
    )
    inter_gigabits: float | None = flag(
        None, help="Rate of a node's link to the others, in each direction.", unit="Gbit/s", allowed=POSITIVE, needs=A_PLAN
    )
    intra_gigabytes: float = flag(100.0, help="Rate into one rank inside its node.", unit="GB/s", allowed=POSITIVE, needs=A_PLAN)


@dataclass(frozen=True)
class Config:
    """All flags in their groups, with notices and assumptions about them.

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
    plan: PlanConfig = field(default_factory=PlanConfig)
    given: frozenset[str] = frozenset()
    notices: tuple[str, ...] = ()
    assumptions: tuple[str, ...] = ()
    sources: Mapping[str, str] = field(default_factory=dict)

    def with_values(self, **values: Any) -> Config:
        """The same configuration with these fields replaced. Field names are unique among groups."""
        by_group: dict[str, dict[str, Any]] = defaultdict(dict)
        for name, value in values.items():
            by_group[GROUP_OF_FIELD[name]][name] = value
        changes: dict[str, Any] = {group: replace(getattr(self, group), **members) for group, members in by_group.items()}
        return replace(self, **changes)

    def with_notices(self, *lines: str) -> Config:
        return replace(self, notices=self.notices + lines)

    def value_of(self, name: str) -> Any:
        return getattr(getattr(self, GROUP_OF_FIELD[name]), name)


PLAN_GROUP = "plan"
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
    PLAN_GROUP: PlanConfig,
}
GROUP_OF_FIELD: dict[str, str] = {member.name: group for group, members in GROUPS.items() for member in fields(members)}
