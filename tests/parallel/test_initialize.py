from __future__ import annotations

import ast
import contextlib
import io
import os
import pickle
import weakref
from contextlib import nullcontext
from datetime import timedelta
from threading import Event
from types import SimpleNamespace

import pytest
import torch
import torch.distributed as dist
from harness.patience import PATIENCE_SECONDS
from harness.places import ROOT
from harness.rank_pool import RankPool
from harness.tiny_runs import TINY
from harness.world_of_gpus import world_without_gloo

from megatron_zpp.config.cli import parse_flags
from megatron_zpp.config.flag import FlagError
from megatron_zpp.config.resolve import resolve
from megatron_zpp.parallel import initialize
from megatron_zpp.parallel.groups import WorldGroups
from megatron_zpp.parallel.initialize import World, choose_device, joined_errors
from megatron_zpp.parallel.launch import Launch, read_launch
from megatron_zpp.system.user_error import UserError
from megatron_zpp.training.instruments import make_instruments
from megatron_zpp.training.setup import build_links


def test_gloo_means_the_cpu_whatever_the_machine_has(monkeypatch: pytest.MonkeyPatch) -> None:
    _pretend_gpus(monkeypatch, 8)
    assert choose_device(Launch(0, 1, 0, 1), "gloo") == torch.device("cpu")


def test_nccl_without_a_gpu_is_refused_with_flag_and_remedy(monkeypatch: pytest.MonkeyPatch) -> None:
    _pretend_gpus(monkeypatch, 0)
    with pytest.raises(UserError, match="--distributed-backend nccl needs a GPU.*leave the flag out"):
        choose_device(Launch(0, 1, 0, 1), "nccl")


def test_each_local_rank_gets_a_gpu_of_its_own_or_the_run_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    _pretend_gpus(monkeypatch, 2)
    monkeypatch.delenv("NCCL_HOSTID", raising=False)
    assert choose_device(Launch(1, 4, 1, 4), None) == torch.device("cuda", 1)
    with pytest.raises(UserError, match="local rank 2 finds only 2 GPUs.*start at most 2 ranks"):
        choose_device(Launch(2, 4, 2, 4), None)


def test_no_error_on_any_rank_joins_to_nothing() -> None:
    assert joined_errors(["", "", ""]) == ""


def test_the_same_mistake_everywhere_is_said_once() -> None:
    assert joined_errors(["bad flag"] * 3) == "bad flag"


def test_a_mistake_of_some_ranks_names_them_one_line_per_message_in_the_order_of_ranks() -> None:
    joined = joined_errors(["", "no such file", "", "no such file", "full disk"])
    assert joined.splitlines() == ["no such file (on rank 1, 3 of 5)", "full disk (on rank 4 of 5)"]


@pytest.mark.parametrize(
    ("raised", "is_agreed"), [(UserError("no such file"), True), (FlagError("no such flag"), True), (ValueError("a bug"), False)]
)
def test_ranks_agree_on_a_users_mistake_and_a_bug_goes_its_own_way(raised: ValueError, is_agreed: bool) -> None:
    agreed: list[str | None] = []
    world = SimpleNamespace(world_size=1, agree_on_errors=agreed.append)
    with nullcontext() if is_agreed else pytest.raises(ValueError, match="a bug"), World.agreement(world):  # type: ignore[arg-type]
        raise raised
    assert agreed == ([str(raised)] if is_agreed else [])


# Of every rank in turn: nothing, other alphabets, a path whose bytes are not UTF-8, more than one packet.
TEXTS = ("", "Größe 量 😀", "/data/\udcff", "long " * 40_000)


def gather_texts_without_pickle() -> list[list[str]]:
    """What this rank gathers from all, first short texts, then long ones, then none; pickle is out of order meanwhile."""
    world = World(read_launch(os.environ), torch.device("cpu"), timedelta(minutes=1))
    loads, dumps, pickler, unpickler = pickle.loads, pickle.dumps, dist.distributed_c10d._pickler, dist.distributed_c10d._unpickler

    def refuse(*_: object) -> None:
        raise AssertionError("a rank pickles")

    pickle.loads = pickle.dumps = dist.distributed_c10d._pickler = dist.distributed_c10d._unpickler = refuse  # type: ignore[assignment]
    try:
        found = [world.gather_texts(f"rank {world.rank}"), world.gather_texts(TEXTS[world.rank]), world.gather_texts("")]
    finally:
        pickle.loads, pickle.dumps = loads, dumps
        dist.distributed_c10d._pickler, dist.distributed_c10d._unpickler = pickler, unpickler
    world.leave()
    return found


def test_texts_of_any_length_and_alphabet_cross_the_network_as_bytes(ranks: RankPool) -> None:
    expected = [[f"rank {rank}" for rank in range(4)], [*TEXTS[:2], "/data/\\udcff", TEXTS[3]], [""] * 4]
    assert ranks.run(2, 2, gather_texts_without_pickle) == [expected] * 4


def groups_that_outlive_a_world() -> list[bool]:
    """Of each group for texts, whether it is still there after the end, as its threads would be, while the program keeps its world."""
    with world_without_gloo():
        world = World(read_launch(os.environ), torch.device("cpu"), timedelta(minutes=1))
    assert world.gather_texts(TEXTS[world.rank]) == [*TEXTS[:2], "/data/\\udcff", TEXTS[3]]
    made = [weakref.ref(group) for group in world._text_groups.made()]
    world.leave()
    return [group() is not None for group in made]


def test_no_group_outlives_its_world(ranks: RankPool) -> None:
    assert ranks.run(2, 2, groups_that_outlive_a_world) == [[False] * 2, [False], [False] * 2, [False]]


MEMBERS = (0, 2, 3)


def sent_bytes(sender: int, receiver: int) -> torch.Tensor:
    """What one member sends another: nothing, or many bytes."""
    return torch.full(((sender + 2 * receiver) % 3 * 100_000,), 16 * sender + receiver, dtype=torch.uint8)


def exchange_among_members(both_ways: bool) -> list[bool]:
    """Whether what each member has received is what was sent to it; of a rank that is none, nothing."""
    world = World(read_launch(os.environ), torch.device("cpu"), timedelta(minutes=1))
    messages = world.messages_among(MEMBERS, in_background=True, both_ways=both_ways)
    found = []
    if world.rank in MEMBERS:
        own = MEMBERS.index(world.rank)
        expected = [sent_bytes(other, own) for other in range(len(MEMBERS))]
        numels = [0 if other == own else values.numel() for other, values in enumerate(expected)]
        sent = [sent_bytes(own, other)[: None if other != own else 0] for other in range(len(MEMBERS))]
        received = messages.exchange(sent, numels)
        found = [values.equal(expected[other][: numels[other]]) for other, values in enumerate(received)]
    world.leave()
    return found


@pytest.mark.parametrize("both_ways", [False, True])
def test_members_of_a_group_exchange_bytes_of_any_number(ranks: RankPool, both_ways: bool) -> None:
    assert ranks.run(2, 2, exchange_among_members, both_ways) == [[True] * 3, [], [True] * 3, [True] * 3]


def how_a_rank_ends_while_rank_1_cannot_connect(call: str) -> str:
    """What this rank says at its end.

    A call of torch.distributed is replaced: rank 0 waits in it forever, rank 1 gets an error, and others have connected.
    """
    ended, lost = Event(), ""
    before, exit_before, make_before = getattr(dist, call), initialize.os._exit, initialize.make_text_groups

    def connect(*_: object, **__: object) -> None:
        if os.environ["RANK"] == "1":
            raise RuntimeError("connection refused")
        assert os.environ["RANK"] != "0" or ended.wait(PATIENCE_SECONDS)

    if call == "init_process_group":
        dist.init_process_group = connect
        initialize.make_text_groups = lambda *_: WorldGroups()
    initialize.os._exit = lambda code: ended.set()  # type: ignore[assignment]
    try:
        with contextlib.redirect_stderr(io.StringIO()) as said:
            world = World(read_launch(os.environ), torch.device("cpu"), timedelta(minutes=10))
            world.release = lambda: print("released", file=said)
            if call == "new_group":
                dist.new_group = connect
                config = resolve(parse_flags(TINY), 2, 2)
                build_links(config, world, make_instruments(config, world.device, world.rank))
            world._pulse.stop()
    except initialize.RankLost as error:
        lost = str(error)
    finally:
        setattr(dist, call, before)
        initialize.os._exit, initialize.make_text_groups = exit_before, make_before
        if dist.is_initialized():
            dist.destroy_process_group()
    lines = said.getvalue().splitlines()
    assert lines[1:] == (["released"] if lines and call == "new_group" else [])  # nothing is held before there is a world
    return lines[0] if lines else lost


@pytest.mark.parametrize("call", ["init_process_group", "new_group"], ids=["of the world", "of a lane"])
def test_a_rank_that_cannot_connect_ends_those_that_wait_for_it_in_a_group(call: str, ranks: RankPool) -> None:
    first = f"rank 1: {initialize.CONNECTING}: connection refused"
    assert ranks.run(1, 2, how_a_rank_ends_while_rank_1_cannot_connect, call) == [f"[Rank 0] ended, because {first}", first]


def test_a_rank_that_has_connected_waits_for_those_that_cannot_and_says_why_they_fail(ranks: RankPool) -> None:
    first = f"rank 1: {initialize.CONNECTING}: connection refused"
    assert ranks.run(1, 3, how_a_rank_ends_while_rank_1_cannot_connect, "init_process_group")[2] == first


def test_nothing_that_ranks_send_is_pickled() -> None:
    """No module imports pickle or calls a collective of objects; workers of a DataLoader, which pickle, stay on their machine.

    Megatron's checkpoints hold pickles, which checkpoint/megatron/ reads by itself without running them.
    """
    reads_pickles = ROOT / "megatron_zpp" / "checkpoint" / "megatron"
    for path in [*(ROOT / "megatron_zpp").rglob("*.py"), ROOT / "pretrain_zeropp_gpt.py"]:
        tree = ast.parse(path.read_text(encoding="utf-8"))
        called = {node.attr for node in ast.walk(tree) if isinstance(node, ast.Attribute)}
        imported = {alias.name for node in ast.walk(tree) if isinstance(node, ast.Import | ast.ImportFrom) for alias in node.names}
        assert not {name for name in called | imported if name.endswith(("gather_object", "object_list"))}, path
        assert not imported & {"pickle", "_pickle", "cPickle", "dill", "cloudpickle"}, path
        assert path.parent == reads_pickles or not any("pickle" in name for name in called | imported), path


def _pretend_gpus(monkeypatch: pytest.MonkeyPatch, count: int) -> None:
    monkeypatch.setattr(torch.cuda, "is_available", lambda: count > 0)
    monkeypatch.setattr(torch.cuda, "device_count", lambda: count)
