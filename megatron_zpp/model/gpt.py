"""The GPT (embedding, blocks, final), and its description for the sharding engine: units and uses.

B micro-batch size, S tokens per sample, R runs of one document each, H hidden size, V padded vocabulary. If ranks divide samples, each has
Q of the S tokens; otherwise Q is S.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from functools import partial

import torch
from torch import Tensor, nn

from megatron_zpp.comm.context_link import ContextLink
from megatron_zpp.config.schema import ModelConfig
from megatron_zpp.model.attention_kernel import HeadShape, head_shape_of
from megatron_zpp.model.block import Block
from megatron_zpp.model.blueprint import Blueprint
from megatron_zpp.model.chunks import recomputed_chunks
from megatron_zpp.model.document_attention import Documents, separated
from megatron_zpp.model.embedding import Embedding
from megatron_zpp.model.final import Final
from megatron_zpp.model.initialization import initial_values
from megatron_zpp.model.recompute import recomputed
from megatron_zpp.model.rotary import RotaryPositions, Rotation
from megatron_zpp.model.shapes import InitialValues, ModelShape
from megatron_zpp.parallel.division import Division
from megatron_zpp.parallel.specs import UnitSpec, Use
from megatron_zpp.tensor_parallel.context import TensorParallel
from megatron_zpp.tensor_parallel.kept_inputs import KeptInputs


class GPT(nn.Module):
    """A language model of the GPT, Llama or Qwen kind. Its parameters are on the meta device; the engine or `materialize` replaces them.

    A weight's storage may be freed between uses. So no code here reads a weight outside the forward of the module that uses it, keeps a
    copy of one, or keeps anything derived from one.
    """

    def __init__(
        self,
        model_config: ModelConfig,
        padded_vocab_size: int,
        seed: int,
        dtype: torch.dtype,
        tensor: TensorParallel | None = None,
        context: ContextLink | None = None,
    ) -> None:
        """tensor: how the layers are divided. context: to the ranks that have other tokens of the samples. None: a rank has them whole."""
        super().__init__()
        self.config = model_config
        self.padded_vocab_size = padded_vocab_size
        self.seed = seed
        part = (1, 0, False) if tensor is None else (tensor.link.ranks, tensor.link.rank, tensor.sequence_parallel)
        self._shape = ModelShape(model_config, padded_vocab_size, *part)
        blueprint = Blueprint(self._shape, seed, dtype, tensor, context)
        self._context_ranks = blueprint.context_ranks
        self._kept_inputs: KeptInputs | None = None
        self.rotary = RotaryPositions(model_config) if model_config.position_embedding_type == "rope" else None
        with torch.device("meta"):
            self.embedding = Embedding(blueprint)
            self.blocks = nn.ModuleList(Block(blueprint, index) for index in range(model_config.num_layers))
            self.final = Final(blueprint)

    def forward(
        self,
        tokens_BQ: Tensor,
        labels_BQ: Tensor | None,
        *,
        first_sample: int,
        position_ids_BS: Tensor | None = None,
        document_lengths_R: Tensor | None = None,
    ) -> Tensor:
        """loss_BQ, per token and in fp32; without labels logits_BQV in the model's dtype.

        first_sample: index in the training run of the micro-batch's first sample; it and the seed decide what dropout drops.
        document_lengths_R: int64 on the host, the number of tokens of each run of one document, sample after sample; attention stays
        inside a run. None: inside a sample. These and the position ids are of whole samples.
        """
        hidden_BQH = self.embedding(tokens_BQ, first_sample, position_ids_BS)
        samples, length = tokens_BQ.shape[0], tokens_BQ.shape[1] * self._context_ranks
        documents = None
        if document_lengths_R is not None:
            documents = separated(document_lengths_R, (samples, length), self.head_shape(hidden_BQH.dtype), tokens_BQ.device)
        rotation = None if self.rotary is None else self.rotary.of_samples(length, position_ids_BS, hidden_BQH)
        kept_from = 0
        inputs = None if self._kept_inputs is None else self._kept_inputs.of_forward()
        for index, chunk in enumerate(recomputed_chunks(self.config)):
            hooks = None if inputs is None else inputs.hooks(index)
            hidden_BQH = recomputed(self._through, chunk, hidden_BQH, first_sample, documents, rotation, hooks=hooks)
            kept_from = chunk.stop
        hidden_BQH = self._through(range(kept_from, self.config.num_layers), hidden_BQH, first_sample, documents, rotation)
        tied_weight_VH = None if self.config.untie_embeddings_and_output_weights else self.embedding.word.weight
        loss_or_logits: Tensor = self.final(hidden_BQH, tied_weight_VH, labels_BQ)
        return loss_or_logits

    def _through(
        self, blocks: range, hidden_BQH: Tensor, first_sample: int, documents: Documents | None, rotation: Rotation | None
    ) -> Tensor:
        for index in blocks:
            hidden_BQH = self.blocks[index](hidden_BQH, first_sample, documents, rotation)
        return hidden_BQH

    def keep_inputs(self, kept: KeptInputs) -> None:
        """Lets `kept` keep the inputs of recomputed chunks from now on, instead of the graph of autograd."""
        self._kept_inputs = kept

    def head_shape(self, dtype: torch.dtype) -> HeadShape:
        """The properties of the heads that decide which attention kernel runs."""
        return head_shape_of(self.config, dtype, self._shape.tensor_ranks * self._context_ranks)

    def unit_specs(self, values: Callable[[str, Division], InitialValues] | None = None) -> tuple[UnitSpec, ...]:
        """Every parameter once, grouped into the units that are gathered together. values: initial ones, in place of the model's own."""
        return self._shape.unit_specs(values or partial(initial_values, self.config, self.seed))

    def uses(self) -> tuple[Use, ...]:
        """The module calls of one forward in order, with the units that each reads. The first and the last read a tied embedding."""
        return self._shape.uses()


def materialize(model: GPT, device: torch.device | str = "cpu") -> GPT:
    """The same model, its meta parameters replaced by real ones with initial values: for a model without sharding, in one process."""
    for unit in model.unit_specs():
        for spec in unit.params:
            owner_path, attribute = spec.name.rsplit(".", 1)
            values = spec.initial_values(0, math.prod(spec.shape)).view(spec.shape)
            dtype = model.get_parameter(spec.name).dtype
            setattr(model.get_submodule(owner_path), attribute, nn.Parameter(values.to(device=device, dtype=dtype)))
    return model
