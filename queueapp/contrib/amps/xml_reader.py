"""The XML of a configuration as elements that know their lines, and what is said of them: in one line, with file and
line.

Expat, which Python has, and nothing else: no file is opened for a document, and a document type is refused before it
can declare an entity, so that none can grow or name a file. AMPS' own configurations have none.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, NoReturn
from xml.parsers import expat

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


#: AMPS itself takes 5 MB, its included files among them.
MOST_BYTES = 16 * 1024 * 1024
#: Between the namespace and the name of an element; no name has it.
_BETWEEN = " "


@dataclass(slots=True)
class Element:
    """One element: its name without the namespace if that is the document's, the text in it, and what is in it."""

    name: str
    line: int
    attributes: dict[str, str] = field(default_factory=dict)
    children: list[Element] = field(default_factory=list)
    pieces: list[str] = field(default_factory=list)

    @property
    def text(self) -> str:
        return "".join(self.pieces).strip()

    def named(self, *names: str) -> Iterator[Element]:
        return (child for child in self.children if child.name in names)


def read(path: str) -> Element:
    """The root of the file. Raises UnreadableConfiguration."""
    try:
        with Path(path).open("rb") as file:
            raw = file.read(MOST_BYTES + 1)
    except OSError as error:
        raise UnreadableConfiguration(f"{shown(path)}: cannot be read: {error.strerror}.") from error
    if len(raw) > MOST_BYTES:
        raise UnreadableConfiguration(f"{shown(path)}: is larger than {MOST_BYTES} bytes, which is no configuration.")
    return _Reader(path).read(raw)


class _Reader:
    """One document. Elements are kept on a stack: a deep document costs memory, never the depth of a call."""

    def __init__(self, path: str) -> None:
        self._path = path
        self._root: Element | None = None
        self._open: list[Element] = []
        self._namespace = ""
        parser = expat.ParserCreate(namespace_separator=_BETWEEN)
        parser.buffer_text = True
        parser.StartElementHandler = self._start
        parser.EndElementHandler = self._end
        parser.CharacterDataHandler = self._text
        parser.StartDoctypeDeclHandler = self._refuse
        # Without a document type there is no entity; should one ever come by another way, it ends here.
        parser.EntityDeclHandler = self._refuse
        parser.ExternalEntityRefHandler = self._refuse
        self._parser = parser

    def read(self, raw: bytes) -> Element:
        try:
            self._parser.Parse(raw, True)
        except expat.ExpatError as error:
            why = expat.errors.messages[error.code]
            raise UnreadableConfiguration(f"{shown(self._path)}:{error.lineno}: is no XML: {why}.") from error
        except (LookupError, ValueError) as error:  # an encoding that is unknown, or of more than one byte
            raise UnreadableConfiguration(
                f"{shown(self._path)}:1: is in an encoding that is not read: {error}."
            ) from error
        assert self._root is not None, "expat refuses a document without an element"
        return self._root

    def _start(self, name: str, attributes: dict[str, str]) -> None:
        namespace, _, local = name.rpartition(_BETWEEN)
        if self._root is None:
            self._namespace = namespace
        if namespace != self._namespace:
            local = f"{{{namespace}}}{local}"
        element = Element(local, self._parser.CurrentLineNumber, attributes)
        if self._open:
            self._open[-1].children.append(element)
        else:
            self._root = element
        self._open.append(element)

    def _end(self, name: str) -> None:
        self._open.pop()

    def _text(self, text: str) -> None:
        self._open[-1].pieces.append(text)

    def _refuse(self, *_: Any) -> NoReturn:
        raise UnreadableConfiguration(
            f"{shown(self._path)}:{self._parser.CurrentLineNumber}: a document type (DOCTYPE) is not read: it could "
            "declare entities. An AMPS configuration needs none; take it out."
        )
