"""The errors of the Spark data source. Spark shows their text inside its own exception, so the text is complete."""

from __future__ import annotations

from collections.abc import Iterable

from ...errors import QueueError


class SparkSinkError(QueueError):
    """Base of the sink's errors."""


class InvalidDataFrame(SparkSinkError, ValueError):
    """A column or a value of the DataFrame cannot become part of a message."""


class SinkUnavailable(SparkSinkError):
    """The database cannot be reached from this process, or lacks a table or privilege that the sink needs."""


class SourceUnavailable(QueueError):
    """The database cannot be reached from this process, or lacks a privilege that reading needs."""


class StagingLost(SparkSinkError):
    """Staged rows were missing at the commit. Nothing was published; run the job again.

    The database crashed since the task staged them (staging tables are not logged), or an operator or another job has
    dropped the table, or rolled the prepared transaction back.
    """

    def __init__(
        self, table: str, expected: int, found: int | None, unit: str = "rows", kind: str = "staging table"
    ) -> None:
        self.table, self.expected, self.found = table, expected, found
        what = "is gone" if found is None else f"holds {found} {unit}"
        self._start = f"The {kind} {table} {what}, its task wrote {expected} {unit}."
        super().__init__(f"{self._start} Nothing was published; run the job again.")

    def of_part(self) -> StagingLost:
        """The error where other tables of the publication are moved already (atomic = false)."""
        self.args = (
            f"{self._start} Other parts of the publication are in the queue; those that wait are named in "
            "SparkCommit.pending. Take this one out there, and run the job again for the rest.",
        )
        return self


def listed(names: Iterable[str]) -> str:
    """Names for an error text, in the order in which they are documented."""
    return ", ".join(names)
