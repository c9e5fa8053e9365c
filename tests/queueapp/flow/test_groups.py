"""Groups: each way in which a member ends, and one completion message in the transaction of the last end."""

from __future__ import annotations

import io
import threading
import uuid
from collections.abc import Callable
from contextlib import closing, suppress
from datetime import timedelta
from typing import Any

import pytest
from django.core.management import call_command
from django.db import connections, transaction

from queueapp import Context, Group, InvalidMessage, MessageNotFound, PublishTo
from queueapp.delayed import operations as delayed
from queueapp.errors import QueueError
from queueapp.failures import apply_verdict, poison_operations
from queueapp.flow import group_members
from queueapp.messages import GROUP, GROUP_DONE, GROUP_FAILED, decode_headers
from queueapp.models import DelayedMessage, GroupMember, GroupMessage, MessageGroup, PoisonMessage
from queueapp.operations import control, expiration
from queueapp.operations.move_messages import move_delayed, move_type
from queueapp.sending.isolation import in_another_thread
from tests.databases import only_on_postgresql, parametrize_alias
from tests.in_process_worker import Worker, eventually, real_commits
from tests.testapp.messages import Ping
from tests.testapp.models import (
    Effect,
    FlightAudit,
    Grouped,
    GroupedTogether,
    GroupedTransactional,
    Interop,
    Keyed,
    Leased,
    Short,
)

pytestmark = real_commits


def pytest_generate_tests(metafunc: pytest.Metafunc) -> None:
    """One case per database."""
    parametrize_alias(metafunc, real_commits.kwargs["available_apps"])


def completions(alias: str) -> list[tuple[str, str, str]]:
    """What was sent on completion: body, done, failed."""
    rows = Leased.objects.using(alias).order_by("seq")
    found = [(bytes(row.body).decode(), decode_headers(row.headers)) for row in rows]
    return [(body, headers[GROUP_DONE], headers[GROUP_FAILED]) for body, headers in found]


def group_of(alias: str, **options: Any) -> Group:
    return Group(on_complete=Leased.prepare("whole", using=alias), using=alias, **options)


def end(alias: str, count: int = 1, how: str = "ack") -> None:
    with Grouped.receive(count, using=alias) as batch:
        assert len(batch) == count
        for message in batch:
            getattr(message, how)()


def test_the_last_ack_sends_the_completion_message(alias: str) -> None:
    with group_of(alias) as group:
        group.send(Grouped, {"n": 1})
        assert group.send_many(Grouped, ({"n": n} for n in range(2, 4))) == 2
    assert group.counts() == (3, 0, 0)

    end(alias, 2)
    assert group.counts() == (1, 2, 0)
    assert (completions(alias), group.is_complete) == ([], False)

    with transaction.atomic(using=alias):
        end(alias)
        assert completions(alias) == [('"whole"', "3", "0")]
        transaction.set_rollback(True, using=alias)
    assert completions(alias) == []

    assert not GroupMember.objects.using(alias).filter(outcome__gt=0).exists()


def test_an_empty_group_completes_when_it_is_closed(alias: str) -> None:
    with group_of(alias) as group:
        assert completions(alias) == []

    assert completions(alias) == [('"whole"', "0", "0")]
    assert group.is_complete
    assert not GroupMessage.objects.using(alias).exists()
    with pytest.raises(InvalidMessage, match="complete"):
        group.send(Grouped, {"n": 1})
    assert not Grouped.objects.using(alias).exists()
    group.close()
    assert len(completions(alias)) == 1


def test_a_group_whose_block_raises_stays_open(alias: str) -> None:
    group = group_of(alias)
    with suppress(ZeroDivisionError), group:
        group.send(Grouped, {"n": 1})
        raise ZeroDivisionError
    end(alias)
    assert completions(alias) == []

    Group.get(group.id, using=alias).close()

    assert completions(alias) == [('"whole"', "1", "0")]


@only_on_postgresql
def test_a_member_does_not_end_beside_another_one_in_a_transaction_with_one_snapshot() -> None:
    with group_of("default") as group:
        group.send_many(Grouped, [{"n": 1}, {"n": 2}])
    holder = connections["default"].copy()
    holder.set_autocommit(False)

    def ack(message: Any) -> None:
        with transaction.atomic():
            with connections["default"].cursor() as cursor:
                cursor.execute("SET TRANSACTION ISOLATION LEVEL REPEATABLE READ")
            message.ack()

    with Grouped.receive(2) as batch, closing(holder):
        with holder.cursor() as cursor:  # what a transaction that ends the second member keeps locked
            cursor.execute("SELECT 1 FROM queueapp_groupmember WHERE message_id = %s FOR SHARE", [batch[1].id])
        with pytest.raises(QueueError, match="READ COMMITTED"):
            ack(batch[0])
    assert group.counts() == (2, 0, 0)


@pytest.mark.parametrize("how", ["expired", "purged", "deleted", "forced", "delayed", "by seq"])
def test_each_other_end_counts_as_failed(alias: str, how: str) -> None:
    options: dict[str, Any] = {"expires_in": timedelta(milliseconds=1)} if how == "expired" else {}
    if how == "delayed":
        options["delay"] = timedelta(hours=1)
    with group_of(alias, on_failure=Leased.prepare("broken", using=alias)) as group:
        identity = group.send(Grouped, {"n": 1}, **options)
    seq = Grouped.objects.using(alias).values_list("seq", flat=True).first()

    if how == "expired":
        eventually(lambda: expiration.delete_expired(Grouped, alias, 10))
    elif how == "purged":
        control.purge(Grouped, using=alias)
    elif how == "deleted":
        control.delete(Grouped, [seq], using=alias)
    elif how == "forced":
        end(alias, how="expire")
    elif how == "by seq":
        with Grouped.receive(using=alias):
            token = Grouped.objects.using(alias).values_list("lease_token", flat=True).get()
            assert Grouped.expire(seq, client=token, using=alias) == 1
    else:
        assert delayed.cancel(identity, using=alias) == 1

    assert completions(alias) == [('"broken"', "0", "1")]
    assert group.counts() == (0, 0, 1)


@only_on_postgresql
def test_members_that_are_purged_by_the_command_have_failed() -> None:
    with group_of("default", on_failure=Leased.prepare("broken")) as group:
        group.send_many(Grouped, [{"n": 1}, {"n": 2}])

    call_command("purgequeue", Grouped._meta.label, "--yes", stdout=io.StringIO())

    assert completions("default") == [('"broken"', "0", "2")]


def test_a_requeued_or_edited_poison_member_waits_again(alias: str) -> None:
    with group_of(alias) as group:
        ids = [group.send(Grouped, {"n": n}) for n in range(3)]
    seqs = list(Grouped.objects.using(alias).order_by("seq").values_list("seq", flat=True))
    control.move_to_poison(Grouped, seqs[:2], reason="by hand", using=alias)
    assert group.counts() == (1, 0, 2)

    poison = PoisonMessage.objects.using(alias).order_by("number")
    poison_operations.requeue(poison.filter(message_id=ids[0]))
    edited = poison_operations.edit_and_requeue(poison.get(message_id=ids[1]).number, body=b'{"n": 7}', using=alias)
    assert group.counts() == (3, 0, 0)
    assert edited != ids[1]

    end(alias, 3)
    assert completions(alias) == [('"whole"', "3", "0")]


def test_poison_of_a_complete_group_changes_nothing_any_more(alias: str) -> None:
    with group_of(alias) as group:
        group.send(Grouped, {"n": 1})
    control.move_to_poison(
        Grouped, list(Grouped.objects.using(alias).values_list("seq", flat=True)), reason="by hand", using=alias
    )
    assert completions(alias) == [('"whole"', "0", "1")]

    poison_operations.requeue(PoisonMessage.objects.using(alias).all())
    end(alias)

    assert completions(alias) == [('"whole"', "0", "1")]
    assert group.counts() == (0, 0, 1)


def test_an_inner_group_is_a_member_of_the_outer_one(alias: str) -> None:
    with group_of(alias) as outer:
        with Group(parent=outer, on_complete=Leased.prepare("inner", using=alias)) as inner:
            inner.send(Grouped, {"n": 1})
        with Group(parent=outer) as failing:
            failing.send(Grouped, {"n": 2})
        outer.send(Grouped, {"n": 3})
    assert outer.counts() == (3, 0, 0)

    end(alias)
    assert completions(alias) == [('"inner"', "1", "0")]
    end(alias, how="expire")
    assert outer.counts() == (1, 1, 1)
    end(alias)

    assert completions(alias)[1:] == [('"whole"', "2", "1")]


def test_two_ends_at_once_send_one_message(alias: str) -> None:
    """Each of the first two sees that the other's member waits, and the third sees that both do."""
    with group_of(alias) as group:
        ids = [group.send(Grouped, {"n": n}) for n in range(3)]
    written, committed = threading.Barrier(3), list[uuid.UUID]()

    def end_one(identity: uuid.UUID) -> None:
        try:
            with transaction.atomic(using=alias):
                connection = connections[alias]
                statements, tables = group_members.backend_of(connection).groups, group_members.tables()
                GroupMember.objects.using(alias).get(pk=identity)
                written.wait(30)
                group_members.end(connection, [identity])
                assert statements.lock(connection, tables, uuid.uuid4()) is None
            committed.append(identity)
        finally:
            connections.close_all()

    threads = [threading.Thread(target=end_one, args=(identity,)) for identity in ids]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(60)

    assert sorted(committed) == sorted(ids)
    assert completions(alias) == [('"whole"', "3", "0")]


@pytest.mark.parametrize("queue", [Grouped, GroupedTransactional, GroupedTogether], ids=lambda queue: queue.__name__)
def test_workers_end_members_and_handlers_add_some(alias: str, queue: Any) -> None:
    with group_of(alias) as group:
        group.send_many(queue, [Ping("plain"), Ping("more+2"), Ping("fails", fail=9), Ping("again", fail=1)])
    worker = Worker(queue, alias, dispatcher=True)
    worker.start()
    try:
        eventually(lambda: group.is_complete)
    finally:
        worker.stop()

    assert completions(alias) == [('"whole"', "5", "1")]
    names = set(Effect.objects.using(alias).values_list("name", flat=True))
    assert names == {"plain", "more+2", "more.0", "more.1", "again"}


def test_a_completion_message_for_an_unknown_queue_goes_through_the_delayed_store(alias: str) -> None:
    with group_of(alias):
        GroupMessage.objects.using(alias).update(destination="other.Project")

    row = DelayedMessage.objects.using(alias).get()
    assert row.destination == "other.Project"
    assert decode_headers(row.headers)[GROUP_DONE] == "0"


def test_what_never_ends_is_completed_by_hand(alias: str) -> None:
    group = group_of(alias).open()
    group.send(Grouped, {"n": 1})
    Grouped.objects.using(alias).all().delete()

    assert group_members.complete_now(alias, group.id)

    assert completions(alias) == [('"whole"', "0", "1")]
    assert not group_members.complete_now(alias, group.id)


def test_complete_groups_are_deleted_after_their_retention(alias: str) -> None:
    with group_of(alias):
        pass
    waits = group_of(alias).open()
    MessageGroup.objects.using(alias).update(completed_at=group_members.Now() - timedelta(days=8))
    MessageGroup.objects.using(alias).filter(pk=waits.id).update(completed_at=None)

    group_members.run_maintenance(alias, lambda: True)

    assert list(MessageGroup.objects.using(alias).values_list("pk", flat=True)) == [waits.id]


def test_refusals(alias: str) -> None:
    group = group_of(alias).open()
    with pytest.raises(InvalidMessage, match=r"groups = True"):
        group.send(Leased, {"n": 1})
    with pytest.raises(InvalidMessage, match="isolated"):
        group.send(Grouped, {"n": 1}, isolated=True)
    for send, body in ((group.send, {"n": 1}), (group.send_many, [{"n": 1}])):
        with pytest.raises(InvalidMessage, match="encrypt-for"):
            send(Grouped, body, headers={"encrypt-for": "ada"})
        with pytest.raises(TypeError, match="prioriti"):
            send(Grouped, body, prioriti=1)
    for option in ("correlation_id", "recipient", "ordering_key", "on_conflict"):
        with pytest.raises(TypeError, match=option):
            group.send_many(Grouped, [{"n": 1}], **{option: "x"})
    with pytest.raises(InvalidMessage, match="prepare"):
        Group(on_complete={"n": 1})  # type: ignore[arg-type]
    with pytest.raises(InvalidMessage, match="dedupe keys"):
        Keyed.prepare({"n": 1})
    with pytest.raises(MessageNotFound):
        Group.get(uuid.uuid4(), using=alias)


def test_the_group_of_a_context(alias: str, django_assert_num_queries: Any) -> None:
    class Fake:
        headers: dict[str, str]

    context = Fake()
    context.headers = {}
    assert Group.of(context) is None
    assert Context is not None
    group = group_of(alias, name="night").open()
    context.headers, context.alias = {GROUP: str(group.id)}, alias  # type: ignore[attr-defined]
    found = Group.of(context)
    assert found is not None
    assert (found.id, found.name) == (group.id, "night")


def test_a_prepared_message_that_is_sent_twice_is_two_messages(alias: str) -> None:
    """With one id ``processed_once`` would take the second for the first."""
    prepared = Leased.prepare({"n": 1}, using=alias)
    ids = {prepared.send(), prepared.send()}
    for _ in range(2):
        with Group(on_complete=prepared, using=alias):
            pass

    stored = list(Leased.objects.using(alias).values_list("id", flat=True))
    assert len(set(stored)) == 4
    assert ids < set(stored)


def test_the_id_in_the_headers_of_a_prepared_message_is_its_own(alias: str) -> None:
    prepared = Interop.prepare({"n": 1}, using=alias)
    for _ in range(2):
        identity = prepared.send()
        row = Interop.objects.using(alias).get(id=identity)
        assert str(identity) in row.headers


def test_members_that_are_moved_to_a_queue_without_groups_have_failed(alias: str) -> None:
    """Nothing would end them there."""
    with group_of(alias) as group:
        group.send(Grouped, {"n": 1})
        group.send(Grouped, {"n": 2}, delay=timedelta(hours=1))

    assert move_type(Grouped, "", Short, using=alias) == 1
    assert completions(alias) == []
    assert move_delayed(Grouped._meta.label, Short, using=alias) == 1

    assert completions(alias) == [('"whole"', "0", "2")]


def test_a_delayed_member_that_is_not_moved_stays_a_member(alias: str) -> None:
    """Its dedupe key is that of a message which waits in the other queue."""
    Keyed.send({"key": "a"}, using=alias)
    with group_of(alias) as group:
        for key in ("a", "b"):
            group.send(Grouped, {"key": key}, delay=timedelta(hours=1))

    assert move_delayed(Grouped._meta.label, Keyed, using=alias) == 1

    assert group.counts() == (1, 0, 1)


def test_an_expired_member_is_published_as_a_message_of_no_group(alias: str, delivery: Any) -> None:
    """Its group may be complete, so who receives it could add nothing."""
    delivery(Grouped, on_expired=PublishTo("AUDIT_DIRECT"))
    with group_of(alias) as group:
        group.send(Grouped, {"n": 1})

    end(alias, how="expire")

    assert completions(alias) == [('"whole"', "0", "1")]
    assert GROUP not in decode_headers(FlightAudit.objects.using(alias).get().headers)


def test_a_member_that_is_given_up_and_cannot_be_published_is_poison(alias: str, delivery: Any) -> None:
    """So it waits again when it is requeued."""
    delivery(Grouped, max_deliveries=1, on_expired=PublishTo("no queue collects this"))
    with group_of(alias) as group:
        group.send(Grouped, {"n": 1})
        group.send(Grouped, {"n": 2}, delay=timedelta(hours=1))
    with Grouped.receive(using=alias) as batch:
        token = Grouped.objects.using(alias).get().lease_token
        apply_verdict.fail(Grouped, alias, batch[0].seq, ValueError("test"), consumer=None, token=token)
    assert group.counts() == (1, 0, 1)

    assert poison_operations.requeue(PoisonMessage.objects.using(alias).all()) == 1

    assert group.counts() == (2, 0, 0)


@only_on_postgresql
def test_a_requeue_locks_groups_in_the_order_of_acks(alias: str) -> None:
    """Each waits for the middle one of three groups; what it has locked until then must not be what the other one locks
    afterwards."""
    groups = sorted((group_of(alias) for _ in range(3)), key=lambda group: group.id)
    for group in groups:
        with group:
            group.send(Grouped, {"poison": str(group.id)})
            group.send(Grouped, {"ack": str(group.id)})
    seqs = list(Grouped.objects.using(alias).order_by("seq").values_list("seq", flat=True))
    assert control.move_to_poison(Grouped, seqs[::2], reason="test", using=alias) == 3
    poison = PoisonMessage.objects.using(alias).all()
    errors: list[BaseException] = []

    def run(step: Callable[[], Any]) -> None:
        try:
            step()
        except BaseException as error:
            errors.append(error)
        finally:
            connections.close_all()

    def waiting(count: int) -> bool:
        with connections[alias].cursor() as cursor:
            cursor.execute("SELECT count(DISTINCT pid) FROM pg_locks WHERE NOT granted")
            return bool(cursor.fetchone()[0] == count)

    with Grouped.receive(3, using=alias):
        (token,) = set(Grouped.objects.using(alias).values_list("lease_token", flat=True))
        steps: tuple[Callable[[], Any], ...] = (
            lambda: poison_operations.requeue(poison),
            lambda: Grouped.ack(seqs[1::2], client=token, using=alias),
        )
        threads = [threading.Thread(target=run, args=(step,)) for step in steps]
        with transaction.atomic(using=alias):
            MessageGroup.objects.using(alias).select_for_update().get(pk=groups[1].id)
            for number, thread in enumerate(threads, 1):
                thread.start()
                eventually(lambda number=number: waiting(number))
        for thread in threads:
            thread.join()

    assert errors == []
    assert [group.counts() for group in groups] == [(1, 1, 0)] * 3


def test_a_repeatable_read_transaction_sees_a_group_complete(alias: str) -> None:
    """A caller that polls in it would wait for ever."""
    with group_of(alias) as group:
        group.send(Grouped, {"n": 1})
    with transaction.atomic(using=alias):
        with connections[alias].cursor() as cursor:
            cursor.execute("SET TRANSACTION ISOLATION LEVEL REPEATABLE READ")
        assert not group.is_complete

        in_another_thread(alias, lambda: end(alias))

        assert (group.is_complete, group.counts()) == (True, (0, 1, 0))


def test_a_group_is_opened_once(alias: str) -> None:
    with Group(on_complete=Leased.prepare("whole", using=alias), using=alias) as group:
        pass

    with pytest.raises(InvalidMessage, match=f"Group {group.id} has been opened before"):
        group.open()


def test_a_batch_is_received_once(alias: str) -> None:
    received = Leased.receive(using=alias)
    with received:
        pass

    with pytest.raises(QueueError, match=r"call Leased.receive\(\) again"), received:
        pass
