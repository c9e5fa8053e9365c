"""A message that names no recipient though several consumers want it: who met it puts a copy for each in its place.

A foreign producer, Spark, plain SQL, or a delayed message that is due know no consumers. Whoever claims such a message first
asks who subscribes now (once a claim), and never runs a handler for it: original and copies change places in one statement,
so a process that dies at any moment leaves either the one or the others. One that only one consumer wants is handled as it is.

What was leased is replaced under its token. What would be deleted by its claim is rolled back first, and then replaced, if
nobody else was faster: the copies are claimed as any other message.
"""

from __future__ import annotations

import uuid
from collections.abc import Iterable, Sequence

from django.db import Error, connections, transaction

from queueapp.services.connection_timeouts import ResponseDeadline
from queueapp.sql.claims import HEADERS, MAX_SEQ, PRIORITY, RECIPIENT, SEQ, Claimed, SeqRange

from .queue_state import QueueState

#: So many are replaced at once where they are not claimed in batches.
MOST = 500

#: Seqs by the consumers that are to have a copy.
Parts = dict[tuple[str, ...], list[int]]


def parts_of(state: QueueState, rows: Iterable[Claimed]) -> Parts:
    """Of what was claimed what is to be replaced; asks who subscribes now where something names no recipient."""
    unaddressed = [(row[SEQ], row[HEADERS]) for row in rows if not row[RECIPIENT]]
    if not unaddressed:
        return {}
    state.handlers.learn(connections[state.alias])
    return _sorted(state, unaddressed)


def replace_leased(state: QueueState, rows: Sequence[Claimed], token: uuid.UUID) -> list[Claimed]:
    """Replace what several want of a leased batch; returns the others."""
    connection = connections[state.alias]
    while True:
        try:
            with ResponseDeadline(connection):
                parts = parts_of(state, rows)
                if parts:
                    _replace(state, parts, token)
            break
        except Error as error:
            # After a commit without an answer nothing is leased under the token any more, and nothing is done.
            if not state.retry_after(error, state.breaker, connection):
                raise
    if not parts:
        return list(rows)
    state.copied()
    gone = {seq for seqs in parts.values() for seq in seqs}
    return [row for row in rows if row[SEQ] not in gone]


def replace_free(state: QueueState, parts: Parts) -> None:
    """Replace these, whose claim was rolled back; what somebody else has taken since then is his."""
    with ResponseDeadline(connections[state.alias]):
        _replace(state, parts, None)
    state.copied()


def replace_from(state: QueueState, row: Claimed) -> None:
    """The same from a message on that was claimed alone: what follows came from the same producer as a rule."""
    connection = connections[state.alias]
    with ResponseDeadline(connection):
        stretch = SeqRange(row[SEQ], MAX_SEQ, priority=row[PRIORITY])
        parts = _sorted(state, state.sql.claims.read_heads(connection, stretch, MOST))
        if parts:
            _replace(state, parts, None)
    state.copied()


def _sorted(state: QueueState, heads: Iterable[tuple[int, str]]) -> Parts:
    parts: Parts = {}
    for seq, headers in heads:
        names = state.handlers.wanted_by(headers)
        if names:
            parts.setdefault(names, []).append(seq)
    return parts


def _replace(state: QueueState, parts: Parts, token: uuid.UUID | None) -> None:
    connection = connections[state.alias]
    with transaction.atomic(using=state.alias):
        for names, seqs in parts.items():
            state.sql.fanout.replace_by_copies(connection, sorted(seqs), names, token)
