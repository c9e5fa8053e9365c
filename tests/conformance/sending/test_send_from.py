"""``send_from``: messages from rows of the same database, by one statement."""

from __future__ import annotations

import dataclasses
import json
import re
import uuid
from collections.abc import Callable
from datetime import UTC, date, datetime, timedelta
from decimal import Decimal
from typing import Any

import msgspec
import pytest
from asgiref.sync import async_to_sync
from django.contrib.auth.models import Group
from django.db import connections, transaction
from django.db.models import F, Value
from django.db.models.functions import Upper

from queueapp import InvalidMessage, consumer
from queueapp.messages import new_id
from queueapp.messages.ids import time_of
from queueapp.sql import backend_of, queue_sql
from tests.conformance.endpoint import Endpoint
from tests.in_process_worker import eventually
from tests.testapp.messages import Pong
from tests.testapp.models import Addressed, Effect, ForeignPostgres, Interop, Urgent


class Made(msgspec.Struct):
    name: str
    detail: str = ""
    pk: int = 0


@pytest.fixture
def rows(endpoint: Endpoint) -> Any:
    Effect.objects.using(endpoint.alias).bulk_create([Effect(name=f"name {n}", detail="d") for n in range(20)])
    return Effect.objects.using(endpoint.alias).order_by("pk")


def stored(endpoint: Endpoint) -> list[Any]:
    return list(endpoint.rows.order_by("seq"))


def test_a_message_for_each_row_in_their_order(endpoint: Endpoint, rows: Any) -> None:
    started = new_id()
    assert endpoint.queue.send_from(rows.values("pk", "name", "detail"), of=Made, using=endpoint.alias) == 20

    found = stored(endpoint)
    assert [json.loads(row.body) for row in found] == list(rows.values("pk", "name", "detail"))
    assert [row.id for row in found] == sorted({row.id for row in found})
    assert {row.id.version for row in found} == {7}
    assert abs(time_of(found[0].id) - time_of(started)) < timedelta(minutes=1)
    endpoint.queue.send(Made("like"), using=endpoint.alias)
    like = stored(endpoint)[-1]
    assert {row.headers for row in found} == {like.headers}
    for name in ("recipient", "priority", "deliveries", "lease_token", "expires", "correlation_id", "is_barrier"):
        assert {getattr(row, name) for row in found} == {getattr(like, name)}, name


def test_its_consumer_gets_them(endpoint: Endpoint, rows: Any) -> None:
    got: list[Made] = []

    @consumer(endpoint.queue, name="made")
    def made(message: Made) -> None:
        got.append(message)

    endpoint.queue.send_from(rows.values("name"), of=Made, using=endpoint.alias)
    endpoint.start()
    eventually(lambda: len(got) == 20)

    assert sorted(message.name for message in got) == sorted(f"name {n}" for n in range(20))


def test_it_is_part_of_the_callers_transaction_and_wakes_after_it(endpoint: Endpoint, rows: Any) -> None:
    connection = connections[endpoint.alias]
    # A SQL Server without Service Broker sends no notification.
    may_notify = backend_of(connection).notifications.may_notify(connection)
    with transaction.atomic(using=endpoint.alias):
        endpoint.queue.send_from(rows.values("name"), using=endpoint.alias)
        assert bool(connection.run_on_commit) == may_notify
        transaction.set_rollback(True, using=endpoint.alias)

    assert stored(endpoint) == []
    assert endpoint.queue.send_from(rows.filter(pk=-1).values("name"), using=endpoint.alias) == 0


def test_a_select_with_parameters(endpoint: Endpoint, rows: Any) -> None:
    sql = "SELECT name AS name, 7 AS pk FROM testapp_effect WHERE name <> %s AND name LIKE %s"
    assert endpoint.queue.send_from(sql, ["name 3", "name 1%"], of=Made, using=endpoint.alias) == 11
    assert (
        endpoint.queue.send_from("SELECT name FROM testapp_effect WHERE name LIKE 'name 1%';", using=endpoint.alias)
        == 11
    )

    assert {json.loads(row.body).get("pk") for row in stored(endpoint)} == {7, None}


def test_querysets_of_every_kind(endpoint: Endpoint, rows: Any) -> None:
    send: Callable[..., int] = endpoint.queue.send_from
    using = {"using": endpoint.alias}
    annotated = rows.annotate(loud=Upper("name"), kind=Value("100 %")).values("kind", "loud", number=F("pk"))
    assert send(annotated[:3], **using) == 3
    assert send(rows, **using) == 20
    assert send(rows.filter(name="name 1").values_list("name", "pk"), **using) == 1
    assert send(rows.values("detail").distinct().order_by(), **using) == 1

    bodies = [json.loads(row.body) for row in stored(endpoint)]
    assert bodies[0] == {"kind": "100 %", "loud": "NAME 0", "number": rows[0].pk}
    assert set(bodies[3]) == {"id", "name", "detail", "at"}
    assert bodies[-1] == {"detail": "d"}


def test_values_of_every_kind_arrive_as_send_writes_them(endpoint: Endpoint) -> None:
    if connections[endpoint.alias].vendor != "postgresql":
        pytest.skip("the types are PostgreSQL's")

    class Kinds(msgspec.Struct):
        whole: int
        text: str
        quoted: str
        yes: bool
        no: bool
        none: str | None
        number: Decimal
        real: float
        day: date
        moment: datetime
        identity: uuid.UUID
        raw: bytes
        nested: dict[str, Any]
        many: list[int]

    sql = (
        "SELECT 9007199254740993 AS whole, 'ünï' AS text, E'a\"b\\\\c\\n\\u0001' AS quoted, true AS yes, false AS no, "
        "NULL::text AS none, "
        "1.50::numeric AS number, 0.1::float8 AS real, DATE '2026-01-02' AS day, TIMESTAMPTZ '2026-01-02 "
        "03:04:05.678+00' AS moment, "
        "'01890a5d-ac96-774b-bcce-b302099a8057'::uuid AS identity, '\\x00ff00ff00'::bytea AS raw, '{\"a\": "
        "[1]}'::jsonb AS nested, "
        "ARRAY[1, 2] AS many"
    )
    endpoint.queue.send_from(sql, of=Kinds, using=endpoint.alias)

    assert msgspec.json.decode(stored(endpoint)[0].body, type=Kinds) == Kinds(
        9007199254740993,
        "ünï",
        'a"b\\c\n\x01',
        True,
        False,
        None,
        Decimal("1.50"),
        0.1,
        date(2026, 1, 2),
        datetime(2026, 1, 2, 3, 4, 5, 678000, UTC),
        uuid.UUID("01890a5d-ac96-774b-bcce-b302099a8057"),
        b"\x00\xff\x00\xff\x00",
        {"a": [1]},
        [1, 2],
    )


#: (value in SQL, the same value in Python)
KINDS = {
    "interval": ("interval '400 days 0.000007 s'", timedelta(days=400, microseconds=7)),
    "negative interval": ("interval '-1 day' + interval '5 s'", timedelta(days=-1, seconds=5)),
    "whole days": ("interval '2 days'", timedelta(days=2)),
    "zero interval": ("interval '0'", timedelta(0)),
    "hours": ("interval '30 hours 1.5 s'", timedelta(hours=30, seconds=1.5)),
    "bytes in a list": ("ARRAY['\\x6162'::bytea, NULL, '\\xff'::bytea]", [b"ab", None, b"\xff"]),
    "empty list of bytes": ("'{}'::bytea[]", []),
    "intervals in a list": ("ARRAY[interval '1 hour', interval '-1 s']", [timedelta(hours=1), timedelta(seconds=-1)]),
    "decimals in a list": ("ARRAY[1.50, 2]::numeric[]", [Decimal("1.50"), Decimal(2)]),
    "floats in a list": ("ARRAY['-0'::float8, 1.5]", [-0.0, 1.5]),
    "minus zero": ("'-0'::float8", -0.0),
    "whole float": ("3::float8", 3.0),
    "float4": ("1.5::float4", 1.5),
}


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("style", ["postgres", "iso_8601", "sql_standard"])
def test_value_is_stored_as_send_stores_it(endpoint: Endpoint, kind: str, style: str) -> None:
    connection = connections[endpoint.alias]
    if connection.vendor != "postgresql":
        pytest.skip("the types are PostgreSQL's")
    sql, value = KINDS[kind]
    with connection.cursor() as cursor:
        cursor.execute(f"SET intervalstyle = '{style}'")
    endpoint.queue.send_from(f"SELECT {sql} AS value", using=endpoint.alias)
    endpoint.queue.send({"value": value}, using=endpoint.alias)

    first, second = (bytes(row.body) for row in stored(endpoint))

    assert first.replace(b": ", b":") == second


@pytest.mark.parametrize("value", ["NaN", "Infinity", "-Infinity"])
def test_number_that_json_does_not_have_is_refused_as_by_send(endpoint: Endpoint, value: str) -> None:
    if connections[endpoint.alias].vendor != "postgresql":
        pytest.skip("the types are PostgreSQL's")
    words = []
    for send in (
        lambda: endpoint.queue.send_from(f"SELECT 1 AS a, '{value}'::float8 AS value", using=endpoint.alias),
        lambda: endpoint.queue.send_from(f"SELECT ARRAY['{value}'::float8] AS value", using=endpoint.alias),
        lambda: endpoint.queue.send([float(value)], using=endpoint.alias),
    ):
        with pytest.raises(
            InvalidMessage, match=r"cannot be a message body: it holds .* JSON has no such number"
        ) as error:
            send()
        words.append(re.findall(r"it holds (\S+?)(?: at \S+)?,", str(error.value)))
    assert words[0] == words[1] == words[2]
    assert not stored(endpoint)


def test_a_row_may_have_many_columns_with_any_names(endpoint: Endpoint) -> None:
    columns = ", ".join(f"{n} AS c{n}" for n in range(130))
    odd = '%"x' if connections[endpoint.alias].vendor == "postgresql" else "%x"
    quoted = '"' + odd.replace('"', '""') + '"'
    endpoint.queue.send_from(f"SELECT {columns}, 1 AS {quoted}", using=endpoint.alias)

    body = json.loads(stored(endpoint)[0].body)
    assert body == {**{f"c{n}": n for n in range(130)}, odd: 1}


def test_options_hold_for_all_of_them(endpoint: Endpoint, rows: Any) -> None:
    endpoint.queue.send_from(
        rows.values("name"), headers={"Tenant": "acme"}, expires_in=timedelta(hours=1), using=endpoint.alias
    )

    found = stored(endpoint)
    assert {json.loads(row.headers)["Tenant"] for row in found} == {"acme"}
    remaining = {row.expires - datetime.now(UTC) for row in found}
    assert all(timedelta(minutes=50) < item < timedelta(minutes=70) for item in remaining)


def test_levels_and_recipients(endpoint: Endpoint, rows: Any) -> None:
    using = endpoint.alias
    Urgent.send_from(rows.values("name"), priority=2, using=using)
    Addressed.send_from(rows.values("name"), of=Pong, recipient="x", unknown_recipient=True, using=using)

    assert set(Urgent.objects.using(using).values_list("priority", flat=True)) == {2}
    assert set(Addressed.objects.using(using).values_list("recipient", flat=True)) == {"x"}


def test_async_code_sends_them_as_well(endpoint: Endpoint, rows: Any) -> None:
    assert async_to_sync(endpoint.queue.asend_from)(rows.values("name"), using=endpoint.alias) == 20


def test_what_cannot_be_sent_is_refused_with_a_reason(endpoint: Endpoint, rows: Any) -> None:
    send: Callable[..., int] = endpoint.queue.send_from
    for given, options, words in (
        (rows.values("detail"), {"of": Made}, "a Made has no name in these rows"),
        (rows.values("name"), {"of": dict}, "must be a msgspec.Struct or a dataclass"),
        ([1, 2], {}, "a queryset or a SELECT"),
        (rows.values("name"), {"params": [1]}, "a queryset"),
        (rows.values("name"), {"priority": 9}, "priority = 9 is not accepted"),
        (Group.objects.using("elsewhere").values("name"), {}, "these are of 'elsewhere'"),
        ("SELECT 1 AS a, 2 AS a", {}, "several columns have one name"),
    ):
        with pytest.raises(InvalidMessage, match=words):
            send(given, using=endpoint.alias, **options)
    for queue in (Interop, ForeignPostgres):
        with pytest.raises(InvalidMessage, match="its wire format has the id"):
            queue.send_from(rows.values("name"), using=endpoint.alias)
    assert stored(endpoint) == []


class Tagged(msgspec.Struct, tag="tagged"):
    name: str


class Listed(msgspec.Struct, array_like=True):
    name: str


class Strict(msgspec.Struct, forbid_unknown_fields=True):
    name: str


class Drawn(msgspec.Struct):
    name: str
    key: uuid.UUID = msgspec.field(default_factory=uuid.uuid4)
    notes: list[str] = []


@dataclasses.dataclass
class DrawnDataclass:
    name: str
    key: uuid.UUID = dataclasses.field(default_factory=uuid.uuid4)


@pytest.mark.parametrize(
    ("cls", "columns", "words"),
    [
        (Tagged, ("name",), "a Tagged has no type in these rows"),
        (Listed, ("name",), "a Listed is an array"),
        (Strict, ("name", "detail"), "a Strict forbids the fields detail"),
        (Drawn, ("name",), "a Drawn has no key in these rows"),
        (DrawnDataclass, ("name",), "a DrawnDataclass has no key in these rows"),
    ],
)
def test_class_that_rows_could_not_be_read_as_is_refused(
    endpoint: Endpoint, rows: Any, cls: Any, columns: tuple[str, ...], words: str
) -> None:
    with pytest.raises(InvalidMessage, match=words):
        endpoint.queue.send_from(rows.values(*columns), of=cls, using=endpoint.alias)
    assert stored(endpoint) == []


def test_rows_with_what_a_class_needs_are_read_as_that_class(endpoint: Endpoint, rows: Any) -> None:
    typed = rows.filter(name="name 1").values("name", type=Value("tagged"))
    assert endpoint.queue.send_from(typed, of=Tagged, using=endpoint.alias) == 1
    assert endpoint.queue.send_from(rows.values("name")[:1], of=Strict, using=endpoint.alias) == 1

    tagged, strict = stored(endpoint)

    assert msgspec.json.decode(bytes(tagged.body), type=Tagged) == Tagged("name 1")
    assert msgspec.json.decode(bytes(strict.body), type=Strict).name == rows[0].name


def test_queues_whose_bodies_the_database_cannot_write(
    endpoint: Endpoint, rows: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    for option, value in (
        ("message_type", "msgpack"),
        ("encoding", ("zlib",)),
        ("dedupe_key", str),
        ("deferred_ack_expiration", timedelta(1)),
    ):
        with monkeypatch.context() as patch:
            patch.setattr(endpoint.queue.delivery, option, value)
            with pytest.raises(InvalidMessage, match=f"send_from is not for .*{option}"):
                endpoint.queue.send_from(rows.values("name"), using=endpoint.alias)
    assert queue_sql(endpoint.queue, connections[endpoint.alias]).maintenance.is_empty(connections[endpoint.alias])
