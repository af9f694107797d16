"""A state small enough to save hundreds of times, cut among ranks that live in threads of this process."""

from __future__ import annotations

import random
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from itertools import pairwise
from pathlib import Path

import torch
from torch import Tensor

from harness.messages import Messages
from harness.patience import PATIENCE_SECONDS
from harness.rank_threads import on_ranks
from harness.run_state import run_state
from harness.worlds import Barrier
from megatron_zpp.checkpoint.disk import Disk, Gather
from megatron_zpp.checkpoint.manifest import ELEMENT_TYPE, Manifest
from megatron_zpp.checkpoint.reader import CheckpointReader
from megatron_zpp.checkpoint.saver import CheckpointSaver, SaveOptions, Share
from megatron_zpp.zero.pieces import Piece

SHAPES = {"embedding.weight": (60, 20), "norm.weight": (20,), "head.weight": (20, 90)}
STATES = ("weight", "exp_avg")
CHUNK_BYTES = 512
State = Mapping[tuple[str, str], Tensor]


def state_at(iteration: int) -> State:
    """By parameter and state all elements, flat: another one at every iteration."""
    generator = torch.Generator().manual_seed(iteration)
    return {
        (name, state): torch.randn(torch.Size(shape).numel(), generator=generator) for name, shape in SHAPES.items() for state in STATES
    }


def shares(state: State, world_size: int, seed: int = 0) -> list[Share]:
    """The state cut at random places; the pieces are views of it, so that later changes of the state are changes of theirs."""
    places = random.Random(seed)
    pieces: list[list[Piece]] = [[] for _ in range(world_size)]
    for name, shape in SHAPES.items():
        numel = torch.Size(shape).numel()
        ends = [0, *sorted(places.choices(range(numel + 1), k=world_size - 1)), numel]
        for rank, (start, stop) in enumerate(pairwise(ends)):
            if start < stop:
                pieces[rank] += [Piece(name, kind, start, stop, state[name, kind][start:stop]) for kind in STATES]
    return [Share(rank, world_size, of_rank) for rank, of_rank in enumerate(pieces)]


def manifest_at(iteration: int, chunk_bytes: int = CHUNK_BYTES) -> Manifest:
    states = dict.fromkeys(STATES, ELEMENT_TYPE)
    return Manifest(iteration, 8 * iteration, SHAPES, states, run_state(0), {}, {}, {}, chunk_bytes)


class Gathering:
    """`gather` for ranks in threads of one process."""

    def __init__(self, world_size: int) -> None:
        self._texts = [""] * world_size
        self._barrier = Barrier(world_size, timeout=PATIENCE_SECONDS)

    def of(self, rank: int) -> Gather:
        def gather(text: str) -> list[str]:
            self._texts[rank] = text
            self._barrier.wait()
            texts = list(self._texts)
            self._barrier.wait()
            return texts

        return gather

    def lose_a_rank(self) -> None:
        """Ends every wait with an error, now and later."""
        self._barrier.abort()


def disks_of(world_size: int, count: int, among_firsts: Messages | None = None, copies: int = 1) -> list[Disk]:
    """The disk of each rank of a world, where equally many ranks share each of `count` disks."""
    among_firsts = among_firsts or Messages(count)
    ranks_per_disk = world_size // count
    messages = [among_firsts.of(rank // ranks_per_disk) for rank in range(world_size)]
    return [Disk(rank, world_size, ranks_per_disk, copies, own, own, PATIENCE_SECONDS) for rank, own in enumerate(messages)]


class Ranks:
    """The savers of a small world; `on_each` lets all of them do the same at a time.

    directory: several are those of as many disks, each of equally many ranks. copies: on how many of them each file is saved.
    copied_bytes: of each rank, that have come from other disks.
    """

    def __init__(
        self,
        directory: Path | Sequence[Path],
        state: State,
        world_size: int = 2,
        options: SaveOptions | None = None,
        seed: int = 0,
        copies: int = 1,
    ) -> None:
        directories = [directory] if isinstance(directory, Path) else list(directory)
        self._gathering = Gathering(world_size)
        self._among_firsts = Messages(len(directories))
        self.disks = disks_of(world_size, len(directories), self._among_firsts, copies)
        self.copied_bytes = [0] * world_size
        self.savers = [
            CheckpointSaver(
                directories[disk.index],
                share,
                options or SaveOptions(),
                self._gathering.of(share.rank),
                disk=disk if disk.count > 1 else None,
                count_copied=partial(self._count_copied, share.rank),
            )
            for disk, share in zip(self.disks, shares(state, world_size, seed), strict=True)
        ]

    def _count_copied(self, rank: int, nbytes: int) -> None:
        self.copied_bytes[rank] += nbytes

    def lose_nodes(self) -> None:
        """Ends every wait of a rank for others with an error, as connections do that are lost."""
        self._gathering.lose_a_rank()
        self._among_firsts.lose_a_rank()

    def save(self, iteration: int) -> None:
        """Returns when the state may change."""
        self.on_each(lambda saver: saver.save(manifest_at(iteration)))
        self.on_each(lambda saver: saver.wait_for_copy())

    def finish(self) -> None:
        self.on_each(lambda saver: saver.finish())

    def on_each(self, act: Callable[[CheckpointSaver], object]) -> list[object]:
        """What each rank returned; the first error that a rank raised is raised here."""
        return on_ranks(len(self.savers), lambda rank: act(self.savers[rank]))


def set_state(state: State, iteration: int) -> None:
    """Makes the state that of an iteration, in place."""
    for key, values in state_at(iteration).items():
        state[key].copy_(values)


def check_holds(folder: Path, iteration: int) -> None:
    """Asserts that the checkpoint is complete and holds the state of the iteration bit for bit."""
    with CheckpointReader(folder) as reader:
        assert list(reader.verify()) == []
        assert reader.manifest.iteration == iteration
        for (name, kind), values in state_at(iteration).items():
            assert torch.equal(reader.read(name, kind, 0, values.numel()), values)
