"""What a session is left in: the interface to what a driver knows beneath Django's bookkeeping.

Whoever hands a connection to somebody else's code looks at it afterwards, once per message. So each look takes well below
a microsecond and asks nobody, but where it says so.
"""

from __future__ import annotations

import abc
import contextlib
import enum
from typing import Any


class SessionState(enum.Enum):
    """What is open on a session, whatever Django thinks."""

    IDLE = "idle"  #: no transaction; each statement commits by itself
    MANUAL = "manual"  #: no transaction, and the next statement begins one that nobody may commit: autocommit is off
    IN_TRANSACTION = "in transaction"
    FAILED = "failed"  #: in a transaction that can only be rolled back; COMMIT would answer ROLLBACK
    BUSY = "busy"  #: in the middle of a statement, a COPY or a pipeline
    GONE = "gone"  #: there is no session: never opened, closed or lost


class Sessions(abc.ABC):
    """What a ``Backend`` knows about sessions."""

    @abc.abstractmethod
    def session_state(self, connection: Any, *, ask: bool = False) -> SessionState:
        """What is open on a Django connection's session, by what this side of the line knows. ``ask``: where that is not
        everything, ask the server, one round trip. Never raises a database error."""

    @abc.abstractmethod
    def hung_up(self, connection: Any) -> bool:
        """Whether the server has ended an idle session and nobody has noticed yet. False where the driver does not tell."""

    @abc.abstractmethod
    def transaction_mark(self, connection: Any) -> Any:
        """Something to recognize the open transaction by."""

    @abc.abstractmethod
    def may_be_another(self, connection: Any, mark: Any) -> bool:
        """Whether the open transaction may not be the marked one, because somebody ended that in SQL of his own and began
        anew. True is a suspicion (a rollback to a savepoint raises it as well); False is no proof: see each database."""

    @abc.abstractmethod
    def changes_session(self, sql: str, params: Any = None) -> bool:
        """Whether a statement of somebody's leaves something on its session that outlives its transaction, going by its text:
        settings, temporary tables, locks of the session. A statement that does so inside of a function is not known by that.
        ``params``, of one execution, may say that one which looks like a change is none; never the reverse."""

    @abc.abstractmethod
    def may_be_several(self, sql: str) -> bool:
        """Whether a long text may hold more than the statement that it begins with. At the speed of ``in``."""

    def settings_of_session(self, connection: Any) -> tuple[Any, ...]:
        """What this side of the line knows of the session's settings without asking: something to compare with."""
        return ()

    def abandon(self, raw: Any) -> None:
        """Close a driver's connection of which nobody knows what it is in the middle of; the server rolls back. Never
        raises."""
        with contextlib.suppress(Exception):
            raw.close()
