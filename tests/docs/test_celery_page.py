"""The page of Celery: its block runs, and what its tables say is in the code and in the tests."""

from __future__ import annotations

import re
from typing import Any

import pytest

from queueapp.contrib.celery.models import BrokerQueue
from queueapp.contrib.celery.options import OPTIONS
from queueapp.models import DelayedMessage

from .pages import CHECKOUT, DOCS
from .running import run_blocks

PAGE = DOCS / "howto/celery.md"
TESTS = DOCS / "explanation/celery-tests.md"


@pytest.mark.django_db(transaction=True)
def test_the_block_of_the_page_runs() -> None:
    BrokerQueue.objects.all().delete()  # tests of other pages empty the tables of queueapp alone
    with run_blocks(PAGE) as module:
        assert BrokerQueue.objects.get().recipient == "celery"
        assert DelayedMessage.objects.get().priority == 5
        assert module.app.control.purge() == 2


def test_every_option_is_on_the_page() -> None:
    text = PAGE.read_text()

    assert [option.name for option in OPTIONS if f"| `{option.name}` |" not in text] == []


def test_every_test_that_the_page_names_is_there() -> None:
    found = set(re.findall(r"`(test_\w+)`", TESTS.read_text()))
    tests: set[Any] = set()
    for file in (CHECKOUT / "tests/queueapp/contrib/celery").glob("*.py"):
        tests |= set(re.findall(r"^def (test_\w+)", file.read_text(), re.M))

    assert found - tests == set()
    assert len(found) > 20
