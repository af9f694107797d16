"""The manifest of a checkpoint without its tensors: all that a plan reads."""

from __future__ import annotations

from pathlib import Path

import pytest

from harness.run_state import run_state
from megatron_zpp.checkpoint import manifest as module
from megatron_zpp.checkpoint.folders import iteration_folder, move_latest
from megatron_zpp.checkpoint.manifest import Manifest
from megatron_zpp.checkpoint.unfinished import make_unfinished, seal
from megatron_zpp.config.schema import Config
from megatron_zpp.model.shapes import ModelShape
from megatron_zpp.training.saving import flags_by_group

STATES = dict.fromkeys(("weight", "exp_avg", "exp_avg_sq"), "F32")


def manifest_of_run(config: Config, padded_vocab: int, iteration: int = 3, consumed_samples: int = 12) -> Manifest:
    """config: resolved."""
    shapes = {param.name: param.whole_shape for unit in ModelShape(config.model, padded_vocab).unit_specs() for param in unit.params}
    flags = {**flags_by_group(config), "padded_vocab_size": padded_vocab}
    return Manifest(iteration, consumed_samples, shapes, STATES, run_state(consumed_samples), flags, {}, {})


def write_manifest(directory: Path, manifest: Manifest) -> Path:
    """The folder of its iteration, which is the latest then."""
    folder = iteration_folder(directory, manifest.iteration)
    make_unfinished(folder)
    seal(folder, manifest)
    move_latest(directory, str(manifest.iteration))
    return folder


def count_parsed_manifests(monkeypatch: pytest.MonkeyPatch) -> list[Path]:
    """A list that grows by the folder of every manifest that is parsed from now on."""
    parsed: list[Path] = []
    parse = module.manifest_of

    def counted(folder: Path, data: bytes) -> Manifest:
        parsed.append(folder)
        return parse(folder, data)

    monkeypatch.setattr(module, "manifest_of", counted)
    return parsed
