"""Figures of queues: also of those that nobody here knows and that delayed messages are stuck for."""

from __future__ import annotations

import json
import uuid
from datetime import timedelta
from io import StringIO

from django.core.management import call_command

from queueapp.models import DelayedMessage, Now
from queueapp.operating.statistics import figures
from tests.inprocess import real_commits
from tests.testapp.models import Leased

pytestmark = real_commits  # some queues of the tests have no table: an error that would end a test's transaction


def stuck(destination: str, count: int, late: timedelta = timedelta(hours=1)) -> None:
    for _ in range(count):
        DelayedMessage.objects.create(destination=destination, due=Now() - late, message_id=uuid.uuid4())


def test_delayed_messages_for_a_queue_that_nobody_knows_are_a_line_of_their_own() -> None:
    stuck("gone.Queue", 3)
    stuck("testapp.Leased", 2)
    stuck("young.Queue", 1, late=timedelta(0))

    found = {one.queue: one for one in figures()}

    assert (found["gone.Queue"].delayed, found["gone.Queue"].database) == (3, "default")
    assert "no such queue here" in found["gone.Queue"].error
    assert found["testapp.Leased"].delayed == 2
    assert "young.Queue" not in found, "another project is about to deliver it"
    assert [one.queue for one in figures([Leased])] == ["testapp.Leased"]


def test_queuestats_shows_it() -> None:
    stuck("gone.Queue", 3)
    out = StringIO()

    call_command("queuestats", stdout=out)
    (line,) = [line for line in out.getvalue().splitlines() if "gone.Queue" in line]
    assert "3" in line
    assert "no such queue here" in line

    out = StringIO()
    call_command("queuestats", "--json", stdout=out)
    assert {"queue": "gone.Queue", "delayed": 3}.items() <= json.loads(out.getvalue())[-1].items()
