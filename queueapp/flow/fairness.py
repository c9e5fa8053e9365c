"""Which subscriber gets which message while there are fewer messages than they have room for. Pure: no database, no clock.

``assign`` gives the same as one that deals the messages out one at a time, each to the subscriber that the model names:
fast, the first one with room; round-robin, the next one with room; proportional, the one that has used the smallest part of
its backlog, the first of several. With filters there is no ranking that holds for all of them, and it does deal them out.
"""

from __future__ import annotations

import heapq
from collections.abc import Callable, Sequence
from fractions import Fraction
from typing import NamedTuple, TypeVar

from ..models.delivery import FairnessModel

_Key = TypeVar("_Key")


class Capacity(NamedTuple):
    """A subscription: how many messages it may hold, and how many it holds. It may hold more than it may."""

    backlog: int
    outstanding: int

    @property
    def free(self) -> int:
        return max(0, self.backlog - self.outstanding)


class Assigned(NamedTuple):
    """For each message the place of its subscription, None where nobody takes it; and where the turn of round-robin is now:
    the place of the subscription that got the last one."""

    places: list[int | None]
    turn: int


def assign(
    rooms: Sequence[Capacity],
    messages: int,
    model: FairnessModel,
    turn: int = -1,
    takes: Callable[[int, int], bool] | None = None,
) -> Assigned:
    """Deal so many messages out to these subscriptions. ``turn``: who got the last one, -1 for nobody. ``takes`` (place,
    message): whether the filter of a subscription lets that message pass; None: there are no filters."""
    if takes is not None:
        return _one_at_a_time(rooms, messages, model, turn, takes)
    count = len(rooms)
    ranked = heapq.nsmallest(
        messages, ((_rank(room, k, place, model, turn, count), place) for place, room in enumerate(rooms)
                   for k in range(min(room.free, messages)))
    )  # fmt: skip
    places: list[int | None] = [place for _, place in ranked]
    last = ranked[-1][1] if ranked and model is FairnessModel.ROUND_ROBIN else turn
    return Assigned(places + [None] * (messages - len(places)), last)


def _rank(
    room: Capacity, k: int, place: int, model: FairnessModel, turn: int, count: int
) -> tuple[Fraction | int, int]:
    """The place in the order of all free slots of the ``k``-th one of a subscription."""
    if model is FairnessModel.FAST:
        return place, k
    if model is FairnessModel.ROUND_ROBIN:
        return k, (place - turn - 1) % count
    return Fraction(room.outstanding + k, room.backlog), place


def _one_at_a_time(
    rooms: Sequence[Capacity],
    messages: int,
    model: FairnessModel,
    turn: int,
    takes: Callable[[int, int], bool],
) -> Assigned:
    count, given = len(rooms), [0] * len(rooms)
    places: list[int | None] = []
    for message in range(messages):
        able = [n for n, room in enumerate(rooms) if given[n] < room.free and takes(n, message)]
        if not able:
            places.append(None)
            continue
        place = min(able, key=lambda n: _next_rank(rooms[n], given[n], n, model, turn, count))
        given[place] += 1
        if model is FairnessModel.ROUND_ROBIN:
            turn = place
        places.append(place)
    return Assigned(places, turn)


def _next_rank(
    room: Capacity, given: int, place: int, model: FairnessModel, turn: int, count: int
) -> tuple[Fraction | int, int]:
    if model is FairnessModel.ROUND_ROBIN:
        return 0, (place - turn - 1) % count
    return _rank(room, given, place, model, turn, count)
