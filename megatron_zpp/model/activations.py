"""Estimates the memory of activations from the configuration alone.

T tokens of a micro-batch, S tokens per sample, H hidden size, A = heads x channels of a head, C = key and value heads x channels of a head,
F feed-forward hidden size, V padded vocabulary.
"""

from __future__ import annotations

from dataclasses import dataclass, replace

from megatron_zpp.config.schema import ModelConfig
from megatron_zpp.model.chunks import recomputed_blocks, recomputed_chunks, recomputes_attention
from megatron_zpp.model.context_traffic import DividedSamples
from megatron_zpp.model.kept_need import kept_inputs_shape, kept_need
from megatron_zpp.model.loss_chunks import chunk_logits, has_chunks

STATISTICS_BYTES = 2 * 4  # mean and deviation of a token in a norm, fp32
SCORE_BYTES = 3 * 4  # fp32 scores after softmax, after dropout, and the mask, as torch's plain attention keeps them
NORMALIZER_BYTES = 4  # per token and head, if the kernel computes scores again in backward
WIDE_BYTES = 4  # of an fp32 value
# Of fp32 values of the loss that exist at once, see ops/softmax_reference.py; 16-bit logits need two such chunks.
WIDE_CHUNK_BYTES = 64 * 2**20


@dataclass(frozen=True)
class AttentionNeed:
    """The tensors that an attention kernel keeps for backward, beside its inputs and output.

    keeps_scores: it keeps the S x S matrices. repeats_heads: it keeps a copy of a shared key and value head for every query head.
    """

    keeps_scores: bool
    repeats_heads: bool = False


def activation_bytes(
    config: ModelConfig,
    padded_vocab_size: int,
    micro_batch_size: int,
    element_bytes: int,
    *,
    attention: AttentionNeed,
    tensor_ranks: int = 1,
    sequence_parallel: bool = False,
    context_ranks: int = 1,
    has_host: bool = False,
    fuses_loss: bool = False,
) -> int:
    """Estimated peak bytes of activations and their gradients in one micro-batch: what forward keeps, plus the larger of two peaks.

    They are those of one rank of `tensor_ranks`, each of which has its part of the heads, of F and of V, and whole hidden states or, with
    sequence parallelism, those of its own tokens. What crosses the tensor link comes on top: see `tensor_buffer_bytes`.

    If `context_ranks` ranks divide every sample, a rank has 1/C of the tokens. Inside attention it has all tokens and 1/C of the heads,
    which is as much, but for key heads that several ranks get. What crosses the context link on top: see `context_buffer_bytes`.

    has_host: the host of the device has memory of its own. fuses_loss: see `head_bytes`.

    Forward keeps the input of every chunk of recomputed blocks, unless flags give it places that last, or on the host (model/kept_need.py).
    Of any other block forward keeps all activations, except those inside attention if attention is recomputed. The first peak is that of
    the head. The second is that of one block's backward: the gradients of the block, the activations that are recomputed for it (of the
    largest chunk, or of one attention), and with a tied output the gradient of the word embedding.
    """
    divided = DividedSamples(config, context_ranks, tensor_ranks)
    inputs_shape = kept_inputs_shape(
        config, micro_batch_size, tensor_ranks, sequence_parallel=sequence_parallel, context_ranks=context_ranks
    )
    inputs = kept_need(config, inputs_shape, element_bytes, has_host=has_host)
    tokens = micro_batch_size * divided.own.seq_length
    repeated_keys = tokens * divided.repeated_key_channels * element_bytes
    config, padded_vocab_size = _of_one_rank(config, tensor_ranks), padded_vocab_size // tensor_ranks
    own_tokens = tokens // tensor_ranks if sequence_parallel else tokens
    inside = tokens * _inside_attention_bytes_per_token(config, element_bytes, attention) + repeated_keys
    within_layers = tokens * _bytes_per_token_within_layers(config, element_bytes)
    block = own_tokens * _bytes_per_token_between_layers(config, element_bytes) + within_layers + inside
    hidden = own_tokens * config.hidden_size * element_bytes
    chunks = recomputed_chunks(config)
    kept_of_block, again = (block - inside, inside) if recomputes_attention(config) else (block, 0)
    kept = inputs.passing + (config.num_layers - recomputed_blocks(config)) * kept_of_block
    again = max((len(chunk) * block for chunk in chunks), default=again)
    head = head_bytes(config, padded_vocab_size, tokens, element_bytes, fuses_loss=fuses_loss)
    word_gradient = 0 if config.untie_embeddings_and_output_weights else padded_vocab_size * config.hidden_size * element_bytes
    backward_of_block = block + again + word_gradient
    return kept + hidden + max(head, inputs.staging + backward_of_block)


def _of_one_rank(config: ModelConfig, tensor_ranks: int) -> ModelConfig:
    """The configuration of a model as wide as the part of one rank. Ranks that share a key and value head each have a copy."""
    return replace(
        config,
        num_attention_heads=config.num_attention_heads // tensor_ranks,
        num_query_groups=max(1, config.key_value_heads // tensor_ranks),
        ffn_hidden_size=config.ffn_hidden_size // tensor_ranks,
    )


def head_bytes(config: ModelConfig, padded_vocab_size: int, tokens: int, element_bytes: int, *, fuses_loss: bool) -> int:
    """The peak of head and loss: logits, and what exists beside them.

    Whole logits: first their gradient and fp32 values, then their gradient and that of the head. In chunks: the logits of one, which their
    gradient overwrites, their fp32 values, the gradient of the head, and the fp32 sum of the hidden states' gradients. Logits in fp32 are
    their own fp32 values, and such a sum is the gradient itself. fuses_loss: kernels compute the loss, so no fp32 values exist.
    """
    hidden = tokens * config.hidden_size
    logits = chunk_logits(tokens, padded_vocab_size, config.loss_chunk_tokens)
    is_narrow = element_bytes < WIDE_BYTES
    wide = 0 if fuses_loss else min(WIDE_CHUNK_BYTES, WIDE_BYTES * logits)
    head_gradient = padded_vocab_size * config.hidden_size * element_bytes
    if has_chunks(tokens, config.loss_chunk_tokens):
        beside = wide + WIDE_BYTES * hidden if is_narrow else 0
        return logits * element_bytes + beside + head_gradient + 2 * hidden * element_bytes
    values = 2 * wide if is_narrow else wide
    return logits * element_bytes + max(logits * element_bytes + values, head_gradient) + 2 * hidden * element_bytes


def mask_bytes(samples: int, length: int, element_bytes: int) -> int:
    """Bytes of the additive mask that separates the documents of a micro-batch."""
    return samples * length * length * element_bytes


def tensor_buffer_bytes(
    config: ModelConfig, micro_batch_size: int, element_bytes: int, *, tensor_ranks: int, sequence_parallel: bool, uses_streams: bool
) -> int:
    """The most bytes that exist at once because hidden states cross the tensor link: in the backward of a column layer.

    These are what came from the other ranks, and the sum: of the rank's own tokens with sequence parallelism, otherwise first of its part
    and then whole. With sequence parallelism also the gathered input, and the gradient of all tokens before it is summed. More than two
    ranks add up in fp32, 16-bit values into another copy. uses_streams: whether the link is on streams of a GPU. There the sums of forward,
    in another stream than those of backward, have a buffer of their own for what comes from the other ranks, and it stays.
    """
    if tensor_ranks == 1:
        return 0
    numel = micro_batch_size * config.seq_length * config.hidden_size
    wide_copies = 0 if tensor_ranks == 2 else 1 if element_bytes == WIDE_BYTES else 2
    of_part = (element_bytes + wide_copies * WIDE_BYTES) * numel // tensor_ranks
    return ((3 if sequence_parallel else 2) + uses_streams) * numel * element_bytes + of_part


def context_buffer_bytes(divided: DividedSamples, micro_batch_size: int, element_bytes: int) -> int:
    """The most bytes that exist at once because attention exchanges: the parts that a rank sends, and those that it receives."""
    if divided.context_ranks == 1:
        return 0
    return 2 * micro_batch_size * divided.own.seq_length * divided.exchanged_channels * element_bytes


def _bytes_per_token_between_layers(config: ModelConfig, element_bytes: int) -> int:
    """Bytes that a block keeps between its linear layers: inputs and outputs of two norms (4 H), and their statistics."""
    return element_bytes * 4 * config.hidden_size + 2 * STATISTICS_BYTES


def _bytes_per_token_within_layers(config: ModelConfig, element_bytes: int) -> int:
    """Bytes that a block keeps from a column layer to the next row layer, outside attention.

    These are the output of the qkv projection (A + 2 C), the input of the other projection (A), and inputs and output of the activation
    function (2 F, or 3 F with a gate). Hidden dropout keeps no mask.
    """
    ffn_widths = 3 if config.swiglu else 2
    return element_bytes * (config.qkv_width + config.heads_width + ffn_widths * config.ffn_hidden_size)


def _inside_attention_bytes_per_token(config: ModelConfig, element_bytes: int, attention: AttentionNeed) -> int:
    """Bytes that attention keeps between its projections, beside what the projections read and write.

    That is the output in the kernel's own layout (A), a copy of q, k and v if another operation comes between projection and kernel,
    repeated heads, and scores.
    """
    repeated = 2 * (config.heads_width - config.key_value_heads * config.kv_channels) if attention.repeats_heads else 0
    is_rotated = config.position_embedding_type == "rope"
    is_copied = config.qk_layernorm or (config.key_value_heads < config.num_attention_heads and not is_rotated)
    values = config.heads_width + repeated + (config.qkv_width if is_copied else 0)
    scores = SCORE_BYTES * config.seq_length if attention.keeps_scores else NORMALIZER_BYTES
    return element_bytes * values + config.num_attention_heads * scores
