"""Editing a poison message: a mended copy is sent, the original is kept and names it."""

from __future__ import annotations

import threading
import uuid
from typing import Any

import pytest
from django.db import connections, transaction

from queueapp import InvalidMessage, MessageNotFound, QueueNotFound, messages
from queueapp.errors import UndecodableMessage
from queueapp.failures import apply_verdict, poison_operations, recoverability
from queueapp.failures.poison_operations import edit_and_requeue
from queueapp.models import Now, PoisonMessage
from tests.in_process_worker import real_commits
from tests.testapp.models import Leased, Transactional

from .test_poison import HOUR, bury

pytestmark = real_commits
Status = PoisonMessage.Status
JSON_HEADERS = '{"type":"shop.Board","content-type":"application/json","correlation-id":"c-1"}'


def test_the_copy_has_a_new_id_and_all_its_attempts_and_names_the_original() -> None:
    (buried,) = bury(headers=JSON_HEADERS, correlation_id="c-1", priority=0, expires=Now() - HOUR)

    new = edit_and_requeue(buried.number, body=b'{"gate":"B12"}')

    row = Leased.objects.get()
    assert (row.id, row.body, row.correlation_id) == (new, b'{"gate":"B12"}', "c-1")
    assert (row.deliveries, row.cancels, row.failures, row.expires) == (0, 0, None, None)
    assert messages.decode_headers(row.headers) == {
        "type": "shop.Board", "content-type": "application/json", "correlation-id": "c-1",
        "edit-of": str(buried.message_id),
    }  # fmt: skip
    assert new != buried.message_id


def test_the_original_is_kept_as_edited_with_its_bytes_and_names_the_copy() -> None:
    (buried,) = bury()

    new = edit_and_requeue(buried.number, body=b"1")

    kept = PoisonMessage.objects.get()
    assert (kept.status, kept.edited_as, kept.body, kept.headers) == (Status.EDITED, new, b"0", '{"k":"v"}')
    assert kept.archived_at is not None


def test_an_edited_message_is_neither_edited_nor_requeued_nor_archived_nor_restored_again() -> None:
    (buried,) = bury()
    edit_and_requeue(buried.number, body=b"1")

    with pytest.raises(MessageNotFound, match=f"Poison message {buried.number} is edited: only unresolved ones"):
        edit_and_requeue(buried.number, body=b"2")
    everything = PoisonMessage.objects.all()
    for act in (poison_operations.requeue, poison_operations.archive, poison_operations.restore):
        assert act(everything) == 0
    assert Leased.objects.count() == 1


def test_what_is_left_out_stays_as_it_is() -> None:
    first, second = bury(2, body=b"\x00\xff")

    edit_and_requeue(first.number, headers={"k": "w"})
    edit_and_requeue(second.number)

    rows = [(row.body, messages.decode_headers(row.headers)["k"]) for row in Leased.objects.order_by("seq")]
    assert rows == [(b"\x00\xff", "w"), (b"\x00\xff", "v")]


@pytest.mark.parametrize(
    ("given", "text"),
    [
        ({"body": b""}, "The edited body is empty"),
        ({"body": b"{"}, "does not suit its content type application/json"),
        ({"headers": {"content-type": "application/json"}}, "'correlation-id' is locked"),
        ({"headers": {"correlation-id": "c-2"}}, "'correlation-id' is locked"),
        ({"headers": {"correlation-id": "c-1", "edit-of": "x"}}, "'edit-of' is locked"),
        ({"headers": {"correlation-id": "c-1", "NServiceBus.Retries": "9"}}, "'NServiceBus.Retries' is locked"),
        ({"headers": {"correlation-id": "c-1", "a": "\0"}}, "NUL"),
    ],
)
def test_what_is_refused_changes_nothing(given: dict[str, Any], text: str) -> None:
    (buried,) = bury(headers=JSON_HEADERS)

    with pytest.raises(InvalidMessage, match=text):
        edit_and_requeue(buried.number, **given)

    assert PoisonMessage.objects.get().status == Status.UNRESOLVED
    assert not Leased.objects.exists()


def test_headers_that_do_not_parse_have_to_be_replaced() -> None:
    (buried,) = bury(headers="{nonsense")

    with pytest.raises(InvalidMessage, match="Give the edited message headers of its own"):
        edit_and_requeue(buried.number, body=b"1")
    edit_and_requeue(buried.number, headers={"type": "shop.Board"})

    assert messages.read_head(Leased.objects.get().headers)[0] == "shop.Board"


def test_the_copy_of_a_foreign_message_carries_its_new_id_in_its_headers_too() -> None:
    (buried,) = bury(headers='{"NServiceBus.MessageId":"old","NServiceBus.ConversationId":"talk"}')

    new = edit_and_requeue(buried.number, body=b"1")

    headers = messages.decode_headers(Leased.objects.get().headers)
    assert (headers["NServiceBus.MessageId"], headers["NServiceBus.ConversationId"]) == (str(new), "talk")


def test_it_goes_to_another_queue_if_asked_and_a_queue_that_is_no_more_is_named() -> None:
    first, second = bury(2, queue=Leased)
    PoisonMessage.objects.filter(pk=second.pk).update(queue="gone.Queue")

    edit_and_requeue(first.number, body=b"1", to=Transactional)
    with pytest.raises(QueueNotFound, match=r"gone\.Queue"):
        edit_and_requeue(second.number, body=b"1")

    assert Transactional.objects.count() == 1
    assert PoisonMessage.objects.filter(status=Status.UNRESOLVED).count() == 1


def test_a_copy_that_fails_again_states_in_poison_what_it_was_edited_from() -> None:
    (buried,) = bury()
    edit_and_requeue(buried.number, body=b"1")
    seq = Leased.objects.get().seq

    verdict = apply_verdict.fail(Leased, "default", seq, UndecodableMessage("no"), consumer=None, token=None)

    assert isinstance(verdict, recoverability.Poison)
    assert PoisonMessage.objects.get(status=Status.UNRESOLVED).edit_of == buried.message_id


def test_of_two_who_edit_together_one_does() -> None:
    (buried,) = bury()
    start = threading.Barrier(2)
    ended: list[uuid.UUID | MessageNotFound] = []

    def run() -> None:
        start.wait(30)
        try:
            ended.append(edit_and_requeue(buried.number, body=b"1"))
        except MessageNotFound as error:
            ended.append(error)
        connections.close_all()

    threads = [threading.Thread(target=run) for _ in range(2)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(30)

    assert sorted(type(item).__name__ for item in ended) == ["MessageNotFound", "UUID"]
    assert Leased.objects.count() == 1


def test_an_edit_may_be_part_of_the_callers_transaction() -> None:
    (buried,) = bury()

    with transaction.atomic():
        edit_and_requeue(buried.number, body=b"1")
        transaction.set_rollback(True)

    assert PoisonMessage.objects.get().status == Status.UNRESOLVED
    assert not Leased.objects.exists()
