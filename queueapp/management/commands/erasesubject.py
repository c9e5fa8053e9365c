"""``manage.py erasesubject``: destroy the keys of a subject, so that nothing that was encrypted for it can be read."""

from __future__ import annotations

import logging
from argparse import ArgumentParser
from typing import Any

from django.core.management.base import CommandError

from ...encryption import subject_keys
from ..base_command import OperatorCommand, counted

log = logging.getLogger("queueapp")


class Command(OperatorCommand):
    """Erase a subject."""

    help = (
        "Destroy the keys of a subject in every database with queues: nothing that was sent with this `encrypt-for` "
        "can be read any more, in any queue, store or table. It cannot be undone. Asks for confirmation unless --yes. "
        "Exit code 1: the subject has no key, so that a misspelt name does not look erased."
    )

    def add_arguments(self, parser: ArgumentParser) -> None:
        parser.add_argument("subject", help="The full subject, as in the header encrypt-for.")
        parser.add_argument(
            "--database", action="append", metavar="ALIAS", help="Only in this database. Repeatable. Default: all with "
                                                                 "queues."
        )  # fmt: skip
        parser.add_argument(
            "--yes", "--no-input", "--noinput", action="store_true", help="Do not ask for confirmation."
        )

    def handle(self, *args: Any, **options: Any) -> None:
        subject = options["subject"]
        found = subject_keys.find(subject, options["database"])
        if not found:
            raise CommandError(f"{subject!r} has no key. Nothing was done.")
        if not options["yes"]:
            where = ", ".join(match.database for match in found)
            self.confirm(
                f"Destroy the keys of {subject!r} in {where} for good? Type the subject to confirm: ", subject, "--yes"
            )
        for alias, keys in subject_keys.erase(subject, found).items():
            # Without the subject: the log is kept longer than its data.
            log.warning("Destroyed %s of a subject in database %r.", counted(keys, "encryption key"), alias,
                        extra={"database": alias, "keys": keys})  # fmt: skip
            self.stdout.write(f"{alias}: {counted(keys, 'key')} destroyed.")
