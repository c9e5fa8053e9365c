"""A connection outside the caller's transaction, for what must be written whatever becomes of that transaction.

``send(..., isolated=True)`` uses it: a message that goes out even if the handler fails. One spare connection is kept
per thread and database, so that an isolated send costs a round trip and not a login.
"""

from __future__ import annotations

import threading
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

from django.core.signals import request_finished
from django.db import connections, transaction

_spare = threading.local()


@contextmanager
def isolated_connection(alias: str) -> Iterator[Any]:
    """A second Django connection to the same database, in autocommit. Not for use across threads."""
    held: dict[str, Any] = _spare.__dict__.setdefault("held", {})
    main = connections[alias]
    connection = held.get(alias)
    if connection is None or connection.settings_dict["NAME"] != main.settings_dict["NAME"]:
        connection = held[alias] = main.copy()
    try:
        yield connection
    except BaseException:
        close_isolated(alias)
        raise


def close_isolated(alias: str | None = None) -> None:
    """Close this thread's spare connections (one database's, or all)."""
    held: dict[str, Any] = _spare.__dict__.get("held", {})
    for name in [alias] if alias else list(held):
        connection = held.pop(name, None)
        if connection is not None:
            connection.close()


@contextmanager
def atomic_on(connection: Any) -> Iterator[None]:
    """``transaction.atomic`` for a connection that may be a spare one, which Django's registry does not know."""
    if connections[connection.alias] is connection:
        with transaction.atomic(using=connection.alias):
            yield
        return
    connection.set_autocommit(False)
    try:
        yield
        connection.commit()
    except BaseException:
        connection.rollback()
        raise
    finally:
        connection.set_autocommit(True)


def _close_after_request(**_: Any) -> None:
    close_isolated()


# A web thread lives long and rarely sends isolated: its spare connection is not kept between requests.
request_finished.connect(_close_after_request, dispatch_uid="queueapp.isolation")
