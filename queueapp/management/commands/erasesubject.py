"""``manage.py erasesubject``: destroy the key of a subject, so that nobody reads any more what was encrypted for it."""

from __future__ import annotations

import logging
from argparse import ArgumentParser
from typing import Any

from django.core.management.base import CommandError

from ...encryption import erase
from ..base_command import OperatorCommand

log = logging.getLogger("queueapp")


class Command(OperatorCommand):
    """Erase a subject."""

    help = (
        "Destroy the keys of a subject, on every database that has queues: nothing that was sent with this `encrypt-for` can be read any "
        "more, in whatever queue, store or table it lies. It cannot be undone. Asks first unless --yes. Exit code 1: it had no key, "
        "so that a name that is misspelt is not taken for one that is erased."
    )

    def add_arguments(self, parser: ArgumentParser) -> None:
        parser.add_argument("subject", help="As `encrypt-for` has it, the whole of it.")
        parser.add_argument(
            "--database", action="append", metavar="ALIAS", help="Only here; may be given again. Default: all that have queues."
        )  # fmt: skip
        parser.add_argument("--yes", "--no-input", "--noinput", action="store_true", help="Do not ask.")

    def handle(self, *args: Any, **options: Any) -> None:
        subject = options["subject"]
        found = erase.find(subject, options["database"])
        if not found:
            raise CommandError(f"{subject!r} has no key. Nothing was done.")
        if not options["yes"]:
            where = ", ".join(one.database for one in found)
            self.confirm(
                f"Destroy the key of {subject!r} in {where} for good? Type the subject to confirm: ", subject, "--yes"
            )
        for alias, keys in erase.erase(subject, found).items():
            # Not whose it was: the log outlives it.
            log.warning("%d keys of subjects were destroyed in database %r.", keys, alias)
            self.stdout.write(f"{alias}: {keys} key{'' if keys == 1 else 's'} destroyed.")
