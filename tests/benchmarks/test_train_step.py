"""What benchmarks/train_step.py compares."""

from __future__ import annotations

import sys

import pytest

from benchmarks import train_step
from benchmarks.slow_links.batches import microbatches, same_batches
from benchmarks.slow_links.configurations import FSDP2, ZERO3, Workload
from benchmarks.slow_links.deepspeed_zero3 import PACKAGE
from benchmarks.train_step import SHARED_SMOKE_MODEL, _parse, compared
from megatron_zpp.config.cli import parse_flags
from megatron_zpp.config.resolve import resolve

WORKLOAD = Workload(1, 4, SHARED_SMOKE_MODEL, micro_batch_size=2)


def test_without_sizes_of_groups_ours_is_compared_with_fsdp2() -> None:
    assert list(compared(WORKLOAD, [], _parse([]).peers)) == [FSDP2, ZERO3]


def test_every_size_of_a_group_trains_on_the_same_samples_in_micro_batches_of_the_same_size() -> None:
    found = compared(WORKLOAD, [1, 2, 4], ["fsdp2"])
    assert list(found) == ["T = 1", "T = 2", "T = 2, sequence parallel", "T = 4", "T = 4, sequence parallel"]
    for flags in found.values():
        config = resolve(parse_flags(flags), 4, 4)
        tensor_ranks = config.distributed.tensor_model_parallel_size
        data_ranks = 4 // tensor_ranks
        assert (config.training.global_batch_size, microbatches(config, data_ranks)) == (8, tensor_ranks)
        samples = set()
        for data_rank in range(data_ranks):
            batches = same_batches(config, range(data_rank, 4, data_ranks))
            samples |= {next(batches).first_sample for _ in range(tensor_ranks)}
        assert samples == {0, 2, 4, 6}


def test_without_deepspeed_no_world_is_started(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    monkeypatch.setitem(sys.modules, PACKAGE, None)
    monkeypatch.setattr(train_step, "World", lambda *arguments: pytest.fail("a world was started"))
    assert train_step.main(["--smoke", "--peers", "fsdp2", "deepspeed"]) == train_step.MISTAKE_EXIT_CODE
    assert "--peers deepspeed needs the package deepspeed, which is not installed" in capsys.readouterr().err


def test_peers_and_sizes_of_groups_are_not_compared_together(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit):
        _parse(["--ranks", "4", "--tensor", "2", "--peers", "fsdp2", "deepspeed"])
    assert "--peers fsdp2 deepspeed has no meaning with --tensor" in capsys.readouterr().err


def test_a_size_that_does_not_divide_the_ranks_is_refused(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit):
        _parse(["--ranks", "4", "--tensor", "3"])
    assert "--tensor 3 does not divide --ranks 4" in capsys.readouterr().err
