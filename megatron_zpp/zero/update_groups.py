"""Decides which units the optimizer updates together, and in which order (no torch)."""

from __future__ import annotations

from collections.abc import Sequence

from megatron_zpp.zero.schedule import Actions


def update_groups(names: Sequence[str], first_actions: Actions, *, at_once: bool) -> list[list[int]]:
    """Indices of the units in groups. Those that the next step needs first (`first_actions`) come first, so that they climb early.

    at_once: of a device that runs behind the host. It gets two groups, what is needed first and all others, because each update takes the
    host some time. Otherwise each unit is a group, so that it can climb while the next is updated.
    """
    needed = dict.fromkeys([*first_actions.climb_to_full, *first_actions.climb_to_secondary])
    first = [names.index(name) for name in needed]
    others = [index for index, name in enumerate(names) if name not in needed]
    if at_once:
        return [group for group in (first, others) if group]
    return [[index] for index in (*first, *others)]


def update_order(groups: Sequence[Sequence[int]]) -> list[int]:
    """The indices of all units in the order of their updates."""
    return [index for group in groups for index in group]
