"""Writing down once what is tried until it is written down, though the answer to a commit may be lost."""

from __future__ import annotations

import uuid
from typing import Any

from django.db import Error, connections, transaction

from ..models import ProcessedMessage
from ..poison.burying import is_passing
from ..sql import backend_of


class Once:
    """One record of a message that is in no table: a connection that is lost at its commit leaves open whether it is there.

    Each try notes the same key in its transaction (``note_processed``): the one whose note is there already has nothing to
    write, and one that meets a commit in flight waits for its end. Housekeeping deletes the notes.
    """

    def __init__(self, queue: Any, alias: str) -> None:
        self._key = uuid.uuid4().hex
        self._label = queue._meta.label
        self._alias = alias
        #: What was decided by the try that has written it down, if any has.
        self.decided: Any = None

    def first(self) -> bool:
        """Whether nothing was written yet; noted in the transaction that is open, and with it. Raises what a database that is
        away says; one that cannot take the note keeps nobody from writing."""
        connection = connections[self._alias]
        try:
            with transaction.atomic(using=self._alias):
                return backend_of(connection).note_processed(
                    connection, ProcessedMessage._meta.db_table, self._key, self._label
                )
        except Error as error:
            if is_passing(error, self._alias):
                raise
            return True
