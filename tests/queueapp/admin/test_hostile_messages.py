"""Whatever a message holds, its pages show it as text, in bounded size, and nothing of it takes effect."""

import json
import re
import uuid
from typing import Any

import pytest
from django.test import Client

from queueapp.models import DelayedMessage, PoisonMessage, Subscriber
from tests.testapp.models import AddressedUrgent, Leased, Readable

from .conftest import operate, url

SCRIPT = "<script>alert('pwned')</script>"
BREAKOUT = "\"'></pre></td><img src=x onerror=alert(1)>{{ 7|add:7 }}{% now %}"
#: Characters that turn the line around, hide, or are obeyed by a terminal.
DECEPTIVE = "\u202e\u2066\u2069\u200b\u200f\ufeff\x1b\x07"

BODIES = {
    "script": SCRIPT.encode(),
    "breakout": BREAKOUT.encode(),
    "script in json": f'{{"{SCRIPT}": "{SCRIPT}"}}'.encode(),
    "deceptive": f"{DECEPTIVE} and enough text around it that it is taken for text".encode(),
    "nul": b"a\x00b and more text that is readable",
    "invalid utf-8": b"\xff\xfe\xfa<script>alert('pwned')</script>",
    "utf-16": SCRIPT.encode("utf-16"),
    "latin-1": "Tromsø".encode("latin-1"),
    "empty": b"",
    "nested": b"[" * 20_000 + b"]" * 20_000,
    "number": b"1" * 100_000,
    "5 MB of text": b"x" * 5_000_000,
    "5 MB of json": b"[" + b",".join([b'"' + b"y" * 1000 + b'"'] * 5000) + b"]",
    "5 MB of noise": bytes(range(256)) * 20_000,
}


def shown(client: Client, address: str) -> str:
    """The page, after checks that hold for every page."""
    response = client.get(address)
    assert response.status_code == 200
    text = response.content.decode()
    assert "<script>alert" not in text
    assert "<img src=x" not in text
    assert not set(DECEPTIVE) & set(text)
    assert len(text) < 600_000
    return text


@pytest.mark.parametrize("body", BODIES.values(), ids=BODIES.keys())
def test_body_in_every_place_where_messages_are_shown(operator: Client, body: bytes) -> None:
    Leased.send(body)
    DelayedMessage.objects.create(
        message_id=uuid.uuid4(), destination="testapp.Leased", due="2030-01-01T00:00Z", body=body
    )
    PoisonMessage.objects.create(message_id=uuid.uuid4(), queue="testapp.Leased", reason="r", body=body)
    for model in (Leased, DelayedMessage, PoisonMessage):
        key = model.objects.get().pk
        shown(operator, url(model))
        shown(operator, url(model, "change", key))
        assert operator.get(url(model, "body", key)).content == body


def test_readable_queue_with_a_name_that_needs_quoting(operator: Client) -> None:
    Readable.send({"n": SCRIPT})
    key = Readable.objects.get().pk
    shown(operator, url(Readable))
    assert "&lt;script&gt;" in shown(operator, url(Readable, "change", key))
    shown(operator, url(Readable) + "?state=ready&q=" + str(Readable.objects.get().id))
    operate(operator, Readable, "move_to_poison", key)
    operate(operator, PoisonMessage, "requeue", PoisonMessage.objects.get().pk, counts="reset")
    operate(operator, Readable, "delete_selected", Readable.objects.get().pk)
    assert not Readable.objects.exists()


@pytest.mark.parametrize("text", [SCRIPT, BREAKOUT, DECEPTIVE, "z" * 100_000, "zal\u0334\u0335\u0336go " * 500])
def test_headers(operator: Client, text: str) -> None:
    Leased.send({}, headers={"type": text, "content-type": text, text: text, "x": "y"})
    key = Leased.objects.get().pk
    shown(operator, url(Leased))
    assert "<table" in shown(operator, url(Leased, "change", key))


@pytest.mark.parametrize(
    "headers",
    ["", "null", "[]", "{", f'"{SCRIPT}"', f'{{"a": {{"b": "{SCRIPT}"}}}}', "[" * 50_000, '{"a":"' + "b" * 3_000_000 + '"}'],  # noqa: E501
    ids=["nothing", "null", "list", "broken", "string", "nested", "deep", "3 MB"],
)  # fmt: skip
def test_headers_that_are_not_as_they_should_be(operator: Client, headers: str) -> None:
    Leased.send({})
    Leased.objects.update(headers=headers)
    shown(operator, url(Leased))
    assert "Headers" in shown(operator, url(Leased, "change", Leased.objects.get().pk))


@pytest.mark.parametrize("text", [SCRIPT, BREAKOUT, DECEPTIVE])
def test_addresses_and_failures(operator: Client, text: str) -> None:
    AddressedUrgent.send({}, recipient=text, unknown_recipient=True, correlation_id=text, reply_to=text)
    AddressedUrgent.objects.update(
        failures=f'["{SCRIPT}", 7, null, {{"attempt": {{"a": 1}}, "exception": {text.encode().hex()!r}}}]'.replace(
            "'", '"'
        )
    )
    shown(operator, url(AddressedUrgent))
    shown(operator, url(AddressedUrgent, "change", AddressedUrgent.objects.get().pk))


@pytest.mark.parametrize("failures", ["", "{}", "[", "7", f'[{{"exception": "{SCRIPT}", "at": [], "host": null}}]'])
def test_failures_that_are_not_as_they_should_be(operator: Client, failures: str) -> None:
    Leased.send({})
    Leased.objects.update(failures=failures)
    shown(operator, url(Leased, "change", Leased.objects.get().pk))


def test_a_history_of_failures_is_bounded_in_number_and_length(operator: Client) -> None:
    Leased.send({})
    Leased.objects.update(failures=json.dumps([{"attempt": n, "exception": f"{n}-" + "x" * 9000} for n in range(300)]))
    text = shown(operator, url(Leased, "change", Leased.objects.get().pk))
    assert text.count('data-label="Attempt"') == 50
    assert ">299-xxx" in text, "the last ones"
    assert "x" * 500 not in text


@pytest.mark.parametrize("text", [SCRIPT, BREAKOUT, DECEPTIVE])
def test_poison_reason_exception_traceback_and_everything_beside(operator: Client, text: str) -> None:
    texts: dict[str, Any] = dict.fromkeys(
        ("queue", "destination", "consumer", "message_type", "reason", "exception_type", "exception_message",
         "traceback", "host", "worker_version", "recipient", "correlation_id"),
        text[:60],
    )  # fmt: skip
    PoisonMessage.objects.create(message_id=uuid.uuid4(), group_key="g", process=text[:20], **texts)
    message = PoisonMessage.objects.get()
    shown(operator, url(PoisonMessage))
    shown(operator, url(PoisonMessage, "change", message.pk))
    data = {"action": "requeue", "_selected_action": message.pk, "confirmed": "yes", "counts": "reset"}
    answer = operator.post(url(PoisonMessage), data, follow=True).content.decode()
    assert "<script>alert" not in answer
    assert "not requeued: There is no queue " in answer


def test_host_names_of_subscribers(operator: Client) -> None:
    owner = Subscriber.objects.create(
        queue="testapp.Leased", host=SCRIPT, process=1, supervisor=uuid.uuid4(), alive_until="2030-01-01T00:00Z",
        version=BREAKOUT[:60],
    )  # fmt: skip
    Leased.send({})
    Leased.objects.update(lease_owner=owner.pk, lease_token=uuid.uuid4(), lease_expires="2030-01-01T00:00Z")
    shown(operator, url(Leased))
    shown(operator, url(Subscriber))
    shown(operator, url(Subscriber, "change", owner.pk))


def test_nothing_on_our_pages_is_inline_script_or_style(operator: Client) -> None:
    Leased.send({})
    for address in (url(Leased), url(Leased, "change", Leased.objects.get().pk)):
        text = shown(operator, address)
        assert not re.search(r"<script(?![^>]*\bsrc=)[^>]*>", text)
        assert not re.search(r"\son[a-z]+\s*=|\sstyle\s*=|javascript:", text)
