"""What is said of a configuration: in one line, with the file and the line."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from ...messages.escaping import in_one_line

#: Characters of a name or a value that a finding shows: a configuration is not trusted.
SHOWN = 200


class UnreadableConfiguration(Exception):
    """The file is no configuration of AMPS, or is one that is not read for safety's sake. The text has file and
    line."""


class NotMapped(ValueError):
    """A value that has no counterpart; the text says why. ``instead``: what is written all the same, if anything."""

    def __init__(self, reason: str, instead: Any = None) -> None:
        super().__init__(reason)
        self.instead = instead


@dataclass(frozen=True, slots=True)
class Finding:
    """One thing that was not mapped, or that is worth knowing. ``queue`` is "" where it is about none."""

    file: str
    line: int
    queue: str
    element: str
    reason: str

    def __str__(self) -> str:
        about = f"{shown(self.queue)}: " if self.queue else ""
        return f"{shown(self.file)}:{self.line}: {about}{self.element}: {self.reason}"

    def as_dict(self) -> dict[str, str | int]:
        return {name: getattr(self, name) for name in ("file", "line", "queue", "element", "reason")}


def shown(text: str) -> str:
    """A text of the configuration in one line that no terminal obeys."""
    return in_one_line(text, SHOWN)
