"""What is traced of sends and publishes, and that nothing is imported for it where it is off."""

from __future__ import annotations

import json
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest
from asgiref.sync import async_to_sync
from opentelemetry.trace import SpanKind

from queueapp import InvalidMessage, apublish, publish, publish_many
from queueapp.telemetry import tracing
from tests.telemetry import Telemetry, is_child_of, telemetry
from tests.testapp.models import Leased
from tests.testapp.topics import Bookings, FlightAudit

pytestmark = pytest.mark.django_db


@pytest.fixture
def recorded() -> Iterator[Telemetry]:
    with telemetry() as item:
        yield item


def test_a_publish_is_one_span_however_many_queues_take_it(recorded: Telemetry) -> None:
    identity = publish("FLIGHTS", {"flight": "UA1"})

    (span,) = recorded.spans
    assert (span.name, span.kind) == ("publish FLIGHTS", SpanKind.PRODUCER)
    assert (span.attributes or {})["messaging.message.id"] == str(identity)
    assert span.context is not None
    for queue in (Bookings, FlightAudit):
        (row,) = queue.objects.all()
        assert json.loads(row.headers)["traceparent"].split("-")[2] == f"{span.context.span_id:016x}"
    names = {
        "messaging.system": "queueapp",
        "messaging.operation.name": "publish",
        "messaging.destination.name": "FLIGHTS",
    }
    assert recorded.figures("messaging.client.sent.messages") == {tuple(sorted(names.items())): 1}


def test_many_that_are_published_share_a_span(recorded: Telemetry) -> None:
    assert publish_many("FLIGHTS", [1, 2, 3]) == 3

    (span,) = recorded.spans
    assert (span.attributes or {})["messaging.batch.message_count"] == 3
    assert len({json.loads(row.headers)["traceparent"] for row in Bookings.objects.all()}) == 1
    assert Bookings.objects.count() == 3


def test_an_asynchronous_send_is_in_the_span_that_is_current(recorded: Telemetry) -> None:
    async def view() -> None:
        await Leased.asend({"n": 1}, headers={"mine": "1"})
        await apublish("FLIGHTS", 1)

    with recorded.tracer.start_as_current_span("view") as around:
        async_to_sync(view)()
    (send,), (published,) = recorded.named("send testapp.Leased"), recorded.named("publish FLIGHTS")
    assert is_child_of(send, around)  # type: ignore[arg-type]
    assert is_child_of(published, around)  # type: ignore[arg-type]
    (row,) = Leased.objects.all()
    assert json.loads(row.headers)["mine"] == "1"


@pytest.mark.parametrize("headers", [5, "abc", {"a": 1}])
def test_headers_that_are_none_are_refused_as_without_it(recorded: Telemetry, headers: object) -> None:
    with pytest.raises(InvalidMessage):
        Leased.send({"n": 1}, headers=headers)  # type: ignore[arg-type]
    assert not Leased.objects.exists()


def test_every_option_of_a_send_arrives(recorded: Telemetry) -> None:
    Leased.send({"n": 1}, correlation_id="c-1", reply_to="r-1", is_barrier=False)

    (row,) = Leased.objects.all()
    assert (row.correlation_id, row.reply_to_address) == ("c-1", "r-1")
    assert {"correlation-id", "reply-to", "traceparent"} <= json.loads(row.headers).keys()


def test_the_setting_turns_it_on_and_off() -> None:
    with telemetry():
        assert tracing.tracer is not None
    assert tracing.tracer is None


def test_nothing_of_it_is_imported_where_it_is_off() -> None:
    code = (
        "import django, sys; django.setup(); import queueapp.queue, workers.processes.child, workers.receiving.pump;"
        "print([name for name in sys.modules if name.startswith(('opentelemetry', 'prometheus_client', "
        "'queueapp.telemetry.s'))])"
    )
    done = subprocess.run(
        [sys.executable, "-c", code], cwd=Path(__file__).parents[2], capture_output=True, text=True, check=True
    )
    assert done.stdout.strip() == "[]"
