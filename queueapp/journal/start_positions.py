"""Converts a start point that a user names to a position that no later commit can precede."""

from __future__ import annotations

import logging
from collections.abc import Sequence
from datetime import datetime
from typing import Any, NamedTuple

from ..errors import BookmarkNotFound
from ..models.delivery.topics import EPOCH, NOW, Point
from ..sql.journal import BEGINNING, JournalSql, Position

log = logging.getLogger("queueapp")


class Start(NamedTuple):
    """Read what follows ``after``, except entries published before ``not_before`` and those in ``passed_over``: entries
    committed before reading began although they follow one that may still be committed."""

    after: Position
    not_before: datetime | None = None
    passed_over: frozenset[int] = frozenset()


def start_of(
    connection: Any, journal: JournalSql, topics: Sequence[str], point: Point, *, inclusive: bool, missing: str = EPOCH
) -> Start:
    """Where reading these topics begins for a point. ``inclusive``: at a bookmark, not after it. ``missing``: the
    replacement of a bookmark that does not exist: epoch, now, or fail, which raises BookmarkNotFound."""
    if isinstance(point, datetime):
        return Start(BEGINNING, point)
    if isinstance(point, int):
        found = journal.find(connection, point)
        if found is not None:
            return Start(Position(found.txid, found.seq - 1) if inclusive else found)
        if missing not in (EPOCH, NOW):
            raise BookmarkNotFound(point)
        log.warning(
            "The journal in %r has no entry %d; reading begins at %r instead.", connection.alias, point, missing
        )
        point = missing
    if point == EPOCH:
        return Start(BEGINNING)
    horizon = journal.horizon(connection)
    return Start(horizon, None, frozenset(journal.beyond(connection, topics, horizon)))
