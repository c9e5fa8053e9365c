"""The interface of a delayed store, and which one a database has.

A third party plugs its own in by dotted path (``QUEUEAPP["DELAYED_STORE"]``). With the built-in one, on a table beside
the queues, dispatch is one transaction per batch, so exactly once however often a process dies; with another it is at
least once. Due times are compared by the database's clock; no time zone and no host's clock takes part.
"""

from __future__ import annotations

import abc
import uuid
from dataclasses import make_dataclass
from datetime import datetime
from functools import lru_cache
from typing import Any

from django.utils.module_loading import import_string

from ..conf import settings
from ..errors import InvalidOption
from ..models.delivery import Semantics
from ..sql.carried import CARRIED

_delayed: Any = make_dataclass(
    "_delayed",
    [
        ("message_id", uuid.UUID),
        ("destination", str),
        ("due", datetime),
        ("headers", str),
        ("body", bytes | None),
        ("retries", int, 0),
        *((one.name, Any, one.default) for one in CARRIED),
        ("deliveries", int, 0),
        ("cancels", int, 0),
        ("failures", str | None, None),
        ("handle", Any, None),
    ],
)


class Delayed(_delayed):  # type: ignore[misc]
    """A delayed message as a store sees it: ``message_id``, ``destination``, ``due``, ``headers``, ``body``, ``retries`` (of
    the dispatch), what ``sql.carried`` declares (``expires``, ``recipient``, ...), the counts, and ``handle``, which is the
    store's own (a key, a lock token). A store keeps all of it; what it does not give back is taken to be as it is here by
    default."""

    message_id: uuid.UUID
    destination: str
    due: datetime
    headers: str
    body: bytes | None
    retries: int
    handle: Any


class DelayedStore(abc.ABC):
    """NServiceBus' interface of such a store (docs/lineage.md has the names). One instance serves one database; its
    methods are called from many threads.
    """

    def __init__(self, alias: str) -> None:
        self.alias = alias

    @abc.abstractmethod
    def initialize(self, name: str, semantics: Semantics) -> None:
        """Called once at every start, with the name of the process' role. Raise if the store cannot honour the semantics."""

    @abc.abstractmethod
    def store(self, message: Delayed) -> None:
        """Keep a message until ``message.due``. In the caller's transaction if the store can."""

    @abc.abstractmethod
    def fetch_next_due(self, at: datetime) -> Delayed | None:
        """The oldest message due at or before ``at``, locked against other dispatchers, or None."""

    @abc.abstractmethod
    def remove(self, message: Delayed) -> bool:
        """Remove a dispatched message. False: it was gone already."""

    @abc.abstractmethod
    def increment_failure_count(self, message: Delayed) -> bool:
        """Count a failed dispatch. False: it was gone already."""

    @abc.abstractmethod
    def next(self) -> datetime | None:
        """When the next message will be due, or None if there is none."""


class DelayedStoreWithInfrastructure(DelayedStore):
    """A store that can set up what it needs. ``setup_infrastructure`` is called before ``initialize``."""

    @abc.abstractmethod
    def setup_infrastructure(self) -> None:
        """Create tables and the like, if they do not exist yet."""


def store_class(path: str | None = None) -> type[DelayedStore]:
    """The class of the delayed store that is configured, or that this path names. Raises InvalidOption."""
    path = settings.DELAYED_STORE if path is None else path
    try:
        cls = import_string(path)
    except ImportError as error:
        raise InvalidOption("QUEUEAPP.DELAYED_STORE", path, f"the dotted path of a class ({error})") from error
    if not (isinstance(cls, type) and issubclass(cls, DelayedStore)):
        raise InvalidOption("QUEUEAPP.DELAYED_STORE", path, "a subclass of queueapp.delayed.DelayedStore")
    return cls


@lru_cache(maxsize=64)
def _store(path: str, alias: str) -> DelayedStore:
    return store_class(path)(alias)


def store_of(alias: str) -> DelayedStore:
    """The delayed store of a database, as configured. Raises InvalidOption."""
    return _store(settings.DELAYED_STORE, alias)
