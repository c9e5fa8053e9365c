"""Sends: into the caller's transaction, all or nothing, by whichever connection, and only to queues that exist."""

from __future__ import annotations

import threading
from typing import Any

import pytest
from django.db import connections, transaction

from queueapp import InvalidMessage, QueueNotFound
from queueapp.registry import queues
from queueapp.sql import backend_of
from tests.conformance.endpoint import Endpoint, Note, modes
from tests.in_process_worker import DEADLINE, eventually


@pytest.fixture
def missing_table(endpoint: Endpoint, monkeypatch: pytest.MonkeyPatch) -> Endpoint:
    """The queue of this test has a model, but no table."""
    monkeypatch.setattr(endpoint.queue._meta, "db_table", "never_migrated")
    return endpoint


@modes("NRS")
def test_when_dispatching_messages_should_store_them_in_order(endpoint: Endpoint) -> None:
    sent = [endpoint.send(n) for n in range(3)]
    endpoint.send_many(2)

    stored = list(endpoint.rows.order_by("seq").values_list("id", flat=True))

    assert stored[:3] == sent
    assert len(set(stored)) == 5


@modes("NRS")
def test_when_dispatching_one_that_is_invalid_should_store_none_of_them(endpoint: Endpoint) -> None:
    bodies = [Note(endpoint.tag, 1), Note(endpoint.tag, 2), {"not JSON": object()}]

    with pytest.raises(InvalidMessage):
        endpoint.queue.send_many(bodies, using=endpoint.alias)

    assert endpoint.is_empty()
    endpoint.send(3)
    assert endpoint.rows.count() == 1, "the connection is as good as before"


@modes("NRS")
def test_when_one_destination_is_missing_should_store_nothing_of_the_transaction(
    endpoint: Endpoint, monkeypatch: pytest.MonkeyPatch
) -> None:
    def send_to_both() -> None:
        with transaction.atomic(using=endpoint.alias):
            endpoint.send(1)
            monkeypatch.setattr(endpoint.queue._meta, "db_table", "never_migrated")
            endpoint.send(2)

    with pytest.raises(QueueNotFound):
        send_to_both()
    monkeypatch.undo()

    assert endpoint.is_empty()


@modes("NRS")
@pytest.mark.parametrize("isolated", [False, True])
def test_when_queue_does_not_exist_should_name_it(missing_table: Endpoint, isolated: bool) -> None:
    with pytest.raises(QueueNotFound) as raised:
        missing_table.send(1, isolated=isolated)

    assert raised.value.name == "never_migrated"


@modes("NRS")
def test_when_bulk_queue_does_not_exist_should_name_it(missing_table: Endpoint) -> None:
    with pytest.raises(QueueNotFound) as raised:
        missing_table.send_many(2)

    assert raised.value.name == "never_migrated"


@modes("NRS")
def test_when_sending_in_a_transaction_should_not_deliver_before_the_commit(endpoint: Endpoint) -> None:
    endpoint.handle()
    worker = endpoint.start()
    with transaction.atomic(using=endpoint.alias):
        endpoint.send(1)
        peeks = worker.pump.stats.peeks
        eventually(lambda: worker.pump.stats.peeks > peeks + 1)
        assert endpoint.calls == []

    eventually(lambda: endpoint.numbers == [1])


@modes("NRS")
def test_when_sending_in_a_transaction_that_rolls_back_should_deliver_nothing(endpoint: Endpoint) -> None:
    with transaction.atomic(using=endpoint.alias):
        endpoint.send(1)
        endpoint.send_many(10)
        transaction.set_rollback(True, using=endpoint.alias)

    assert endpoint.is_empty()


@modes("NRS")
def test_when_sending_isolated_should_deliver_whatever_becomes_of_the_transaction(endpoint: Endpoint) -> None:
    with transaction.atomic(using=endpoint.alias):
        endpoint.send(1, isolated=True)
        transaction.set_rollback(True, using=endpoint.alias)

    assert endpoint.rows.count() == 1


@modes("NRS")
def test_when_sending_in_a_savepoint_that_rolls_back_should_deliver_the_rest(endpoint: Endpoint) -> None:
    with transaction.atomic(using=endpoint.alias):
        kept = endpoint.send(1)
        with transaction.atomic(using=endpoint.alias):
            endpoint.send(2)
            transaction.set_rollback(True, using=endpoint.alias)

    assert endpoint.rows.get().id == kept


@modes("NRS")
def test_when_transaction_rolled_back_should_send_in_the_next_one(endpoint: Endpoint) -> None:
    # psycopg forgets all prepared statements after a rollback, the one of the send among them.
    for number in range(3):
        with transaction.atomic(using=endpoint.alias):
            assert not endpoint.is_empty() or number == 0
            endpoint.send(number)
            transaction.set_rollback(number == 1, using=endpoint.alias)

    assert endpoint.rows.count() == 2


@modes("NRS")
def test_when_a_number_is_committed_late_should_be_received_all_the_same(endpoint: Endpoint) -> None:
    # Its seq is below what was received meanwhile: only the rescan behind the floor finds it.
    endpoint.handle()
    endpoint.start()
    with transaction.atomic(using=endpoint.alias):
        endpoint.send(1)
        _send_on_another_connection(endpoint, 2)
        eventually(lambda: endpoint.numbers == [2])

    eventually(lambda: endpoint.numbers == [1, 2])


def _send_on_another_connection(endpoint: Endpoint, number: int) -> None:
    def work() -> None:
        endpoint.send(number)
        connections.close_all()

    thread = threading.Thread(target=work)
    thread.start()
    thread.join(DEADLINE)


@modes("NRS")
def test_when_recoverable_column_is_removed_should_go_on_sending_and_receiving(endpoint: Endpoint) -> None:
    connection = connections[endpoint.alias]
    with connection.schema_editor() as editor:
        editor.remove_field(endpoint.queue, endpoint.queue._meta.get_field("recoverable"))
    try:
        endpoint.handle()
        endpoint.send(1)
        endpoint.send_many(1)
        endpoint.start()

        eventually(lambda: endpoint.numbers == [0, 1])
        endpoint.wait_until_empty()
    finally:
        endpoint.close()
        with connection.schema_editor() as editor:
            editor.add_field(endpoint.queue, endpoint.queue._meta.get_field("recoverable"))


@modes("NRS")
def test_when_queue_is_named_by_its_table_should_find_it(endpoint: Endpoint) -> None:
    assert queues.find(endpoint.queue._meta.db_table) is endpoint.queue
    assert queues.find(endpoint.queue._meta.label.upper()) is endpoint.queue
    with pytest.raises(QueueNotFound, match="nowhere"):
        queues.find("nowhere")


@modes("NRS")
def test_when_clocks_differ_should_use_the_clock_of_the_database(endpoint: Endpoint, monkeypatch: Any) -> None:
    monkeypatch.setattr("time.time", lambda: 0.0)
    endpoint.send(1)
    monkeypatch.undo()

    connection = connections[endpoint.alias]
    age = backend_of(connection).now(connection) - endpoint.rows.get().enqueued_at
    assert abs(age.total_seconds()) < DEADLINE
