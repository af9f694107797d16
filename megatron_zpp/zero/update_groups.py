"""Decides which units the optimizer updates together, and in which order."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import TypeVar

from megatron_zpp.zero.schedule import Actions

Group = TypeVar("Group")


def update_groups(names: Sequence[str], actions: Iterable[Actions], *, at_once: bool) -> list[list[int]]:
    """Indices of the units in groups. The units that the next step needs first come first, so that they climb early.

    actions: of the moments of a training step, in the order of time. Units come in the order of their first climbs.
    at_once: of a device that runs behind the host. It gets two groups, what the first moment needs and all others, because each update
    takes the host some time. Otherwise each unit is a group, so that it can climb while the next is updated.
    """
    first_moment, *later = [(*due.climb_to_full, *due.climb_to_secondary) for due in actions]
    first = [names.index(name) for name in dict.fromkeys(first_moment)]
    in_order = dict.fromkeys([*(names.index(name) for needed in later for name in needed), *range(len(names))])
    others = [index for index in in_order if index not in first]
    if at_once:
        return [group for group in (first, others) if group]
    return [[index] for index in (*first, *others)]


def coming_with(group: int, groups: Sequence[Group]) -> Sequence[Group]:
    """The groups whose gradients start to come to the host when `group` is updated: the next one. The first comes then, too."""
    return groups[group + 1 : group + 2] if group else groups[:2]


def update_order(groups: Sequence[Sequence[int]]) -> list[int]:
    """The indices of all units in the order of their updates."""
    return [index for group in groups for index in group]
