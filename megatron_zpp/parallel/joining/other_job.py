"""The sentence for a rank that has met another job at its place (no torch)."""

from __future__ import annotations

from megatron_zpp.parallel.job_ids import JOB_VARIABLE
from megatron_zpp.parallel.joining.member import Member
from megatron_zpp.parallel.joining.place import Place


def other_job(me: Member, other: Member, place: Place) -> str:
    """Names the other job, by one of its members."""
    return (
        f"at {place} rank {me.rank} of {me.world_size} ({me.job}) met another run: {other}, rank {other.rank} of {other.world_size}; "
        f"choose another MASTER_PORT, or if it is the same run, export {JOB_VARIABLE} and WORLD_SIZE alike on all ranks"
    )
