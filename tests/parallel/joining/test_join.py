"""Ranks of one start come together in a part of the store of their own; whatever prevents it is a sentence."""

from __future__ import annotations

import re
import socket
import threading
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from dataclasses import replace
from datetime import timedelta
from typing import Any

import pytest
import torch
import torch.distributed as dist
from harness.patience import PATIENCE_SECONDS
from harness.rank_pool import free_port
from torch.torch_version import TorchVersion

from megatron_zpp.parallel.job_ids import JobIds
from megatron_zpp.parallel.joining import gathering, interface, join, place, store
from megatron_zpp.parallel.joining.gathering import Gathering, new_invitation
from megatron_zpp.parallel.joining.guest import Guest
from megatron_zpp.parallel.joining.join import Joined
from megatron_zpp.parallel.joining.member import Member, encoded
from megatron_zpp.parallel.joining.place import JoinError, Place
from megatron_zpp.parallel.launch import Launch

SOON = timedelta(seconds=0.5)
LATER = timedelta(seconds=60)
NOTHING = JobIds()
A, B = JobIds("srun", (("SLURM_JOB_ID", "7"),)), JobIds("srun", (("SLURM_JOB_ID", "8"),))
PLACE = Place("node7", 29500)


def launch(rank: int, world_size: int, port: int, job: JobIds = NOTHING, address: str = "127.0.0.1") -> Launch:
    return Launch(rank, world_size, rank, world_size, address, port, False, job)


def joined(world_size: int, port: int, job: JobIds = NOTHING) -> list[Joined]:
    """What each rank of a start gets, in rank order; rank 0 starts last."""
    with ThreadPoolExecutor(world_size) as threads:
        ranks = range(world_size)[::-1]
        return list(threads.map(lambda rank: join.join(launch(rank, world_size, port, job), LATER), ranks))[::-1]


def refusal(rank: int, world_size: int, port: int, job: JobIds = NOTHING, address: str = "127.0.0.1", within: timedelta = LATER) -> str:
    with pytest.raises(JoinError) as refused:
        join.join(launch(rank, world_size, port, job, address), within)
    return str(refused.value)


def start(kept: dist.Store, world_size: int) -> list[dist.Store]:
    """The part that each rank of a start has found in a store that torchrun keeps, in rank order; rank 0 starts last."""

    def part(rank: int) -> dist.Store:
        member = Member.this_process(launch(rank, world_size, 1))
        if rank > 0:
            return dist.PrefixStore(Guest(kept, PLACE, member, lambda _: None, asks=True).take_part(), kept)
        invitation = new_invitation(member)
        Gathering(kept, PLACE, invitation, answers=True).wait(60.0, time.monotonic())
        return dist.PrefixStore(invitation.part, kept)

    with ThreadPoolExecutor(world_size) as threads:
        return list(threads.map(part, range(world_size)[::-1]))[::-1]


@pytest.fixture(autouse=True)
def _short_times(monkeypatch: pytest.MonkeyPatch) -> None:
    for module, name in ((place, "RESOLVE_SECONDS"), (gathering, "FAREWELL_SECONDS"), (store, "ASK_SECONDS")):
        monkeypatch.setattr(module, name, 0.3)


@pytest.mark.parametrize("world_size", [1, 2, 5])
def test_ranks_that_start_again_in_a_kept_store_have_a_part_of_their_own(world_size: int) -> None:
    kept = dist.HashStore()
    for number in range(3):
        parts = start(kept, world_size)
        assert not parts[-1].check(["key"])
        parts[0].set("key", str(number))
        assert [part.get("key") for part in parts] == [str(number).encode()] * world_size


def test_a_start_that_never_came_together_does_not_disturb_the_next() -> None:
    kept = dist.HashStore()
    kept.add("greetings", 1)  # of a rank that died before it wrote its greeting
    with pytest.raises(JoinError, match="rank 0 has waited 0 s at MASTER_ADDR=node7, MASTER_PORT=29500 for ranks 1, 2 of 3; rank 0 joined"):
        Gathering(kept, PLACE, new_invitation(Member.this_process(launch(0, 3, 1))), answers=True).wait(0.0, time.monotonic())
    parts = start(kept, 3)
    parts[0].set("key", "new")
    assert parts[2].get("key") == b"new"


def test_without_torchrun_rank_0_holds_the_store_and_each_rank_has_two_connections_to_it() -> None:
    found = joined(3, free_port())
    found[1].part.set("key", "1")
    assert [one.part.get("key") for one in found] == [one.reports.get("key") for one in found] == [b"1"] * 3
    assert found[2].keeper.name == "rank 0" and found[2].keeper.place.startswith("MASTER_ADDR=127.0.0.1, MASTER_PORT=")


def test_a_torch_whose_default_store_takes_no_socket_holds_the_other_one(monkeypatch: pytest.MonkeyPatch) -> None:
    made, backends = dist.TCPStore, []

    def recorded(*arguments: Any, **options: Any) -> dist.TCPStore:
        kept = made(*arguments, **options)
        if options["is_master"]:
            backends.append(kept.libuvBackend)
        return kept

    monkeypatch.setattr(dist, "TCPStore", recorded)
    monkeypatch.setattr(torch, "__version__", TorchVersion("2.7.1"))
    assert len(joined(3, free_port())) == 3
    assert backends == [False]


def test_ranks_of_another_job_are_refused_with_the_name_of_the_first_which_never_notices() -> None:
    port = free_port()
    first = joined(2, port, A)
    who = rf"process \d+ on {socket.gethostname()} (since .*, SLURM_JOB_ID=7)"
    met = f"met another run: {who}, rank 0 of 2; choose another MASTER_PORT"
    assert_matches(refusal(1, 2, port, B), rf"at MASTER_ADDR=127.0.0.1, MASTER_PORT={port} rank 1 of 2 (SLURM_JOB_ID=8) {met}")
    assert_matches(refusal(1, 4, port), met)  # of no job, but by another launcher
    in_use = (
        f"MASTER_PORT={port} is in use on {socket.gethostname()}, where rank 0 runs, by another run: {who}, rank 0 of 2; choose another"
    )
    assert_matches(refusal(0, 2, port, B), in_use)
    first[0].part.set("key", "untouched")
    assert first[1].part.get("key") == b"untouched"


def test_another_world_size_is_another_run() -> None:
    port = free_port()
    first = joined(2, port)
    assert_matches(refusal(3, 4, port), "rank 3 of 4 (no job id) met another run: process .*, rank 0 of 2; choose another MASTER_PORT")
    assert len(first) == 2


def test_two_processes_that_claim_one_rank_are_both_named() -> None:
    port = free_port()
    first = joined(2, port)
    process = r"process \d+ on \S+ (since [^,]*, no job id)"
    assert_matches(refusal(1, 2, port), f"rank 1 of 2 at .* was claimed by {process} before {process}; give every process its own RANK")
    assert len(first) == 2


def gathered_in_vain(ranks: tuple[int, ...]) -> tuple[str, list[str]]:
    """What rank 0 of 5 says that gives up at once, after the ranks have claimed their numbers, and what these say."""
    shared, invitation = dist.HashStore(), new_invitation(Member.this_process(launch(0, 5, 1)))
    shared.set(gathering.INVITATION, encoded(invitation))

    def said(rank: int, claimed: threading.Event) -> str:
        def tell(finding: str) -> None:
            if "not all of 5 ranks have come" in finding:
                claimed.set()

        with pytest.raises(JoinError) as refused:
            Guest(shared, PLACE, Member.this_process(launch(rank, 5, 1)), tell, asks=False).take_part()
        claimed.set()
        return str(refused.value)

    with ThreadPoolExecutor(len(ranks)) as threads:
        guests = []
        for rank in ranks:
            guests.append(threads.submit(said, rank, claimed := threading.Event()))
            assert claimed.wait(PATIENCE_SECONDS)
        with pytest.raises(JoinError) as refused:
            Gathering(shared, PLACE, invitation, answers=False).wait(0.0, time.monotonic())
        return str(refused.value), [guest.result() for guest in guests]


def test_rank_0_gives_up_with_the_names_of_the_missing_and_those_that_joined_say_the_same() -> None:
    text, others = gathered_in_vain((2,))
    waited = "rank 0 has waited 0 s at MASTER_ADDR=node7, MASTER_PORT=29500 for ranks 1, 3, 4 of 5; ranks 0, 2 joined, on "
    assert text.startswith(waited + socket.gethostname())
    assert others == [f"rank 2 has joined in vain: {text}"]


def test_a_rank_that_is_lost_in_the_middle_of_its_claim_has_joined_and_is_found_missing_later() -> None:
    shared, invitation = dist.HashStore(), new_invitation(Member.this_process(launch(0, 2, 1)))
    part = dist.PrefixStore(invitation.part, shared)
    part.set(gathering.claim_key(1), encoded(Member.this_process(launch(1, 2, 1))))
    Gathering(shared, PLACE, invitation, answers=False).wait(0.0, time.monotonic())
    assert part.check([gathering.BEGUN])


def test_two_processes_that_claim_one_rank_before_a_run_has_begun_end_it_because_either_may_be_of_another_job() -> None:
    process = r"process \d+ on \S+ (since [^,]*, no job id)"
    text, others = gathered_in_vain((2, 2))
    assert_matches(text, f"at MASTER_ADDR=node7, MASTER_PORT=29500 two processes claim rank 2 of 5: {process}, and {process}; give every")
    assert others[0] == f"rank 2 has joined in vain: {text}" and "was claimed by" in others[1]


def test_a_rank_without_a_rank_0_says_whom_it_has_waited_for() -> None:
    port = free_port()
    waited = f"rank 1 on {socket.gethostname()} has waited 0 s for rank 0 at MASTER_ADDR=127.0.0.1, MASTER_PORT={port}"
    assert_matches(refusal(1, 2, port, within=SOON), f"{waited}: connection refused; start rank 0 there, or correct MASTER_ADDR")
    with listener() as port:
        assert_matches(refusal(1, 2, port, within=SOON), "something listens there, but does not answer as the store of a run does; ")


def test_an_address_of_every_host_itself_is_pointed_out_where_a_run_has_several() -> None:
    lonely = replace(launch(1, 4, free_port()), local_world_size=2)
    with pytest.raises(JoinError, match="that address means every host itself, so other hosts do not find rank 0"):
        join.join(lonely, SOON)


def test_a_name_that_nobody_knows_is_refused_at_once_by_every_rank() -> None:
    for rank in range(2):
        unknown = f"MASTER_ADDR=no.such.host.invalid is not known on {socket.gethostname()} (.*); set MASTER_ADDR to a name"
        assert_matches(refusal(rank, 2, 1, address="no.such.host.invalid"), unknown)


def test_rank_0_refuses_an_address_of_another_machine() -> None:
    elsewhere = "192.0.2.77"  # of a block that is kept for documentation
    host = socket.gethostname()
    away = f"MASTER_ADDR=192.0.2.77 (192.0.2.77) is not an address of {host}, where rank 0 runs, and does not lead there; set"
    assert_matches(refusal(0, 2, free_port(), address=elsewhere), away)


def test_rank_0_may_be_at_an_address_that_leads_to_it_without_being_one_of_its_machine(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(store, "is_of_this_machine", lambda address: False)  # as behind a router
    assert len(joined(2, free_port())) == 2


def test_a_port_that_another_program_has_is_named() -> None:
    with listener() as port:
        other = f"MASTER_PORT={port} is in use on .*, where rank 0 runs, by another program; choose another MASTER_PORT"
        assert_matches(refusal(0, 2, port), other)


@pytest.mark.parametrize("invitation", ["{", "[]", '{"part": 7}', "9" * 10_000])
def test_what_another_program_has_put_into_its_store_is_refused(invitation: str) -> None:
    port = free_port()
    foreign = dist.PrefixStore(store.PREFIX, dist.TCPStore("127.0.0.1", port, is_master=True, wait_for_workers=False))
    foreign.set(gathering.INVITATION, invitation)
    assert_matches(
        refusal(1, 2, port), f"at .*MASTER_PORT={port} is another program (the store of the ranks:? .*); choose another MASTER_PORT"
    )


def test_a_single_rank_needs_no_port() -> None:
    with listener() as port:
        alone = join.join(launch(0, 1, port), SOON)
    alone.part.set("key", "1")
    assert alone.reports.get("key") == b"1"


@contextmanager
def listener() -> Iterator[int]:
    """The port of a program that accepts connections and says nothing."""
    with socket.create_server(("", 0)) as server:
        yield server.getsockname()[1]


def assert_matches(text: str, pattern: str) -> None:
    """Whether the pattern is found in the text; parentheses in it stand for themselves."""
    escaped = pattern.replace("(", r"\(").replace(")", r"\)")
    assert re.search(escaped, text), f"{text!r} lacks {pattern!r}"


def test_ranks_of_several_nodes_use_the_interface_with_the_address_from_which_the_kernel_reaches_the_others(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """On the machine of rank 0 the name in MASTER_ADDR leads to 127.0.1.1; there the address of a rank elsewhere shows the way."""
    own_of = {"127.0.1.1": "127.0.0.1", "10.0.0.1": "10.0.0.2", "10.0.0.2": "10.0.0.1"}
    monkeypatch.setattr(interface, "source_address", own_of.__getitem__)
    monkeypatch.setattr(interface, "interface_with", {"10.0.0.1": "eth0", "10.0.0.2": "ib0"}.__getitem__)
    part = dist.HashStore()
    towards = ["127.0.1.1", "127.0.1.1", "10.0.0.1", "10.0.0.1"]
    with ThreadPoolExecutor(4) as threads:
        found = threads.map(lambda rank: interface.interface_to_others(part, rank, 4, towards[rank]), range(4))
        assert list(found) == ["eth0", "eth0", "ib0", "ib0"]


def test_nodes_that_share_this_machine_and_runs_of_one_node_leave_gloos_own_choice() -> None:
    part, port = dist.HashStore(), free_port()
    with ThreadPoolExecutor(2) as threads:
        assert list(threads.map(lambda rank: interface.interface_to_others(part, rank, 2, "127.0.0.1"), range(2))) == ["", ""]
    assert [rank.interface for rank in joined(2, port)] == ["", ""]
    with ThreadPoolExecutor(2) as threads:
        nodes = [replace(launch(rank, 2, port), local_rank=0, local_world_size=1) for rank in range(2)]
        assert [rank.interface for rank in threads.map(lambda one: join.join(one, LATER), nodes)] == ["", ""]


def test_an_address_of_the_loopback_interface_leaves_gloos_own_choice(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(interface, "source_address", lambda address: address)
    monkeypatch.setattr(interface, "interface_with", {"10.0.0.1": "lo"}.__getitem__)
    assert interface.interface_to_others(dist.HashStore(), 0, 1, "10.0.0.1") == ""


def test_the_interface_of_an_address_is_the_one_that_has_it() -> None:
    assert interface.interface_with("127.0.0.1") == "lo"
    assert interface.interface_with("203.0.113.77") == interface.interface_with("") == interface.interface_with("2001:db8::77") == ""
    assert interface.source_address("127.0.1.1").startswith("127.")
    assert all(map(interface.is_loopback, ["127.0.1.1", "::1", "", "a name"])) and not interface.is_loopback("10.0.0.1")
