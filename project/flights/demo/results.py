"""What a demo came to, and whether it is right: each line of the check compares two numbers of different origin.

One side is the database's: effects that consumers committed. The other is computed from the source file by
``source.expected``, which shares no code with Spark, the queue or the consumers.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from django.db.models import Sum

from project.flights import figures, source
from project.flights.demo.workers import Handling
from project.flights.models import DelayFigure, FlightDelays, Rebookings
from project.flights.publication import Published
from queueapp.models import DelayedMessage, PoisonMessage

#: What is known about the whole file from elsewhere: a check of the independent computation itself.
KNOWN = {
    "rows in the file": ("read", 336_776),
    "departed more than 15 minutes late": ("late", 70_774),
    "cancelled": ("cancelled", 8_255),
    "departed more than two hours late": ("long_delays", 9_723),
    "late without an arrival time": ("without_arrival", 250),
    "late and arrived without a time in the air": ("without_air_time", 236),
}

#: By carrier, airport and hour.
Figures = dict[tuple[str, str, int], source.Figure]


@dataclass(frozen=True, slots=True)
class Check:
    """One comparison: what it says, what it found, what it should have found."""

    name: str
    found: int
    expected: int

    @property
    def holds(self) -> bool:
        return self.found == self.expected


@dataclass(frozen=True, slots=True)
class Results:
    """The numbers of one demo, read from the database after its end."""

    publication: Published
    with_spark: bool
    handling: Handling
    expected: source.Expected
    handled: int
    poisoned: int
    broken: int
    delayed: int
    rebooked: int
    left_over: int
    wrong_figures: int
    is_whole_file: bool
    #: Figures that Spark computes otherwise from the journal; None: it was not asked.
    wrong_in_journal: int | None

    @classmethod
    def read(
        cls,
        publication: Published,
        with_spark: bool,
        handling: Handling,
        expected: source.Expected,
        is_whole_file: bool,
        journal: Figures | None = None,
    ) -> Results:
        poison = PoisonMessage.objects.filter(queue__in=figures.LABELS)
        remaining = DelayedMessage.objects.filter(destination__in=figures.LABELS).count()
        return cls(
            publication=publication,
            with_spark=with_spark,
            handling=handling,
            expected=expected,
            handled=figures.handled_flights(),
            poisoned=poison.filter(queue=FlightDelays._meta.label).count(),
            broken=poison.filter(exception_type__endswith=".BrokenRecord").count(),
            delayed=DelayFigure.objects.aggregate(sum=Sum("rebookings"))["sum"] or 0,
            rebooked=figures.rebooked_flights(),
            left_over=remaining + FlightDelays.objects.count() + Rebookings.objects.count(),
            wrong_figures=_wrong_figures(expected.figures),
            is_whole_file=is_whole_file,
            wrong_in_journal=None if journal is None else _wrong_figures(journal),
        )

    def checks(self) -> list[Check]:
        """Every comparison of the demo."""
        expected, published = self.expected, self.publication.published
        known = [
            Check(name, getattr(expected, attribute), value)
            for name, (attribute, value) in KNOWN.items()
            if self.is_whole_file
        ]
        journal = [
            Check("figures that Spark computes otherwise from the journal", wrong, 0)
            for wrong in [self.wrong_in_journal]
            if wrong is not None
        ]
        return [
            *known,
            Check("rows read = rows of the file", self.publication.read, expected.read),
            Check("published = late + cancelled flights of the file", published, expected.published),
            Check("handled + poisoned = published", self.handled + self.poisoned, published),
            Check("poisoned = broken records of the file", self.poisoned, expected.poisoned),
            Check("poisoned for being broken = poisoned", self.broken, self.poisoned),
            Check("figures that differ from the file's", self.wrong_figures, 0),
            *journal,
            Check("delayed = long delays of the file that are not broken", self.delayed, expected.rebooked),
            Check("rebooked = delayed", self.rebooked, self.delayed),
            Check("messages left over", self.left_over, 0),
        ]

    @property
    def hold(self) -> bool:
        """Whether every check holds."""
        return all(check.holds for check in self.checks())

    @property
    def published_per_second(self) -> float:
        return self.publication.published / max(self.publication.seconds, 0.001)

    @property
    def handled_per_second(self) -> float:
        return (self.handled + self.poisoned) / max(self.handling.seconds, 0.001)

    def as_dict(self) -> dict[str, Any]:
        """The same numbers for ``--json``."""
        return {
            "rows_read": self.publication.read,
            "published": self.publication.published,
            "handled": self.handled,
            "delayed": self.delayed,
            "poisoned": self.poisoned,
            "rebooked": self.rebooked,
            "publishing": {
                "with": "spark" if self.with_spark else "send_many",
                "start_seconds": round(self.publication.start_seconds, 3),
                "seconds": round(self.publication.seconds, 3),
                "messages_per_second": round(self.published_per_second),
            },
            "handling": {
                "seconds": round(self.handling.seconds, 3),
                "messages_per_second": round(self.handled_per_second),
                "until_last_rebooking_seconds": round(self.handling.all_seconds, 3),
                "supervisor_restarts": self.handling.restarts,
            },
            "checks": [
                {"check": c.name, "found": c.found, "expected": c.expected, "holds": c.holds} for c in self.checks()
            ],
            "holds": self.hold,
        }

    def as_text(self) -> str:
        """The report of the demo."""
        publishing = "read and published by Spark" if self.with_spark else "read and published without Spark"
        after = f", after {self.publication.start_seconds:.1f} s to start it" if self.with_spark else ""
        lines = [
            f"rows read   {self.publication.read:>9,}",
            f"published   {self.publication.published:>9,}   {self.published_per_second:>7,.0f} messages/s"
            f"   {publishing} in {self.publication.seconds:.1f} s{after}",
            f"handled     {self.handled:>9,}   {self.handled_per_second:>7,.0f} messages/s"
            f"   by workers in {self.handling.seconds:.1f} s, their start included",
            f"delayed     {self.delayed:>9,}   dispatched and rebooked: {self.rebooked:,}, "
            f"the last one after {self.handling.all_seconds:.1f} s",
            f"poisoned    {self.poisoned:>9,}   broken records, kept with the reason",
            "",
        ]
        for check in self.checks():
            verdict = "ok    " if check.holds else "WRONG "
            expectation = "" if check.holds else f", expected {check.expected:,}"
            lines.append(f"{verdict} {check.name}: {check.found:,}{expectation}")
        return "\n".join([*lines, "", self._conclusion()])

    def _conclusion(self) -> str:
        sums = f"published {self.publication.published:,} = handled {self.handled:,} + poisoned {self.poisoned:,}"
        if not self.hold:
            return "The check FAILS: see the lines above."
        return f"The check holds: {sums}, and the figures equal those computed from the source file."


def _wrong_figures(expected: Figures) -> int:
    """Figures, by carrier, airport and hour, that are not what is expected, or only on one side."""
    found = {
        (carrier, origin, hour): source.Figure(late, cancelled, minutes)
        for carrier, origin, hour, late, cancelled, minutes in DelayFigure.objects.values_list(
            "carrier", "origin", "hour", "late", "cancelled", "minutes"
        )
    }
    return sum(found.get(key) != expected.get(key) for key in found.keys() | expected.keys())
