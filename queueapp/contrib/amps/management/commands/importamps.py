"""``manage.py importamps``: the queues of an AMPS configuration as classes."""

from __future__ import annotations

import keyword
import os
from argparse import ArgumentParser
from pathlib import Path
from typing import Any

from django.core.management.base import CommandError

from .....management.base_command import OperatorCommand, counted
from ...convert import IMPORTED, Imported, as_python, import_configuration
from ...xml_reader import UnreadableConfiguration, shown

#: Exit code where something of the configuration has no counterpart here.
NOT_ALL_MAPPED = 3


class Command(OperatorCommand):
    """Print the Queue classes that an AMPS configuration comes to."""

    help = (
        "Print the Queue classes that are equivalent to the queues of an AMPS configuration (SOW/Queue, "
        "SOW/LocalQueue, SOW/GroupLocalQueue), with AMPS' defaults where ours differ. Elements that are not mapped are "
        "reported on stderr with file and line, and in a comment of their class. ${NAME} is replaced from the "
        "environment. The file is not trusted: a DOCTYPE is refused, and no other file is opened. Exit codes: 0 "
        "everything was mapped, 3 an element was not (the rest was printed), 1 the file cannot be read or is no "
        "configuration of AMPS (nothing was printed)."
    )
    # It reads one file, so it runs in a project without a database, or with queues that fail their checks.
    requires_system_checks: list[str] = []

    def add_arguments(self, parser: ArgumentParser) -> None:
        parser.add_argument("config", help="The configuration: an <AMPSConfig>, its <SOW> alone, or one queue.")
        parser.add_argument("--app-label", default="", metavar="LABEL", help="Write it into each class' Meta.")
        parser.add_argument(
            "--output",
            default="",
            metavar="FILE",
            help="Write the classes there instead of stdout; it may not exist yet.",
        )
        parser.add_argument(
            "--json",
            action="store_true",
            help="Print one object: queues (name, class, table, element, line, options), journal (topics), unmapped "
            "and "
            "notes (file, line, queue, element, reason), and source (the module).",
        )

    def handle(self, *args: Any, **options: Any) -> None:
        label = options["app_label"]
        if label and (not label.isidentifier() or keyword.iskeyword(label)):
            raise CommandError(f"--app-label {label!r} is not accepted: it must be the label of a Django app.")
        try:
            imported = import_configuration(options["config"], os.environ, IMPORTED)
        except UnreadableConfiguration as error:
            raise CommandError(str(error)) from error
        source = as_python(imported, label)
        if options["output"]:
            _write(options["output"], source)
        if options["json"]:
            self.write_json(_as_dict(imported, source), indent=2)
        elif not options["output"]:
            self.stdout.write(source, ending="")
        self._report(imported)

    def _report(self, imported: Imported) -> None:
        for finding in imported.notes:
            self.stderr.write(f"{finding} (a note)")
        for finding in imported.unmapped:
            self.stderr.write(str(finding))
        if not imported.queues:
            self.stderr.write(f"{shown(imported.file)}: no queue in it could be converted.")
        if count := len(imported.unmapped):
            raise CommandError(f"{counted(count, 'element')} not mapped.", returncode=NOT_ALL_MAPPED)


def _write(path: str, source: str) -> None:
    """Write the file. Raises CommandError if it exists: it may have been edited."""
    try:
        with Path(path).open("x", encoding="utf-8") as file:
            file.write(source)
    except OSError as error:
        raise CommandError(f"--output {path} cannot be written: {error.strerror}.") from error


def _as_dict(imported: Imported, source: str) -> dict[str, Any]:
    return {
        "file": imported.file,
        "queues": [
            {
                "name": queue.name,
                "class": queue.class_name,
                "table": queue.table,
                "element": queue.element,
                "line": queue.line,
                "options": {option: value.source for option, value in queue.options.items()},
            }
            for queue in imported.queues
        ],
        "journal": imported.journal,
        "unmapped": [finding.as_dict() for finding in imported.unmapped],
        "notes": [finding.as_dict() for finding in imported.notes],
        "source": source,
    }
