"""Bodies that are compressed or encrypted, on every way that a message goes: what lies in the tables, who can read it,
and what becomes of messages that cannot be decrypted any more."""

from __future__ import annotations

import base64
import os
import threading
import time
import zlib
from collections.abc import Iterator
from datetime import timedelta
from typing import Any

import msgspec
import pytest
from django.db import connection, transaction

from queueapp import (
    InvalidMessage,
    InvalidOption,
    RetryLater,
    UndecodableMessage,
    consumer,
    messages,
    publish,
    publish_many,
)
from queueapp.encryption import erase_subject, keyring, rewrap_subject_keys
from queueapp.errors import ErasedMessage
from queueapp.failures import poison_operations
from queueapp.flow.filters import SubscriberFilter
from queueapp.messages import body_filters
from queueapp.models import DelayedMessage, PoisonMessage, SubjectKey
from tests.clock import Clock
from tests.in_process_worker import eventually, real_commits
from tests.testapp.models import Leased, Secret, SecretExpiring, SecretOnce, SecretTransactional, Smaller

pytestmark = real_commits


class Parcel(msgspec.Struct):
    number: int
    content: str = "a very secret thing, a very secret thing, a very secret thing"


PLAIN = b"secret thing"
KEYS = {"new": bytes(range(32)), "old": bytes(range(32, 64))}


@pytest.fixture(autouse=True)
def keys(settings: Any, monkeypatch: pytest.MonkeyPatch, no_consumers: None) -> Iterator[dict[str, bytes]]:
    """The keyring of the test, and no consumers but its own."""
    ring = dict(KEYS)
    settings.QUEUEAPP = {"PEEK_DELAY": 0.1, "RETRY_DELAY": 0, "ATTEMPTS": 2, "KEYRING": lambda: ring}
    monkeypatch.setattr(keyring, "KEPT", 0.0)
    monkeypatch.setattr(keyring, "PATIENCE", 0.0)
    yield ring
    keyring.forget()


def noted(queue: Any, calls: list[Any], name: str = "only", cls: Any = Parcel, **options: Any) -> None:
    def note(message: Any) -> None:
        calls.append(message)

    note.__annotations__["message"] = cls
    consumer(queue, name=name, **options)(note)


QUEUES = [
    (Smaller, "application/json+zlib"),
    (Secret, "application/json+zstd+aes256gcm"),
    (SecretTransactional, "application/msgpack+aes256gcm"),
    (SecretOnce, "application/json+aes256gcm"),
]


@pytest.mark.parametrize(("queue", "content_type"), QUEUES)
def test_what_every_way_of_sending_stores_is_encoded_and_arrives_as_it_was(
    queue: Any, content_type: str, work: Any
) -> None:
    calls: list[Any] = []
    noted(queue, calls)
    queue.send(Parcel(1), headers={"mine": "x"})
    queue.send_many([Parcel(2), Parcel(3)])
    publish(queue.__name__, Parcel(4))
    publish_many(queue.__name__, [Parcel(5)])
    queue.send(Parcel(6), delay=timedelta(milliseconds=1))
    queue.send(Parcel(7), isolated=True)
    kept = [*queue.objects.all(), *DelayedMessage.objects.all()]
    assert len(kept) == 7
    for row in kept:
        assert messages.read_head(row.headers)[1] == content_type
        assert PLAIN not in bytes(row.body)
    bodies = {bytes(row.body) for row in kept}
    assert len(bodies) == 7
    work(queue, dispatcher=True)

    eventually(lambda: len(calls) == 7)

    assert sorted(call.number for call in calls) == [1, 2, 3, 4, 5, 6, 7]
    assert {call.content for call in calls} == {Parcel(0).content}


@pytest.mark.parametrize(
    ("queue", "stored"),
    [(Smaller, "application/json+zlib"), (SecretOnce, "application/json+aes256gcm"), (Leased, "application/json+zlib")],
)
def test_what_its_sender_has_compressed_is_not_compressed_twice_and_is_encrypted_all_the_same(
    queue: Any, stored: str, work: Any
) -> None:
    calls: list[Any] = []
    noted(queue, calls, cls=dict)
    body = zlib.compress(b'{"secret thing": 1}')
    queue.send(body, headers={"content-type": "application/json+zlib"})
    row = queue.objects.get()
    assert messages.read_head(row.headers)[1] == stored
    assert (bytes(row.body) == body) is stored.endswith("zlib")
    work(queue)

    eventually(lambda: calls == [{"secret thing": 1}])


def test_what_comes_encrypted_stays_as_it_is() -> None:
    headers = messages.encode_headers({"content-type": "application/json+aes256gcm", "encryption-key": "new"})
    for encoding in (("encrypted",), ("zlib",)):
        stored, seal = body_filters.sealing(encoding, headers, "default")
        assert (stored, seal(b"as it came", messages.new_id())) == (headers, b"as it came")


@pytest.mark.parametrize(("queue", "content_type"), QUEUES)
def test_bytes_and_nothing_arrive_as_they_were(queue: Any, content_type: str, work: Any) -> None:
    calls: list[Any] = []
    noted(queue, calls, cls=Any)
    for body in (b"\x00\xff", b"", {"a": 1}, None):
        queue.send(body)
    assert queue.objects.filter(body__isnull=True).count() == 1
    work(queue, concurrency=1)

    eventually(lambda: len(calls) == 4)

    assert calls == [b"\x00\xff", b"", {"a": 1}, None]


def test_what_others_insert_in_the_clear_is_read_and_what_is_encoded_is_read_anywhere(work: Any) -> None:
    calls: list[Any] = []
    noted(Secret, calls)
    noted(Leased, calls)
    headers = {"type": messages.type_name(Parcel), "content-type": messages.JSON}
    Secret.objects.bulk_create(
        [Secret(id=messages.new_id(), headers=messages.encode_headers(headers), body=b'{"number":1}')]
    )
    packed = zlib.compress(b'{"number":2}')
    Leased.send(packed, headers=headers | {"content-type": "application/json+zlib"})
    work(Secret)
    work(Leased)

    eventually(lambda: sorted(call.number for call in calls) == [1, 2])


@pytest.mark.parametrize("queue", [Secret, SecretTransactional, SecretOnce])
def test_a_poison_message_stays_encrypted_and_is_requeued_and_edited(queue: Any, work: Any) -> None:
    calls: list[Any] = []

    @consumer(queue, name="only")
    def fail_first(message: Parcel) -> None:
        calls.append(message)
        if message.content == Parcel(0).content and len(calls) <= 4:
            raise ValueError("no")

    queue.send(Parcel(1))
    queue.send(Parcel(2))
    work(queue)
    first, second = eventually(
        lambda: found if len(found := list(PoisonMessage.objects.order_by("number"))) == 2 else []
    )
    for row in (first, second):
        assert PLAIN not in bytes(row.body)
        assert b"+aes256gcm" in row.headers.encode()
    eventually(lambda: len(calls) == (2 if queue is SecretOnce else 4))
    while len(calls) < 4:
        calls.append(None)

    assert poison_operations.requeue(poison_operations.find().filter(number=first.number)) == 1
    plain = messages.encode(Parcel(9, "edited"), None, queue.delivery.message_type)[1]
    new = poison_operations.edit_and_requeue(second.number, body=plain)

    eventually(lambda: Parcel(9, "edited") in calls[4:])
    eventually(lambda: [call.number for call in calls[4:]].count(9) == 1 and len(calls) >= 6)
    eventually(lambda: not queue.objects.exists())
    assert new != second.message_id


def test_an_edit_of_headers_alone_encrypts_the_body_for_the_copy_and_keeps_it_encrypted(work: Any) -> None:
    calls: list[Any] = []
    Secret.send(Parcel(1), recipient="only", unknown_recipient=True)
    row = Secret.objects.get()
    kept = PoisonMessage.objects.create(
        message_id=row.id, queue=Secret._meta.label, recipient="only", headers=row.headers, body=row.body, reason="x"
    )
    Secret.objects.all().delete()
    headers = messages.decode_headers(row.headers)
    for change in ({"content-type": messages.JSON}, {"encryption-key": "old"}):
        with pytest.raises(InvalidMessage, match="locked"):
            poison_operations.edit_and_requeue(kept.number, headers=headers | change)

    poison_operations.edit_and_requeue(kept.number, headers=headers | {"more": "x"})

    copy = Secret.objects.get()
    assert bytes(copy.body) != bytes(row.body)
    assert PLAIN not in bytes(copy.body)
    noted(Secret, calls)
    work(Secret)
    eventually(lambda: calls == [Parcel(1)])


def test_a_body_in_another_message_does_not_open(work: Any) -> None:
    calls: list[Any] = []
    noted(SecretOnce, calls)
    SecretOnce.send(Parcel(1))
    row = SecretOnce.objects.get()
    headers = messages.decode_headers(row.headers)
    SecretOnce.objects.all().delete()
    changed = bytes(row.body)[:-1] + bytes([bytes(row.body)[-1] ^ 1])
    for identity, reported, body in (
        (messages.new_id(), headers, row.body),  # moved
        (row.id, headers, changed),
        (row.id, headers, b"short"),
        (row.id, headers | {"encryption-key": "old"}, row.body),
        (row.id, headers | {"content-type": "application/msgpack+aes256gcm"}, row.body),
        (row.id, {k: v for k, v in headers.items() if k != "encryption-key"}, row.body),
        (row.id, headers | {"encryption-key": "subject/unknown"}, row.body),
    ):
        SecretOnce.objects.bulk_create([SecretOnce(id=identity, headers=messages.encode_headers(reported), body=body)])
    work(SecretOnce)

    eventually(lambda: PoisonMessage.objects.count() == 7)

    assert calls == []
    assert all(item.reason.startswith("undecodable: ") for item in PoisonMessage.objects.all())


def test_what_is_given_up_is_encrypted_for_its_new_id_where_it_is_published(work: Any) -> None:
    calls: list[Any] = []
    SecretExpiring.send(Parcel(1))
    with SecretExpiring.receive() as batch:
        for message in batch:
            assert message.decode(Parcel) == Parcel(1)
            message.cancel()
    row = SecretOnce.objects.get()
    assert PLAIN not in bytes(row.body)
    noted(SecretOnce, calls)
    work(SecretOnce)

    eventually(lambda: calls == [Parcel(1)])


# -- keys ------------------------------------------------------------------------------------------------------------


def test_a_rotation_encrypts_with_the_new_key_and_still_reads_the_old_one(keys: dict[str, bytes], work: Any) -> None:
    calls: list[Any] = []
    del keys["new"]
    SecretOnce.send(Parcel(1))
    keys.clear()
    keys.update(KEYS)
    SecretOnce.send(Parcel(2))
    used = [
        messages.decode_headers(text)["encryption-key"] for text in SecretOnce.objects.values_list("headers", flat=True)
    ]
    assert sorted(used) == ["new", "old"]
    noted(SecretOnce, calls)
    work(SecretOnce)

    eventually(lambda: sorted(call.number for call in calls) == [1, 2])


def test_a_key_that_is_missing_fails_attempts_and_is_found_after_a_requeue(keys: dict[str, bytes], work: Any) -> None:
    calls: list[Any] = []
    noted(SecretTransactional, calls)
    SecretTransactional.send(Parcel(1))
    del keys["new"]
    work(SecretTransactional)

    kept = eventually(PoisonMessage.objects.first)
    assert kept.attempts == 2
    assert kept.exception_type == "queueapp.errors.KeyMissing"
    assert "'new' is not in QUEUEAPP.KEYRING" in kept.reason
    keys["new"] = KEYS["new"]
    assert poison_operations.requeue(poison_operations.find()) == 1

    eventually(lambda: calls == [Parcel(1)])


def test_without_a_key_nothing_is_sent(keys: dict[str, bytes]) -> None:
    keys.clear()
    with pytest.raises(LookupError, match="no key to encrypt with"):
        SecretOnce.send(Parcel(1))
    keys["short"] = b"x"
    with pytest.raises(InvalidOption, match="32 bytes") as raised:
        SecretOnce.send(Parcel(1))
    assert "b'x'" not in str(raised.value)
    assert not SecretOnce.objects.exists()


def test_keys_of_the_environment(monkeypatch: pytest.MonkeyPatch) -> None:
    text = base64.b64encode(KEYS["new"]).decode()
    monkeypatch.setenv(keyring.VARIABLE, f"2026-11:{text}, 2026-05:{text}")
    assert list(keyring.from_environment()) == ["2026-11", "2026-05"]
    monkeypatch.setenv(keyring.VARIABLE, "2026-11:not base64")
    with pytest.raises(InvalidOption, match="2026-11") as raised:
        keyring.from_environment()
    assert "not base64" not in str(raised.value)


# -- subjects --------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("queue", [Secret, SecretTransactional, SecretOnce])
def test_what_was_sent_for_an_erased_subject_is_discarded_and_never_retried(queue: Any, work: Any) -> None:
    calls: list[Any] = []
    asked: list[Any] = []

    def retry(failure: Any) -> RetryLater:
        asked.append(failure)
        return RetryLater(timedelta(0))

    noted(queue, calls, policy=retry)
    ada, bob = {"encrypt-for": "ada"}, {"encrypt-for": "bob"}
    queue.send(Parcel(1), headers=ada)
    queue.send_many([Parcel(2), Parcel(3)], headers=ada)
    queue.send(Parcel(4), headers=bob)
    queue.send(Parcel(5))
    queue.send(Parcel(6), headers=ada, delay=timedelta(milliseconds=1))
    row = queue.objects.first()
    assert '"ada"' not in row.headers
    assert "encrypt-for" not in row.headers
    PoisonMessage.objects.create(
        message_id=row.id, queue=queue._meta.label, recipient=getattr(row, "recipient", ""), headers=row.headers,
        body=row.body, reason="x",
    )  # fmt: skip
    assert SubjectKey.objects.count() == 2

    assert erase_subject("ada") == 1
    assert erase_subject("ada") == 0
    poison_operations.requeue(poison_operations.find())
    queue.send(Parcel(7), headers=ada)  # it is back, with another key
    work(queue, dispatcher=True)

    eventually(lambda: len(calls) == 3)
    eventually(lambda: not queue.objects.exists() and not DelayedMessage.objects.exists())
    assert sorted(call.number for call in calls) == [4, 5, 7]
    assert asked == []
    assert not PoisonMessage.objects.exists()
    tomb = SubjectKey.objects.get(erased_at__isnull=False)
    assert (tomb.subject, tomb.wrapped, tomb.key) == (None, None, "")


@pytest.mark.parametrize("queue", [SecretExpiring, SecretOnce, SecretTransactional])
def test_a_consumer_of_several_messages_gets_those_that_can_be_read(queue: Any, work: Any) -> None:
    calls: list[int] = []

    @consumer(queue, batch=10)
    def several(parcels: list[Parcel]) -> None:
        calls.extend(parcel.number for parcel in parcels)

    for number in range(6):
        queue.send(Parcel(number), headers={"encrypt-for": "ada" if number % 2 else "bob"})
    erase_subject("ada")
    work(queue, concurrency=1)

    eventually(lambda: sorted(calls) == [0, 2, 4])
    eventually(lambda: not queue.objects.exists())
    assert not PoisonMessage.objects.exists()


def test_an_erased_message_is_reported_to_a_manual_receiver() -> None:
    SecretOnce.send(Parcel(1), headers={"encrypt-for": "ada"})
    erase_subject("ada")
    with SecretOnce.receive() as batch:
        for message in batch:
            with pytest.raises(ErasedMessage, match="erased: the key of its subject was destroyed"):
                message.decode(Parcel)


def test_a_key_that_was_rolled_back_encrypts_nothing_later(work: Any) -> None:
    calls: list[Any] = []
    with transaction.atomic():
        SecretOnce.send(Parcel(1), headers={"encrypt-for": "ada"})
        transaction.set_rollback(True)
    assert not SubjectKey.objects.exists()
    SecretOnce.send(Parcel(2), headers={"encrypt-for": "ada"})
    noted(SecretOnce, calls)
    work(SecretOnce)

    eventually(lambda: calls == [Parcel(2)])


def test_senders_who_need_a_new_key_at_once_get_the_same_one(work: Any) -> None:
    calls: list[Any] = []
    gate = threading.Barrier(4)

    def send(number: int) -> None:
        try:
            gate.wait(20)
            with transaction.atomic():
                SecretOnce.send(Parcel(number), headers={"encrypt-for": "ada"})
        finally:
            connection.close()

    threads = [threading.Thread(target=send, args=(number,)) for number in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(30)
    assert SubjectKey.objects.count() == 1
    noted(SecretOnce, calls)
    work(SecretOnce)

    eventually(lambda: sorted(call.number for call in calls) == [0, 1, 2, 3])


def test_keys_of_subjects_are_wrapped_anew_after_a_rotation(keys: dict[str, bytes], work: Any) -> None:
    calls: list[Any] = []
    del keys["new"]
    for number in range(3):
        SecretOnce.send(Parcel(number), headers={"encrypt-for": f"customer {number}"})
    erase_subject("customer 0")
    keys.clear()
    keys.update(KEYS)
    assert rewrap_subject_keys(batch=1) == 2
    assert rewrap_subject_keys() == 0
    del keys["old"]
    noted(SecretOnce, calls)
    work(SecretOnce)

    eventually(lambda: sorted(call.number for call in calls) == [1, 2])


@pytest.mark.parametrize("subject", ["", "x" * 201, "a\0b"])
def test_a_subject_that_is_none_is_refused(subject: str) -> None:
    with pytest.raises(InvalidMessage, match=r"encrypt-for|NUL"):
        SecretOnce.send(Parcel(1), headers={"encrypt-for": subject})


def test_a_queue_that_encrypts_nothing_refuses_a_subject() -> None:
    for send in (
        lambda: Leased.send(Parcel(1), headers={"encrypt-for": "ada"}),
        lambda: Smaller.send_many([Parcel(1)], headers={"encrypt-for": "ada"}),
        lambda: publish("Smaller", Parcel(1), headers={"encrypt-for": "ada"}),
        lambda: publish_many("Smaller", [Parcel(1)], headers={"encrypt-for": "ada"}),
    ):
        with pytest.raises(InvalidMessage, match="nothing is encrypted there"):
            send()


# -- bombs, and what cannot be seen ----------------------------------------------------------------------------------


@pytest.mark.parametrize("kind", ["zlib", "zstd", "zstd of unknown size"])
def test_a_small_body_that_becomes_a_huge_one_is_poison_and_never_in_memory(
    kind: str, settings: Any, work: Any
) -> None:
    import zstandard

    settings.QUEUEAPP = settings.QUEUEAPP | {"MAX_DECOMPRESSED": 1024 * 1024}
    calls: list[Any] = []
    noted(Leased, calls, cls=Any)
    huge = b"0" * (32 * 1024 * 1024)
    made = {
        "zlib": lambda: zlib.compress(huge),
        "zstd": lambda: zstandard.ZstdCompressor().compress(huge),
        "zstd of unknown size": lambda: zstandard.ZstdCompressor(write_content_size=False).compress(huge),
    }[kind]()
    Leased.send(made, headers={"content-type": f"application/json+{kind.split()[0]}"})
    work(Leased)

    kept = eventually(PoisonMessage.objects.first)
    assert "larger than 1048576 bytes" in kept.reason
    assert calls == []


@pytest.mark.parametrize("suffix", ["zlib", "zstd"])
def test_what_is_not_compressed_as_it_states_is_undecodable(suffix: str) -> None:
    right = {"zlib": zlib.compress, "zstd": body_filters.zstd()[0]}[suffix](b"{}" * 50)
    for body in (b"", b"nonsense", right[:-3], right + b"more", os.urandom(50)):
        with pytest.raises(UndecodableMessage):
            body_filters.opened(body, f"application/json+{suffix}", {}, messages.new_id(), "default")
    assert body_filters.opened(right, f"application/json+{suffix}", {}, messages.new_id(), "default")[0] == b"{}" * 50


def test_a_foreign_content_type_is_decoded_to_a_limited_depth() -> None:
    """``+zlib`` for each of 60,000 times took 9 seconds, and a worker's thread."""
    begun = time.thread_time()  # a machine that stands still is no fault of it
    for times, body in ((60_000, None), (body_filters.MOST_STEPS + 1, b"{}"), (60_000, zlib.compress(b"{}"))):
        content_type = "application/json" + "+zlib" * times
        assert body_filters.is_wrapped(content_type)
        assert not body_filters.is_secret(content_type)
        with pytest.raises(UndecodableMessage, match="more than 16 times"):
            body_filters.opened(body, content_type, {}, messages.new_id(), "default")
    assert time.thread_time() - begun < 3
    limit, body = "application/json", b"{}"
    for _ in range(body_filters.MOST_STEPS):
        limit, body = f"{limit}+zlib", zlib.compress(body)
    assert body_filters.opened(body, limit, {}, messages.new_id(), "default") == (b"{}", "application/json")
    assert body_filters.innermost("+zlib") == "+zlib"
    assert body_filters.innermost("application/a+b+zlib+aes256gcm") == "application/a+b"


def test_expressions_read_what_is_compressed_and_are_refused_where_it_is_encrypted() -> None:
    Smaller.send({"number": 1})
    Smaller.send({"number": 2})
    assert Smaller.ack(where="/number = 1") == 1
    SecretExpiring.send({"number": 1})
    with pytest.raises(InvalidOption, match="no expression can read the bodies"):
        SecretExpiring.ack(where="/number = 1")
    with pytest.raises(InvalidOption, match="those of this one are encrypted"):
        SubscriberFilter("/number = 1", SecretExpiring._meta.label)


def test_what_a_queue_encrypts_is_not_published_where_the_journal_would_keep_it(settings: Any) -> None:
    settings.QUEUEAPP = settings.QUEUEAPP | {"JOURNAL": {"SecretOnce": None}}
    for send in (lambda: publish("SecretOnce", Parcel(1)), lambda: publish_many("SecretOnce", [Parcel(1)])):
        with pytest.raises(InvalidMessage, match="would keep them in the clear"):
            send()
    assert not SecretOnce.objects.exists()


def test_the_tag_of_an_encrypted_body_covers_its_content_type() -> None:
    """Else who writes to the table makes a handler read a body as another kind of content."""
    SecretOnce.send(Parcel(1))
    row = SecretOnce.objects.get()
    headers = messages.decode_headers(row.headers)
    content_type = headers["content-type"]
    assert body_filters.opened(row.body, content_type, headers, row.id, "default")[1] == "application/json"

    for changed in ("application/octet-stream+aes256gcm", "application/msgpack+aes256gcm", "x+aes256gcm"):
        with pytest.raises(UndecodableMessage, match="does not open"):
            body_filters.opened(row.body, changed, headers | {"content-type": changed}, row.id, "default")


def test_the_keyring_is_asked_again_at_once_for_a_key_that_is_not_known(
    keys: dict[str, bytes], settings: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    """After a rotation a worker meets the new key before its minute is over."""
    clock = Clock()
    monkeypatch.setattr(keyring, "monotonic", clock)
    monkeypatch.setattr(keyring, "KEPT", 60.0)
    monkeypatch.setattr(keyring, "PATIENCE", 1.0)
    asked: list[str] = []

    def ring() -> dict[str, bytes]:
        asked.append("asked")
        return keys

    settings.QUEUEAPP = settings.QUEUEAPP | {"KEYRING": ring}
    assert keyring.key_of("new") == KEYS["new"]
    keys["newer"] = b"n" * 32

    with pytest.raises(LookupError):
        keyring.key_of("newer")  # not more than once a second
    clock.now += 1.1
    assert keyring.key_of("newer") == b"n" * 32
    clock.now += 58
    assert keyring.current() == ("new", KEYS["new"])
    assert len(asked) == 2
    clock.now += 3
    keyring.current()
    assert len(asked) == 3
