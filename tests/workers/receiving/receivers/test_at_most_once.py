"""AT_MOST_ONCE: what was claimed is gone, so what is not handled has to be kept, whole, and the others are handled all
the same."""

from __future__ import annotations

from typing import Any

import pytest
from django.db import OperationalError

from queueapp import Context, Poison, consumer
from queueapp.failures import apply_verdict
from queueapp.messages.ids import as_uuid
from queueapp.models import PoisonMessage
from tests.in_process_worker import real_commits
from tests.testapp.messages import Nop, Ping
from tests.testapp.models import AtMostOnce
from tests.workers.receiving.single_receiver import SingleReceiver
from workers.receiving.receivers import outcomes

pytestmark = [real_commits, pytest.mark.usefixtures("no_consumers")]


@pytest.fixture
def handled() -> list[int]:
    """The messages that were handled; number 0 fails."""
    numbers: list[int] = []

    def act(message: Nop, context: Context) -> None:
        context.items["seen"] = message.number
        if message.number == 0:
            raise ValueError("bad")
        numbers.append(message.number)

    consumer(AtMostOnce, name="tests", policy=lambda failure: Poison(f"items {failure.items}"))(act)
    return numbers


def send(count: int) -> None:
    AtMostOnce.send_many(Nop(number, "") for number in range(count))


def test_as_many_are_claimed_at_once_as_the_setting_states(settings: Any) -> None:
    settings.QUEUEAPP = {"AT_MOST_ONCE_BATCH": 7}

    assert SingleReceiver(AtMostOnce).task.size.limit == 7


def test_what_fails_is_kept_with_all_that_it_carried(handled: list[int]) -> None:
    identity = AtMostOnce.send(Nop(0, ""), correlation_id="c1", reply_to="me", headers={"k": "v"})
    send(2)
    SingleReceiver(AtMostOnce).receive(1)

    kept = PoisonMessage.objects.get()
    assert (kept.message_id, kept.correlation_id, kept.reply_to_address) == (identity, "c1", "me")
    assert '"k"' in kept.headers
    assert kept.reason == "items {'seen': 0}"
    assert AtMostOnce.objects.count() == 2


def test_with_a_message_of_unknown_type_nothing_is_claimed_and_the_others_are_the_next_time(handled: list[int]) -> None:
    AtMostOnce.send(Ping())
    AtMostOnce.send(Nop(1, ""))
    single_receiver = SingleReceiver(AtMostOnce)

    assert single_receiver.receive(2) == 2
    assert single_receiver.task.full, "the others are still to be claimed"
    assert AtMostOnce.objects.count() == 2
    single_receiver.receive(2)

    assert handled == [1]
    assert AtMostOnce.objects.count() == 1
    assert single_receiver.pump.stats.skipped == 1


def test_what_a_claim_that_was_rolled_back_had_taken_is_claimed_again(
    handled: list[int], monkeypatch: pytest.MonkeyPatch
) -> None:
    AtMostOnce.send(Nop(1, ""))
    single_receiver = SingleReceiver(AtMostOnce)

    def lose(task: Any, rows: Any) -> Any:
        monkeypatch.undo()
        raise OperationalError("the connection is lost before the commit")

    monkeypatch.setattr(outcomes, "not_for_this_process", lose)
    with pytest.raises(OperationalError):
        single_receiver.receive(2)
    single_receiver.receive(2)

    assert handled == [1]


def test_a_record_that_a_database_does_not_take_is_tried_again(
    handled: list[int], monkeypatch: pytest.MonkeyPatch
) -> None:
    really, tried = apply_verdict.fail_taken, list[None]()

    def fail_taken(*arguments: Any, **options: Any) -> Any:
        tried.append(None)
        if len(tried) == 1:
            raise OperationalError("away")
        return really(*arguments, **options)

    monkeypatch.setattr(apply_verdict, "fail_taken", fail_taken)
    send(3)
    SingleReceiver(AtMostOnce).receive(3)

    assert PoisonMessage.objects.count() == 1
    assert handled == [1, 2]


def test_on_the_way_out_what_cannot_be_kept_is_named_and_the_others_are_handled(
    handled: list[int], monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    def fail_taken(*arguments: Any, **options: Any) -> Any:
        single_receiver.pump.stopping.set()
        raise OperationalError("away")

    monkeypatch.setattr(apply_verdict, "fail_taken", fail_taken)
    send(3)
    single_receiver = SingleReceiver(AtMostOnce)
    single_receiver.receive(3)

    assert handled == [1, 2]
    assert "failed and could not be kept; headers:" in caplog.text


def test_its_slot_knows_what_is_nowhere_else(handled: list[int]) -> None:
    kept: list[bytes] = []

    class Slot:
        def keep(self, identity: bytes, headers: str) -> None:
            kept.append(identity)

        def begin(self, seq: int) -> None:
            pass

        def end(self) -> None:
            pass

        def only_here(self, so: bool) -> None:
            reported.append((so, AtMostOnce.objects.count()))

    reported: list[tuple[bool, int]] = []
    send(3)
    identities = [as_uuid(item).bytes for item in AtMostOnce.objects.order_by("seq").values_list("id", flat=True)]
    single_receiver = SingleReceiver(AtMostOnce)
    single_receiver.task.slot = Slot()  # type: ignore[assignment]
    single_receiver.receive(3)

    assert reported == [(True, 3), (False, 0)], "from before they were claimed"
    assert kept == identities
