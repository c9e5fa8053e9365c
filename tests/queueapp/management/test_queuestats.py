"""``queuestats`` shows names and errors of foreign writers, each in its line; a queue that is named twice is one
queue."""

from __future__ import annotations

import json
import uuid
from datetime import timedelta
from io import StringIO

import pytest
from django.core.management import CommandError, call_command

from queueapp.models import Now, PoisonMessage, Subscriber
from tests.testapp.models import Leased

pytestmark = pytest.mark.django_db

HOSTILE = "a\x1b[2J\nb\u202ec"


def lines(*queues: str) -> list[str]:
    out = StringIO()
    try:
        call_command("queuestats", *queues, stdout=out, stderr=out, no_color=True)
    except CommandError as error:
        out.write(str(error))  # foreign queues of the tests have no tables
    return out.getvalue().splitlines()


def test_control_characters_of_foreign_rows_are_escaped() -> None:
    PoisonMessage.objects.create(message_id=uuid.uuid4(), queue=HOSTILE, reason="r")
    trouble = [{"name": "Peek", "state": "failing", "error": HOSTILE}]
    Subscriber.objects.create(
        queue="testapp.Leased", host="h", process=1, supervisor=uuid.uuid4(), alive_until=Now() + timedelta(1),
        breakers=json.dumps(trouble), consumers=json.dumps([["c", "known"]]), unknown_types=json.dumps([HOSTILE]),
    )  # fmt: skip
    Leased.send({}, headers={"type": "x"})
    Leased.objects.update(headers=json.dumps({"type": HOSTILE}))

    shown = lines()

    assert all(line.isprintable() for line in shown), shown
    reported = "a⟨U+001B⟩[2J b⟨U+202E⟩c"
    (queue,) = [line for line in shown if line.startswith("testapp.Leased ")]
    assert queue.endswith(f"Peek: failing: {reported}")
    assert [line.split()[:2] for line in shown if line.startswith("a⟨")] == [["a⟨U+001B⟩[2J", "b⟨U+202E⟩c"]]
    assert any(
        line.startswith(f"testapp.Leased: 1 message for type {HOSTILE!r}, no consumer in a live worker")
        for line in shown
    )


def test_a_queue_that_is_named_by_label_and_by_table_is_shown_once() -> None:
    assert len(lines("testapp.Leased", "testapp_leased")) == 2
