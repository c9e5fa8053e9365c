"""How often a message may be tried, handed out and given back: three counts, each with its limit (``attempts``,
``max_deliveries``, ``max_cancels``).

*Deliveries* count hand-outs. A lease counts one, and it is taken off again when the message is given back unstarted; of
a TRANSACTIONAL receive, which leaves nothing behind when it is rolled back, those are counted whose handler failed.
*Cancels* count what was given back on purpose. *Attempts* count handlers that started: the failed ones are in the
history that the row carries (``failures.history``), also those that took their process with them, which its supervisor
writes down. They have no column, and are not deliveries less cancels either: that would count deliveries
without an ack as attempts, because a whole process tree died or a give-back did not arrive in time, and most of those
messages were only waiting for their turn. A fresh message has no history, so it costs a claim nothing to return it.

Unacknowledged deliveries are bounded all the same, or a message that kills its process would return for ever: there may
be as many as attempts, and ``MAX_UNACKNOWLEDGED`` more, which is how often a message may be lost beside the one that
kills (once in a large batch, once in a small one: ``workers.receiving.quarantine``). A handler sees them as attempts
(``Context.attempt``): it had better know that it may have begun before."""

from __future__ import annotations

import sys
from collections.abc import Iterable
from typing import Any

from ..conf import settings
from ..messages import counted_attempts, counts_a_death
from ..models.delivery.options import MAX_CANCELS, MAX_DELIVERIES
from ..sql.claims import CANCELS, DELIVERIES, FAILURES, HEADERS, Claimed
from ..sql.message_columns import Row
from .history import attempts_of, is_moved_back, records_a_death

#: So many hand-outs of a message may end without a word, beside those that count like attempts.
MAX_UNACKNOWLEDGED = 2


class LimitReached(Exception):
    """A message is not handed to its handler any more: the "exception" of an attempt that was not begun. ``reasons``:
    the limits of its queue that it has reached, if it is for them."""

    def __init__(self, text: str, reasons: tuple[str, ...] = ()) -> None:
        super().__init__(text)
        self.reasons = reasons


def attempt_of(claimed: Claimed, *, keeps_counts: bool) -> int:
    """Which attempt it is to handle a message that was just claimed: 1 for the first."""
    return 1 + (attempts_of(claimed[FAILURES]) if keeps_counts else counted_attempts(claimed[HEADERS]))


def check_limits(claimed: Claimed, attempt: int, attempts: int, delivery: Any, *, leased: bool) -> LimitReached | None:
    """Why a message that was just claimed is not to be handled, if so. ``attempts``: how often its handler may start;
    ``sys.maxsize`` where a policy decides. ``leased``: this hand-out is counted in the row."""
    before = claimed[DELIVERIES] - leased
    if is_moved_back(claimed[FAILURES], before):
        return None  # it gets one run more, whatever its counts are
    if delivery.max_deliveries and before >= delivery.max_deliveries:
        return LimitReached(f"{MAX_DELIVERIES}: handed out {before} times", (MAX_DELIVERIES,))
    if attempt > attempts:
        return LimitReached(f"It failed {attempt - 1} of {attempts} attempts; its handler is not run again.")
    lost = unacknowledged_deliveries(claimed, attempt, leased=leased)
    if lost >= MAX_UNACKNOWLEDGED + (attempts if attempts < sys.maxsize else settings.ATTEMPTS):
        return LimitReached(f"It was handed out {lost} times and never ended; its handler is not run again.")
    return None


def unacknowledged_deliveries(claimed: Claimed, attempt: int, *, leased: bool) -> int:
    """How many earlier deliveries ended without an acknowledgement: their handlers may have begun."""
    return max(0, claimed[DELIVERIES] - leased - claimed[CANCELS] - (attempt - 1))


def suspicion_level(claimed: Claimed, attempt: int, *, leased: bool, keeps_counts: bool) -> int:
    """How much speaks for it that a message that was just claimed has killed its process: 0 nothing; 1 it was in a
    large batch without an ack; 2 it was one of few, or in flight in a process that died, as a supervisor recorded."""
    if records_a_death(claimed[FAILURES]) if keeps_counts else counts_a_death(claimed[HEADERS]):
        return 2
    return min(2, unacknowledged_deliveries(claimed, attempt, leased=leased))


def reached(delivery: Any, deliveries: int, cancels: int) -> tuple[str, ...]:
    """Which limits of its queue a message has reached whose delivery ends without an ack; its cancels count that end,
    if it was one."""
    found = [MAX_CANCELS] if delivery.max_cancels and cancels >= delivery.max_cancels else []
    found += [MAX_DELIVERIES] if delivery.max_deliveries and deliveries >= delivery.max_deliveries else []
    return tuple(found)


def in_words(row: Row, reasons: Iterable[str]) -> str:
    """What a message has come to that reached these limits; '' for others."""
    texts = {MAX_CANCELS: f"given back {row.cancels} times", MAX_DELIVERIES: f"handed out {row.deliveries} times"}
    return " and ".join(texts[reason] for reason in reasons if reason in texts)
