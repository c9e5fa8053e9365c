"""The text of the statement that says how many workers a queue wants, for whoever asks the database without this project: KEDA."""

from __future__ import annotations

import abc
from typing import NamedTuple


class Wanted(NamedTuple):
    """What is asked. ``per_worker``: messages that one worker is for; ``late_ms``: the age above which there are to be more of them than
    there are; None: it says nothing. ``subscribers``: the table of those, and ``label``: the queue there."""

    per_worker: int
    late_ms: int | None
    least: int
    most: int
    subscribers: str
    label: str

    @property
    def rows(self) -> int:
        """So many rows decide: more of them change nothing."""
        return self.per_worker * self.most

    @property
    def quoted_label(self) -> str:
        """As a literal."""
        return self.label.replace("'", "''")


class Scaling(abc.ABC):
    """Part of ``QueueSql``."""

    @abc.abstractmethod
    def wanted_text(self, wanted: Wanted) -> str:
        """A SELECT without parameters, of one row with one whole number. It reads at most ``wanted.rows`` of the table's rows."""
