"""A few numbers of every rank: which rank sends how many bytes to which, counted on groups whose members are threads."""

from __future__ import annotations

import threading
from collections import defaultdict
from dataclasses import dataclass, field
from datetime import timedelta
from queue import SimpleQueue
from types import SimpleNamespace
from typing import Any, cast

import pytest
import torch
import torch.distributed as dist
from harness.rank_pool import RankPool
from harness.rank_threads import on_ranks
from torch import Tensor

from megatron_zpp.comm.backend import TorchBackend
from megatron_zpp.comm.ledger import Ledger
from megatron_zpp.parallel import gathers as module
from megatron_zpp.parallel.gathers import gather_levels
from megatron_zpp.parallel.grid import Grid
from megatron_zpp.parallel.groups import WorldGroups, end_world, make_world_groups

CPU, TIMEOUT = torch.device("cpu"), timedelta(minutes=1)


@dataclass
class Messages:
    """What the ranks have sent. of: queues by sender and receiver. lists: (sender, bytes) of each message, by receiver."""

    of: defaultdict[tuple[int, int], SimpleQueue[Tensor]] = field(default_factory=lambda: defaultdict(SimpleQueue))
    lists: defaultdict[int, list[tuple[int, int]]] = field(default_factory=lambda: defaultdict(list))
    lock: threading.Lock = field(default_factory=threading.Lock)

    def queue(self, sender: int, receiver: int) -> SimpleQueue[Tensor]:
        with self.lock:
            return self.of[sender, receiver]


class Group:
    """A process group as one of its members sees it; a message that nobody sends fails after ten seconds."""

    def __init__(self, messages: Messages, ranks: list[int], rank: int) -> None:
        self.messages, self.ranks, self.own = messages, ranks, rank

    def rank(self) -> int:
        return self.ranks.index(self.own)

    def size(self) -> int:
        return len(self.ranks)

    def send(self, tensors: list[Tensor], receiver: int, tag: int) -> Any:
        self.messages.queue(self.own, self.ranks[receiver]).put(tensors[0].clone())
        return SimpleNamespace(wait=lambda: None)

    def recv(self, tensors: list[Tensor], sender: int, tag: int) -> Any:
        def wait() -> None:
            sent = self.messages.queue(self.ranks[sender], self.own).get(timeout=10)
            assert sent.shape == tensors[0].shape
            self.messages.lists[self.own].append((self.ranks[sender], sent.nbytes))
            tensors[0].copy_(sent)

        return SimpleNamespace(wait=wait)

    def broadcast(self, tensor: Tensor, source: int) -> None:
        if self.own == source:
            for receiver in range(1, self.size()):
                self.send([tensor], receiver, 0)
        else:
            self.recv([tensor], self.ranks.index(source), 0).wait()


def groups_of(grid: Grid, rank: int, messages: Messages) -> WorldGroups:
    """Those of make_world_groups, where a new group is the list of its ranks, and torch has one of all ranks."""
    everyone = list(range(grid.world_size))
    made = make_world_groups(grid, [everyone], rank, TIMEOUT, CPU)
    node, between = cast(Any, made.node), cast(Any, made.between)
    if node is None:
        between = everyone
    node, between = (None if ranks is None else cast(Any, Group(messages, ranks, rank)) for ranks in (node, between))
    return WorldGroups(node, between, made.nodes)


def gather_everywhere(grid: Grid, monkeypatch: pytest.MonkeyPatch) -> Messages:
    """Gathers rank and a half, in fp64, on every rank; each must get those of all."""
    monkeypatch.setattr(module.dist, "get_global_rank", lambda group, member: group.ranks[member])
    monkeypatch.setattr(module.dist, "broadcast", lambda tensor, source, group: group.broadcast(tensor, source))
    monkeypatch.setattr(module.dist, "new_group", lambda ranks, **others: ranks)
    messages = Messages()
    own = [torch.tensor([rank, 0.5], dtype=torch.float64) for rank in range(grid.world_size)]
    found = on_ranks(grid.world_size, lambda rank: gather_levels(own[rank], groups_of(grid, rank, messages)))
    assert all(torch.equal(rows, torch.stack(own)) for rows in found)
    return messages


@pytest.mark.parametrize("shape", [(1, 1), (1, 3), (3, 1), (2, 2), (3, 2), (2, 4), (5, 3), (7, 2)], ids=str)
def test_a_number_enters_a_node_once_and_the_ledger_has_every_byte(shape: tuple[int, int], monkeypatch: pytest.MonkeyPatch) -> None:
    grid = Grid.of_nodes(*shape)
    messages = gather_everywhere(grid, monkeypatch)
    for node in range(grid.nodes):
        ranks = range(node * grid.ranks_per_node, (node + 1) * grid.ranks_per_node)
        received = [message for rank in ranks for message in messages.lists[rank]]
        booked = [Ledger(grid, rank).measure_world(16) for rank in ranks]
        entered = sum(nbytes for sender, nbytes in received if sender not in ranks)
        assert entered == (grid.world_size - grid.ranks_per_node) * 16 == sum(traffic.inter_bytes for traffic in booked)
        assert sum(nbytes for sender, nbytes in received if sender in ranks) == sum(traffic.intra_bytes for traffic in booked)


@pytest.mark.parametrize(("members", "rounds"), [(1, 0), (2, 1), (3, 2), (4, 2), (5, 3), (8, 3), (9, 4)])
def test_over_gloo_a_rank_waits_for_a_message_for_each_doubling_up_to_the_number_of_members(
    members: int, rounds: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    messages = gather_everywhere(Grid.of_nodes(members, 1), monkeypatch)
    assert [len(messages.lists[rank]) for rank in range(members)] == [rounds] * members


def gathered_over_gloo(nodes: int, ranks_per_node: int) -> list[Any]:
    """Twice what every rank gathers of its number: in one world, and in two whose ranks take turns."""
    dist.init_process_group("gloo", timeout=TIMEOUT)
    rank, rows = dist.get_rank(), []
    all_ranks = list(range(dist.get_world_size()))
    for grid, worlds in [
        (Grid.of_nodes(nodes, ranks_per_node), [all_ranks]),
        (Grid.of_nodes(nodes, ranks_per_node // 2), [all_ranks[::2], all_ranks[1::2]]),
    ]:
        own = next(ranks for ranks in worlds if rank in ranks)
        backend = TorchBackend(grid, own.index(rank), {}, make_world_groups(grid, worlds, rank, TIMEOUT, CPU))
        rows += [backend.gather_world(torch.tensor([rank + shift])).flatten().tolist() for shift in (0, 100)]
    dist.barrier()
    end_world()
    return rows


def test_real_ranks_gather_in_the_order_of_the_world(ranks: RankPool) -> None:
    for rank, rows in enumerate(ranks.run(2, 4, gathered_over_gloo, 2, 4)):
        everyone, own = list(range(8)), list(range(rank % 2, 8, 2))
        assert rows == [[number + shift for number in numbers] for numbers in (everyone, own) for shift in (0, 100)]


def test_a_value_of_any_shape_arrives_without_its_graph() -> None:
    own = torch.ones(2, 3, requires_grad=True)
    rows = gather_levels(own, WorldGroups(between=cast(Any, Group(Messages(), [0], 0))))
    assert rows.tolist() == [[1.0] * 6] and not rows.requires_grad


def test_over_nccl_each_level_is_one_gather_into_rows_of_the_members(monkeypatch: pytest.MonkeyPatch) -> None:
    def all_gather(output: Tensor, own: Tensor, group: list[int]) -> None:
        asked.append((group, own.shape))
        output.view(len(group), -1)[:] = own

    asked: list[tuple[list[int], torch.Size]] = []
    monkeypatch.setattr(module, "all_gather", all_gather)
    monkeypatch.setattr(module.dist, "get_world_size", len)
    rows = module._gather(OnGpu(torch.ones(2, 3)), cast(Any, [0, 1, 2, 3]))
    assert rows.shape == (4, 6) and asked == [([0, 1, 2, 3], torch.Size([6]))]


class OnGpu(Tensor):
    """A tensor of the CPU that says it is of a GPU."""

    @property
    def is_cuda(self) -> bool:
        return True

    @staticmethod
    def __new__(cls: type[OnGpu], values: Tensor) -> OnGpu:
        return cast(OnGpu, values.as_subclass(cls))
