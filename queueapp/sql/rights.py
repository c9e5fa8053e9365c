"""The interface of the SQL layer, continued: what the user of a connection may do with a table.

Nothing here runs while messages are sent or received: the start of a worker does, and whoever was refused.
"""

from __future__ import annotations

import abc
from collections.abc import Sequence
from typing import Any


class Rights(abc.ABC):
    """Part of ``Backend``."""

    @abc.abstractmethod
    def lacking_rights(self, connection: Any, table: str, rights: Sequence[str]) -> list[str]:
        """Which of these (``"SELECT"``, …) the user lacks. One that is granted for some columns counts as had. Of a table that is
        not there, or that the user does not see: none on PostgreSQL, all on SQL Server, which does not tell the two apart. Reads
        the catalog only."""

    @abc.abstractmethod
    def grant(self, connection: Any, table: str, rights: Sequence[str]) -> str:
        """The statement that gives them to the user of this connection."""

    @abc.abstractmethod
    def read_only(self, connection: Any) -> str:
        """Where this user can write nothing here by a setting: the statement that ends that; '' where it can, or where the
        server is one that follows another and will be told to lead some day."""
