"""AT_MOST_ONCE with consumers of several messages. They are gone before their handler runs, and no handler is called again: what
a call fails on as a whole is kept as poison, all of it."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

from queueapp.sql.claims import Claimed

from .at_most_once import AtMostOnceReceiver
from .sent import SentTask
from .several import Ready, SeveralTask


class _Once(SeveralTask):
    """Mixed into both tasks of AT_MOST_ONCE."""

    def receive(self, limit: int) -> int:
        limit = self.gather(limit)
        return super().receive(limit) if limit else 0

    def _outcomes(
        self, rows: Sequence[Claimed], *, leased: bool
    ) -> Iterator[tuple[Claimed, BaseException | bool | None]]:
        waiting = list(rows)
        while waiting:
            route, mine, waiting = self.next_call(waiting, leased=leased)
            if route is None or len(mine) == 1:
                yield from super()._outcomes(mine, leased=leased)  # type: ignore[misc]
                continue
            ready: list[Ready] = []
            for row in mine:
                self.note(row)  # type: ignore[attr-defined]
                made = self.make_ready(route, row, leased=leased)
                if isinstance(made, Ready):
                    ready.append(made)
                else:
                    self.items = None
                    yield row, False if made is None else made
            if not ready:
                continue
            outcome = self.call_several(route, ready, leased=leased)
            for place, one in enumerate(ready):
                self.items = self.items_of(place)
                yield one.row, outcome.get(place) if isinstance(outcome, dict) else outcome


class AtMostOnceSeveralTask(_Once, AtMostOnceReceiver):
    """AT_MOST_ONCE."""


class SentSeveralTask(_Once, SentTask):
    """AT_MOST_ONCE with a limit, with messages that are shared out, or with barriers."""
