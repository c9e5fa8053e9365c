"""Where reading begins: a point that a user names, as a position that nothing can come in before."""

from __future__ import annotations

import logging
from collections.abc import Sequence
from datetime import datetime
from typing import Any, NamedTuple

from ..errors import BookmarkNotFound
from ..models.delivery.journal import EPOCH, NOW, Point
from ..sql.journal import BEGINNING, JournalSql, Position

log = logging.getLogger("queueapp")


class Start(NamedTuple):
    """What stands behind ``after`` is read, but for what was published before ``not_before``, and ``passed_over``: entries that
    were committed before reading began though they stand behind one that may still be."""

    after: Position
    not_before: datetime | None = None
    passed_over: frozenset[int] = frozenset()


def start_of(
    connection: Any, journal: JournalSql, topics: Sequence[str], point: Point, *, inclusive: bool, missing: str = EPOCH
) -> Start:
    """Where reading these topics begins for a point. ``inclusive``: at a bookmark, not behind it. ``missing``: what stands for
    a bookmark that is not there: epoch, now, or fail, which raises BookmarkNotFound."""
    if isinstance(point, datetime):
        return Start(BEGINNING, point)
    if isinstance(point, int):
        found = journal.find(connection, point)
        if found is not None:
            return Start(Position(found.txid, found.seq - 1) if inclusive else found)
        if missing not in (EPOCH, NOW):
            raise BookmarkNotFound(point)
        log.warning(
            "The journal in %r has no entry %d: reading begins with %r instead.", connection.alias, point, missing
        )
        point = missing
    if point == EPOCH:
        return Start(BEGINNING)
    horizon = journal.horizon(connection)
    return Start(horizon, None, frozenset(journal.beyond(connection, topics, horizon)))
