"""The page about traces: its example is run, and makes the trace that the page shows."""

from __future__ import annotations

import pytest
from django.test import RequestFactory

from tests.in_process_worker import eventually
from tests.telemetry import Telemetry, telemetry
from tests.workers.receiving.single_receiver import SingleReceiver

from .pages import DOCS, blocks
from .running import run_blocks

PAGE = DOCS / "howto" / "tracing.md"


def as_tree(telemetry: Telemetry) -> str:
    """What has a parent in the trace below it, indented, as the page shows it."""
    lines: list[str] = []

    def add(parent: int | None, depth: int) -> None:
        for span in sorted(telemetry.spans, key=lambda item: item.start_time or 0):
            if (span.parent.span_id if span.parent else None) == parent and span.context is not None:
                consumer = (span.attributes or {}).get("messaging.consumer.group.name")
                lines.append("  " * depth + span.name + (f" [{consumer}]" if consumer else ""))
                add(span.context.span_id, depth + 1)

    add(None, 0)
    return "\n".join(line for line in lines if not line.startswith(("receive ", "ack ")))


@pytest.mark.django_db(transaction=True)
def test_the_example_makes_the_trace_of_the_page() -> None:
    with run_blocks(PAGE) as shop, telemetry(PEEK_DELAY=0.1) as reported:
        with reported.tracer.start_as_current_span("GET /order"):
            assert shop.order(RequestFactory().get("/order")).status_code == 202
        for queue in (shop.Orders, shop.Parcels):
            single_receiver = SingleReceiver(queue)
            eventually(lambda item=single_receiver: item.receive(1))
        (expected,) = (block.code for block in blocks(PAGE, "text"))
        assert as_tree(reported) == expected.rstrip("\n")

        shop.Orders.send({"number": 8})
        shop.nightly()
        assert [
            (item.attributes or {})["messaging.consumer.group.name"] for item in reported.named("process shop.Orders")
        ] == [
            "pack",
            "nightly",
        ]
        assert not shop.Orders.objects.exists()
