"""Messages whose seq was given long before they can be seen, and which no number of a transaction tells of: what has a seq may
have none yet. (Who took all below a number for over hid such messages for twenty seconds.)"""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator
from typing import Any

import pytest
from django.db import connection, connections

from queueapp import consumer, messages
from tests.databases import only_on_postgresql
from tests.in_process_worker import Worker, eventually, real_commits
from tests.testapp.messages import Nop
from tests.testapp.models import Leased

pytestmark = [real_commits, only_on_postgresql, pytest.mark.usefixtures("no_consumers")]
_GATE = 7_401


@pytest.fixture
def handled(settings: Any, start_worker: Callable[..., Worker]) -> list[int]:
    """What a worker has handled that looks ten times a second."""
    settings.QUEUEAPP = {"PEEK_DELAY": 0.1}
    numbers: list[int] = []

    @consumer(Leased, name="tests")
    def handle(message: Nop) -> None:
        numbers.append(message.number)

    start_worker(Leased)
    return numbers


@pytest.fixture
def slow_trigger() -> Iterator[None]:
    """Inserts of messages with the number -1 wait, before the row is stored, until the test lets go of a lock."""
    with connection.cursor() as cursor:
        cursor.execute(
            "CREATE FUNCTION late() RETURNS trigger LANGUAGE plpgsql AS $$ BEGIN "
            "IF position('-1' in convert_from(NEW.body, 'UTF8')) > 0 THEN "
            f"PERFORM pg_advisory_xact_lock_shared({_GATE}); END IF; RETURN NEW; END $$"
        )
        cursor.execute("CREATE TRIGGER late BEFORE INSERT ON testapp_leased FOR EACH ROW EXECUTE FUNCTION late()")
        cursor.execute(f"SELECT pg_advisory_lock({_GATE})")
    yield
    with connection.cursor() as cursor:
        cursor.execute(f"SELECT pg_advisory_unlock({_GATE})")  # where the test has not come to it; else a warning
        cursor.execute("DROP TRIGGER late ON testapp_leased")
        cursor.execute("DROP FUNCTION late()")


def ten_others_are_handled(handled: list[int]) -> None:
    """One by one, so that floors rise and looks come by."""
    for number in range(10):
        Leased.send(Nop(number, ""))
        eventually(lambda wanted=number: wanted in handled)


def test_a_send_whose_trigger_waits_is_found_soon(handled: list[int], slow_trigger: None) -> None:
    def send() -> None:
        Leased.send(Nop(-1, ""))
        connections.close_all()

    sender = threading.Thread(target=send)
    sender.start()
    with connection.cursor() as cursor:

        def waits() -> bool:
            cursor.execute(
                "SELECT count(*) > 0 FROM pg_locks WHERE locktype = 'advisory' AND NOT granted AND objid = %s", [_GATE]
            )
            return bool(cursor.fetchone()[0])

        eventually(waits)
        ten_others_are_handled(handled)
        cursor.execute("SELECT pg_advisory_unlock(%s)", [_GATE])
        sender.join()

    eventually(lambda: handled == [*range(10), -1], 10)


def test_a_copy_that_is_not_at_its_end_is_found_soon(handled: list[int]) -> None:
    """``send_many`` is one: its rows have their seqs before the first of them is stored."""
    before, numbers = last_seq(), range(-100, 0)
    other = connection.copy()
    other.inc_thread_sharing()
    other.ensure_connection()
    try:
        with other.connection.cursor().copy("COPY testapp_leased (id, headers, body) FROM STDIN") as copy:
            for number in numbers:
                headers, body = messages.encode(Nop(number, "x" * 1_000))
                copy.write_row((messages.new_id(), headers, body))
            eventually(lambda: last_seq() > before)
            ten_others_are_handled(handled)
    finally:
        other.close()

    eventually(lambda: sorted(handled) == [*numbers, *range(10)], 10)


def last_seq() -> int:
    """The seq that was given last."""
    with connection.cursor() as cursor:
        cursor.execute("SELECT pg_sequence_last_value(pg_get_serial_sequence('testapp_leased', 'seq')::regclass)")
        return cursor.fetchone()[0] or 0
