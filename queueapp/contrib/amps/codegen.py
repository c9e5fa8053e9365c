"""Queues as a module of Python, formatted as ruff formats it.

Whatever comes from the configuration is a string literal or stands in a comment, in one line without control
characters: nothing in it can become code.
"""

from __future__ import annotations

import re
import textwrap
from collections.abc import Iterator

from .convert import Imported, ImportedQueue
from .diagnostics import shown
from .elements import LINE, assignment, text_literal

#: Where the names of the generated module come from; no class of a queue may have one of them.
PUBLIC = ("Drop", "ExpirationModel", "FairnessModel", "Leasing", "Queue", "Semantics")
IMPORTED = (*PUBLIC, "timedelta")
_NAME = re.compile(r"\w+")


def as_python(imported: Imported, app_label: str = "") -> str:
    """The module. Without a queue it is a docstring alone."""
    lines = ['"""Queues of an AMPS configuration, written by ``manage.py importamps``."""']
    if imported.queues:
        lines += ["", *_imports(imported)]
    if imported.journal:
        lines += ["", *_comment("The TransactionLog keeps these topics. In the settings:", 0)]
        lines += [f"# {line}" for line in journal_setting(imported.journal)]
    for queue in imported.queues:
        lines += ["", "", *_class(queue, imported.file, app_label)]
    return "\n".join(lines) + "\n"


def journal_setting(topics: list[str]) -> list[str]:
    """The lines that mark topics as journaled."""
    return ['QUEUEAPP["JOURNAL"] = {', *(f"    {text_literal(topic)}: None," for topic in topics), "}"]


def _imports(imported: Imported) -> Iterator[str]:
    used = {"Queue"}
    for queue in imported.queues:
        for value in queue.options.values():
            if not value.source.startswith(("'", '"')):
                used.update(_NAME.findall(value.source))
    if "timedelta" in used:
        yield from ("from datetime import timedelta", "")
    yield f"from queueapp import {', '.join(name for name in PUBLIC if name in used)}"


def _class(queue: ImportedQueue, file: str, app_label: str) -> Iterator[str]:
    yield f"class {queue.class_name}(Queue):"
    yield from _comment(f"{queue.element} {shown(queue.name)}, {shown(file)}:{queue.line}", 4)
    for finding in queue.findings:
        yield from _comment(f"Line {finding.line}, {finding.element}: {finding.reason}.", 4)
    for comment in queue.comments:
        yield from _comment(comment, 4)
    yield "    class Meta:"
    if app_label:
        yield from assignment("app_label", text_literal(app_label), 8)
    yield from assignment("db_table", text_literal(queue.table), 8)
    yield from ("", "    class Delivery:")
    for option, value in queue.options.items():
        yield from assignment(option, value.source, 8)


def _comment(text: str, indent: int) -> list[str]:
    # visible() has left no character that ends a line; what is in a comment is never read as anything else.
    return textwrap.wrap(
        " ".join(text.split()),
        LINE,
        initial_indent=" " * indent + "# ",
        subsequent_indent=" " * indent + "# ",
        break_long_words=False,
        break_on_hyphens=False,
    )
