"""Estimates the memory of activations from the configuration alone."""

from __future__ import annotations

from typing import NamedTuple

from megatron_zpp.config.schema import ModelConfig
from megatron_zpp.model.block_memory import WIDE_BYTES, AttentionNeed, BlockMemory, RankShare, tensor_buffer_bytes
from megatron_zpp.model.chunks import recomputed_blocks, recomputed_chunks, recomputes_attention
from megatron_zpp.model.kept_need import kept_inputs_shape, kept_need
from megatron_zpp.model.loss_chunks import chunk_logits, has_chunks

# Of fp32 values of the loss that exist at once, see ops/softmax_reference.py; 16-bit logits need two such chunks.
WIDE_CHUNK_BYTES = 64 * 2**20


class ActivationNeed(NamedTuple):
    """Peak bytes in backward of the blocks, and elsewhere: in forward, and in head and loss with their backward."""

    in_blocks: int
    elsewhere: int


def activation_need(
    config: ModelConfig, padded_vocab_size: int, share: RankShare, *, attention: AttentionNeed, is_on_gpu: bool = False
) -> ActivationNeed:
    """Estimated peaks of activations and their gradients in one micro-batch, with what crosses the tensor and the context link.

    is_on_gpu: the host of the device has memory of its own, kernels compute the loss and RMSNorm, and links are on streams. Without
    kernels of the loss a GPU needs two chunks of fp32 values more; a plan does not know what is built where the run will be.

    Forward keeps the input of every chunk of recomputed blocks, unless flags give it places that last, or on the host (model/kept_need.py).
    Of any other block forward keeps all activations, except those inside attention if attention is recomputed. Elsewhere the peak is that
    of the head, of the norm before it, or of the last block's forward. In blocks it is that of one block's backward
    (model/block_memory.py), with a tied output beside the gradient of the word embedding. Beside it there is what other blocks keep, which
    come last; or, when backward has freed that, the activations of the largest chunk that is recomputed, but for its input.
    """
    angles = 2 * config.rotary_channels if config.position_embedding_type == "rope" else 0  # a cosine and a sine for each channel
    rotation = share.samples * config.seq_length * angles * share.element_bytes
    block = BlockMemory(config, share, attention, is_on_gpu)
    inputs_shape = kept_inputs_shape(
        config, share.samples, share.tensor_ranks, sequence_parallel=share.sequence_parallel, context_ranks=share.context_ranks
    )
    inputs = kept_need(config, inputs_shape, share.element_bytes, has_host=is_on_gpu)
    kept_of_block = block.kept - (block.inside if recomputes_attention(config) else 0)
    kept = (config.num_layers - recomputed_blocks(config)) * kept_of_block
    again = max((len(chunk) * block.kept - block.hidden for chunk in recomputed_chunks(config)), default=0)
    vocabulary = padded_vocab_size // share.tensor_ranks
    crossing = tensor_buffer_bytes(config, share, uses_streams=is_on_gpu)
    head = crossing + head_bytes(config, vocabulary, block.tokens, share.element_bytes, fuses_loss=is_on_gpu)
    word_gradient = 0 if config.untie_embeddings_and_output_weights else vocabulary * config.hidden_size * share.element_bytes
    final_norm = block.norm_gradients + block.lasting_buffers
    in_forward = max(0, kept - kept_of_block) + block.in_forward
    in_backward = inputs.staging + max(kept, again) + block.in_backward + word_gradient
    throughout = rotation + inputs.passing + block.hidden
    return ActivationNeed(throughout + in_backward, throughout + max(kept + max(head, final_norm), in_forward))


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
