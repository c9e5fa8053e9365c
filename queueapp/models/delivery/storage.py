"""Options of ``class Delivery`` about the table of the queue, and where delayed messages are stored."""

from __future__ import annotations

from typing import Any

from ...options import Option


def _are_aliases(value: Any) -> bool:
    return all(isinstance(one, str) and one and len(one) <= 60 for one in value)


OPTIONS: tuple[Option, ...] = (
    Option(
        "delayed_in",
        tuple,
        (),
        "Aliases of other databases that may keep delayed messages for this queue: `send(..., delay=..., "
        "delayed_in=alias)` "
        "stores one in that database's transaction, and a dispatcher forwards it, at least once.",
        accept=_are_aliases,
    ),
    Option(
        "body_string",
        bool,
        False,
        "Add a generated column with the body as readable text (NServiceBus' CreateMessageBodyComputedColumn).",
    ),
    Option(
        "fillfactor",
        int,
        None,
        "PostgreSQL: how full pages are filled. None: by the semantics. 45 for AT_LEAST_ONCE, so that a lease "
        "fits on the page of its row: no index entry and a quarter of the WAL, for half-empty pages; 90 for "
        "TRANSACTIONAL, "
        "100 for AT_MOST_ONCE.",
        low=10,
        high=100,
        optional=True,
    ),
    Option(
        "autovacuum_threshold",
        int,
        1000,
        "PostgreSQL: autovacuum starts after this many dead rows, for any size of the table.",
        low=1,
        high=1_000_000_000,
    ),
)  # fmt: skip


class StorageOptions:
    """The types of these options."""

    delayed_in: tuple[str, ...]
    body_string: bool
    fillfactor: int | None
    autovacuum_threshold: int
