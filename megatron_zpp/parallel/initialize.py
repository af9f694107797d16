"""Joins the world: chooses a device, makes the process group, and lets all ranks agree on start-up errors."""

from __future__ import annotations

import os
import socket
import sys
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, nullcontext
from datetime import timedelta

import torch
import torch.distributed as dist
from torch import Tensor

from megatron_zpp.config.counted import counted
from megatron_zpp.parallel.failures.failure_board import FailureBoard
from megatron_zpp.parallel.failures.launcher_watch import FAILURE_EXIT_CODE
from megatron_zpp.parallel.failures.pulse import Pulse
from megatron_zpp.parallel.failures.roll_call import SILENT_SECONDS, RollCall
from megatron_zpp.parallel.failures.unlimited_wait import ended_by_failures
from megatron_zpp.parallel.gathers import gather_around, gather_levels
from megatron_zpp.parallel.groups import WorldGroups, end_world, make_text_groups, nccl_backend, shorten_records, world_options
from megatron_zpp.parallel.joining.interface import GLOO_VARIABLE
from megatron_zpp.parallel.joining.join import join
from megatron_zpp.parallel.launch import Launch
from megatron_zpp.system.user_error import UserError

NO_LIMIT = timedelta(days=30)
FAREWELL = timedelta(seconds=15)  # time to find out which rank failed, tell the others and end
CONNECTING = f"connecting to the other ranks ({GLOO_VARIABLE} names the network interface between hosts)"


class StartupError(UserError):
    """A user's mistake, raised on every rank; its text names the ranks that found it."""


class RankLost(RuntimeError):
    """A rank has failed or does not answer while the world comes together or apart; the text is the first failure that was reported."""


class World:
    """The connected ranks of this run. Every rank must make the same calls in the same order, except `report_failure`.

    release: gives up what this process holds; is called where another thread ends the process.
    """

    def __init__(self, launch: Launch, device: torch.device, timeout: timedelta) -> None:
        """Connects the ranks: over gloo for CPU tensors, and on GPUs over NCCL for CUDA tensors. A single rank needs no launcher.

        On GPUs torch's own group has NCCL alone, which connects ranks when they first send: a gloo group of all ranks would keep the store
        of thousands busy for minutes. Texts have groups of their own there.

        timeout: after a link or a rank is lost, every rank ends within this time. A collective may take timeout - FAREWELL of it, or half
        of it if that is more.
        Raises JoinError, a UserError, if the ranks do not find each other, and RankLost if one of them is lost afterwards.
        """
        self.rank = launch.rank
        self.world_size = launch.world_size
        self.device = device
        self.collective_timeout = max(timeout - FAREWELL, timeout / 2)
        self._silent_seconds = min(SILENT_SECONDS, 0.8 * self.collective_timeout.total_seconds())
        if device.type == "cuda":
            torch.cuda.set_device(device)
            shorten_records()
        self._joined = join(launch, timeout)
        if self._joined.interface and GLOO_VARIABLE not in os.environ:
            os.environ[GLOO_VARIABLE] = self._joined.interface  # gloo reads it for every group
            if launch.rank == 0:
                print(f"gloo connects nodes through {self._joined.interface}, which leads to them ({GLOO_VARIABLE} names another)")
        holds_store = launch.rank == 0 and not launch.torchrun_holds_store
        keeper = None if holds_store else self._joined.keeper
        self._failure_board = FailureBoard(self._joined.reports, launch.rank, launch.world_size, keeper)
        self._reported: str | None = None
        self.release: Callable[[], object] = lambda: None
        self._pulse = Pulse(self._joined.reports, launch.rank, self.collective_timeout.total_seconds(), self._end_without_store)
        backend = nccl_backend() if device.type == "cuda" else "gloo"
        # A rank that has connected waits here. In its first collective it would run into the timeout as early as those that cannot connect.
        with self._naming_lost_ranks(CONNECTING), self._roll_call(CONNECTING).after(print), self.connecting():
            self._failure_board.enter()
            dist.init_process_group(
                backend,
                store=self._joined.part,
                rank=launch.rank,
                world_size=launch.world_size,
                timeout=self.collective_timeout,
                pg_options=world_options(self.collective_timeout, device),
            )
            self._text_groups = make_text_groups(launch.world_size, launch.rank, self.collective_timeout, self.connecting)

    @contextmanager
    def connecting(self) -> Iterator[None]:
        """Runs a block in which torch makes a process group. Raises RankLost, or ends this process, if ranks cannot connect to each other.

        It may take as long as a collective. By itself gloo waits five times as long, also for a rank that has failed meanwhile.
        """
        limit_seconds = self.collective_timeout.total_seconds()
        with (
            self._naming_lost_ranks(CONNECTING),
            ended_by_failures(self.check_others, limit_seconds, lambda why: self._end(f"{CONNECTING}: {why}")),
        ):
            yield

    def messages_among(self, ranks: Sequence[int], *, in_background: bool = False, both_ways: bool = False) -> GroupRanks:
        """Messages among these ranks. Every rank of the world must call this.

        in_background: for a thread beside the main one, which waits without a limit, because the main thread finds lost ranks.
        both_ways: whether ranks send each other many bytes at a time.
        """
        limit = NO_LIMIT if in_background else self.collective_timeout
        with self.connecting():
            groups = [dist.new_group(list(ranks), backend="gloo", timeout=limit) for _ in range(1 + both_ways)]
        return GroupRanks(*groups)

    def hosts(self) -> list[str]:
        """The host name of every rank, in rank order."""
        return self.gather_texts(socket.gethostname())

    def gather_texts(self, text: str) -> list[str]:
        """The texts of all ranks, in rank order. Every rank must call it."""
        return gather_texts(text, self._text_groups)

    @contextmanager
    def agreement(self, long_work: str | None = None, announce: Callable[[str], None] = print) -> Iterator[None]:
        """Runs a block of start-up checks. A UserError on any rank becomes a StartupError on every rank once all have left the block.

        The block must not wait for other ranks, because one of them may have left it early.
        long_work: what the block does, if that may take longer than a collective may; while ranks wait, rank 0 calls announce with a line
        now and then.
        """
        error = None
        with self._roll_call(long_work).after(announce) if long_work is not None and self.world_size > 1 else nullcontext():
            try:
                yield
            except UserError as mistake:
                error = str(mistake)
        self.agree_on_errors(error)

    def agree_on_errors(self, error: str | None) -> None:
        """Raises StartupError on every rank if any rank has an error, with one line per distinct message."""
        errors = self.gather_texts(error or "")
        if any(errors):
            raise StartupError(joined_errors(errors))

    def remember(self, key: str, text: str) -> None:
        """Keeps a text for later starts of these ranks by the same torchrun, which keeps the store when it restarts them."""
        self._joined.kept.set(f"kept/{key}", text)

    def recall(self, key: str) -> str:
        """The text that an earlier start has kept; empty if there is none."""
        return self._joined.kept.get(f"kept/{key}").decode() if self._joined.kept.check([f"kept/{key}"]) else ""

    def report_failure(self, text: str, *, is_cause: bool = False) -> str:
        """The first failure that any rank has reported; if there was none before, `text` of this rank. Later calls return the same text.

        is_cause: whether no other rank can be why this one fails.
        """
        self._reported = self._reported or self._failure_board.report(text, is_cause=is_cause)
        return self._reported

    def check_others(self) -> None:
        """Raises RuntimeError if another rank is known to have failed."""
        self._failure_board.check()

    def leave(self) -> None:
        """Ends the process groups; no message may be under way. Every rank must call it. Raises RankLost if another rank is lost."""
        with self._naming_lost_ranks("leaving the run"):
            if self.world_size > 1:
                self.gather_texts("")
            self._pulse.stop()
            self.gather_texts("")  # no rank needs a group any more
            self._text_groups = WorldGroups()  # groups that are held keep their threads
            end_world()

    @contextmanager
    def _naming_lost_ranks(self, what: str) -> Iterator[None]:
        try:
            yield
        except RuntimeError as error:
            raise RankLost(self.report_failure(f"{what}: {error}")) from None

    def _roll_call(self, work: str) -> RollCall:
        return RollCall(self._joined.reports, self.rank, self.world_size, work, self.check_others, self._silent_seconds)

    def _end_without_store(self) -> None:
        self._failure_board.lose(f"has not answered for {self.collective_timeout.total_seconds():.0f} s")
        self._end("waiting for it")

    def _end(self, text: str) -> None:
        """Ends this process from another thread, while a call of torch may wait without a limit."""
        print(f"[Rank {self.rank}] ended, because {self.report_failure(text)}", file=sys.stderr, flush=True)
        self.release()
        os._exit(FAILURE_EXIT_CODE)


def choose_device(launch: Launch, backend: str | None) -> torch.device:
    """The device of this rank: a GPU if the machine has one and the backend is not gloo, else the CPU.

    Raises UserError if the machine has fewer GPUs than ranks, or if the backend is nccl and the machine has no GPU.
    """
    devices = torch.cuda.device_count() if torch.cuda.is_available() else 0
    if backend == "nccl" and devices == 0:
        raise UserError(
            "--distributed-backend nccl needs a GPU and this machine shows none; leave the flag out to run on the CPU over gloo"
        )
    if backend == "gloo" or devices == 0:
        return torch.device("cpu")
    shares_device = "NCCL_HOSTID" in os.environ  # with different host ids, NCCL lets ranks share one device
    if launch.local_rank >= devices and not shares_device:
        raise UserError(
            f"local rank {launch.local_rank} finds only {counted(devices, 'GPU')} on this machine; start at most "
            f"{counted(devices, 'rank')} per machine, or let each rank see all GPUs of its machine (srun --gpu-bind=none)"
        )
    return torch.device("cuda", launch.local_rank % devices)


def gather_texts(text: str, groups: WorldGroups) -> list[str]:
    """The texts of all ranks of these groups of gloo in rank order; each must call it. They are sent as UTF-8 and never unpickled.

    What UTF-8 cannot hold, such as a path of other bytes, arrives as \\udcXX. Raises UnicodeDecodeError if what arrives is not UTF-8.
    """
    data = text.encode("utf-8", errors="backslashreplace")
    lengths = gather_levels(torch.tensor([len(data)]), groups).flatten().tolist()
    padded = torch.zeros(max(lengths), dtype=torch.uint8)
    if padded.numel() == 0:
        return [""] * len(lengths)
    padded[: len(data)] = torch.frombuffer(bytearray(data), dtype=torch.uint8) if data else padded[:0]
    rows = gather_levels(padded, groups, gather_around)
    return [row[:length].numpy().tobytes().decode("utf-8") for row, length in zip(rows, lengths, strict=True)]


class GroupRanks:
    """Messages among all ranks of a group: checkpoint/disk.py says what they do.

    downwards: a second group of the same ranks, for what goes to lower ranks. A connection of gloo sends and receives in turns: two nodes
    that exchange bytes over one get half of what their link carries.
    """

    def __init__(self, group: dist.ProcessGroup, downwards: dist.ProcessGroup | None = None) -> None:
        self._group = group
        self._downwards = downwards

    def gather(self, text: str) -> list[str]:
        return gather_texts(text, WorldGroups(between=self._group))

    def exchange(self, sent: Sequence[Tensor], numels: Sequence[int]) -> list[Tensor]:
        if self._downwards is not None:
            return self._exchange_both_ways(sent, numels)
        output = torch.empty(sum(numels), dtype=torch.uint8)
        dist.all_to_all_single(output, torch.cat(list(sent)), list(numels), [part.numel() for part in sent], group=self._group)
        return list(output.split(list(numels)))

    def _exchange_both_ways(self, sent: Sequence[Tensor], numels: Sequence[int]) -> list[Tensor]:
        own, ranks = dist.get_rank(self._group), dist.get_process_group_ranks(self._group)
        received = [torch.empty(numel, dtype=torch.uint8) for numel in numels]
        works: list[dist.Work | None] = []
        for other, rank in enumerate(ranks):
            if other != own and numels[other] > 0:
                works.append(dist.irecv(received[other], rank, self._group if other < own else self._downwards))
            if other != own and sent[other].numel() > 0:
                works.append(dist.isend(sent[other], rank, self._group if other > own else self._downwards))
        for work in filter(None, works):
            work.wait()
        return received

    def broadcast(self, data: Tensor, source: int) -> None:
        dist.broadcast(data, source, group=self._group)


def joined_errors(errors: Sequence[str]) -> str:
    """One line per distinct message of `errors[rank]`; a message that not all ranks have is followed by the ranks that have it."""
    ranks_of: dict[str, list[int]] = {}
    for rank, text in enumerate(errors):
        if text:
            ranks_of.setdefault(text, []).append(rank)
    lines = []
    for text, ranks in ranks_of.items():
        met_everywhere = len(ranks) == len(errors)
        lines.append(text if met_everywhere else f"{text} (on rank {', '.join(map(str, ranks))} of {len(errors)})")
    return "\n".join(lines)
