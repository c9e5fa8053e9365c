"""How many handlers of one consumer run at once in this process (``@consumer(..., concurrency=N)``).

A receive task runs one handler at a time, so tasks are what is counted. One takes a place of the consumer before a claim that
may bring messages of it, since what is claimed is in hand:

    (none) --before a claim, a place is free--> taken --the claim brought none of it--> (none)
           --none is free--> (none): the claim leaves the consumer's messages where they are, and takes those of the others
    taken  --none of its messages waits in hand, and a handler of another consumer begins--> (none)
           --what waited was given back--> (none)
           --the task has done--> (none)

Nobody waits for a place. Who was refused one is called once it is free: the pump looks again.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager
from typing import Any

from queueapp.consuming.registration import Registration
from queueapp.sql.claims import MAX_SEQ, RECIPIENT, SEQ, Claimed, SeqRange

from .claim_tracker import ActiveClaim

Call = Callable[[Any, Any], None]


class Permits:
    """The places that one task has, by consumer, each with those of its messages that wait in hand."""

    __slots__ = ("running", "waiting")

    def __init__(self) -> None:
        self.waiting: dict[str, set[int]] = {}
        #: The consumer whose handler was begun last: it may be called again with what its call failed on.
        self.running = ""


class ConsumerLimiter:
    """The places of all consumers of one queue that have a limit."""

    def __init__(self, registrations: Iterable[Registration]) -> None:
        some = list(registrations)
        self._most: Mapping[str, int] = {one.name: one.options["concurrency"] for one in some}
        #: By what its messages are addressed to.
        self._consumer = {name: one.name for one in some for name in (one.name, *one.aliases)}
        self._recipients = {one.name: (one.name, *one.aliases) for one in some}
        self._hands: dict[int, Permits] = {}
        self._taken = dict.fromkeys(self._most, 0)
        #: Somebody wanted a place and got none, or did not look for messages because there was none.
        self._refused: set[str] = set()
        #: A look behind the floors left messages out.
        self._passed_over = False
        #: Told when a place is free that somebody wanted, and whether messages behind the floors were left out meanwhile.
        self.freed: Callable[[bool], None] = _nobody
        self._lock = threading.Lock()

    def __contains__(self, name: str) -> bool:
        """Whether this consumer has a limit."""
        return name in self._most

    # -- around claims and looks --------------------------------------------------------------------------------------

    @contextmanager
    def turn(self, claim: AbstractContextManager[ActiveClaim]) -> Iterator[ActiveClaim]:
        """Around a claim of the calling task."""
        full = self._take()
        with claim as mine:
            if full:
                left = self._without(mine.ranges, full)
                if mine.behind and any(one.high != MAX_SEQ for one in mine.ranges if one not in left):
                    mine.behind = ()  # it does not say that nothing is there
                mine.ranges = left
            yield mine

    def visible(self, ahead: Sequence[SeqRange], behind: Sequence[SeqRange]) -> tuple[list[SeqRange], list[SeqRange]]:
        """Where a look goes: not where the messages of consumers lie of which no place is free."""
        with self._lock:
            full = [name for name, taken in self._taken.items() if taken >= self._most[name]]
            self._refused.update(full)
        if not full:
            return list(ahead), list(behind)
        return self._without(ahead, full), self._without(behind, full)

    def _without(self, ranges: Sequence[SeqRange], full: Collection[str]) -> list[SeqRange]:
        names = {recipient for name in full for recipient in self._recipients[name]}
        left = [one for one in ranges if one.recipient not in names]
        if any(one.high != MAX_SEQ for one in ranges if one.recipient in names):
            self._passed_over = True
        return left

    def _take(self) -> list[str]:
        """Take a place of each consumer that has one for the calling task; returns those that have none."""
        me = threading.get_ident()
        full: list[str] = []
        with self._lock:
            hand = self._hands.setdefault(me, Permits())
            for name, most in self._most.items():
                if name in hand.waiting:
                    continue
                if self._taken[name] < most:
                    self._taken[name] += 1
                    hand.waiting[name] = set()
                else:
                    full.append(name)
            self._refused.update(full)
        return full

    # -- what a task has in hand --------------------------------------------------------------------------------------

    def claimed(self, rows: Sequence[Claimed]) -> None:
        """The calling task has these in hand now, and nothing else."""
        with self._freeing():
            hand = self._hands.get(threading.get_ident())
            if hand is None:
                return
            hand.running = ""
            for waiting in hand.waiting.values():
                waiting.clear()
            for row in rows:
                name = self._consumer.get(row[RECIPIENT])
                if name is not None and name in hand.waiting:
                    hand.waiting[name].add(row[SEQ])
            self._release(hand)

    def came_back(self, seqs: Sequence[int]) -> None:
        """These were given back, by their task or, while that is busy with another one, by who looks after leases."""
        with self._freeing():
            for hand in self._hands.values():
                for name, waiting in list(hand.waiting.items()):
                    if waiting and not waiting.difference(seqs) and name != hand.running:
                        self._drop(hand, name)
                    else:
                        waiting.difference_update(seqs)

    def leave(self) -> None:
        """The calling task has nothing in hand."""
        with self._freeing():
            hand = self._hands.pop(threading.get_ident(), None)
            if hand is not None:
                for name in list(hand.waiting):
                    self._drop(hand, name)

    def around(self, registration: Registration, call: Call) -> Call:
        """The handler of a consumer of this queue, with or without a limit: those of others need no place while it runs."""
        name, several = registration.name, registration.takes_several

        def called(message: Any, context: Any) -> None:
            self._begin(name, [one.seq for one in context] if several else [context.seq])
            call(message, context)

        return called

    def _begin(self, name: str, seqs: Sequence[int]) -> None:
        with self._freeing():
            hand = self._hands.get(threading.get_ident())
            if hand is not None:
                hand.running = name
                if name in hand.waiting:
                    hand.waiting[name].difference_update(seqs)
                self._release(hand)

    # -- under the lock -----------------------------------------------------------------------------------------------

    @contextmanager
    def _freeing(self) -> Iterator[None]:
        """Under the lock; afterwards whoever wanted what is free now is called."""
        with self._lock:
            yield
            wanted = {name for name in self._refused if self._taken[name] < self._most[name]}
            self._refused -= wanted
            passed_over = bool(wanted) and self._passed_over
            if wanted:
                self._passed_over = False
        if wanted:
            self.freed(passed_over)

    def _release(self, hand: Permits) -> None:
        """Of consumers of which it has nothing in hand."""
        for name, waiting in list(hand.waiting.items()):
            if not waiting and name != hand.running:
                self._drop(hand, name)

    def _drop(self, hand: Permits, name: str) -> None:
        del hand.waiting[name]
        self._taken[name] -= 1


def limiter_of(registrations: Iterable[Registration]) -> ConsumerLimiter | None:
    """Of those that have a limit; None: nobody has one."""
    limited = [one for one in registrations if one.options["concurrency"] is not None]
    return ConsumerLimiter(limited) if limited else None


def _nobody(passed_over: bool) -> None:
    """There is no pump to tell."""
