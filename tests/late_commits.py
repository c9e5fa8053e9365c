"""Messages whose seq is taken long before they are committed."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

from django.db import connection, connections, transaction

from tests.in_process_worker import DEADLINE


def jump(queue: Any, seq: int) -> None:
    """The next message has a higher number than this."""
    if connection.vendor == "microsoft":
        statement, parameters = "DBCC CHECKIDENT (%s, RESEED, %s)", [queue._meta.db_table, seq]
    else:
        statement, parameters = "SELECT setval(pg_get_serial_sequence(%s, 'seq'), %s)", [queue._meta.db_table, seq]
    with connection.cursor() as cursor:
        cursor.execute(statement, parameters)


@contextmanager
def committed_late(send: Callable[[], object]) -> Iterator[Callable[[], None]]:
    """Send in a transaction that stays open until what is yielded is called, or to the end of the block."""
    sent, commit = threading.Event(), threading.Event()

    def run() -> None:
        with transaction.atomic():
            send()
            sent.set()
            commit.wait(DEADLINE)
        connections.close_all()

    sender = threading.Thread(target=run)
    sender.start()

    def end() -> None:
        commit.set()
        sender.join()

    try:
        assert sent.wait(DEADLINE)
        yield end
    finally:
        end()
