"""The memory of one block on one rank: what forward keeps, and the most that exists beside it in backward (pure arithmetic, no torch).

Backward frees what a layer has kept when it has been through that layer. So a block's gradients never exist all at once, and when attention
exchanges heads, all of the feed-forward half is gone. The moments of backward, beside what forward has kept and the gradient of the block's
output:

    moment                   freed before    there
    down projection          -               f, w
    activation function      f               2 f; squared ReLU 4 f, SwiGLU 5 f
    up projection            n f             (n - 1) f, h, and what crosses the tensor link
    norm before it           n f + h         2 h; RMSNorm without a kernel h and 4 or 5 fp32 values
    output projection        n f + 2 h       w, a; three times a if context ranks exchange it
    attention                n f + 2 h       a, y, and as much as attention keeps inside; of scores see `ScoreBytes`
    its input projection     all but 2 h     h, x

    h       hidden states between layers, of the rank's tokens
    w       hidden states of all tokens with sequence parallelism; otherwise h if there is dropout, and none without
    f, n f  outputs of the activation function; with its inputs
    a       queries, or outputs of attention
    x, y    queries, keys and values: before they are exchanged, and after

On a GPU plans count with each of the four products the gradient of its weight, which leaves at once, and a buffer for that of its bias
(`bias_buffer_bytes`), which exists when the input of the product has been freed; on CPUs the latter does not exist, and the former has not
shown beside the rest.

What attention recomputes for itself is there from then on. Where context ranks exchange in forward, of the block there are 2 h, x and
twice y, or three times if several ranks get one key head: less than later, unless heads are much wider than the feed-forward half.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import NamedTuple

from megatron_zpp.config.schema import ModelConfig
from megatron_zpp.model.chunks import recomputes_attention
from megatron_zpp.model.context_traffic import DividedSamples

STATISTICS_BYTES = 2 * 4  # mean and deviation of a token in a norm, fp32
NORMALIZER_BYTES = 4  # per token and head, if the kernel computes scores again in backward
WIDE_BYTES = 4  # of an fp32 value
PROCESSORS = 148  # of a B200; an H200 has 132, an A100 108


class ScoreBytes(NamedTuple):
    """Bytes of each score in torch's plain attention, which computes in fp32.

    kept: after forward. These are the scores after softmax, and with dropout also the scores after it and its mask. beside: the most that
    backward has beside them, which are gradients. On GPUs the mask has one byte, and softmax needs a product of its size in backward.
    """

    kept: int
    beside: int

    @classmethod
    def of(cls, *, has_dropout: bool, is_on_gpu: bool) -> ScoreBytes:
        if is_on_gpu:
            return cls(2 * WIDE_BYTES + 1, 2 * WIDE_BYTES - 1) if has_dropout else cls(WIDE_BYTES, 3 * WIDE_BYTES)
        return cls(3 * WIDE_BYTES, WIDE_BYTES) if has_dropout else cls(WIDE_BYTES, 2 * WIDE_BYTES)


@dataclass(frozen=True)
class AttentionNeed:
    """The tensors of an attention kernel beside its inputs and output.

    keeps_scores: it keeps the S x S matrices for backward. repeats_heads: it keeps a copy of a shared key and value head for every query
    head. is_deterministic: several sums of the queries' gradients exist, so that an order can be kept (kernels of GPUs).
    """

    keeps_scores: bool
    repeats_heads: bool = False
    is_deterministic: bool = False


@dataclass(frozen=True)
class RankShare:
    """What one rank has of a micro-batch of `samples` samples. tensor_ranks: that share layers. context_ranks: that divide samples."""

    samples: int
    element_bytes: int
    tensor_ranks: int = 1
    sequence_parallel: bool = False
    context_ranks: int = 1


@dataclass(frozen=True)
class BlockMemory:
    """One block of `config` on one rank. is_on_gpu: kernels compute RMSNorm, and the tensor link is on streams."""

    config: ModelConfig
    share: RankShare
    attention: AttentionNeed
    is_on_gpu: bool

    @property
    def tokens(self) -> int:
        """Tokens of the micro-batch inside the rank's layers."""
        return self.share.samples * self.config.seq_length // self.share.context_ranks

    @property
    def hidden(self) -> int:
        """h: bytes of the hidden states that the rank has between layers."""
        return self._own_tokens * self._of_width(self.config.hidden_size)

    @property
    def kept(self) -> int:
        """Bytes that forward keeps, with those inside attention.

        Outside it, these are inputs and outputs of two norms and their statistics, queries, keys and values after an exchange, the input
        of the output projection, and inputs and outputs of the activation function. Hidden dropout keeps no mask.
        """
        norms = 4 * self.hidden + 2 * STATISTICS_BYTES * self._own_tokens
        return norms + self._exchanged + self._heads + self._feed_forward_widths * self._inner + self.inside

    @property
    def inside(self) -> int:
        """Bytes that attention keeps between its projections, beside what the projections read and write.

        These are the output in the kernel's own layout, if it is not what the projection reads, a copy of queries, keys and values if
        another operation comes between projection and kernel, another if the kernel keeps scores of 16-bit values, repeated heads,
        statistics of their norms, and scores.
        """
        config = self._of_rank
        shared_heads = config.num_attention_heads - self._divided.exchanged_key_heads
        repeated = 2 * shared_heads * config.kv_channels if self.attention.repeats_heads else 0
        is_copied = config.qk_layernorm or (shared_heads > 0 and config.position_embedding_type != "rope")
        numbers = NORMALIZER_BYTES + (2 * STATISTICS_BYTES if config.qk_layernorm else 0)
        of_heads = self._of_width(self._copied_width + repeated) + config.num_attention_heads * numbers
        copies = is_copied + (self.attention.keeps_scores and self.share.element_bytes < WIDE_BYTES)
        return self.tokens * of_heads + copies * self._exchanged + self._score_bytes.kept * self._scores

    @property
    def _copied_width(self) -> int:
        """The width of the output that attention keeps in the kernel's own layout. Fast kernels of GPUs write what the projection reads."""
        writes_input = self.is_on_gpu and not self.attention.keeps_scores and self.share.context_ranks == 1
        return 0 if writes_input else self._of_rank.heads_width

    @property
    def in_backward(self) -> int:
        """The most bytes that exist in backward beside what forward has kept and the gradient of the output."""
        config, inner, hidden = self.config, self._inner, self.hidden
        feed_forward = self._feed_forward_widths * inner
        up_width = (2 if config.swiglu else 1) * self._of_rank.ffn_hidden_size
        down = (
            inner
            + self._before_product
            + self._of_product(self._of_rank.ffn_hidden_size, config.hidden_size, has_bias=config.has_linear_bias, input_bytes=inner)
        )
        activation = (4 if config.swiglu else 3 if config.squared_relu else 1) * inner
        norm = self.norm_gradients - feed_forward - hidden
        attention = self._attention_gradients - feed_forward - 2 * hidden
        up = hidden - inner + tensor_buffer_bytes(config, self.share, uses_streams=self.is_on_gpu)
        up += self._of_product(config.hidden_size, up_width, has_bias=config.has_linear_bias, input_bytes=hidden)
        of_first = self._of_product(config.hidden_size, self._of_rank.qkv_width, has_bias=config.has_qkv_bias, input_bytes=hidden)
        first = 3 * hidden + self._qkv + of_first - self.kept
        return max(max(down, activation, norm, attention, first, self._exchange - self.kept, self._first_scores) + self.lasting_buffers, up)

    @property
    def in_forward(self) -> int:
        """The most bytes that a block has in forward beside its input, whether it keeps them or not."""
        before_softmax = max(0, 2 * WIDE_BYTES - self._score_bytes.kept) * self._scores + self._first_scores
        attention = 2 * self.hidden + self._exchanged + self._heads + self.inside + before_softmax
        feed_forward = 4 * self.hidden + self._feed_forward_widths * self._inner
        return max(attention, feed_forward, self._exchange) + self.lasting_buffers

    @property
    def norm_gradients(self) -> int:
        """Bytes that exist in backward of a norm beside its input, but for the gradient that its half of the block passes by."""
        if self.config.normalization == "LayerNorm" or self.is_on_gpu:
            return 2 * self.hidden
        # Normalized values, their gradient, that of the input, a product, and 16-bit gradients once more (model/norm.py).
        wide_values = 4 if self.share.element_bytes == WIDE_BYTES else 5
        return self.hidden + wide_values * WIDE_BYTES * self._own_tokens * self.config.hidden_size

    @property
    def _attention_gradients(self) -> int:
        again = self.inside if recomputes_attention(self.config) else 0
        projection = self._before_product + (3 if self.share.context_ranks > 1 else 1) * self._heads
        projection += self._of_product(self._of_rank.heads_width, self.config.hidden_size, has_bias=self.config.has_linear_bias)
        of_inside = self.inside + self._query_sums + (self._score_bytes.beside - self._score_bytes.kept) * self._scores
        return max(projection, self._heads + self._exchanged + of_inside + again)

    @property
    def _score_bytes(self) -> ScoreBytes:
        return ScoreBytes.of(has_dropout=self.config.attention_dropout > 0, is_on_gpu=self.is_on_gpu)

    @property
    def _scores(self) -> int:
        """The scores that the kernel keeps."""
        return self.tokens * self._of_rank.num_attention_heads * self.config.seq_length if self.attention.keeps_scores else 0

    @property
    def _exchange(self) -> int:
        """What a block has while context ranks exchange in forward. Key heads for several ranks are repeated, and then cut into parts."""
        copies = 2 if self._exchanged == self._qkv else 3
        return 2 * self.hidden + self._qkv + copies * self._exchanged if self.share.context_ranks > 1 else 0

    @property
    def _first_scores(self) -> int:
        """Of forward: the causal mask of one sample and head in fp32, and where values have 16 bits a copy of the scores in them."""
        if not self.attention.keeps_scores:
            return 0
        copy = self.share.element_bytes * self._scores if self.share.element_bytes < WIDE_BYTES else 0
        return WIDE_BYTES * self.config.seq_length**2 + copy

    @property
    def lasting_buffers(self) -> int:
        """Bytes for sums over the tensor link: for what comes from the other ranks. On streams forward has one of its own."""
        return (1 + self.is_on_gpu) * self._whole if self.share.tensor_ranks > 1 else 0

    @property
    def _query_sums(self) -> int:
        """The sums of the queries' gradients, which fast kernels of GPUs have in fp32, beside what attention keeps inside."""
        if self._copied_width > 0:
            return 0
        heads = self.share.samples * self._of_rank.num_attention_heads
        sums = -(-PROCESSORS // heads) if self.attention.is_deterministic else 1
        return sums * self.tokens * WIDE_BYTES * self._of_rank.heads_width

    def _of_product(self, inputs: int, outputs: int, *, has_bias: bool, input_bytes: int = 0) -> int:
        """What backward of a product needs on a GPU beside activations: the gradient of its weight, and a buffer for that of its bias.

        input_bytes: that are freed between the two, if nothing else keeps the input of the product.
        """
        if not self.is_on_gpu:
            return 0
        buffer = bias_buffer_bytes(self.tokens, outputs) if has_bias else 0
        return self._of_width(inputs * outputs) + max(0, buffer - (input_bytes if self._frees_inputs else 0))

    @property
    def _frees_inputs(self) -> bool:
        """Whether backward of a product frees its input before it sums the gradient of the bias. Products of shared layers do not."""
        return self.share.tensor_ranks == 1

    @property
    def _whole(self) -> int:
        return self.tokens * self._of_width(self.config.hidden_size)

    @property
    def _before_product(self) -> int:
        """w: the gradient of the output of a half's last product, if it is not that of the block's output."""
        if self.share.sequence_parallel and self.share.tensor_ranks > 1:
            return self._whole
        return self.hidden if self.config.hidden_dropout > 0 else 0

    @property
    def _own_tokens(self) -> int:
        return self.tokens // self.share.tensor_ranks if self.share.sequence_parallel else self.tokens

    @property
    def _feed_forward_widths(self) -> int:
        return 3 if self.config.swiglu else 2

    @property
    def _inner(self) -> int:
        return self.tokens * self._of_width(self._of_rank.ffn_hidden_size)

    @property
    def _heads(self) -> int:
        return self.tokens * self._of_width(self._of_rank.heads_width)

    @property
    def _qkv(self) -> int:
        return self.tokens * self._of_width(self._of_rank.qkv_width)

    @property
    def _exchanged(self) -> int:
        return self._qkv + self.tokens * self._of_width(self._divided.repeated_key_channels)

    @property
    def _divided(self) -> DividedSamples:
        return DividedSamples(self.config, self.share.context_ranks, self.share.tensor_ranks)

    @property
    def _of_rank(self) -> ModelConfig:
        """The configuration of a model as wide as the part of one rank. Ranks that share a key and value head each have a copy."""
        ranks, config = self.share.tensor_ranks, self.config
        return replace(
            config,
            num_attention_heads=config.num_attention_heads // ranks,
            num_query_groups=max(1, config.key_value_heads // ranks),
            ffn_hidden_size=config.ffn_hidden_size // ranks,
        )

    def _of_width(self, width: int) -> int:
        """Bytes of so many activations."""
        return width * self.share.element_bytes


def bias_buffer_bytes(tokens: int, width: int) -> int:
    """The most bytes that torch takes on a GPU to sum [tokens, width] gradients over tokens (ATen/native/cuda/Reduce.cuh).

    A block of 128 threads sums 128 columns, in fp32 in each of its 32 x 4 accumulators. There are up to 16 blocks for every multiprocessor,
    but no more than tokens / 64 for the same columns.
    """
    bytes_per_column = WIDE_BYTES * 128
    return min(bytes_per_column * (PROCESSORS * 16 * 128 + width), bytes_per_column * width * tokens // 64)


def tensor_buffer_bytes(config: ModelConfig, share: RankShare, *, uses_streams: bool) -> int:
    """The most bytes that exist at once because hidden states cross the tensor link: in the backward of a column layer.

    These are what came from the other ranks, and the sum: of the rank's own tokens with sequence parallelism, otherwise first of its part
    and then whole. With sequence parallelism also the gathered input, and the gradient of all tokens before it is summed. More than two
    ranks add up in fp32, 16-bit values into another copy. uses_streams: whether the link is on streams of a GPU. There the sums of forward,
    in another stream than those of backward, have a buffer of their own for what comes from the other ranks, and it stays.
    """
    if share.tensor_ranks == 1:
        return 0
    numel = share.samples * (config.seq_length // share.context_ranks) * config.hidden_size
    wide_copies = 0 if share.tensor_ranks == 2 else 1 if share.element_bytes == WIDE_BYTES else 2
    of_part = (share.element_bytes + wide_copies * WIDE_BYTES) * numel // share.tensor_ranks
    return ((3 if share.sequence_parallel else 2) + uses_streams) * numel * share.element_bytes + of_part
