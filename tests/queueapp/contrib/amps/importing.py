"""Configurations of AMPS as the tests write them, and what comes of them."""

from __future__ import annotations

import itertools
from collections.abc import Mapping
from pathlib import Path

from queueapp.contrib.amps.convert import IMPORTED, Imported, import_configuration

_numbers = itertools.count()


def import_text(text: str | bytes, directory: Path, environment: Mapping[str, str] | None = None) -> Imported:
    """What this file comes to."""
    file = directory / f"{next(_numbers)}.xml"
    file.write_bytes(text if isinstance(text, bytes) else text.encode())
    return import_configuration(str(file), environment or {}, IMPORTED)


def queue(inside: str = "", *, element: str = "LocalQueue", name: str = "orders") -> str:
    """A definition with what AMPS requires; what is inside begins in line 4."""
    return f"<{element}>\n<Name>{name}</Name>\n<MessageType>json</MessageType>\n{inside}\n</{element}>"


def configuration(*queues: str, logged: str = "", more: str = "") -> str:
    """A whole configuration; the first queue begins in line 4."""
    log = f"<TransactionLog>{logged}</TransactionLog>" if logged else ""
    return (
        f'<?xml version="1.0"?>\n<AMPSConfig>{log}\n<SOW>\n' + "\n".join(queues) + f"\n</SOW>\n{more}\n</AMPSConfig>\n"
    )


def options(imported: Imported) -> dict[str, str]:
    """The options of its one queue, as they are written."""
    (queue,) = imported.queues
    return {option: value.source for option, value in queue.options.items()}


def said(imported: Imported) -> list[tuple[int, str, str]]:
    """What was not mapped: (line, element, why)."""
    return [(item.line, item.element, item.reason) for item in imported.unmapped]
