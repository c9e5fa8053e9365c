"""Attempts that are counted in the headers, where the table has no column for them."""

from __future__ import annotations

import json

import pytest

from queueapp.errors import UndecodableMessage
from queueapp.messages import count_attempts, counted_attempts, counts_a_death

HEADERS = json.dumps({"type": "a", "odd": "\x00"})


def test_a_count_is_written_and_taken_out_with_all_that_belongs_to_it() -> None:
    once = count_attempts(HEADERS, 1)
    died = count_attempts(once, 2, died=True)
    failed = count_attempts(died, 3)

    assert [counted_attempts(item) for item in (HEADERS, once, died, failed)] == [0, 1, 2, 3]
    assert [counts_a_death(item) for item in (HEADERS, once, died, failed)] == [False, False, True, True]
    assert (
        json.loads(count_attempts(failed, 0))
        == json.loads(count_attempts(HEADERS, 0, died=True))
        == json.loads(HEADERS)
    )


@pytest.mark.parametrize(
    "headers", ["{", "[]", '{"queueapp.Attempts": 1}', '{"queueapp.Attempts": "x"}', '"queueapp.Attempts"']
)
def test_what_does_not_parse_counts_nothing(headers: str) -> None:
    assert counted_attempts(headers) == 0


def test_what_does_not_parse_cannot_be_counted_in() -> None:
    with pytest.raises(UndecodableMessage):
        count_attempts("{", 1)


def test_a_value_that_speaks_of_it_is_no_death() -> None:
    assert not counts_a_death(json.dumps({"a": "queueapp.Died"}) + json.dumps({"b": '"queueapp.Died"'}))
