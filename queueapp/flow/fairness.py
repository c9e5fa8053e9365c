"""Assigns messages to subscribers while there are fewer messages than free capacity. Pure: no database, no clock.

``assign`` has the same result as dealing the messages out one at a time, each to the subscriber that the model selects:
fast, the first with capacity; round-robin, the next with capacity; proportional, the one that uses the smallest part of
its backlog, the first of several. With filters there is no ranking that holds for all messages, and it does deal them
out.
"""

from __future__ import annotations

import heapq
from collections.abc import Callable, Sequence
from fractions import Fraction
from typing import NamedTuple, TypeVar

from ..models.delivery import FairnessModel

_Key = TypeVar("_Key")


class Capacity(NamedTuple):
    """The capacity of a subscription: how many messages it may hold, and how many it holds, which may be more."""

    backlog: int
    outstanding: int

    @property
    def free(self) -> int:
        return max(0, self.backlog - self.outstanding)


class Assigned(NamedTuple):
    """For each message the index of its subscription, or None; and the index of the subscription that got the last one,
    for round-robin."""

    indexes: list[int | None]
    turn: int


def assign(
    capacities: Sequence[Capacity],
    messages: int,
    model: FairnessModel,
    turn: int = -1,
    takes: Callable[[int, int], bool] | None = None,
) -> Assigned:
    """Assign so many messages to these subscriptions. ``turn``: the index that got the last message, or -1. ``takes``
    (index, message): whether the filter of a subscription accepts that message; None: there are no filters."""
    if takes is not None:
        return _one_at_a_time(capacities, messages, model, turn, takes)
    count = len(capacities)
    ranked = heapq.nsmallest(
        messages, ((_rank(capacity, k, index, model, turn, count), index) for index, capacity in enumerate(capacities)
                   for k in range(min(capacity.free, messages)))
    )  # fmt: skip
    indexes: list[int | None] = [index for _, index in ranked]
    last = ranked[-1][1] if ranked and model is FairnessModel.ROUND_ROBIN else turn
    return Assigned(indexes + [None] * (messages - len(indexes)), last)


def _rank(
    capacity: Capacity, k: int, index: int, model: FairnessModel, turn: int, count: int
) -> tuple[Fraction | int, int]:
    """The sort key of the ``k``-th free slot of a subscription among all free slots."""
    if model is FairnessModel.FAST:
        return index, k
    if model is FairnessModel.ROUND_ROBIN:
        return k, (index - turn - 1) % count
    return Fraction(capacity.outstanding + k, capacity.backlog), index


def _one_at_a_time(
    capacities: Sequence[Capacity],
    messages: int,
    model: FairnessModel,
    turn: int,
    takes: Callable[[int, int], bool],
) -> Assigned:
    count, given = len(capacities), [0] * len(capacities)
    indexes: list[int | None] = []
    for message in range(messages):
        able = [n for n, capacity in enumerate(capacities) if given[n] < capacity.free and takes(n, message)]
        if not able:
            indexes.append(None)
            continue
        index = min(able, key=lambda n: _next_rank(capacities[n], given[n], n, model, turn, count))
        given[index] += 1
        if model is FairnessModel.ROUND_ROBIN:
            turn = index
        indexes.append(index)
    return Assigned(indexes, turn)


def _next_rank(
    capacity: Capacity, given: int, index: int, model: FairnessModel, turn: int, count: int
) -> tuple[Fraction | int, int]:
    if model is FairnessModel.ROUND_ROBIN:
        return 0, (index - turn - 1) % count
    return _rank(capacity, given, index, model, turn, count)
