"""The tools read what tensor ranks have saved without knowing of them, and tensor ranks read what the tools write."""

from __future__ import annotations

import sys
from dataclasses import asdict
from pathlib import Path
from typing import Any

import consolidate_checkpoint
import convert_from_hf
import convert_to_hf
import generate_text
import pytest
import torch
from generate_text import load_model, open_checkpoint
from harness.divided_model import whole_state
from harness.small_engine import CPU
from harness.small_gpt import VOCAB, small_config
from harness.small_state import Gathering
from harness.tensor_parts import part_of
from harness.worlds import TurnLanes, run_world
from safetensors.torch import load_file
from test_convert_hf import NULL, PADDED
from test_generate_text import continuation, words
from torch import Tensor

from megatron_zpp.checkpoint.engine_state import EngineState
from megatron_zpp.checkpoint.folders import find_checkpoint
from megatron_zpp.checkpoint.progress import Progress
from megatron_zpp.checkpoint.reader import CheckpointReader
from megatron_zpp.checkpoint.saver import CheckpointSaver, SaveOptions
from megatron_zpp.comm.backend import VirtualBackend
from megatron_zpp.comm.ledger import Ledger
from megatron_zpp.comm.links import Links
from megatron_zpp.model.generation import Sampling
from megatron_zpp.model.gpt import GPT, materialize
from megatron_zpp.parallel.grid import Grid
from megatron_zpp.tensor_parallel.context import TensorParallel
from megatron_zpp.zero.engine import ZeroEngine
from megatron_zpp.zero.engine_options import EngineOptions
from megatron_zpp.zero.pieces import Piece, resting_pieces

pytestmark = pytest.mark.virtual

HEADS: dict[str, Any] = {"num_attention_heads": 4, "kv_channels": 6}
LLAMA: dict[str, Any] = {"position_embedding_type": "rope", "normalization": "RMSNorm", "swiglu": True, "disable_bias_linear": True}
UNTIED = {"untie_embeddings_and_output_weights": True}
# Of one architecture each; in the last one both tensor ranks have the one key.
MODELS: dict[str, tuple[str, dict[str, Any]]] = {
    "GPT-2": ("GPT2LMHeadModel", HEADS),
    "Llama 3": ("LlamaForCausalLM", {**HEADS, **LLAMA, **UNTIED, "num_query_groups": 2}),
    "Qwen3": ("Qwen3ForCausalLM", {**HEADS, **LLAMA, "qk_layernorm": True, "num_query_groups": 1}),
}
SAVING_GRID = Grid.of_nodes(2, 4, tensor_ranks=2)


def randomized(changes: dict[str, Any]) -> GPT:
    """A whole model in which no two weights have the same value by chance."""
    model = materialize(GPT(small_config(**changes, make_vocab_size_divisible_by=PADDED), PADDED, 7, torch.float32)).eval()
    generator = torch.Generator().manual_seed(3)
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.copy_(torch.randn(parameter.shape, generator=generator) * 0.4)
    return model


def engine_of(model: GPT, backend: VirtualBackend) -> ZeroEngine:
    """The engine of one rank for a model of this configuration."""
    links = Links(backend, TurnLanes(), Ledger(backend.grid, backend.rank), CPU)
    tensor = None if links.tensor_link is None else TensorParallel(links.tensor_link)
    own = GPT(model.config, model.padded_vocab_size, 7, torch.float32, tensor)
    return ZeroEngine(own, own.unit_specs(), own.uses(), EngineOptions(block_numel=32), links)


def write(directory: Path, model: GPT) -> None:
    """A checkpoint of the model's weights as two tensor ranks times four data ranks save it."""
    gathering = Gathering(SAVING_GRID.world_size)
    weights = {name: weight.detach() for name, weight in model.named_parameters()}

    def program(backend: VirtualBackend) -> None:
        engine = engine_of(model, backend)
        for unit in engine.units:
            for segment in unit.layout.segments(unit.first_slice, unit.slices):
                name = segment.spec.name
                part = part_of(name, weights[name], model.config, SAVING_GRID.tensor_ranks, engine.links.tensor_rank).flatten()
                unit.main_weight[segment.offset : segment.offset + segment.stop - segment.start] = part[segment.start : segment.stop]
        saver = CheckpointSaver(directory, EngineState(engine).share(with_moments=True), SaveOptions(), gathering.of(backend.rank))
        flags = {"model": asdict(model.config), "data": asdict(NULL), "padded_vocab_size": model.padded_vocab_size}
        saver.save(EngineState(engine).manifest(Progress(7, 56, 56), flags, with_moments=True))
        engine.close()

    run_world(SAVING_GRID, program)


def call(tool: Any, monkeypatch: pytest.MonkeyPatch, *arguments: object) -> None:
    """Runs a tool in this process, which saves the start of another."""
    monkeypatch.setattr(sys, "argv", [f"{tool.__name__}.py", *map(str, arguments)])
    tool.main()


def weights_in(directory: Path, model: GPT, grid: Grid) -> dict[str, Tensor]:
    """The whole weights that the ranks of the grid load from there."""

    def program(backend: VirtualBackend) -> list[Piece]:
        engine = engine_of(model, backend)
        folder = find_checkpoint(directory, None)
        assert folder is not None
        with CheckpointReader(folder) as reader:
            EngineState(engine).load(reader, with_moments=False)
        pieces = [piece for piece in resting_pieces(engine) if piece.state == "weight"]
        engine.close()
        return pieces

    shapes = {name: tuple(weight.shape) for name, weight in model.named_parameters()}
    return {name: values for (name, _), values in whole_state(run_world(grid, program), shapes).items()}


@pytest.mark.parametrize("name", MODELS)
def test_transformers_computes_the_logits_of_what_tensor_ranks_have_saved_and_they_find_it_again(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, name: str
) -> None:
    import transformers

    architecture, changes = MODELS[name]
    model = randomized(changes)
    write(tmp_path / "saved", model)
    call(convert_to_hf, monkeypatch, "--load", tmp_path / "saved", "--output", tmp_path / "hf", "--keep-vocab-padding")
    theirs = getattr(transformers, architecture).from_pretrained(tmp_path / "hf").eval()
    tokens = torch.randint(VOCAB, (3, model.config.seq_length), generator=torch.Generator().manual_seed(5))
    with torch.no_grad():
        ours = model(tokens, None, first_sample=0)
        assert torch.allclose(theirs(tokens).logits, ours, rtol=1e-5, atol=1e-5)
    assert ours.abs().max() > 1  # large enough that a mistake would show
    call(convert_from_hf, monkeypatch, "--input", tmp_path / "hf", "--output", tmp_path / "back", "--make-vocab-size-divisible-by", PADDED)
    for grid in (Grid.of_nodes(1, 4, tensor_ranks=2), Grid.of_nodes(1, 4, tensor_ranks=4)):
        found = weights_in(tmp_path / "back", model, grid)
        assert found.keys() == dict(model.named_parameters()).keys()
        assert all(torch.equal(found[path], weight) for path, weight in model.named_parameters())


@pytest.mark.parametrize("name", MODELS)
def test_generation_and_plain_files_have_the_weights_that_tensor_ranks_have_saved(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], name: str
) -> None:
    model = randomized(MODELS[name][1])
    write(tmp_path / "saved", model)
    loaded = load_model(open_checkpoint(tmp_path / "saved", None)).state_dict()
    call(consolidate_checkpoint, monkeypatch, "--load", tmp_path / "saved", "--output", tmp_path / "plain")
    plain = load_file(tmp_path / "plain" / "model.safetensors")
    for found in (loaded, plain):
        assert found.keys() == model.state_dict().keys()
        assert all(torch.equal(found[path], weight) for path, weight in model.state_dict().items())
    capsys.readouterr()
    call(generate_text, monkeypatch, "--load", tmp_path / "saved", "--prompt", "5 9 2", "--max-new-tokens", 6, "--temperature", 0)
    assert capsys.readouterr().out.strip() == words([5, 9, 2] + continuation(model, [5, 9, 2], 6, Sampling(VOCAB, 0), seed=0))
