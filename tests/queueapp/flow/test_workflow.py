"""``then`` and ``Chain``: what follows a message is in its headers, and is sent in the transaction of its ack."""

from __future__ import annotations

import json
from collections import Counter
from datetime import timedelta
from typing import Any

import pytest
from django.db import connections, transaction

from queueapp import Chain, Context, Group, InvalidMessage, UndecodableMessage, consumer
from queueapp.failures import poison_operations
from queueapp.flow.workflow import MAX_FOLLOW_UPS, MAX_LENGTH
from queueapp.messages import CORRELATION_ID, RELATED_TO, WORKFLOW, decode_headers, encode_headers, json_headers
from queueapp.models import DelayedMessage, PoisonMessage
from queueapp.sql import queue_sql
from tests.databases import only_on_postgresql, parametrize_alias
from tests.in_process_worker import Worker, eventually, real_commits, starting_workers
from tests.protocol_trace import statements
from tests.testapp.messages import Ping
from tests.testapp.models import (
    AtMostOnce,
    Effect,
    Followed,
    FollowedTogether,
    FollowedTransactional,
    ForeignPostgres,
    Keyed,
    Leased,
    SecretTransactional,
)

pytestmark = real_commits
QUEUES = pytest.mark.parametrize(
    "queue", [Followed, FollowedTransactional, FollowedTogether], ids=lambda queue: queue.__name__
)


def pytest_generate_tests(metafunc: pytest.Metafunc) -> None:
    """One case per database."""
    parametrize_alias(metafunc, real_commits.kwargs["available_apps"])


def follow_ups(alias: str) -> list[str]:
    """The bodies of what was sent to the queue that all chains of these tests end in."""
    bodies = Leased.objects.using(alias).order_by("seq").values_list("body", flat=True)
    return [bytes(body).decode() for body in bodies]


def ack(queue: Any, alias: str, count: int = 1) -> None:
    with queue.receive(count, using=alias) as batch:
        assert len(batch) == count
        for message in batch:
            message.ack()


def workflow_of(queue: Any, alias: str) -> dict[str, Any]:
    headers: str = queue.objects.using(alias).values_list("headers", flat=True).get()
    found: dict[str, Any] = json.loads(decode_headers(headers).get(WORKFLOW, "{}"))
    return found


@QUEUES
def test_the_follow_up_is_sent_in_the_transaction_of_the_ack(alias: str, queue: Any) -> None:
    identity = queue.send({"n": 1}, then=Leased.prepare("after", using=alias), using=alias)
    assert follow_ups(alias) == []

    with transaction.atomic(using=alias):
        ack(queue, alias)
        assert follow_ups(alias) == ['"after"']
        transaction.set_rollback(True, using=alias)
    assert follow_ups(alias) == []
    queue.objects.using(alias).update(lease_token=None, lease_owner=None, lease_expires=None)

    ack(queue, alias)
    assert follow_ups(alias) == ['"after"']
    headers = decode_headers(Leased.objects.using(alias).values_list("headers", flat=True).get())
    assert (headers[RELATED_TO], headers[CORRELATION_ID]) == (str(identity), str(identity))
    assert WORKFLOW not in headers


def test_each_message_of_a_chain_carries_what_remains(alias: str) -> None:
    chain = Chain(
        [
            Followed.prepare("1", using=alias),
            FollowedTransactional.prepare(b"\xff", using=alias, then=Followed.prepare("3", using=alias)),
            Leased.prepare("4", using=alias),
        ]
    )
    ids = chain.send()
    again = chain.send()
    assert len({*ids}) == 4
    assert {*ids}.isdisjoint(again)  # a chain is sent as often as is wanted
    Followed.objects.using(alias).order_by("seq").reverse()[:1].get().delete(using=alias)

    labels = [step["queue"] for step in workflow_of(Followed, alias)["then"]]
    assert labels == ["testapp.FollowedTransactional", "testapp.Followed", "testapp.Leased"]
    ack(Followed, alias)
    second = FollowedTransactional.objects.using(alias).get()
    assert (second.id, bytes(second.body)) == (ids[1], b"\xff")
    assert len(workflow_of(FollowedTransactional, alias)["then"]) == 2
    ack(FollowedTransactional, alias)
    ack(Followed, alias)

    last = Leased.objects.using(alias).get()
    assert last.id == ids[3]
    headers = decode_headers(last.headers)
    assert (headers[RELATED_TO], headers[CORRELATION_ID]) == (str(ids[2]), str(ids[0]))


@QUEUES
def test_it_survives_delays_retries_and_poison_and_follows_success_only(alias: str, queue: Any) -> None:
    def send(name: str, *, delay: timedelta | None = None, **ping: Any) -> None:
        queue.send(Ping(name, **ping), then=Leased.prepare(name, using=alias), using=alias, delay=delay)

    send("plain")
    send("again", fail=1)
    send("delayed", delay=timedelta(milliseconds=1))
    send("fails", fail=9)
    worker = Worker(queue, alias, dispatcher=True)
    worker.start()
    try:
        poison = PoisonMessage.objects.using(alias)
        eventually(lambda: len(follow_ups(alias)) == 3 and poison.exists())
        assert set(follow_ups(alias)) == {'"plain"', '"again"', '"delayed"'}

        poison_operations.edit_and_requeue(poison.get().number, body=b'{"name": "mended"}', using=alias)
        eventually(lambda: '"fails"' in follow_ups(alias))
    finally:
        worker.stop()

    assert len(follow_ups(alias)) == 4
    assert Counter(Effect.objects.using(alias).values_list("name", flat=True)) == Counter(
        ["plain", "again", "delayed", "mended"]
    )


def test_what_expires_or_is_dropped_is_followed_by_nothing(alias: str) -> None:
    for _ in range(2):
        Followed.send({"n": 1}, then=Leased.prepare("after", using=alias), using=alias)
    with Followed.receive(2, using=alias) as batch:
        batch[0].expire()
        batch[1].cancel()
    assert follow_ups(alias) == []
    assert "then" in workflow_of(Followed, alias)


def test_acks_by_seq_and_of_a_member_send_it_as_well(alias: str) -> None:
    Followed.send({"n": 1}, then=Leased.prepare("by seq", using=alias), using=alias)
    with Followed.receive(using=alias) as batch:
        token = Followed.objects.using(alias).values_list("lease_token", flat=True).get()
        assert Followed.ack([batch[0].seq, 10**9], client=token, using=alias) == 1
    assert follow_ups(alias) == ['"by seq"']

    with Group(on_complete=Leased.prepare("whole", using=alias), using=alias) as group:
        group.send(FollowedTogether, Ping(), then=Leased.prepare("member", using=alias))
    ack(FollowedTogether, alias)
    assert follow_ups(alias) == ['"by seq"', '"member"', '"whole"']


def test_acks_beside_a_slow_handler_send_it_as_well(alias: str) -> None:
    for name in ("first", "second"):
        Followed.send(Ping(), then=Leased.prepare(name, using=alias), using=alias)
    connection = connections[alias]
    with Followed.receive(2, using=alias) as batch:
        token = Followed.objects.using(alias).values_list("lease_token", flat=True)[0]
        seqs = [message.seq for message in batch]
        assert queue_sql(Followed, connection).acks.try_ack(connection, seqs, token, 1000) == seqs
        assert queue_sql(Followed, connection).acks.try_ack(connection, seqs, token, 1000) == []
    assert follow_ups(alias) == ['"first"', '"second"']


def test_a_completion_message_may_be_the_first_of_a_chain(alias: str) -> None:
    first = Followed.prepare("whole", then=Leased.prepare("after", using=alias), using=alias)
    with Group(on_complete=first, using=alias):
        pass
    ack(Followed, alias)
    assert follow_ups(alias) == ['"after"']


STEP = {"queue": "testapp.Leased", "id": "0197c0ff-eec0-7000-8000-000000000000", "headers": {}}
HOSTILE = {
    "no JSON": "{",
    "no object": "[]",
    "no list": '{"then": 7}',
    "unknown field": '{"then": [], "run": "os.system"}',
    "unknown field of a message": json.dumps({"then": [STEP | {"module": "os"}]}),
    "no id": json.dumps({"then": [STEP | {"id": "7"}]}),
    "headers of numbers": json.dumps({"then": [STEP | {"headers": {"a": 1}}]}),
    "NUL in a header": json.dumps({"then": [STEP | {"headers": {"a": "\0"}}]}),
    "NUL in a name": json.dumps({"then": [STEP | {"queue": "a\0"}]}),
    "half of a pair": json.dumps({"then": [STEP | {"recipient": "\ud800"}]}),
    "long recipient": json.dumps({"then": [STEP | {"recipient": "r" * 201}]}),
    "large priority": json.dumps({"then": [STEP | {"priority": 2**63}]}),
    "no base64": json.dumps({"then": [STEP | {"data": "?"}]}),
    "too many": json.dumps({"then": [STEP] * (MAX_FOLLOW_UPS + 1)}),
    "too large": json.dumps({"then": [STEP | {"text": "x" * MAX_LENGTH}]}),
    "too deep": "[" * 10_000,
}


@QUEUES
def test_a_header_that_says_nothing_makes_its_message_poison_and_nothing_is_lost(alias: str, queue: Any) -> None:
    plain = json_headers(Ping)
    written = {
        name: encode_headers(decode_headers(plain) | {WORKFLOW: text, "case": name}) for name, text in HOSTILE.items()
    }
    for headers in written.values():
        queue.send(Ping(), using=alias)
        newest = queue.objects.using(alias).order_by("-seq").values_list("seq", flat=True)[0]
        queue.objects.using(alias).filter(seq=newest).update(headers=headers)
    queue.send(Ping("good"), then=Leased.prepare("after", using=alias), using=alias)
    worker = Worker(queue, alias)
    worker.start()
    try:
        eventually(lambda: not queue.objects.using(alias).exists())
    finally:
        worker.stop()

    poison = {decode_headers(row.headers)["case"]: row for row in PoisonMessage.objects.using(alias)}
    assert {name: row.headers for name, row in poison.items()} == written
    assert all("'workflow'" in row.reason + row.exception_message for row in poison.values())
    assert list(Effect.objects.using(alias).values_list("name", flat=True)) == ["good"]
    assert follow_ups(alias) == ['"after"']


def test_a_client_cannot_ack_what_it_cannot_follow(alias: str) -> None:
    Followed.send(Ping(), using=alias)
    Followed.objects.using(alias).update(headers=encode_headers({WORKFLOW: "?"}))
    with Followed.receive(using=alias) as batch, pytest.raises(UndecodableMessage, match="workflow"):
        batch[0].ack()
    assert Followed.objects.using(alias).exists()


def test_a_follow_up_for_an_unknown_queue_goes_through_the_delayed_store(alias: str) -> None:
    Followed.send(Ping(), using=alias)
    Followed.objects.using(alias).update(
        headers=encode_headers({WORKFLOW: json.dumps({"then": [STEP | {"queue": "other.Project"}]})})
    )
    ack(Followed, alias)
    assert DelayedMessage.objects.using(alias).get().destination == "other.Project"


def test_an_encrypted_follow_up_is_encrypted_where_it_waits(alias: str, settings: Any) -> None:
    settings.QUEUEAPP = {"KEYRING": lambda: {"only": bytes(range(32))}}
    Followed.send("open", then=SecretTransactional.prepare({"pin": "4711"}, using=alias), using=alias)
    assert "4711" not in str(workflow_of(Followed, alias))

    ack(Followed, alias)

    with SecretTransactional.receive(using=alias) as batch:
        assert batch[0].decode(dict) == {"pin": "4711"}


def test_refusals(alias: str, monkeypatch: pytest.MonkeyPatch) -> None:
    after = Leased.prepare("after", using=alias)

    def refused(match: str, queue: Any, then: Any) -> None:
        with pytest.raises(InvalidMessage, match=match):
            queue.send("first", then=then, using=alias)

    refused(r"workflow = True", Leased, after)
    refused(r"workflow = True", AtMostOnce, after)
    refused(r"workflow = True", Followed, Chain([after, after]))
    refused("Queue.prepare", Followed, "after")
    refused("Queue.prepare", Followed, [after])
    refused("lies in", Followed, Leased.prepare("after", using="elsewhere"))
    refused("another system", Followed, ForeignPostgres.prepare("after", using=alias))
    refused("at most 100", Followed, Chain([*[Followed.prepare("n", using=alias)] * 100, after]))
    refused("65,536", Followed, Leased.prepare("x" * 70_000, using=alias))
    monkeypatch.setattr(SecretTransactional.delivery, "workflow", True)
    refused("encrypts", SecretTransactional, after)
    with pytest.raises(InvalidMessage, match="dedupe keys"):
        Keyed.prepare("after", then=after, using=alias)
    for messages in ([], ["after"], [Chain([after])]):
        with pytest.raises(InvalidMessage, match="prepared messages"):
            Chain(messages)  # type: ignore[arg-type]
    assert not any(queue.objects.using(alias).exists() for queue in (Leased, AtMostOnce, Followed))


def test_a_message_that_is_sent_with_the_headers_of_another_has_none_of_its_follow_ups(alias: str) -> None:
    Followed.send({"n": 1}, then=Leased.prepare("after", using=alias), using=alias)
    with Followed.receive(using=alias) as batch:
        FollowedTransactional.send({"n": 2}, headers=batch[0].headers, using=alias)
        batch[0].ack()

    ack(FollowedTransactional, alias)

    assert follow_ups(alias) == ['"after"']


def test_a_handler_that_passes_on_its_headers_passes_on_no_follow_up(alias: str, no_consumers: None) -> None:
    @consumer(Followed, name="passes_on")
    def passes_on(message: dict, context: Context) -> None:
        FollowedTransactional.send(message, headers=context.headers, using=alias)

    Followed.send({"n": 1}, then=Leased.prepare("after", using=alias), using=alias)
    with starting_workers() as start:
        start(Followed, alias=alias)
        eventually(lambda: follow_ups(alias))

    assert workflow_of(FollowedTransactional, alias) == {}


@only_on_postgresql
def test_an_ack_without_a_follow_up_is_one_statement(alias: str, settings: Any) -> None:
    settings.QUEUEAPP = {"NOTIFY": False}
    for then in (None, Leased.prepare("after", using=alias)):
        Followed.send("first", using=alias, then=then)
        with Followed.receive(using=alias) as batch:
            connections[alias].ensure_connection()
            with statements() as said:
                batch[0].ack()
        kinds = [text.split()[0] for text in said]
        assert (kinds == ["DELETE"]) is (then is None), said
