"""A scene and a second one, the warehouse, in which a queue of the first one's project lies.

Messages for that queue are kept in the first database until they are due, and forwarded from there.
"""

from __future__ import annotations

import contextlib
import itertools
from collections.abc import Iterator
from datetime import timedelta
from pathlib import Path
from typing import Any

import psutil
from django.db import transaction
from django.test import override_settings

from project.database import database as database_entry
from tests.databases import known_as
from tests.testapp.models import Leased, Transactional

from ..workload import ledger
from ..workload.messages import Act
from ..workload.routes import WAREHOUSE
from .processes import Program, Tree
from .scene import Scene
from .waiting import wait_until

SETTINGS = "tests.crash.workload.two_databases"
_numbers = itertools.count(1)


class TwoDatabases:
    """``here`` keeps the delayed messages, ``there`` has the queue; both are known to this process as well."""

    def __init__(self, here: Scene, server: Any, directory: Path) -> None:
        self.here = here
        directory.mkdir()
        self.there = Scene(server, directory)
        self._environment = {"DJANGO_SETTINGS_MODULE": SETTINGS, "CRASH_WAREHOUSE_URL": server.url(self.there.name)}
        #: For what is started from now on.
        self.environ: dict[str, str] = {}

    @contextlib.contextmanager
    def known(self) -> Iterator[None]:
        """Let this process have the second database and the router, within ``as_default``."""
        entry = database_entry(self._environment["CRASH_WAREHOUSE_URL"])
        routed = override_settings(DATABASE_ROUTERS=["tests.crash.workload.routes.Routes"])
        with self.there, known_as(WAREHOUSE, **entry), routed:
            yield

    # -- processes ------------------------------------------------------------------------------------------------

    def workers(self, *arguments: str, **settings: Any) -> Tree:
        """A tree of workers of the queue there, kept running."""
        tree = self.here.tree("testapp.Transactional", *arguments, **settings)
        tree.environment |= self._environment | self.environ
        tree.keep_running()
        return tree

    def dispatcher(self) -> Program:
        """The dispatcher of the database here and its forwarder, kept running."""
        program = self.here.program(f"mover{next(_numbers)}", "manage.py", "rundelayeddispatcher")
        program.environment |= self._environment | self.environ
        program.keep_running()
        return program

    def child_of(self, program: Program) -> psutil.Process:
        """The process that dispatches, waited for."""

        def found() -> psutil.Process | None:
            with contextlib.suppress(psutil.Error):
                for child in psutil.Process(program.pid).children():
                    if '"role": "dispatcher"' in child.cmdline()[-1]:
                        return child
            return None

        child = wait_until(lambda: found() if program.running else None, "a process that dispatches")
        assert child is not None
        return child

    # -- messages -------------------------------------------------------------------------------------------------

    def send(self, key: str, queue: Any = Transactional, **behaviour: Any) -> Any:
        """Send one message, kept here until it is due, its ledger row in the same transaction; returns its id."""
        options = {"delay": behaviour.pop("delay", timedelta(0))}
        if queue is not Leased:
            options["delayed_in"] = "default"
        with transaction.atomic():
            ledger.sent("default", key, queue._meta.label, "single")
            return queue.send(Act(key, **behaviour), **options)

    # -- questions ------------------------------------------------------------------------------------------------

    def kept(self) -> int:
        """Messages that are still in the delayed store here."""
        return int(self.here.look("SELECT count(*) FROM queueapp_delayedmessage")[0][0])

    def arrived(self) -> int:
        """Messages in the queue there."""
        return int(self.there.look("SELECT count(*) FROM testapp_transactional")[0][0])

    def drained(self, seconds: float = 120.0) -> ledger.Verdict:
        """Wait until nothing waits in either database, then let the oracle judge both."""
        wait_until(lambda: self.here.waiting() + self.there.waiting() == 0, "both databases are empty", seconds)
        with self.here.server.connect(self.here.name) as item, self.here.server.connect(self.there.name) as two:
            return ledger.judge(item, two)

    @contextlib.contextmanager
    def removal_held(self) -> Iterator[None]:
        """A session that removes a message from the store stops before that, in the middle of its transaction, for
        as long as this lasts: what he has committed elsewhere is committed."""
        self.here.execute(
            "CREATE OR REPLACE FUNCTION stand_still() RETURNS trigger LANGUAGE plpgsql AS "
            "'BEGIN PERFORM pg_advisory_xact_lock_shared(4711); RETURN NULL; END'"
        )
        self.here.execute(
            "CREATE TRIGGER stand_still BEFORE DELETE ON queueapp_delayedmessage "
            "FOR EACH STATEMENT EXECUTE FUNCTION stand_still()"
        )
        with self.here.server.connect(self.here.name) as harness:
            harness.execute("SELECT pg_advisory_lock(4711)")
            yield
        self.here.execute("DROP TRIGGER stand_still ON queueapp_delayedmessage")

    def standing_still(self) -> int:
        """How many stand still in ``removal_held``."""
        return len(self.here.backends("wait_event = 'advisory' AND state = 'active'"))
