"""Members of groups: adding them, ending them, and deciding which end is the last.

A transaction that has ended members of a group keeps a waiting member locked until its commit (``end``), or else the
row of the group (``lock``), and asks then whether a member waits (``is_waiting``): see ``flow.group_members``.
"""

from __future__ import annotations

import abc
import uuid
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple


@dataclass(frozen=True, slots=True)
class GroupTables:
    """The tables of groups, of their members, and of how many were added."""

    groups: str
    members: str
    additions: str


class EndedIn(NamedTuple):
    """A group in which members have ended. ``has_waiting``: a waiting member is locked by this transaction, which
    therefore is not the last."""

    group: uuid.UUID
    has_waiting: bool


class LockedGroup(NamedTuple):
    """The row of a group, as it is under its lock."""

    parent: uuid.UUID | None
    is_complete: bool


class GroupSql(abc.ABC):
    """All verbs run in a transaction, under READ COMMITTED."""

    @abc.abstractmethod
    def add(
        self, connection: Any, tables: GroupTables, group: uuid.UUID, ids: Sequence[uuid.UUID], *, nested: bool = False
    ) -> int:
        """Add waiting members to a group that is not complete, and keep it so until the transaction ends; returns how
        many were added: none to a complete or unknown group."""

    @abc.abstractmethod
    def end(self, connection: Any, tables: GroupTables, ids: Sequence[uuid.UUID], outcome: int) -> list[EndedIn]:
        """End these messages where they are waiting members: delete their rows, or write an outcome other than 0; then
        lock a waiting member of each of their groups that no other transaction has locked, the last one there is. Waits
        for transactions that have locked one of these members, and for no other."""

    @abc.abstractmethod
    def lock(self, connection: Any, tables: GroupTables, group: uuid.UUID) -> LockedGroup | None:
        """Lock the row of a group until the transaction ends; None: there is none."""

    @abc.abstractmethod
    def is_waiting(self, connection: Any, tables: GroupTables, group: uuid.UUID) -> bool:
        """Whether a member waits as of this statement, one that another open transaction is ending included. Waits for
        no lock. The caller has locked the group."""
