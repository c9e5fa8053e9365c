"""How the child of a handler that forks ends: as a script does."""

from __future__ import annotations

import os
import sys

import pytest

from workers.receiving.receivers import base

ENDS: list[tuple[BaseException | None, int]] = [
    (None, 0),
    (SystemExit(), 0),
    (SystemExit(0), 0),
    (SystemExit(7), 7),
    (SystemExit(300), 44),
    (SystemExit("in words"), 1),
    (ValueError("raised"), 1),
    (KeyboardInterrupt(), 1),
]


def end_of(child: int) -> int:
    return os.waitstatus_to_exitcode(os.waitpid(child, 0)[1])


@pytest.mark.parametrize(("failed", "code"), ENDS)
def test_the_code_is_that_of_a_script(failed: BaseException | None, code: int) -> None:
    child = os.fork()
    if child == 0:
        base.end_child(failed)

    assert end_of(child) == code


@pytest.mark.parametrize(
    ("failed", "message"), [(ValueError("raised"), "ValueError: raised\n"), (SystemExit("in words"), "in words\n")]
)
def test_what_it_has_written_and_why_it_ended_arrives(
    capfd: pytest.CaptureFixture[str], failed: BaseException, message: str
) -> None:
    child = os.fork()
    if child == 0:
        sys.stdout = os.fdopen(os.dup(1), "w", buffering=4096)
        sys.stderr = os.fdopen(os.dup(2), "w", buffering=4096)
        sys.stdout.write("written\n")
        base.end_child(failed)

    assert end_of(child) == 1
    out, err = capfd.readouterr()
    assert out == "written\n"
    assert err.endswith(message)


def test_a_child_is_a_generation_away_and_its_child_two() -> None:
    before = base.generation
    child = os.fork()
    if child == 0:
        grandchild = os.fork()
        if grandchild == 0:
            os._exit(base.generation - before)
        os._exit(10 * (base.generation - before) + end_of(grandchild))

    assert end_of(child) == 12
    assert base.generation == before
