"""From the parts of tensor ranks to whole parameters, in the order of rows of this model.

How Megatron divides a parameter among its tensor ranks:

    rows       word and head (rows of the vocabulary), qkv, up without gate
    halves     up with a gate: each rank has rows of the gate, then as many of the value
    columns    projection.weight and down.weight
    all have   norms, positions, biases of projection and down

The rows of qkv within a rank, for N heads of D channels (checkpoint_version):

    0          q, k, v; in each N heads; in each D channels      before 2020
    1          N heads; in each D channels; in each q, k, v
    2, 3       N heads (or groups); in each q, k, v; in each D channels: as here
"""

from __future__ import annotations

import enum
from collections.abc import Mapping

import torch
from torch import Tensor

from megatron_zpp.checkpoint.hf.rules import compared_rows, largest_difference, padded_rows
from megatron_zpp.checkpoint.megatron.names import FREQUENCIES
from megatron_zpp.checkpoint.megatron.source import HEAD, WORD, Source, StoredTensor, layers_of
from megatron_zpp.checkpoint.stored_flags import units_of
from megatron_zpp.config.counted import counted
from megatron_zpp.config.flag import next_multiple
from megatron_zpp.config.schema import ModelConfig
from megatron_zpp.model.rotary import RotaryPositions
from megatron_zpp.system.user_error import UserError

VERSIONS = (0, 1, 2, 3)
FIRST_VERSION_OF_GROUPS = 2
VOCABULARY = (WORD, HEAD)
TIED = "copy the whole checkpoint again, or another one of the run."


class Joint(enum.Enum):
    """How the parts of the tensor ranks make the whole."""

    ROWS = "rows"
    HALVES = "halves of rows"
    COLUMNS = "columns"
    EQUAL = "all have it"


ENDINGS = {
    "word.weight": Joint.ROWS,
    "head.weight": Joint.ROWS,
    "qkv.weight": Joint.ROWS,
    "qkv.bias": Joint.ROWS,
    "projection.weight": Joint.COLUMNS,
    "down.weight": Joint.COLUMNS,
}


def joint_of(name: str, model: ModelConfig) -> Joint:
    """The joint of a parameter of this model."""
    if name.endswith(("mlp.up.weight", "mlp.up.bias")):
        return Joint.HALVES if model.swiglu else Joint.ROWS
    return next((joint for ending, joint in ENDINGS.items() if name.endswith(ending)), Joint.EQUAL)


class Joining:
    """Reads whole parameters from a checkpoint.

    model: as its arguments say. rows: kept of the vocabulary; None for all that are stored. padded_vocab_size: rows of this model.
    differing: parameters that all tensor ranks have, and not alike, among those read so far; the first rank's values are taken.
    Raises UserError if the checkpoint lacks a parameter, has one that the model lacks, or has one of another shape.
    """

    def __init__(self, source: Source, model: ModelConfig, rows: int | None = None, padding: int = 1) -> None:
        self.source, self.model = source, model
        self.stored_rows = sum(rank[WORD].shape[0] for rank in source.ranks if WORD in rank and rank[WORD].shape)
        self.rows = self.stored_rows if rows is None else rows
        if self.stored_rows == 0:
            raise UserError(f"the checkpoint has no {WORD}; copy the whole checkpoint of a GPT.")
        if self.rows > self.stored_rows:
            raise UserError(f"--vocab-size {self.rows} is more than the {self.stored_rows} rows of the checkpoint's embedding; correct it.")
        self.padded_vocab_size = self.stored_rows if rows is None else next_multiple(rows, padding)
        self.differing: list[str] = []
        self._check_names()
        self._check_shapes()
        self._check_frequencies()

    def joint(self, name: str) -> Joint:
        return joint_of(name, self.model)

    def parts(self, name: str) -> list[StoredTensor]:
        """The parts of a parameter, one of each tensor rank."""
        return [rank[name] for rank in self.source.ranks]

    def weight(self, name: str) -> Tensor:
        """A whole parameter in fp32. Raises UserError if it is an embedding, and the checkpoint has a tied head with other values."""
        parts = [self._in_order(name, tensor.read()).float() for tensor in self.parts(name)]
        if name == WORD and not self.model.untie_embeddings_and_output_weights:
            for rank, part in zip(self.source.ranks, parts, strict=True):
                _check_tied_head(rank, part)
        joint = self.joint(name)
        if joint is Joint.COLUMNS:
            return torch.cat(parts, dim=1)
        if joint is Joint.HALVES:
            return torch.cat([part.chunk(2)[half] for half in range(2) for part in parts])
        if joint is Joint.ROWS:
            whole = torch.cat(parts)
            return padded_rows(whole[: self.rows], self.padded_vocab_size) if name in VOCABULARY else whole
        if any(not torch.equal(part, parts[0]) for part in parts[1:]):
            self.differing.append(name)
        return parts[0]

    def _in_order(self, name: str, rows: Tensor) -> Tensor:
        """The rows of one tensor rank in the order of today."""
        if self.source.checkpoint_version >= FIRST_VERSION_OF_GROUPS or not name.endswith((".qkv.weight", ".qkv.bias")):
            return rows
        channels = self.model.kv_channels
        if self.source.checkpoint_version == 0:
            return rows.unflatten(0, (3, -1, channels)).transpose(0, 1).flatten(0, 2)
        return rows.unflatten(0, (-1, channels, 3)).transpose(1, 2).flatten(0, 2)

    def _check_names(self) -> None:
        layers = layers_of(self.source.ranks[0])
        if layers != self.model.num_layers:
            raise UserError(
                f"the checkpoint has {counted(layers, 'layer')}, its arguments say {self.model.num_layers}; copy the whole checkpoint."
            )
        version, groups = self.source.checkpoint_version, self.model.key_value_heads
        if version not in VERSIONS or (version < FIRST_VERSION_OF_GROUPS and groups != self.model.num_attention_heads):
            raise UserError(f"the checkpoint has checkpoint_version {version:g}, whose order of rows is not known; it cannot be imported.")
        self.units = units_of(self.model, self.padded_vocab_size)
        needed = {param.name for unit in self.units for param in unit.params}
        for rank, named in enumerate(self.source.ranks):
            found = {name for name in named if not name.startswith(FREQUENCIES)}
            found -= set() if self.model.untie_embeddings_and_output_weights else {HEAD}
            if needed != found:
                missing, left = sorted(needed - found), sorted(found - needed)
                lacks = f"lacks {missing[0]}" if missing else f"has {named[left[0]].where}, which the model of its arguments does not have"
                raise UserError(f"tensor rank {rank} of the checkpoint {lacks}; copy the whole checkpoint, or correct its arguments.")

    def _check_shapes(self) -> None:
        for unit in self.units:
            for param in unit.params:
                whole = (self.stored_rows, *param.whole_shape[1:]) if param.name in VOCABULARY else param.whole_shape
                wanted = self._part_shape(param.name, whole)
                for tensor in self.parts(param.name):
                    if tensor.shape != wanted:
                        raise UserError(f"{tensor.where} has shape {tensor.shape}, its arguments say {wanted}; copy the whole checkpoint.")

    def _check_frequencies(self) -> None:
        positions = RotaryPositions(self.model)
        for tensor in (tensor for rank in self.source.ranks for name, tensor in rank.items() if name.startswith(FREQUENCIES)):
            if self.model.position_embedding_type != "rope" or not positions.are_frequencies(tensor.read()):
                raise UserError(f"{tensor.where} are not the rotary frequencies of its arguments; copy the whole checkpoint again.")

    def _part_shape(self, name: str, whole: tuple[int, ...]) -> tuple[int, ...]:
        ranks, joint = len(self.source.ranks), self.joint(name)
        cut = {Joint.EQUAL: None, Joint.COLUMNS: 1}.get(joint, 0)
        divisor = 2 * ranks if joint is Joint.HALVES else ranks
        if cut is None:
            return whole
        if whole[cut] % divisor != 0:
            raise UserError(f"{name} of shape {whole} cannot be divided among {ranks} tensor ranks; copy the whole checkpoint.")
        return (*whole[:cut], whole[cut] // ranks, *whole[cut + 1 :])


def _check_tied_head(rank: Mapping[str, StoredTensor], embedding: Tensor) -> None:
    """Raises UserError if a tensor rank has a copy of its embedding that is none."""
    if HEAD not in rank:
        return
    head, word = rank[HEAD], rank[WORD]
    if head.shape != word.shape:
        raise UserError(f"{head.where} has shape {head.shape}, and {word.where}, to which it is tied, has {word.shape}; {TIED}")
    rows = compared_rows(head.shape)
    largest = largest_difference(zip(head.read().split(rows), embedding.split(rows), strict=True))
    if largest != 0:
        raise UserError(f"{head.where} differs from {word.where}, to which it is tied, by up to {largest:g}; {TIED}")
