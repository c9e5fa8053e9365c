"""Each reader of a stored body, on queues of each encoding: all of them read what was sent."""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator
from datetime import UTC, datetime, timedelta
from pathlib import Path
from typing import Any

import pytest
from django.db import connections, transaction

import queueapp
from queueapp import InvalidOption, consumer, messages, publish, publish_many, set_consumer
from queueapp.contrib.tasks.serialization import stored_arguments
from queueapp.delayed import dispatch_due
from queueapp.encryption import keyring
from queueapp.errors import InvalidMessage
from queueapp.failures import poison_operations
from queueapp.failures.poison_operations import edit_and_requeue
from queueapp.journal.replay_reader import Entry
from queueapp.models import PoisonMessage
from queueapp.receiving.request_reply import Reply
from queueapp.sending import dedupe
from queueapp.sql.journal import JournalRecord
from queueapp.testing import Kit
from tests.in_process_worker import real_commits
from tests.testapp.messages import Nop, Pong
from tests.testapp.models import Leased, SecretOnce, SecretTransactional, Smaller
from tests.testapp.topics import Packed

pytestmark = real_commits
#: As a task's arguments are, so that the reader of those is in the table, too.
BODY = {"args": [1, "é"], "kwargs": {"n": 2}, "n": 1}
QUEUES = [Leased, Smaller, Packed, SecretOnce, SecretTransactional]


@pytest.fixture(autouse=True)
def keys(settings: Any, no_consumers: None) -> Iterator[None]:
    settings.QUEUEAPP = {"KEYRING": lambda: {"only": bytes(range(32))}, "RETRY_DELAY": 0}
    yield
    keyring.forget()


def by_handler(queue: Any, row: Any, kit: Kit, monkeypatch: pytest.MonkeyPatch) -> Any:
    handled: list[Any] = []

    @consumer(queue, name="only")
    def only(message: dict) -> None:
        handled.append(message)

    kit.drain(queue)
    return handled[0]


def by_receive(queue: Any, row: Any, kit: Kit, monkeypatch: pytest.MonkeyPatch) -> Any:
    with queue.receive() as batch:
        return next(iter(batch)).body


def by_reply(queue: Any, row: Any, kit: Kit, monkeypatch: pytest.MonkeyPatch) -> Any:
    return Reply(queue, "default", row, messages.decode_headers(row.headers)).body


def by_kit(queue: Any, row: Any, kit: Kit, monkeypatch: pytest.MonkeyPatch) -> Any:
    return kit.sent(queue)[0].body


def by_dedupe_key(queue: Any, row: Any, kit: Kit, monkeypatch: pytest.MonkeyPatch) -> Any:
    read: list[Any] = []
    monkeypatch.setitem(vars(queue.delivery), "dedupe_key", read.append)
    dedupe.admit_stored(queue, connections["default"], [dedupe.Stored(row.id, row.headers, bytes(row.body))])
    return read[0]


def by_journal(queue: Any, row: Any, kit: Kit, monkeypatch: pytest.MonkeyPatch) -> Any:
    record = JournalRecord(
        1, 1, "t", row.id.bytes, row.headers, bytes(row.body), datetime.now(UTC), None, "", 0, None, None, False
    )
    return Entry(record, "default").decode()


def by_requeue(queue: Any, row: Any, kit: Kit, monkeypatch: pytest.MonkeyPatch) -> Any:
    to_poison(queue, row)
    assert poison_operations.requeue(PoisonMessage.objects.all()) == 1
    return by_handler(queue, row, kit, monkeypatch)


def by_edit(queue: Any, row: Any, kit: Kit, monkeypatch: pytest.MonkeyPatch) -> Any:
    edit_and_requeue(to_poison(queue, row).number)
    return by_handler(queue, row, kit, monkeypatch)


def by_task_result(queue: Any, row: Any, kit: Kit, monkeypatch: pytest.MonkeyPatch) -> Any:
    args, kwargs = stored_arguments(bytes(row.body), row.headers, row.id, "default")
    return {"args": args, "kwargs": kwargs, "n": 1}


def to_poison(queue: Any, row: Any) -> PoisonMessage:
    with transaction.atomic():
        row.delete()
        return PoisonMessage.objects.create(
            message_id=row.id, queue=queue._meta.label, headers=row.headers, body=row.body, reason="x"
        )


READERS: list[Callable[..., Any]] = [
    by_handler, by_receive, by_reply, by_kit, by_dedupe_key, by_journal, by_requeue, by_edit, by_task_result,
]  # fmt: skip


@pytest.mark.parametrize("queue", QUEUES)
@pytest.mark.parametrize("reader", READERS)
def test_reader_reads_what_was_sent(
    queue_kit: Kit, monkeypatch: pytest.MonkeyPatch, reader: Callable[..., Any], queue: Any
) -> None:
    queue.send(BODY)
    assert reader(queue, queue.objects.get(), queue_kit, monkeypatch) == BODY


@pytest.mark.parametrize("reader", [column for column in READERS if column not in (by_journal, by_task_result)])
def test_message_that_names_no_content_type_is_read_as_its_queue_says(
    queue_kit: Kit, monkeypatch: pytest.MonkeyPatch, reader: Callable[..., Any]
) -> None:
    Packed.send(BODY)
    Packed.objects.update(headers="{}")
    assert reader(Packed, Packed.objects.get(), queue_kit, monkeypatch) == BODY


#: way -> sends a body with the headers of another message
PASSING_ON: dict[str, Callable[[Any, Any, Any], Any]] = {
    "send": lambda queue, body, headers: queue.send(body, headers=headers),
    "send_many": lambda queue, body, headers: queue.send_many([body], headers=headers),
    "prepare": lambda queue, body, headers: queue.prepare(body, headers=headers).send(),
    "publish": lambda queue, body, headers: publish(queue._meta.object_name, body, headers=headers),
    "publish_many": lambda queue, body, headers: publish_many(queue._meta.object_name, [body], headers=headers),
    "delayed": lambda queue, body, headers: (
        queue.send(body, headers=headers, delay=timedelta(0)) and dispatch_due("default", 10)
    ),
}


@pytest.mark.parametrize("way", PASSING_ON)
@pytest.mark.parametrize("to", QUEUES)
@pytest.mark.parametrize("queue", QUEUES)
def test_body_that_is_sent_with_the_headers_of_another_message_is_read(
    queue_kit: Kit, monkeypatch: pytest.MonkeyPatch, queue: Any, to: Any, way: str
) -> None:
    queue.send({"n": 7})
    with queue.receive() as batch:
        headers = {"mine": "x"} | batch[0].headers
        batch[0].ack()

    PASSING_ON[way](to, BODY, headers)

    row = to.objects.get()
    assert messages.decode_headers(row.headers)["mine"] == "x"
    assert (b"args" in bytes(row.body)) is (to in (Leased, Packed)), "what is encoded is not in the clear"
    assert by_handler(to, row, queue_kit, monkeypatch) == BODY


def test_typed_body_that_is_sent_with_the_headers_of_another_message_is_of_its_own_type(queue_kit: Kit) -> None:
    Leased.send(Pong("x"), headers={"mine": "x"})
    with Leased.receive() as batch:
        headers = {"base-types": "Acme.Event", "type-version": "2", "NServiceBus.EnclosedMessageTypes": "Acme.Old"}
        headers |= batch[0].headers
        batch[0].ack()
    handled: list[Any] = []

    @consumer(Leased, name="nop", attempts=1)
    def nop(message: Nop) -> None:
        handled.append(message)

    Leased.send(Nop(1, "y"), headers=headers)
    Leased.send_many([Nop(2, "y")], headers=headers)
    for row in Leased.objects.all():
        kind = messages.read_kind(row.headers)
        assert (kind.names, kind.version) == ((messages.type_name(Nop),), 1)
    queue_kit.drain(Leased)

    assert handled == [Nop(1, "y"), Nop(2, "y")]


@pytest.mark.parametrize(
    ("given", "stored"),
    [
        ("application/vnd.acme+json", "application/vnd.acme+json"),
        ("application/json; charset=utf-8", "application/json; charset=utf-8"),
        ("application/msgpack", messages.JSON),
        ("application/json+zlib", messages.JSON),
        (messages.BYTES, messages.JSON),
        ("text/plain", messages.JSON),
        ("", messages.JSON),
    ],
)
def test_body_is_read_whatever_content_type_its_sender_gives(given: str, stored: str) -> None:
    Leased.send(BODY, headers={"content-type": given})
    row = Leased.objects.get()
    assert messages.decode_headers(row.headers)["content-type"] == stored
    assert messages.read_stored(bytes(row.body), row.headers, row.id, "default") == BODY


@pytest.mark.parametrize("to", [SecretOnce, SecretTransactional, Smaller])
def test_bytes_that_are_not_encrypted_as_their_headers_say_are_refused(to: Any) -> None:
    SecretOnce.send(b"for ada only")
    row = SecretOnce.objects.get()
    row.delete()
    headers = messages.decode_headers(row.headers)

    for send in (lambda: to.send(b"for ada only", headers=headers), lambda: to.send_many([b"x"], headers=headers)):
        with pytest.raises(InvalidMessage, match=r"'content-type' = .*aes256gcm.* does not open"):
            send()
    assert not to.objects.exists()

    to.send(bytes(row.body), headers=headers, message_id=row.id)  # the message itself
    again = to.objects.get()
    assert messages.read_stored(bytes(again.body), again.headers, again.id, "default") == b"for ada only"


@pytest.mark.parametrize("queue", [Smaller, SecretTransactional, Packed])
def test_set_consumer_whose_database_cannot_read_the_bodies_is_refused(queue: Any) -> None:
    with pytest.raises(InvalidOption, match=r"@set_consumer"):
        set_consumer(queue)(lambda messages: None)


@pytest.mark.parametrize("queue", [Leased, Packed, SecretTransactional])
def test_edited_body_that_no_reader_could_read_is_refused(queue: Any) -> None:
    queue.send(BODY)
    number = to_poison(queue, queue.objects.get()).number
    with pytest.raises(InvalidMessage, match="does not suit its content type"):
        edit_and_requeue(number, body=b"\xc1 no body")
    assert PoisonMessage.objects.get().status == PoisonMessage.Status.UNRESOLVED


#: Modules outside of ``messages`` that decode bodies -> why not by ``read_stored``.
DECODING = {
    "contrib/tasks/serialization.py": "arguments may hold half a surrogate pair",
    "expressions/enqueue_rules.py": "before a body is encoded, and without keys",
    "expressions/paths.py": "of bodies that need no key; refused for others",
    "failures/poison_operations.py": "a body that is not encoded yet",
    "admin/body_reader.py": "shows the bytes",
    "admin/message_results.py": "shows the bytes of a result",
    "sending/preparation.py": "bytes that their sender has encrypted, whether they open",
    "schedules/stored.py": "the text of a schedule, which is not encoded before it is sent",
    "contrib/spark/readers.py": "typed rows of queues that do not encrypt",
    "workers/receiving/handlers.py": "the reader of a kind of messages, looked up once",
}


def test_each_module_that_decodes_bodies_is_in_the_table() -> None:
    decoders = re.compile(
        r"\b(decode_body|body_decoder|read_as|reader_of|decompressed|opened)\(|messages\.(reader_of|decode_body)"
    )
    package = Path(queueapp.__file__).parent
    found = {
        str(path.relative_to(root))
        for root, top in ((package, package), (package.parent, package.parent / "workers"))
        for path in top.rglob("*.py")
        if "broker_migration" not in path.parts
        and path.relative_to(root).parts[0] != "messages"
        and decoders.search(path.read_text())
    }
    assert found == set(DECODING)
