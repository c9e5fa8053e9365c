"""Each kind of value by each way into a queue: it arrives as ``send`` delivers it, or is refused in its words.

The cells of Spark are in ``tests/queueapp/contrib/spark/test_values.py``: they need a session.
"""

from __future__ import annotations

import json
import re
import uuid
from collections.abc import Callable
from datetime import UTC, datetime, timedelta
from typing import Any

import kombu
import pytest
from django.db import connection, transaction
from kombu.exceptions import EncodeError
from kombu.message import Message
from kombu.utils.json import dumps, loads

import queueapp.contrib.celery  # noqa: F401 - makes the URL known
from queueapp import InvalidMessage, consumer, messages, publish, publish_many
from queueapp.contrib.celery.models import BrokerQueue
from queueapp.contrib.celery.serialization import fields_of
from queueapp.contrib.tasks.compat import InvalidTask, normalize_json
from queueapp.contrib.tasks.models import TaskQueue
from queueapp.contrib.tasks.serialization import stored_arguments
from queueapp.errors import UndecodableMessage
from queueapp.models import DelayedMessage, PoisonMessage
from queueapp.testing import Kit
from tests.conformance.value_kinds import ABSENT, KINDS
from tests.databases import only_on_postgresql
from tests.queueapp.contrib.tasks import declared
from tests.testapp.models import Leased, Urgent

pytestmark = [pytest.mark.django_db, only_on_postgresql]

#: Of errors: what they say, without the class of the body and where in it the value is.
Refused = tuple[str, str]
WORDS = re.compile(r"cannot be a message body: (.*?)( \(it would arrive as null\))?\.$", re.S)
WHERE = re.compile(r" at \.[^ ,]+(?=, )")


def outcome(send: Callable[[], Any], read: Callable[[], Any]) -> Any:
    """What arrives, as text that tells a whole float from a whole number; or the words of the refusal."""
    try:
        with transaction.atomic():
            send()
    except InvalidMessage as error:
        found = WORDS.search(str(error))
        return "refused", WHERE.sub("", found[1]) if found is not None else str(error)
    return repr(read())


def stored(table: Any = Leased, identity: str = "id") -> Any:
    row = table.objects.get()
    return messages.read_stored(bytes(row.body), row.headers, getattr(row, identity), "default")


def by_send(body: Any) -> Any:
    return outcome(lambda: Leased.send(body), stored)


#: way -> (what sends a body, what reads it)
WAYS: dict[str, tuple[Callable[[Any], Any], Callable[[], Any]]] = {
    "send_many": (lambda body: Leased.send_many([body]), stored),
    "send_many beside others": (
        lambda body: Leased.send_many([{"value": 1}, body]) and Leased.objects.order_by("seq")[:1].get().delete(),
        stored,
    ),
    "publish": (lambda body: publish("Leased", body), stored),
    "publish_many": (lambda body: publish_many("Leased", [body]), stored),
    "delayed": (
        lambda body: Leased.send(body, delay=timedelta(hours=1)), lambda: stored(DelayedMessage, "message_id"),
    ),
}  # fmt: skip


@pytest.mark.parametrize("kind", [kind for kind, (value, _) in KINDS.items() if value is not ABSENT])
@pytest.mark.parametrize("way", WAYS)
def test_value_arrives_as_by_send_or_is_refused_in_its_words(way: str, kind: str) -> None:
    body = {"value": KINDS[kind][0]}
    expected = by_send(body)
    Leased.objects.all().delete()
    send, read = WAYS[way]

    assert outcome(lambda: send(body), read) == expected


@pytest.mark.parametrize("kind", [kind for kind, (_, sql) in KINDS.items() if sql])
@pytest.mark.parametrize("zone", ["UTC", "America/New_York"])
def test_value_of_a_row_is_stored_as_send_stores_it(kind: str, zone: str) -> None:
    value, sql = KINDS[kind]
    with connection.cursor() as cursor:
        cursor.execute(f"SET LOCAL timezone = '{zone}'; SET LOCAL intervalstyle = 'sql_standard'")

    found = outcome(lambda: Leased.send_from(f"SELECT {sql} AS value"), stored)

    if value is ABSENT:
        assert found[0] == "refused"
        assert found[1]
        return
    Leased.objects.all().delete()
    expected = by_send({"value": value})
    assert found[0] == expected[0] if "half an emoji" in kind else found == expected


def as_json(value: Any) -> Any:
    """What Python's JSON makes of a value, as TASKS and Celery use it."""
    return json.loads(json.dumps(value))


@pytest.mark.parametrize("kind", [kind for kind, (value, _) in KINDS.items() if value is not ABSENT])
def test_argument_of_a_task_arrives_or_is_refused(kind: str) -> None:
    value = KINDS[kind][0]

    def read() -> Any:
        row = TaskQueue.objects.get()
        return stored_arguments(bytes(row.body), row.headers, row.id, "default")[0][0]

    try:
        found = outcome(lambda: declared.noop.enqueue(value), read)
    except (TypeError, ValueError):
        found = "refused", ""  # by Django, before the backend is asked
    try:
        expected: Any = repr(as_json(normalize_json(value)))
    except (TypeError, ValueError, RecursionError):
        expected = "refused", ""
    if ("NaN" in kind and "decimal" not in kind) or "infinity" in kind:
        expected = by_send({"value": value})
    if kind in ("900 deep", "endless") and found[0] == "refused":
        return  # how deep is too deep depends on the caller's own depth, and so do the words
    assert found == expected


@pytest.mark.parametrize("kind", [kind for kind, (value, _) in KINDS.items() if value is not ABSENT])
def test_argument_of_a_celery_task_arrives_as_by_any_broker_or_is_refused(kind: str) -> None:
    value = KINDS[kind][0]
    refusals = (EncodeError, TypeError, ValueError, RecursionError)
    try:
        expected = repr(loads(dumps([[value], {}, {}]))[0][0])
    except refusals:
        expected = "refused"
    try:
        with kombu.Connection("queueapp://") as conn, transaction.atomic():
            conn.Producer().publish([[value], {}, {}], routing_key="values", headers={"task": "t", "id": "1"})
        row = BrokerQueue.objects.get()
        kept, _ = fields_of(row.headers)
        encoding = {"content_type": kept["content-type"], "content_encoding": kept["content-encoding"]}
        found = repr(Message(body=bytes(row.body), headers=kept["headers"], **encoding).decode()[0][0])
    except refusals:
        found = "refused"
    assert found == expected


@pytest.mark.parametrize(
    "text",
    [
        b'{"value": NaN}', b'{"value": Infinity}', b'{"value": 1e400}', b'{"value": "\\ud83d"}', b'{"value": "a\0b"}',
        b'{"value": "\xff"}', b'{"value": 01}', b'{"value":', b"[" * 100_000, b"\xff\xfe{\x00}\x00",
    ],
)  # fmt: skip
def test_body_by_sql_that_send_would_not_write_is_not_readable(text: bytes) -> None:
    by_hand(body=text)
    with pytest.raises(UndecodableMessage):
        stored()


@pytest.mark.parametrize("kind", [kind for kind, (value, _) in KINDS.items() if value is not ABSENT])
def test_body_by_sql_that_send_writes_is_read_alike(kind: str) -> None:
    body = {"value": KINDS[kind][0]}
    expected = by_send(body)
    if isinstance(expected, tuple):
        return
    row = Leased.objects.get()
    data = bytes(row.body)
    row.delete()
    by_hand(body=b"\xef\xbb\xbf" + data)
    assert repr(stored()) == expected


def by_hand(**columns: Any) -> None:
    """A message as another program inserts it."""
    columns = {"id": uuid.uuid4(), "headers": "{}"} | columns
    table = connection.ops.quote_name(Leased._meta.db_table)
    with connection.cursor() as cursor:
        cursor.execute(
            f"INSERT INTO {table} ({', '.join(columns)}) VALUES ({', '.join(['%s'] * len(columns))})",
            list(columns.values()),
        )


# -- the envelope ------------------------------------------------------------------------------------------------------

HALF, NUL, LONG = "a\ud83d", "a\0b", "x" * 600
FAR = timedelta(days=365 * 8000)

#: what -> options of a send that no way may accept
ENVELOPES: dict[str, dict[str, Any]] = {
    "NaN in a header": {"headers": {"x": float("nan")}},
    "half an emoji in a header": {"headers": {"x": HALF}},
    "half an emoji in the name of a header": {"headers": {HALF: "x"}},
    "NUL in a header": {"headers": {"x": NUL}},
    "NUL in the name of a header": {"headers": {NUL: "x"}},
    "NUL in the type": {"headers": {"type": NUL}},
    "a number in a header": {"headers": {"x": 1}},
    "a version that is none": {"headers": {"type": "x", "type-version": "two"}},
    "version 0": {"headers": {"type-version": "0"}},
    "headers that are none": {"headers": ["x"]},
    "headers that are a text": {"headers": "x"},
    "expires in the year 10000": {"expires_in": FAR},
    "expires in a number": {"expires_in": 5},
    "expired": {"expires_in": timedelta(0)},
    "priority too high": {"priority": 3},
    "negative priority": {"priority": -1},
    "priority of 70 bits": {"priority": 2**70},
    "true as priority": {"priority": True},
    "float as priority": {"priority": 1.0},
    "long recipient": {"recipient": LONG, "unknown_recipient": True},
    "NUL in the recipient": {"recipient": NUL, "unknown_recipient": True},
    "half an emoji in the recipient": {"recipient": HALF, "unknown_recipient": True},
    "no text as recipient": {"recipient": 7, "unknown_recipient": True},
    "long correlation id": {"correlation_id": LONG},
    "NUL in the correlation id": {"correlation_id": NUL},
    "half an emoji in the correlation id": {"correlation_id": HALF},
    "long reply address": {"reply_to": LONG},
    "NUL in the reply address": {"reply_to": NUL},
    "long id": {"message_id": LONG},
    "id that is a text": {"message_id": str(uuid.uuid4())},
    "due in the year 10000": {"delay": FAR},
    "due at the end of time": {"at": datetime(9999, 12, 31, tzinfo=UTC)},
    "due at a naive time": {"at": datetime(2030, 1, 1)},
    "due in a number": {"delay": 5},
    "a number for a truth": {"is_barrier": 1},
}
_BULK = {"headers", "expires_in", "priority", "recipient", "unknown_recipient", "is_barrier"}
_PUBLISHED = {"headers", "expires_in", "correlation_id", "reply_to", "message_id", "delay", "at"}

#: way -> (what sends with these options, the options that it has)
ENVELOPE_WAYS: dict[str, tuple[Callable[..., Any], set[str]]] = {
    "send_many": (lambda **options: Urgent.send_many([{}], **options), _BULK),
    "send_from": (lambda **options: Urgent.send_from("SELECT 1 AS n", **options), _BULK),
    "publish": (lambda **options: publish("Urgent", {}, **options), _PUBLISHED),
    "publish_many": (lambda **options: publish_many("Urgent", [{}], **options), {"headers", "expires_in"}),
    "isolated": (lambda **options: Urgent.send({}, isolated=True, **options), set(_BULK | _PUBLISHED)),
}


@pytest.mark.parametrize(
    ("way", "what"),
    [
        (way, what)
        for way, (_, options) in ENVELOPE_WAYS.items()
        for what, given in ENVELOPES.items()
        if given.keys() <= options
    ],
)
def test_envelope_is_refused_in_the_words_of_send(way: str, what: str) -> None:
    with pytest.raises(InvalidMessage) as expected:
        Urgent.send({}, **ENVELOPES[what])
    with pytest.raises(InvalidMessage) as raised:
        ENVELOPE_WAYS[way][0](**ENVELOPES[what])

    assert str(raised.value) == str(expected.value)
    assert not Urgent.objects.exists()


@pytest.mark.parametrize(
    "options",
    [
        {"run_after": datetime(9999, 12, 31, tzinfo=UTC)},
        {"priority": 101},
        {"queue_name": NUL},
        {"queue_name": LONG},
    ],
)
def test_envelope_of_a_task_is_refused(options: dict[str, Any]) -> None:
    with pytest.raises((InvalidTask, InvalidMessage)):
        declared.noop.using(**options).enqueue()
    assert not TaskQueue.objects.exists()


@pytest.mark.parametrize(
    ("options", "expected"),
    [
        ({"priority": 300}, (9, None)),
        ({"priority": -1}, (0, None)),
        ({"expiration": 10**15}, (0, "far")),
        ({"headers": {"eta": "10000-01-01T00:00:00"}}, (0, None)),
    ],
)
def test_envelope_of_kombu_is_bounded(options: dict[str, Any], expected: tuple[int, Any]) -> None:
    with kombu.Connection("queueapp://") as conn:
        conn.Producer().publish("x", routing_key="values", **options)

    row = BrokerQueue.objects.get()
    assert row.priority == expected[0]
    assert (row.expires is None) == (expected[1] is None)


@pytest.mark.parametrize(
    "columns",
    [
        {"expires": "10000-01-01 00:00+00"},
        {"expires": "infinity"},
        {"headers": '{"x": NaN}'},
        {"headers": '{"x": "\\ud83d"}'},
        {"headers": "not json"},
        {"priority": 99},
        {"priority": -1},
        {"recipient": "a.consumer"},
        {"body": None},
    ],
)
def test_row_by_sql_with_an_odd_envelope_ends_and_holds_up_no_other(
    queue_kit: Kit, no_consumers: None, columns: dict[str, Any]
) -> None:
    handled: list[Any] = []

    @consumer(Leased, name="odd", attempts=1)
    def odd(message: Any) -> None:
        handled.append(message)

    by_hand(**({"body": b"{}"} | columns))
    Leased.send({"n": 1})
    queue_kit.drain(Leased)

    assert {"n": 1} in handled
    assert not Leased.objects.exists()
    assert len(handled) + PoisonMessage.objects.count() == 2
