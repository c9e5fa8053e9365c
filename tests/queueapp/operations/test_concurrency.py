"""How many tasks receive a queue is an operator's to say, while they do."""

from __future__ import annotations

from typing import Any

import pytest
from django.contrib.admin.models import LogEntry
from django.contrib.auth import get_user_model
from django.core.management import CommandError, call_command

from queueapp.errors import InvalidOption
from queueapp.models import QueueControl
from queueapp.operations import control
from tests.testapp.models import Leased


@pytest.mark.django_db
def test_it_is_written_with_its_user_and_logged_once() -> None:
    operator = get_user_model().objects.create_user("operator")

    assert control.set_concurrency(Leased, 7, by=operator)
    assert not control.set_concurrency(Leased, 7, by=operator)
    assert QueueControl.objects.get().concurrency == 7
    assert control.set_concurrency(Leased, 8)
    assert control.set_concurrency(Leased, None, by=operator)
    assert not control.set_concurrency(Leased, None)

    row = QueueControl.objects.get()
    assert (row.concurrency, row.paused) == (None, False)
    assert [entry.change_message for entry in LogEntry.objects.order_by("pk")] == [
        "Concurrency set to 7.", "Concurrency set to as started.",
    ]  # fmt: skip


@pytest.mark.django_db
@pytest.mark.parametrize("tasks", [0, -1, 257, "5", 2.5])
def test_what_makes_no_sense_is_refused(tasks: Any) -> None:
    with pytest.raises(InvalidOption, match="from 1 to 256"):
        control.set_concurrency(Leased, tasks)

    assert not QueueControl.objects.exists()


@pytest.mark.django_db
def test_the_command_prints_what_it_did(capsys: pytest.CaptureFixture[str]) -> None:
    for tasks in ("3", "3", "default"):
        call_command("setconcurrency", "testapp.Leased", tasks)

    assert capsys.readouterr().out.splitlines() == [
        "testapp.Leased: each process has 3 receivers.",
        "testapp.Leased: each process has 3 receivers, as before.",
        "testapp.Leased: each process has as many receivers as it was started with.",
    ]
    for bad in (("testapp.Leased", "many"), ("testapp.Leased", "0"), ("testapp.NoSuchQueue", "3")):
        with pytest.raises(CommandError):
            call_command("setconcurrency", *bad)
