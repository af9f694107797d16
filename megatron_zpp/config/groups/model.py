"""Flags of the model: its shape, and how it is computed."""

from __future__ import annotations

from dataclasses import dataclass

from megatron_zpp.config.flag import (
    FRACTION,
    LARGEST_NUMBER,
    POSITIVE,
    POSITIVE_LAYERS,
    POSITIVE_LENGTH,
    POSITIVE_VOCABULARY,
    POSITIVE_WIDTH,
    REQUIRED,
    TOKENS,
    Bounds,
    flag,
    needs,
    unless,
    when,
)

POSITION_EMBEDDING_TYPES = ("learned_absolute", "rope", "none")
NORMALIZATIONS = ("LayerNorm", "RMSNorm")
ATTENTION_BACKENDS = ("auto", "flash", "fused", "unfused", "local")
WITHOUT_ROPE = unless(position_embedding_type="rope")


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
    apply_layernorm_1p: bool = flag(False, help="Norms store their gain minus 1, and add the 1 in the working dtype.")
    norm_backend: str = flag(
        "torch",
        help="Kernels of the norms: torch's, or NVIDIA Apex's FusedLayerNorm and FusedRMSNorm (GPUs only, built from NVIDIA's sources).",
        allowed=("torch", "apex"),
    )
    qk_layernorm: bool = flag(False, help="Normalize the query and the key of every head before rotary positions are applied.")
    swiglu: bool = flag(False, help="The feed-forward layer is gated: SiLU(gate) x value instead of GELU; excludes --squared-relu.")
    squared_relu: bool = flag(False, help="The feed-forward layer uses the square of ReLU instead of GELU; excludes --swiglu.")
    disable_bias_linear: bool = flag(
        False, help="Linear layers have no biases; GELU is then exact, as with --no-bias-gelu-fusion, unless --openai-gelu is given."
    )
    no_bias_gelu_fusion: bool = flag(
        False,
        help="GELU is exact, z / 2 (1 + erf(z / sqrt 2)), as Megatron computes it without its fused kernel, whose form is that of tanh.",
        without_effect=when("swiglu", "squared_relu", "openai_gelu"),
    )
    openai_gelu: bool = flag(
        False,
        help="GELU always has its tanh form.",
        without_effect=when("swiglu", "squared_relu") + unless("no_bias_gelu_fusion", "disable_bias_linear"),
    )
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
        aliases=("--activations-checkpoint-granularity",),
        allowed=("full", "selective"),
        otherwise="nothing",
        shorthands=(("--checkpoint-activations", "full"), ("--recompute-activations", "selective")),
    )
    recompute_method: str | None = flag(
        None,
        help="Blocks that --recompute-granularity full recomputes: all, in chunks of --recompute-num-layers that keep only their "
        "input (uniform), or the first --recompute-num-layers blocks, each alone (block).",
        aliases=("--activations-checkpoint-method",),
        allowed=("uniform", "block"),
        otherwise="uniform with --recompute-granularity full",
        needs=needs(recompute_granularity="full"),
    )
    recompute_num_layers: int | None = flag(
        None,
        help="With --recompute-method uniform, blocks per chunk, whose weights are all in memory at once; with block, number of "
        "recomputed blocks.",
        unit="blocks",
        aliases=("--checkpoint-num-layers", "--activations-checkpoint-num-layers"),
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
    def has_exact_gelu(self) -> bool:
        """Whether the activation is GELU by the error function; otherwise it is its tanh form, or no GELU."""
        is_fused = not (self.no_bias_gelu_fusion or self.disable_bias_linear)
        return not (is_fused or self.openai_gelu or self.swiglu or self.squared_relu)

    @property
    def learns_positions(self) -> bool:
        return self.position_embedding_type == "learned_absolute"

    @property
    def rotary_channels(self) -> int:
        """Channels of a head that rotate. The rules make it an even number."""
        return int(self.kv_channels * self.rotary_percent)
