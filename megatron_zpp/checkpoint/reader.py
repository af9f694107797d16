"""Loading: any range of any parameter, from whichever files hold its pieces; nothing is ever unpickled."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError, safe_open
from torch import Tensor

from megatron_zpp.checkpoint.manifest import CheckpointError, StoredPiece, read_manifest
from megatron_zpp.config.options import spelling_of
from megatron_zpp.zero.engine import ZeroEngine
from megatron_zpp.zero.pieces import WEIGHT, resting_pieces

# What decides the function of the weights; heads, for example, leave no trace in shapes.
MODEL_FLAGS = (
    "num_layers",
    "hidden_size",
    "num_attention_heads",
    "kv_channels",
    "ffn_hidden_size",
    "max_position_embeddings",
    "norm_epsilon",
    "untie_embeddings_and_output_weights",
)


class CheckpointReader:
    """One checkpoint, open for reading. Raises CheckpointError where its manifest cannot be used."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.manifest = read_manifest(folder)
        self._pieces: dict[str, list[StoredPiece]] = defaultdict(list)
        for piece in self.manifest.pieces:
            self._pieces[piece.parameter].append(piece)
        self._files: dict[str, Any] = {}

    def read(self, parameter: str, state: str, start: int, stop: int) -> Tensor:
        """Elements [start, stop) of one state of a flattened parameter, [stop - start] fp32 on the CPU."""
        values = torch.empty(stop - start, dtype=torch.float32)
        missing = stop - start
        for piece in self._pieces[parameter]:
            first, last = max(start, piece.start), min(stop, piece.stop)
            if first < last:
                values[first - start : last - start] = self._slice(piece, state, first - piece.start, last - piece.start)
                missing -= last - first
        if missing:
            raise CheckpointError(
                f"{self.folder} lacks {missing} of elements {start} to {stop} of {parameter}; choose another with --ckpt-step"
            )
        return values

    def _slice(self, piece: StoredPiece, state: str, first: int, last: int) -> Tensor:
        path = self.folder / piece.file
        try:
            if piece.file not in self._files:
                self._files[piece.file] = safe_open(path, framework="pt")
            values: Tensor = self._files[piece.file].get_slice(f"{piece.parameter}.{state}")[first:last]
        except (OSError, SafetensorError) as error:
            raise CheckpointError(f"{path} cannot be read ({error}); choose another checkpoint with --ckpt-step") from error
        if values.numel() != last - first:
            raise CheckpointError(f"{path} holds {values.numel()} elements of {piece.parameter} where its manifest says {last - first}")
        return values

    def check_model(self, shapes: Mapping[str, tuple[int, ...]], flags: Mapping[str, Any]) -> None:
        """Nothing, where the checkpoint holds this model: the same shapes, and the same function of the weights.

        flags: the model's configuration here, compared with the checkpoint's.
        Raises CheckpointError naming the flags, or the first parameter, that differ.
        """
        theirs = self.manifest.flags.get("model", {})
        differing = [
            f"{spelling_of(name)} {theirs[name]} there and {flags[name]} here"
            for name in MODEL_FLAGS
            if name in theirs and theirs[name] != flags[name]
        ]
        if not differing and dict(self.manifest.shapes) == dict(shapes):
            return
        raise CheckpointError(
            f"{self.folder} holds another model: {'; '.join(differing) or _first_difference(self.manifest.shapes, shapes)}; "
            "give the flags of the checkpoint or another --load"
        )


def load_engine(engine: ZeroEngine, reader: CheckpointReader, *, with_moments: bool) -> None:
    """Fills the engine's main weights, and with_moments its optimizer and loss scaler, with the checkpoint's."""
    if with_moments and len(reader.manifest.states) == 1:
        raise CheckpointError(f"{reader.folder} holds no optimizer state; give --no-load-optim or --finetune to go on without it")
    for piece in resting_pieces(engine):
        if with_moments or piece.state == WEIGHT:
            piece.values.copy_(reader.read(piece.parameter, piece.state, piece.start, piece.stop))
    if with_moments:
        engine.optimizer.steps = reader.manifest.run["optimizer_steps"]
        engine.loss_scaler.load_state(reader.manifest.run["loss_scaler"])
    engine.weights_changed()


def _first_difference(theirs: Mapping[str, tuple[int, ...]], ours: Mapping[str, tuple[int, ...]]) -> str:
    for name in sorted({*theirs, *ours}):
        if theirs.get(name) != ours.get(name):
            return f"{name} has shape {theirs.get(name)} there and {ours.get(name)} here"
    return "no parameter differs"
