"""The programs of examples/ run, learn and print what they promise."""

from __future__ import annotations

import re
from pathlib import Path

import pytest
import torch
from harness import forked
from harness.example_runs import output_of_example
from harness.places import ROOT
from harness.rank_pool import RankPool
from safetensors.torch import load_file

LOSS = re.compile(r"loss (\d+\.\d+)(?: to (\d+\.\d+))?")


def losses(output: str) -> list[float]:
    return [float(number) for found in LOSS.findall(output) for number in found if number]


def printed_by(name: str, *arguments: object) -> str:
    done = forked.run("-m", f"examples.{name}", *arguments)
    assert done.returncode == 0, done.stderr
    return done.stdout


@pytest.mark.gloo
def test_a_module_of_your_own_learns_alone_and_as_well_on_two_ranks(ranks: RankPool) -> None:
    alone = printed_by("shard_your_own_module")
    assert losses(alone)[-1] < 0.1 * losses(alone)[0]
    assert "in a world of 1, each rank holds" in alone
    assert "received 0 bytes" in alone
    first, second = ranks.run(1, 2, output_of_example, "shard_your_own_module")
    assert second == ""
    assert "in a world of 2, each rank holds" in first
    # The same samples in another order of sums: printed with four digits, losses differ by rounding at most.
    assert losses(first) == pytest.approx(losses(alone), abs=2e-4)


def test_a_module_of_your_own_goes_on_from_what_it_saved(tmp_path: Path) -> None:
    whole = printed_by("shard_your_own_module")
    printed_by("shard_your_own_module", "--checkpoints", tmp_path, "--steps", 15)
    rest = printed_by("shard_your_own_module", "--checkpoints", tmp_path)
    assert losses(rest) == losses(whole)[3:]  # from step 10 on, to the digit
    assert sorted(path.name for path in tmp_path.glob("iter_*")) == ["iter_0000010", "iter_0000020"]


def test_a_codec_of_your_own_sends_about_a_quarter_and_learns_as_well() -> None:
    plain, coded = printed_by("codec_of_your_own").splitlines()
    plain_bytes, coded_bytes = (int(re.findall(r"(\d+) bytes", line)[0]) for line in (plain, coded))
    # One byte per value and 16 per payload, instead of 4 bytes per value.
    assert 0.25 * plain_bytes < coded_bytes < 0.26 * plain_bytes
    (plain_first, plain_last), (coded_first, coded_last) = losses(plain), losses(coded)
    assert plain_last < 0.2 * plain_first
    assert coded_last < 0.2 * coded_first


def test_a_model_of_transformers_learns_and_transformers_reads_what_was_saved(tmp_path: Path) -> None:
    import transformers  # takes a second, and every worker imports this file

    first, *_, last = losses(printed_by("hugging_face_model", "--steps", 20, "--save", tmp_path))
    assert last < 0.8 * first
    ids = torch.tensor(list((ROOT / "examples/hugging_face_model.py").read_bytes())[:1024]).view(-1, 64)
    saved = transformers.AutoModelForCausalLM.from_pretrained(tmp_path)(input_ids=ids, labels=ids).loss.item()
    assert saved == pytest.approx(last, rel=0.1)  # other samples of the same text


def test_adapters_learn_beside_a_frozen_model_and_are_saved_alone(tmp_path: Path) -> None:
    file = tmp_path / "adapters.safetensors"
    printed = printed_by("lora", "--save", file)
    first, *_, last = losses(printed)
    assert last < first - 0.2
    weights = load_file(file)
    places = [f"model.layers.{layer}.self_attn.{name}" for layer in range(2) for name in ("q_proj", "v_proj")]
    assert weights.keys() == {f"{place}.{matrix}.weight" for place in places for matrix in ("down", "up")}
    assert all(weight.any() for weight in weights.values())
    assert f"trained {sum(weight.numel() for weight in weights.values())} weights" in printed


@pytest.mark.gloo
def test_a_model_learns_on_islands_about_as_well_as_on_one_with_few_bytes_between_them(ranks: RankPool) -> None:
    alone = printed_by("outer_steps", "--steps", 48)
    first, *_, last = losses(alone)
    assert last < 0.65 * first
    printed, second = ranks.run(2, 1, output_of_example, "outer_steps", "--steps", 48)
    assert second == ""
    assert losses(printed)[-1] == pytest.approx(last, rel=0.03)
    received = [
        int(number) for number in re.findall(r"(\d+) bytes have come into", printed)
    ]  # after 1, 16, 32 and 48 steps, and at the end
    of_all_units = received[0]
    parameters = 256 * 96 + 64 * 96 + 3 * (12 * 96 * 96 + 13 * 96) + 2 * 96 + 96 * 256 + 256
    # Half of the model goes each way in 3 bits and the scales; what is more is padding, and gains and biases in 16 bits.
    assert 2 * (3 / 8 + 2 / 256) / 2 < of_all_units / parameters < 1.1 * 2 * (3 / 8 + 2 / 256) / 2
    assert received == [of_all_units, *(of_all_units * exchanges for exchanges in (16, 17, 18, 19))]
