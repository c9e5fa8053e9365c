"""Operations on many messages: batch by batch, to the end, whatever happens in between."""

from __future__ import annotations

import json
import subprocess
import sys
import uuid
from collections.abc import Iterator
from datetime import timedelta
from typing import Any

import pytest
from django.contrib.auth import get_user_model

from queueapp.errors import InvalidOption
from queueapp.failures import expire_actions
from queueapp.models import BulkOperation, DelayedMessage, Now, PoisonMessage
from queueapp.operations import bulk_operations, selections
from queueapp.operations.bulk_operations import FINISHED, PAUSED, RUNNING, STOPPED, carry_out, start
from queueapp.operations.selections import Source
from queueapp.services.leader_election import Elector
from queueapp.services.maintenance import Maintenance
from tests.bulk_rows import fill_up
from tests.in_process_worker import eventually
from tests.testapp.models import ForeignPostgres, Leased, Transactional, Urgent

pytestmark = pytest.mark.django_db(transaction=True)
POISON = Source(PoisonMessage, "default")
GROUP = "a" * 32


@pytest.fixture
def small_batches(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(bulk_operations, "BATCH", 10)
    monkeypatch.setattr(bulk_operations, "SCAN", 25)


def bury(count: int, **values: Any) -> None:
    defaults = {"queue": "testapp.Leased", "reason": "failed", "group_key": GROUP, "headers": "{}", "body": b"{}"}
    fill_up(PoisonMessage(message_id=uuid.uuid4(), **{**defaults, **values}), count)


def now(operation: BulkOperation) -> BulkOperation:
    operation.refresh_from_db()
    return operation


def batches(count: int) -> Any:
    """``may_continue`` for so many batches."""
    remaining = iter(range(count))
    return lambda: next(remaining, None) is not None


def test_all_that_matches_is_requeued_batch_by_batch_and_nothing_else(small_batches: None) -> None:
    bury(35)
    bury(20, group_key="b" * 32)
    bury(5, status=PoisonMessage.Status.ARCHIVED)
    user = get_user_model().objects.create_user("ada")

    operation = start(POISON, "requeue", {"group": GROUP}, {"counts": "reset"}, by=user)
    bury(3)  # arrives later

    assert carry_out("default") is False
    assert now(operation).state == FINISHED
    assert (operation.changed, operation.skipped, operation.failed) == (35, 0, 0)
    assert (operation.username, operation.started_by) == ("ada", user)
    assert Leased.objects.count() == 35
    assert PoisonMessage.objects.filter(group_key=GROUP, status=PoisonMessage.Status.UNRESOLVED).count() == 3


def test_pause_resume_and_stop_take_effect_between_batches(small_batches: None) -> None:
    bury(40)
    operation = start(POISON, "requeue")
    carry_out("default", batches(1))

    assert bulk_operations.pause(operation.pk)
    assert not bulk_operations.pause(operation.pk)
    carry_out("default")
    assert (now(operation).changed, operation.state) == (10, PAUSED)

    assert bulk_operations.resume(operation.pk)
    carry_out("default", batches(1))
    assert (now(operation).changed, operation.state) == (20, RUNNING)

    assert bulk_operations.stop(operation.pk)
    carry_out("default")
    assert (now(operation).changed, operation.state) == (20, STOPPED)
    assert not bulk_operations.resume(operation.pk)
    assert (Leased.objects.count(), PoisonMessage.objects.count()) == (20, 20)


def test_a_rate_makes_small_batches_with_a_wait_between_them() -> None:
    bury(30)
    operation = start(POISON, "archive", rate=5)

    assert carry_out("default") is False

    assert (now(operation).changed, operation.state) == (5, RUNNING)
    assert BulkOperation.objects.filter(next_at__gt=Now()).exists()
    assert bulk_operations.set_rate(operation.pk, None)
    carry_out("default")
    assert (now(operation).changed, operation.state) == (30, FINISHED)


@pytest.mark.parametrize("rate", [0, -1, 1e9])
def test_a_rate_out_of_bounds_is_refused(rate: float) -> None:
    with pytest.raises(InvalidOption, match="rate"):
        start(POISON, "requeue", rate=rate)


def test_an_action_or_a_filter_that_the_list_has_not_is_refused() -> None:
    with pytest.raises(InvalidOption, match="dispatch_now"):
        start(POISON, "dispatch_now")
    with pytest.raises(InvalidOption, match="state"):
        start(POISON, "requeue", {"state": "ready"})
    for name, value in (("age", "hour"), ("delivered", "no"), ("priority", "1")):
        with pytest.raises(InvalidOption, match=name):  # of a column that the foreign table has not
            start(Source(ForeignPostgres, "default"), "delete_selected", {name: value})


def test_a_killed_process_loses_and_doubles_nothing_and_another_goes_on(child_environment: dict[str, str]) -> None:
    bury(100)
    ids = set(PoisonMessage.objects.values_list("message_id", flat=True))
    operation = start(POISON, "requeue")

    done = subprocess.run(
        [sys.executable, "-m", "tests.queueapp.operations.killed_operation"],
        env=child_environment, capture_output=True, text=True, timeout=120, check=False,
    )  # fmt: skip

    assert done.returncode == 0, done.stderr
    # Three processes were killed in or after their second batch: what is counted has been moved.
    moved = Leased.objects.count()
    assert now(operation).changed == moved == 100 - PoisonMessage.objects.count()
    assert operation.state == RUNNING
    # The server may not have noticed yet that the last process is gone, which has the operation's row.
    eventually(lambda: carry_out("default") or now(operation).state == FINISHED)
    assert operation.changed == 100
    requeued = list(Leased.objects.values_list("id", flat=True))
    assert len(requeued) == 100
    assert set(requeued) == ids


def test_maintenance_carries_operations_out() -> None:
    bury(30)
    operation = start(POISON, "requeue")
    service = Maintenance("default", [Leased], Elector("default", "maintenance", uuid.uuid4()), round_interval=0.05)
    service.start()
    try:
        eventually(lambda: now(operation).state == FINISHED)
    finally:
        service.stop(10)
    assert operation.changed == 30


@pytest.fixture
def one_that_fails() -> Iterator[list[int]]:
    """The numbers of messages that cannot be deleted."""
    failing: list[int] = []

    def refuse(alias: str, rows: Any, reason: str) -> None:
        if any(row.seq in failing for row in rows):
            raise ValueError("not this one")

    expire_actions.removal_hooks[Leased] = refuse
    yield failing
    del expire_actions.removal_hooks[Leased]


def test_a_message_that_fails_is_recorded_and_the_others_are_done(one_that_fails: list[int]) -> None:
    Leased.send_many({"n": n} for n in range(20))
    keys = list(Leased.objects.order_by("pk").values_list("pk", flat=True))
    one_that_fails.append(keys[7])
    operation = start(Source(Leased, "default"), "delete_selected")

    carry_out("default")

    assert (now(operation).state, operation.changed, operation.failed) == (FINISHED, 19, 1)
    assert json.loads(operation.errors) == [[keys[7], "ValueError: not this one"]]
    assert list(Leased.objects.values_list("pk", flat=True)) == [keys[7]]


def test_it_pauses_when_no_message_of_a_batch_can_be_changed(small_batches: None) -> None:
    bury(15, queue="shop.Retired")
    bury(5)
    operation = start(POISON, "requeue")

    carry_out("default")

    assert (now(operation).state, operation.failed) == (PAUSED, 10)
    assert operation.note.startswith("Paused: no message of the last batch could be changed.")
    bulk_operations.resume(operation.pk)
    carry_out("default")
    assert (now(operation).state, operation.changed, operation.failed) == (FINISHED, 5, 15)


def test_messages_of_a_retired_queue_go_into_another_one() -> None:
    bury(5, queue="shop.Retired")
    operation = start(POISON, "requeue", {"queue": "shop.Retired"}, {"to": "testapp.Urgent"})
    carry_out("default")
    assert now(operation).changed == Urgent.objects.count() == 5


def test_messages_in_flight_are_skipped_and_counted() -> None:
    Leased.send_many({"n": n} for n in range(4))
    key = Leased.objects.order_by("pk").values_list("pk", flat=True)[2]
    Leased.objects.filter(pk=key).update(lease_token=uuid.uuid4(), lease_expires=Now() + timedelta(minutes=5))
    operation = start(Source(Leased, "default"), "move_to_poison")
    carry_out("default")
    assert (now(operation).changed, operation.skipped) == (3, 1)
    assert PoisonMessage.objects.values_list("reason", flat=True).first() == "moved to poison by a script"


def test_two_operations_share_the_rounds(small_batches: None) -> None:
    bury(20)
    Transactional.send_many({"n": n} for n in range(20))
    first, second = start(POISON, "archive"), start(Source(Transactional, "default"), "delete_selected")
    carry_out("default", batches(2))
    assert (now(first).changed, now(second).changed) == (10, 10)


def test_an_operation_of_another_project_is_left_to_it() -> None:
    operation = BulkOperation.objects.create(action="delete_selected", source="else.Where", first=1, last=9, cursor=0)
    assert carry_out("default") is False
    assert now(operation).state == RUNNING


def test_an_operation_on_nothing_has_ended_after_one_round() -> None:
    operation = start(POISON, "requeue")
    carry_out("default")
    assert now(operation).state == FINISHED


def test_old_operations_are_deleted_and_running_ones_kept() -> None:
    for state in (FINISHED, STOPPED, RUNNING):
        BulkOperation.objects.create(
            action="requeue", source="else.Where", first=1, last=9, cursor=0, state=state,
            changed_at=Now() - bulk_operations.KEPT,
        )  # fmt: skip
    assert bulk_operations.drop_old("default") == 2
    assert BulkOperation.objects.get().state == RUNNING


@pytest.mark.parametrize(
    ("filters", "count"),
    [({}, 3), ({"destination": "testapp.Leased"}, 2), ({"destination": selections.NO_SUCH_QUEUE}, 1),
     ({"when": "overdue"}, 1), ({"when": "hour"}, 3)],
)  # fmt: skip
def test_filters_of_delayed_messages(filters: dict[str, str], count: int) -> None:
    for destination, minutes in (("testapp.Leased", 5), ("testapp.Leased", -5), ("shop.Retired", 5)):
        DelayedMessage.objects.create(
            message_id=uuid.uuid4(), destination=destination, due=Now() + timedelta(minutes=minutes), headers="{}"
        )
    operation = start(Source(DelayedMessage, "default"), "delete_selected", filters)
    carry_out("default")
    assert now(operation).changed == count
