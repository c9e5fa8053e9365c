"""Callbacks: called by the guard of their thread, and else directly."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator
from typing import Any

import pytest

from queueapp import callbacks


@pytest.fixture
def guarded() -> Iterator[list[tuple[str, bool]]]:
    """What the guard of this thread was asked to call."""
    asked: list[tuple[str, bool]] = []

    def by(what: str, call: Callable[[], Any], *, outcome_final: bool) -> Any:
        asked.append((what, outcome_final))
        return call()

    callbacks.guard(by)
    yield asked
    callbacks.guard(None)


def fail() -> None:
    raise ValueError("its own")


def test_without_a_guard_it_is_called_and_nothing_else() -> None:
    assert callbacks.run("a hook", lambda: 4711) == 4711
    with pytest.raises(ValueError, match="its own"):
        callbacks.run("a hook", fail)


def test_a_guard_gets_the_callback_kind_and_whether_its_outcome_is_final(guarded: list[tuple[str, bool]]) -> None:
    assert callbacks.run("a hook", lambda: 4711) == 4711
    assert callbacks.run("the policy", lambda: None, outcome_final=False) is None
    with pytest.raises(ValueError, match="its own"):
        callbacks.run("a signal", fail)

    assert guarded == [("a hook", True), ("the policy", False), ("a signal", True)]


def test_a_guard_is_that_of_its_thread(guarded: list[tuple[str, bool]]) -> None:
    returned: list[int] = []
    thread = threading.Thread(target=lambda: returned.append(callbacks.run("elsewhere", lambda: 4711)))
    thread.start()
    thread.join()

    assert returned == [4711]
    assert guarded == []


def test_a_guard_is_until_there_is_none(guarded: list[tuple[str, bool]]) -> None:
    callbacks.guard(None)

    assert callbacks.run("a hook", lambda: 4711) == 4711
    assert guarded == []
