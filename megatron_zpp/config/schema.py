"""The whole configuration: one frozen dataclass per group, one field per flag.

The flag of a field is its name with dashes: `num_layers` is `--num-layers`. The type of a field is that after `resolve.resolve`.
Before that, a field whose default depends on other flags or on the world is None unless the user gave it.
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
CONTEXT_EXCHANGES = ("a2a", "p2p", "allgather", "a2a+p2p")
WORKING_DTYPE_BITS = 16  # a number of bits that means no quantization, even if the working dtype is fp32

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
    group_query_attention: bool = flag(False, help="Groups of heads share keys and values; --num-query-groups alone has the same effect.")
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
        help="Position embedding: a learned vector added to each token, rotation of queries and keys, or none.",
        allowed=POSITION_EMBEDDING_TYPES,
        shorthands=(("--use-rotary-position-embeddings", "rope"),),
    )
    no_position_embedding: bool = flag(False, help="Use no position embedding: the default of --position-embedding-type becomes none.")
    max_position_embeddings: int = flag(
        None,
        help="Number of learned positions, at least --seq-length; the other position embeddings have no limit.",
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
        help="Share of a head's channels that rotary positions rotate; the others carry no position.",
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
        help="Factor by which --use-rope-scaling stretches long wavelengths.",
        unit="1",
        allowed=Bounds(at_least=1, limit=LARGEST_NUMBER),
        without_effect=WITHOUT_ROPE + unless("use_rope_scaling"),
    )
    rope_scaling_low_freq_factor: float = flag(
        1.0,
        help="Wavelengths above --rope-scaling-original-max-position-embeddings / this value are stretched by the full factor.",
        unit="1",
        allowed=POSITIVE,
        without_effect=WITHOUT_ROPE + unless("use_rope_scaling"),
    )
    rope_scaling_high_freq_factor: float = flag(
        4.0,
        help="Wavelengths below --rope-scaling-original-max-position-embeddings / this value are not stretched.",
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
    apply_layernorm_1p: bool = flag(False, help="Norms store their gain minus 1, which 16-bit formats represent more precisely.")
    norm_backend: str = flag(
        "torch",
        help="Kernels of the norms: torch's, or NVIDIA Apex's FusedLayerNorm and FusedRMSNorm (GPUs only, built from NVIDIA's sources).",
        allowed=("torch", "apex"),
    )
    qk_layernorm: bool = flag(False, help="Normalize the query and the key of every head before rotary positions are applied.")
    swiglu: bool = flag(False, help="The feed-forward layer is gated: SiLU(gate) x value instead of GELU; excludes --squared-relu.")
    squared_relu: bool = flag(False, help="The feed-forward layer uses the square of ReLU instead of GELU; excludes --swiglu.")
    disable_bias_linear: bool = flag(False, help="Linear layers have no biases.")
    add_qkv_bias: bool = flag(
        False,
        help="Query, key and value have biases also with --disable-bias-linear.",
        without_effect=unless("disable_bias_linear", why=", as every linear layer has a bias"),
    )
    attention_backend: str = flag(
        "auto",
        help="Attention kernel: the fastest that is known to be right here (auto), flash alone, cuDNN or memory-efficient (fused), or "
        "plain matrix products (unfused, local). A kernel that cannot run here is an error.",
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
        help="What backward recomputes instead of keeping it: whole blocks (full), or attention between its projections (selective).",
        allowed=("full", "selective"),
        otherwise="nothing",
        shorthands=(("--checkpoint-activations", "full"), ("--recompute-activations", "selective")),
    )
    recompute_method: str | None = flag(
        None,
        help="Blocks that --recompute-granularity full recomputes: all, in chunks of --recompute-num-layers that keep only their "
        "input (uniform), or the first --recompute-num-layers blocks, each alone (block).",
        allowed=("uniform", "block"),
        otherwise="uniform with --recompute-granularity full",
        needs=needs(recompute_granularity="full"),
    )
    recompute_num_layers: int | None = flag(
        None,
        help="With --recompute-method uniform, blocks per chunk, whose weights are all in memory at once; with block, number of "
        "recomputed blocks.",
        unit="blocks",
        aliases=("--checkpoint-num-layers",),
        allowed=POSITIVE_LAYERS,
        otherwise="1 with --recompute-granularity full",
        needs=needs(recompute_granularity="full"),
    )
    partition_activations: bool = flag(
        False,
        help="Each of the ranks that share layers keeps a part of the inputs of recomputed chunks, and backward gathers them, one chunk "
        "ahead.",
        aliases=("--distribute-saved-activations", "--distribute-checkpointed-activations"),
        needs=needs(recompute_granularity="full"),
    )
    checkpoint_in_cpu: bool = flag(
        False,
        help="The inputs of recomputed chunks are kept in pinned memory of the host, and come back one chunk ahead.",
        aliases=("--cpu-checkpointing",),
        needs=needs(recompute_granularity="full"),
    )
    contiguous_checkpointing: bool = flag(
        False,
        help="The inputs of recomputed chunks are kept in memory that is allocated once, before the first step.",
        aliases=("--contigious-checkpointing",),
        needs=needs(recompute_granularity="full"),
        without_effect=when("checkpoint_in_cpu"),
    )
    loss_chunk_tokens: int = flag(
        1024,
        help="Logits that exist at once, as a number of tokens: output layer and loss of a larger micro-batch are computed in chunks, and "
        "backward computes the logits again. 0: all logits exist at once and are kept for backward.",
        unit="tokens",
        allowed=TOKENS,
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
        help="START INCREMENT SAMPLES: the global batch grows from START to --global-batch-size by INCREMENT, in equal stages over "
        "SAMPLES.",
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
        help="Length of training in tokens, rounded up to whole samples; with --train-samples too, the shorter of the two counts.",
        unit="tokens",
        allowed=POSITIVE_TOKENS,
    )
    iterations_to_skip: tuple[str, ...] = flag(
        (),
        help="Iterations to skip, counted from 1 as they are printed: their samples are consumed without training on them.",
        unit="iterations",
    )
    skip_train: bool = flag(False, help="Do not train: evaluate the checkpoint of --load on the validation and test sets, and end.")
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
        help="After this many steps in a row with a NaN or infinite loss or gradient, save the state from before them and end with an "
        "error; 0 never ends the run.",
        unit="iterations",
        allowed=COUNT,
    )
    seed: int = flag(1234, help="Seed of weights, dropout and data order.", unit="1", allowed=Bounds(at_least=0, at_most=2**32 - 1))
    eval_interval: int = flag(1000, help="Iterations from one validation to the next.", unit="iterations", allowed=POSITIVE_COUNT)
    eval_iters: int = flag(
        100, help="Global batches of one validation, and of the test; 0 turns both off.", unit="iterations", allowed=COUNT
    )
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
        help="Samples of all ranks in one global batch of an evaluation; a multiple of --eval-micro-batch-size x ranks.",
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
        help="Length of the annealing of a WSD schedule, which ends with the decay.",
        unit="iterations",
        allowed=POSITIVE_COUNT,
        needs=needs(lr_decay_style="WSD"),
    )
    lr_wsd_decay_samples: int | None = flag(
        None,
        help="Length of the annealing in samples, with --train-samples.",
        unit="samples",
        allowed=POSITIVE_COUNT,
        needs=needs(lr_decay_style="WSD"),
    )
    lr_decay_iters: int | None = flag(
        None, help="Iterations until the decay ends, warmup included.", unit="iterations", allowed=POSITIVE_COUNT, otherwise="--train-iters"
    )
    lr_decay_samples: int | None = flag(
        None, help="--lr-decay-iters in samples, with --train-samples.", unit="samples", allowed=POSITIVE_COUNT, otherwise="--train-samples"
    )
    lr_decay_tokens: int | None = flag(
        None, help="--lr-decay-iters in tokens, with --train-samples or --train-tokens.", unit="tokens", allowed=POSITIVE_TOKENS
    )
    lr_warmup_iters: int = flag(0, help="Length of the linear warmup.", unit="iterations", allowed=COUNT)
    lr_warmup_samples: int = flag(0, help="Length of the warmup in samples, with --train-samples.", unit="samples", allowed=COUNT)
    lr_warmup_tokens: int = flag(
        0, help="Length of the warmup in tokens, with --train-samples or --train-tokens.", unit="tokens", allowed=TOKENS
    )
    lr_warmup_fraction: float | None = flag(
        None,
        help="Length of the warmup as a fraction of the decay (--lr-decay-iters); excludes the other --lr-warmup lengths.",
        unit="1",
        allowed=FRACTION,
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
        help="Shape of the change of weight decay from --start-weight-decay to --end-weight-decay.",
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
        help="Samples over which weight decay changes.",
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
        help="Overflows until the loss scale halves; every later one halves it again, until the scale doubles.",
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
        None,
        help="DeepSpeed JSON file; its keys set the flags that they correspond to.",
        unit="path",
        aliases=("--deepspeed_config", "--deepscale_config"),
    )
    zeropp: str | None = flag(
        None,
        help="A set of ZeRO++ flags. paper: --zero-stage 3 with qwZ, hpZ over the ranks of a node, and qgZ. lean: quantized weight "
        "differences and the Gaussian code for gradients, in --zero-stage 3 (with hpZ over the ranks of a node), 1 or 2.",
        allowed=("paper", "lean"),
    )
    zero_quantized_weights: bool = flag(False, help="qwZ: weights cross links as blocks of integers; needs --zero-stage 1, 2 or 3.")
    zero_hpz_partition_size: int = flag(
        1,
        help="hpZ: ranks per group; each group holds a secondary copy of the weights, so that gathers in backward stay inside it. Usually "
        "the ranks of a node, where ranks that share layers count as one; 1 turns it off; needs --zero-stage 3.",
        unit="ranks",
        allowed=POSITIVE_RANKS,
    )
    zero_quantized_gradients: bool = flag(False, help="qgZ: gradients cross links as blocks of integers; needs --zero-stage 1, 2 or 3.")
    zero_quantized_weights_bits: int = flag(
        8, help="Bits of a weight under --zero-quantized-weights.", unit="bits", allowed=(4, 8), needs=needs("zero_quantized_weights")
    )
    zero_quantized_weight_differences: bool = flag(
        False,
        help="Every node keeps a copy of the weights across steps, and only quantized differences cross between nodes; needs --zero-stage "
        "1 or 2, or 3 with --zero-hpz-partition-size.",
    )
    zero_quantized_weight_differences_bits: int = flag(
        3,
        help="Bits of a weight's difference under --zero-quantized-weight-differences.",
        unit="bits",
        allowed=(1, 2, 3, 4),
        needs=needs("zero_quantized_weight_differences"),
    )
    zero_quantized_gradients_code: str = flag(
        "absmax",
        help="Code of gradients. absmax: even steps up to the largest value of a block. gaussian: blocks of 256 are rotated, and levels "
        "are placed for a Gaussian with an unbiased scale; between partitions only, inside them INT8.",
        allowed=("absmax", "gaussian"),
        needs=needs("zero_quantized_gradients"),
    )
    zero_quantized_gradients_intra_bits: int | None = flag(
        None,
        help="Bits of a gradient between the ranks of one partition (a node, or a group of --zero-hpz-partition-size ranks) under "
        "--zero-quantized-gradients; 16 is the working precision.",
        unit="bits",
        allowed=(4, 8, WORKING_DTYPE_BITS),
        otherwise="4, or 8 with --zero-quantized-gradients-code gaussian",
        needs=needs("zero_quantized_gradients"),
    )
    zero_quantized_gradients_inter_bits: int | None = flag(
        None,
        help="Bits of a gradient between partitions under --zero-quantized-gradients; 16 is the working precision.",
        unit="bits",
        allowed=(1, 2, 3, 4, 8, WORKING_DTYPE_BITS),
        otherwise="4, or 3 with --zero-quantized-gradients-code gaussian",
        needs=needs("zero_quantized_gradients"),
    )
    zero_quantized_gradients_rotation: str = flag(
        "none",
        help="Transform of 32 neighbouring gradients before they are quantized; it spreads outliers and adds no bytes.",
        allowed=("none", "hadamard"),
        needs=needs("zero_quantized_gradients"),
    )
    zero_quantized_gradients_rounding: str = flag(
        "nearest",
        help="Rounding of quantized gradients: to the nearest code, or up or down at random so that the mean error is 0.",
        allowed=("nearest", "stochastic"),
        needs=needs("zero_quantized_gradients"),
    )
    zero_gradients_between_microbatches: str | None = flag(
        None,
        help="Where the gradients of a step's micro-batches are added up. primary: every micro-batch is sent to the owner of a slice. "
        "secondary: they are added up inside each partition and sent between partitions once per step, which takes 4 bytes per parameter "
        "divided by the ranks of a partition; needs --zero-stage 2 or 3.",
        allowed=("primary", "secondary"),
        otherwise="primary, or secondary with --zeropp lean, --zero-stage 2 or 3 and several micro-batches per step",
    )
    zero_full_precision_iters: int = flag(
        0,
        help="Number of iterations at the start of the run in which nothing is quantized.",
        unit="iterations",
        allowed=COUNT,
        needs=needs("zero_quantized_weights", "zero_quantized_weight_differences", "zero_quantized_gradients"),
    )
    quantization_block_size: int = flag(
        256,
        help="Neighbouring values that share a scale; every rank's slice of a unit is padded to whole blocks.",
        unit="values",
        allowed=Bounds(at_least=32, multiple_of=32, limit=LARGEST_WIDTH),
    )
    optimizer_cpu_offload: bool = flag(
        False,
        help="Main weights and Adam's moments are kept and updated in the memory of the host, all cores of a node divided among its ranks; "
        "on the device stay 4 bytes per owned parameter, and working weights. Needs --zero-stage 1, 2 or 3.",
        aliases=("--cpu-optimizer", "--cpu-offload"),
    )
    zero_prefetch_units: int = flag(
        2, help="How many units ahead of need are gathered over the link between partitions.", unit="units", allowed=COUNT
    )
    zero_prefetch_units_intra: int = flag(
        1, help="How many units ahead of need are gathered over the link inside a partition.", unit="units", allowed=COUNT
    )

    @property
    def quantizes(self) -> bool:
        """Whether anything crosses a link as quantized values."""
        return self.zero_quantized_weights or self.zero_quantized_weight_differences or self.zero_quantized_gradients


@dataclass(frozen=True)
class DistributedConfig:
    """Ranks, nodes and their communication."""

    tensor_model_parallel_size: int = flag(
        1,
        help="Ranks that share every layer and its samples; must divide the ranks of a node.",
        unit="ranks",
        allowed=POSITIVE_RANKS,
    )
    sequence_parallel: bool = flag(
        False,
        help="Between the layers, each of the ranks that share them has only its own part of the tokens.",
        without_effect=when(tensor_model_parallel_size=1),
    )
    context_parallel_size: int = flag(
        1,
        help="Ranks that divide the tokens of every sample among themselves; must divide the ranks that do not share layers.",
        unit="ranks",
        aliases=("--ds-sequence-parallel-size",),
        allowed=POSITIVE_RANKS,
    )
    cp_comm_type: str = flag(
        "a2a",
        help="How attention sees whole samples that ranks divide: they exchange tokens for heads (a2a). The other kinds are refused.",
        allowed=CONTEXT_EXCHANGES,
        without_effect=when(context_parallel_size=1),
    )
    pipeline_model_parallel_size: int = flag(1, help="Pipeline stages; only 1 is available.", unit="ranks", allowed=POSITIVE_RANKS)
    ranks_per_node: int = flag(
        None,
        help="Ranks of one node; must divide the number of ranks.",
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
        help="Accepted because some launchers pass it, and ignored: the environment variable LOCAL_RANK counts.",
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
        "with their numbers of samples as weights.",
        unit="path",
    )
    train_data_path: tuple[str, ...] = flag(
        (), help="As --data-path, for training alone, without --split; excludes --data-path.", unit="path"
    )
    valid_data_path: tuple[str, ...] = flag((), help="As --train-data-path, for validation.", unit="path")
    test_data_path: tuple[str, ...] = flag((), help="As --train-data-path, for the test.", unit="path")
    multiple_validation_sets: bool = flag(
        False, help="Validate on every corpus separately, and report one loss for each; the corpora must have no weights."
    )
    validation_set_names: tuple[str, ...] = flag(
        (),
        help="Names of the sets of --multiple-validation-sets in printed lines and logs, in the order of the corpora.",
        otherwise="the file names of the corpora",
        needs=needs("multiple_validation_sets"),
    )
    data_args_path: str | None = flag(None, help="Text file with the words of --data-path, for many corpora.", unit="path")
    per_split_data_args_path: str | None = flag(
        None,
        help="JSON file with the words of --train-data-path, --valid-data-path and --test-data-path under train, valid and test.",
        unit="path",
    )
    split: str = flag("969, 30, 1", help="Shares of documents for training, validation and test.", unit="parts")
    mock_data: bool = flag(False, help="Train on generated tokens instead of files; assumed if no flag names a corpus.")
    tokenizer_type: str = flag(
        None,
        help="Tokenizer of the corpus.",
        allowed=TOKENIZER_TYPES,
        otherwise="NullTokenizer with mock data, else required",
    )
    tokenizer_model: str | None = flag(
        None,
        help="SentencePiece .model, tokenizer.json (or its folder) of HuggingFaceTokenizer, .tiktoken or .json of TikTokenizer.",
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
        help="Number of tokens <extra_id_N> that SentencePieceTokenizer adds after its own.",
        unit="ids",
        allowed=VOCABULARY,
        without_effect=unless(tokenizer_type="SentencePieceTokenizer"),
    )
    tiktoken_pattern: str | None = flag(
        None,
        help="Megatron's name of the pattern by which TikTokenizer cuts text into words.",
        allowed=("v1", "v2"),
        otherwise="required by TikTokenizer",
        without_effect=unless(tokenizer_type="TikTokenizer"),
    )
    tiktoken_num_special_tokens: int = flag(
        1000,
        help="Number of TikTokenizer's special tokens, whose ids come before those of its file.",
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
        help="Vocabulary size before padding: NullTokenizer needs it, TikTokenizer cuts its file to it, others must have it.",
        unit="tokens",
        allowed=POSITIVE_VOCABULARY,
        otherwise="50257 for NullTokenizer with mock data",
    )
    data_cache_path: str | None = flag(None, help="Folder of the index cache.", unit="path", otherwise="a folder beside each corpus")
    mid_level_dataset_surplus: float = flag(
        0.005,
        help="Extra samples that each corpus of a weighted blend prepares, as a share of the samples that its weight asks for.",
        unit="1",
        allowed=FRACTION,
    )
    dataloader_type: str = flag(
        "single", help="Order of samples: one shuffled order, the same for any number of ranks.", allowed=("single",)
    )
    reset_position_ids: bool = flag(
        False, help="Positions start over after an end-of-document token.", without_effect=when(position_embedding_type="none")
    )
    reset_attention_mask: bool = flag(
        False, help="No token attends across an end-of-document token.", aliases=("--dataloader-inter-document-masking",)
    )
    eod_mask_loss: bool = flag(False, help="The loss leaves out the prediction of the token that follows an end-of-document token.")
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
    load: str | None = flag(None, help="Folder to load a checkpoint from; if it holds none, the run starts from scratch.", unit="path")
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
        None, help="Folder to load weights from, as with --finetune, if --load holds no checkpoint.", unit="path"
    )
    ckpt_step: int | None = flag(
        None, help="Iteration of the checkpoint to load.", unit="iterations", allowed=COUNT, otherwise="the latest", needs=A_CHECKPOINT
    )
    load_last_good_checkpoint: bool = flag(
        False,
        help="Verify the checkpoint before loading it; if it is damaged, load the newest older one that is intact.",
        needs=A_CHECKPOINT,
    )
    exit_on_missing_checkpoint: bool = flag(
        False, help="End with an error if --load holds no checkpoint, instead of starting from scratch.", needs=A_CHECKPOINT
    )
    use_checkpoint_args: bool = flag(
        False,
        help="Take the model's shape and the tokenizer from the checkpoint, except values that flags give.",
        needs=needs("load", "pretrained_checkpoint", what="a checkpoint"),
    )
    override_opt_param_scheduler: bool = flag(
        False,
        help="Use the schedule of learning rate and weight decay that the flags give, even if the checkpoint's differs.",
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
    log_throughput: bool = flag(False, help="Log with each training line the model FLOP/s of one rank.")
    device_peak_tflops: float | None = flag(
        None,
        help="Peak speed of one device in the run's precision, from which MFU and HFU are computed.",
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
        0,
        help="What is timed: 0 iterations, 1 also the parts that run once per iteration, 2 also parts that run more often.",
        allowed=(0, 1, 2),
    )
    timing_log_option: str = flag(
        "minmax",
        help="What is logged of each timer: the maximum over ranks, minimum and maximum, or the times of all ranks.",
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
    log_timers_to_tensorboard: bool = flag(False, help="Log points of the timers of --timing-log-level.", without_effect=WITHOUT_POINTS)
    log_memory_to_tensorboard: bool = flag(False, help="Log points of the memory allocated and reserved.", without_effect=WITHOUT_POINTS)
    log_world_size_to_tensorboard: bool = flag(False, help="Log points of the number of ranks.", without_effect=WITHOUT_POINTS)
    log_validation_ppl_to_tensorboard: bool = flag(
        False, help="Log points of the perplexity of each validation.", without_effect=WITHOUT_POINTS
    )
    no_log_learnig_rate_to_tensorboard: bool = flag(
        False,
        help="Do not log points of the learning rate.",
        aliases=("--no-log-learning-rate-to-tensorboard",),
        without_effect=WITHOUT_POINTS,
    )
    no_log_loss_scale_to_tensorboard: bool = flag(False, help="Do not log points of the loss scale.", without_effect=WITHOUT_POINTS)
    wandb_project: str | None = flag(None, help="Project of Weights & Biases to log the same points to as to TensorBoard.")
    wandb_entity: str | None = flag(
        None, help="Owner of that project.", otherwise="the account that is logged in", without_effect=unless("wandb_project")
    )
    wandb_exp_name: str | None = flag(
        None,
        help="Name of the run on Weights & Biases.",
        otherwise="generated by Weights & Biases",
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
        help="Number of iterations that this process runs before the profile starts.",
        unit="iterations",
        allowed=COUNT,
        without_effect=unless("profile"),
    )
    profile_step_end: int = flag(
        12,
        help="Number of iterations of this process after which the profile ends; above --profile-step-start.",
        unit="iterations",
        allowed=POSITIVE_COUNT,
        without_effect=unless("profile"),
    )
    profile_ranks: tuple[str, ...] = flag(
        (),
        help="Ranks that write profiles and memory records.",
        unit="ranks",
        otherwise="0",
        without_effect=unless("profile", "record_memory_history"),
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
    """The plan that --dry-run prints, for any world. Only --dry-run uses these flags."""

    dry_run: bool = flag(
        False, help="Check every flag, print the plan of the run (memory per rank, bytes per link, tokens, time) and end; needs no GPU."
    )
    nodes: int | None = flag(
        None, help="Nodes of the planned world, of --ranks-per-node ranks each.", unit="nodes", allowed=POSITIVE_RANKS, needs=A_PLAN
    )
    world_size: int | None = flag(
        None,
        help="Number of ranks of the planned world; needs --nodes or --ranks-per-node.",
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
        help="Memory of each rank; a plan that needs more is refused, as the run would be at start-up.",
        unit="GB",
        allowed=POSITIVE,
        needs=A_PLAN,
    )
    host_memory_gigabytes: float | None = flag(
        None,
        help="Memory of each node's host, which its ranks share; a plan that needs more is refused.",
        unit="GB",
        allowed=POSITIVE,
        needs=A_PLAN,
    )
    teraflops: float | None = flag(
        None,
        help="Speed that a rank sustains while it computes, with recomputation counted; without it no time is planned.",
        unit="TFLOP/s",
        allowed=POSITIVE,
        needs=A_PLAN,
    )
    inter_gigabits: float | None = flag(
        None, help="Rate of the link between a node and the others, in each direction.", unit="Gbit/s", allowed=POSITIVE, needs=A_PLAN
    )
    intra_gigabytes: float = flag(
        100.0, help="Rate at which one rank receives from the other ranks of its node.", unit="GB/s", allowed=POSITIVE, needs=A_PLAN
    )


@dataclass(frozen=True)
class Config:
    """All flags in their groups, with notices and assumptions about them.

    given: names of the fields that the user set. notices: lines to print. assumptions: what the run assumes, one line each.
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
