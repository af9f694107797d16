"""What a program that shards its own module finds in traces of torch's profiler and in the log."""

from __future__ import annotations

import logging
from functools import partial

import pytest
import torch
import torch.distributed as dist
from harness.own_modules import UNITS, loss_of, made, vit
from harness.rank_pool import RankPool
from torch.profiler import ProfilerActivity, profile

from megatron_zpp import POLICIES, ZEROPP, EngineOptions, leave_world, shard
from megatron_zpp.monitor.observer import Observer
from megatron_zpp.monitor.profiler import LabelObserver


def names_in_a_trace(*, is_silent: bool) -> list[str]:
    """Of a step of this rank, in order, without those of torch."""
    dist.init_process_group("gloo")
    model = made(vit)
    options = EngineOptions(POLICIES[3], **({"observer": _Silent()} if is_silent else {}))
    engine = shard(model, UNITS[vit], options)
    for step in range(2):
        with profile(activities=[ProfilerActivity.CPU]) as trace:
            engine.backward(loss_of(model, step, engine.rank, engine.world_size))
            engine.step(1e-3)
    engine.close()
    leave_world()
    events = sorted(trace.events(), key=lambda event: event.time_range.start)
    return [event.name for event in events if not event.name.startswith(("aten::", "autograd::", "gloo:", "_", "torch", "PROFILER"))]


class _Silent(Observer):
    """An observer of the program's own."""


def test_a_trace_of_torchs_profiler_names_units_waits_for_climbs_and_descents_and_the_update(ranks: RankPool) -> None:
    names, _ = ranks.run(1, 2, partial(names_in_a_trace, is_silent=False))
    units = [name for name in names if name.startswith(("forward ", "backward "))]
    modules = ["patch", "blocks.0", "blocks.1"]
    assert units == [
        *(f"forward {name}" for name in ("(root)", *modules)),
        *(f"backward {name}" for name in ("(root)", *reversed(modules))),
    ]
    for unit in ("(root)", *modules):
        assert f"{unit} intra-climb to full wait" in names
        assert f"{unit} intra-descend to secondary wait" in names
    assert names.index("optimizer-clip-main-grad") < names.index("optimizer-inner-step")


def test_an_observer_of_ones_own_takes_the_place_of_labels(ranks: RankPool) -> None:
    found = ranks.run(1, 2, partial(names_in_a_trace, is_silent=True))
    assert not any(name.startswith(("forward", "backward", "optimizer-")) for names in found for name in names)


def test_nothing_is_named_while_no_profiler_runs() -> None:
    observer = LabelObserver()
    assert not observer.is_on
    with profile(activities=[ProfilerActivity.CPU]) as trace:
        assert observer.is_on
        with observer.phase("a phase"), observer.hop("a hop"):
            pass
    with observer.phase("later"):
        observer.begin_unit("forward", "later")
        observer.end_unit()
    assert {event.name for event in trace.events()} >= {"a phase", "a hop"}
    assert "later" not in {event.name for event in trace.events()}


def test_the_log_says_what_was_sharded(caplog_of_library: list[logging.LogRecord]) -> None:
    model = made(vit)
    model.head.requires_grad_(False)
    shard(model, UNITS[vit], EngineOptions(ZEROPP, dtype=torch.bfloat16)).close()
    (record,) = caplog_of_library
    numel = sum(parameter.numel() for parameter in made(vit).parameters())
    frozen = sum(parameter.numel() for parameter in made(vit).head.parameters())
    assert record.levelno == logging.INFO and record.name.startswith("megatron_zpp.")
    assert record.getMessage().startswith(
        f"sharded {numel} parameters, of which {numel - frozen} are trained, in 5 units among 1 rank on 1 node, 1 per partition; they rest "
        "on the primary rung, in a step on the secondary one, and cross links in 16 bits between partitions and 16 inside; "
    )


@pytest.fixture
def caplog_of_library() -> list[logging.LogRecord]:
    """The records of the library, from level INFO on; pytest's own capture is switched off here."""
    records: list[logging.LogRecord] = []

    class Keeping(logging.Handler):
        def emit(self, record: logging.LogRecord) -> None:
            records.append(record)

    logger, handler = logging.getLogger("megatron_zpp"), Keeping()
    logger.addHandler(handler)
    logger.setLevel(logging.INFO)
    yield records
    logger.removeHandler(handler)
    logger.setLevel(logging.NOTSET)
