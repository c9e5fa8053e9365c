"""The examples of docs/reference/journal.md run under the settings that the page shows, and it has every argument of
``replay``."""

from __future__ import annotations

import inspect
from datetime import timedelta
from typing import Any

import pytest

from queueapp import replay
from queueapp.journal import replay_reader, retention

from .pages import DOCS, blocks
from .running import run_blocks

PAGE = DOCS / "reference" / "journal.md"
SETTINGS = {"JOURNAL": {"audit": None, "^orders": timedelta(days=14)}}


@pytest.mark.django_db(transaction=True)
def test_the_examples_run_under_the_settings_of_the_page(settings: Any, capsys: pytest.CaptureFixture[str]) -> None:
    settings.QUEUEAPP = SETTINGS | {"PEEK_DELAY": 0.1}
    with run_blocks(PAGE) as module:
        assert module.QUEUEAPP == SETTINGS


def test_every_argument_of_replay_is_on_the_page() -> None:
    text = PAGE.read_text()
    for name in inspect.signature(replay).parameters:
        assert f"| `{name}` |" in text


def test_times_of_the_page_are_those_of_the_code() -> None:
    assert timedelta(days=7) == retention.ABANDONED
    assert timedelta(minutes=10) == replay_reader.READER_LIFE
    assert (retention.WAIT_MS, retention.BATCH) == (200, 3000)
    assert blocks(PAGE, "python")[0].title == "settings.py"
