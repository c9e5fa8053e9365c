"""A second connection outside the caller's transaction, for rows that must be committed even if that transaction rolls
back.

``send(..., isolated=True)`` uses it. One spare connection is kept per thread and database, so that an isolated send
costs a round trip and not a login. Django's registry does not know it: it is an attribute of the thread's ordinary
connection and shares its lifetime. Closing that one (``connections.close_all()``, the end of a request or of the tests)
closes it as well, and ``close_old_connections`` (CONN_MAX_AGE, CONN_HEALTH_CHECKS) checks it as well. A forked child
abandons its parent's.
"""

from __future__ import annotations

import os
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any, NamedTuple, TypeVar

from django.db import connections, transaction

from .. import inline
from ..sql import backend_of

_ResultT = TypeVar("_ResultT")

_HELD, _TIED = "_queueapp_spare", "_queueapp_tied"


class _Spare(NamedTuple):
    connection: Any
    #: The process id that opened it.
    process: int


#: Connections of the parent process. Closing one would end the parent's session, and so may its destructor.
_of_a_parent: list[Any] = []


@contextmanager
def isolated_connection(alias: str) -> Iterator[Any]:
    """A second Django connection to the same database, in autocommit. Not for use across threads."""
    main = connections[alias]
    if inline.is_rehearsing():
        yield main  # what it commits would outlive the rehearsal
        return
    spare = _held_by(main)
    if spare is None or spare.settings_dict["NAME"] != main.settings_dict["NAME"]:
        _close_spare_of(main)
        spare = main.copy()
        _hang_on(main, spare)
    try:
        yield spare
    except BaseException:
        _close_spare_of(main)
        raise


def close_isolated(alias: str | None = None) -> None:
    """Close this thread's spare connections (one database's, or all)."""
    for main in [connections[alias]] if alias else connections.all(initialized_only=True):
        _close_spare_of(main)


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


def in_transaction(connection: Any) -> bool:
    """Whether what is written on this connection waits for a commit of its user: in ``atomic()``, or without
    autocommit."""
    return bool(connection.in_atomic_block or not connection.get_autocommit())


def outside_transaction(alias: str, work: Callable[[], _ResultT]) -> _ResultT:
    """Call ``work`` outside of a transaction that this thread has open: in a thread with a connection of its own."""
    if not in_transaction(connections[alias]) or inline.is_rehearsing():
        return work()
    return in_another_thread(alias, work)


def as_of_now(alias: str, read: Callable[[], _ResultT]) -> _ResultT:
    """Read beside the open transaction if that does not see what others commit."""
    connection = connections[alias]
    if in_transaction(connection) and backend_of(connection).sessions.has_fixed_snapshot(connection):
        return outside_transaction(alias, read)
    return read()


def in_another_thread(alias: str, work: Callable[[], _ResultT]) -> _ResultT:
    """Call ``work`` in a thread of its own, which has a connection of its own."""
    result: list[_ResultT] = []
    failure: list[BaseException] = []

    def run() -> None:
        try:
            result.append(work())
        except BaseException as error:
            failure.append(error)
        finally:
            connections[alias].close()

    thread = threading.Thread(target=run, name="queueapp-outside-transaction")
    thread.start()
    thread.join()
    if failure:
        raise failure[0]
    return result[0]


def _held_by(main: Any) -> Any:
    """The spare connection of this one; None: there is none, or it is the parent process'."""
    held: _Spare | None = main.__dict__.get(_HELD)
    if held is None:
        return None
    if held.process != os.getpid():
        _of_a_parent.append(main.__dict__.pop(_HELD))
        return None
    return held.connection


def _close_spare_of(main: Any) -> None:
    spare = _held_by(main)
    if spare is not None:
        del main.__dict__[_HELD]
        spare.close()


def _hang_on(main: Any, spare: Any) -> None:
    if not main.__dict__.setdefault(_TIED, False):
        _tie(main)
        main.__dict__[_TIED] = True
    main.__dict__[_HELD] = _Spare(spare, os.getpid())


def _tie(main: Any) -> None:
    """Close and check the spare connection together with this one. Django has no signal for either."""
    close_main, look_after_main = main.close, main.close_if_unusable_or_obsolete

    def close() -> None:
        main.validate_thread_sharing()
        try:
            _close_spare_of(main)
        finally:
            close_main()

    def close_if_unusable_or_obsolete() -> None:
        look_after_main()
        spare = _held_by(main)
        if spare is not None:
            spare.close_if_unusable_or_obsolete()

    main.close, main.close_if_unusable_or_obsolete = close, close_if_unusable_or_obsolete
