"""Fairness models: the ranking gives what dealing out one message at a time gives."""

from __future__ import annotations

from fractions import Fraction

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from queueapp import FairnessModel
from queueapp.flow.fairness import Capacity, assign

rooms_of = st.lists(st.builds(Capacity, st.integers(1, 12), st.integers(0, 14)), max_size=6)


def one_at_a_time(
    rooms: list[Capacity], messages: int, model: FairnessModel, turn: int, takes: set[tuple[int, int]] | None = None
) -> tuple[list[int | None], int]:
    """As the manual says it: each message to the subscription that the model names at that moment."""
    out = [room.outstanding for room in rooms]
    places: list[int | None] = []
    for message in range(messages):
        able = [n for n, room in enumerate(rooms) if out[n] < room.backlog and (takes is None or (n, message) in takes)]
        place: int | None = None
        if able and model is FairnessModel.FAST:
            place = able[0]
        elif able and model is FairnessModel.ROUND_ROBIN:
            after = [n for n in able if n > turn]
            place = turn = (after or able)[0]
        elif able:
            place = min(able, key=lambda n: (Fraction(out[n], rooms[n].backlog), n))
        if place is not None:
            out[place] += 1
        places.append(place)
    return places, turn


@settings(max_examples=3000)
@given(rooms=rooms_of, messages=st.integers(0, 40), model=st.sampled_from(FairnessModel), data=st.data())
def test_fairness_model_assigns_as_one_at_a_time(
    rooms: list[Capacity], messages: int, model: FairnessModel, data: st.DataObject
) -> None:
    turn = data.draw(st.integers(-1, len(rooms) - 1))

    assigned = assign(rooms, messages, model, turn)

    places, last = one_at_a_time(rooms, messages, model, turn)
    assert assigned.indexes == places
    assert model is not FairnessModel.ROUND_ROBIN or assigned.turn == last


@settings(max_examples=1500)
@given(rooms=rooms_of, messages=st.integers(0, 15), model=st.sampled_from(FairnessModel), data=st.data())
def test_fairness_model_with_filters_assigns_as_one_at_a_time(
    rooms: list[Capacity], messages: int, model: FairnessModel, data: st.DataObject
) -> None:
    turn = data.draw(st.integers(-1, len(rooms) - 1))
    pairs = [(place, message) for place in range(len(rooms)) for message in range(messages)]
    takes = {pair for pair in pairs if data.draw(st.booleans())}

    assigned = assign(rooms, messages, model, turn, lambda place, message: (place, message) in takes)

    places, last = one_at_a_time(rooms, messages, model, turn, takes)
    assert assigned.indexes == places
    assert model is not FairnessModel.ROUND_ROBIN or assigned.turn == last


def test_fairness_model_proportional_takes_the_least_used_of_the_manuals_example() -> None:
    inky, blinky, clyde = Capacity(2, 1), Capacity(4, 3), Capacity(10, 4)

    assert assign([inky, blinky, clyde], 1, FairnessModel.PROPORTIONAL).indexes == [2]


@pytest.mark.parametrize(
    ("model", "expected"),
    [
        (FairnessModel.FAST, [0, 0, 1, 1]),
        (FairnessModel.ROUND_ROBIN, [1, 0, 1, 0]),
        (FairnessModel.PROPORTIONAL, [0, 1, 1, 0]),
    ],
)
def test_fairness_model_names_who_is_next(model: FairnessModel, expected: list[int]) -> None:
    rooms = [Capacity(2, 0), Capacity(4, 0)]

    assert assign(rooms, 4, model, turn=0).indexes == expected


def test_messages_beyond_all_limits_stay_unassigned() -> None:
    assert assign([Capacity(1, 0), Capacity(3, 5)], 3, FairnessModel.ROUND_ROBIN).indexes == [0, None, None]
    assert assign([], 2, FairnessModel.FAST).indexes == [None, None]
