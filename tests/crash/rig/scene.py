"""One database of the private server with everything that happens on it: trees, programs, messages, questions.

A scene is made from a migrated template in a fraction of a second, so every test has its own and none sees another's
leftovers. Leaving it ends all of its processes.
"""

from __future__ import annotations

import contextlib
import itertools
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from django.db import connections, transaction

from project.database import database as database_entry

from ..workload import ledger
from ..workload.messages import Act
from .migrating import migrate
from .processes import CeleryTree, Program, Tree, environment
from .server import TEMPLATE, PrivateServer
from .waiting import PATIENCE_SECONDS, wait_until

_numbers = itertools.count(1)


def make_template(server: PrivateServer) -> None:
    """Create and migrate the database that scenes are copied from."""
    server.execute(f"CREATE DATABASE {TEMPLATE}")
    migrate(server, TEMPLATE)


class Scene:
    """A database, its processes and its ledger. ``server``: a private one, or a SQL Server (``sqlserver``), which is
    asked for what both have."""

    def __init__(self, server: Any, directory: Path) -> None:
        self.server = server
        self.name = f"scene_{next(_numbers)}"
        self.directory = directory
        self.starts_file = directory / "starts"
        self._programs: list[Program] = []
        self._tree_numbers = itertools.count(1)
        server.make(self.name)

    def __enter__(self) -> Scene:
        return self

    def __exit__(self, *exc: object) -> None:
        for program in self._programs:
            program.kill()
        self.server.drop(self.name)

    def print_logs(self) -> None:
        """The end of what each process has written."""
        for program in self._programs:
            print(f"--- {program.name}: {' '.join(program.command)}\n{program.log_text()[-6000:]}")

    # -- processes ------------------------------------------------------------------------------------------------

    def tree(self, *arguments: str, port: int | None = None, parameters: dict[str, Any] | None = None,
             environ: dict[str, str] | None = None, **settings: object) -> Tree:  # fmt: skip
        """A worker tree on this database, not yet started. ``port``: by TCP, through it. ``parameters`` of libpq.
        ``environ`` is for the handlers (see ``consumers``). ``settings`` override QUEUEAPP."""
        name = f"tree{next(self._tree_numbers)}"
        url = self.server.url(self.name, port=port, **parameters or {})
        tree = Tree(arguments, environment(url, name, self.starts_file, **settings), self.directory / name)
        tree.environment |= environ or {}
        self._programs.append(tree)
        return tree

    def celery_tree(self, *arguments: str, port: int | None = None, parameters: dict[str, Any] | None = None,
                    **settings: object) -> CeleryTree:  # fmt: skip
        """A worker of Celery on this database, not yet started."""
        name = f"tree{next(self._tree_numbers)}"
        url = self.server.url(self.name, port=port, **parameters or {})
        tree = CeleryTree(arguments, environment(url, name, self.starts_file, **settings), self.directory / name)
        self._programs.append(tree)
        return tree

    def workers(self, *arguments: str, **options: Any) -> Tree:
        """A tree that runs: started, kept running, and with its first worker process there."""
        tree = self.tree(*arguments, **options)
        tree.keep_running()
        tree.worker()
        return tree

    def program(self, name: str, *command: str, port: int | None = None) -> Program:
        """Another command of this run, not yet started."""
        url = self.server.url(self.name, port=port)
        program = Program(command, environment(url, name, self.starts_file), self.directory / name)
        self._programs.append(program)
        return program

    # -- messages -------------------------------------------------------------------------------------------------

    @contextlib.contextmanager
    def as_default(self) -> Iterator[None]:
        """Let Django's default connection in this process be this database, in every thread."""
        before, settings = connections["default"], connections.settings["default"]
        first = {**settings, **database_entry(self.server.url(self.name))}
        first["TEST"] = settings["TEST"]
        connections.settings["default"] = first
        del connections["default"]
        try:
            yield
        finally:
            connections["default"].close()
            connections.settings["default"] = settings
            connections["default"] = before

    def send(self, queue: Any, key: str, **behaviour: Any) -> Any:
        """Send one message, its ledger row in the same transaction; returns its id. Within ``as_default``."""
        delay = behaviour.pop("delay", None)
        with transaction.atomic():
            ledger.sent("default", key, queue._meta.label, "single")
            return queue.send(Act(key, **behaviour), delay=delay)

    def rewrite(self, queue: Any, old: bytes, new: bytes) -> None:
        """Replace a part of the body of each message that has it. Within ``as_default``."""
        for seq, body in queue.objects.values_list("seq", "body"):
            if old in bytes(body):
                queue.objects.filter(seq=seq).update(body=bytes(body).replace(old, new))

    # -- questions ------------------------------------------------------------------------------------------------

    def execute(self, sql: str, *parameters: object) -> list[tuple[Any, ...]]:
        """Run one statement in this database, on a connection of the harness."""
        rows: list[tuple[Any, ...]] = self.server.execute(sql, *parameters, database=self.name)
        return rows

    def look(self, sql: str, *parameters: object) -> list[tuple[Any, ...]]:
        """The same for a question, which waits for no locks and is answered by one moment of all tables."""
        rows: list[tuple[Any, ...]] = self.server.look(sql, *parameters, database=self.name)
        return rows

    def effects(self, key: str | None = None) -> int:
        """How many effects there are, of one message or of all."""
        where, parameters = ('WHERE "key" = %s', (key,)) if key is not None else ("", ())
        return int(self.look(f"SELECT count(*) FROM crash_effect {where}", *parameters)[0][0])

    def starts(self, key: str) -> list[int]:
        """The attempts of a message in which its handler was started, committed or not."""
        with contextlib.suppress(FileNotFoundError):
            lines = [line.rsplit(" ", 4) for line in self.starts_file.read_text().splitlines()]
            return [int(attempt) for started, _, attempt, _, _ in lines if started == key]
        return []

    def waiting(self) -> int:
        """Messages in queues and in the delayed store, but for those that will never be due."""
        counts = [f"(SELECT count(*) FROM {table})" for table in ledger.QUEUES.values()]
        counts.append(f"(SELECT count(*) FROM {ledger.CELERY_TABLE} WHERE recipient = '{ledger.CELERY_QUEUE}')")
        counts.append(
            f"(SELECT count(*) FROM queueapp_delayedmessage WHERE due < {ledger.WORDS[self.server.vendor].far_future})"
        )
        return int(self.look(f"SELECT {' + '.join(counts)}")[0][0])

    def drained(self, seconds: float = PATIENCE_SECONDS, *, effects: int = 0, poisoned: int = 0) -> ledger.Verdict:
        """Wait until nothing waits any more, then let the oracle judge. An AT_MOST_ONCE message is in no table while
        its handler runs, so who sends such ones says how many effects and how much poison there will be."""

        def is_over() -> bool:
            if self.waiting() or self.effects() < effects:
                return False
            return not poisoned or self.look("SELECT count(*) FROM queueapp_poisonmessage")[0][0] >= poisoned

        wait_until(is_over, "all queues and the delayed store are empty, and all effects are there", seconds)
        return self.verdict()

    def verdict(self) -> ledger.Verdict:
        """The oracle's verdict at this moment."""
        with self.server.connect(self.name) as connection:
            return ledger.judge(connection)

    def terminate_workers(self) -> int:
        """Kill every connection that a worker tree has to this database; returns how many."""
        return int(self.server.terminate_workers(self.name))

    def backends(self, where: str = "true", *parameters: object) -> list[tuple[Any, ...]]:
        """(pid, application, state, query) of the client backends in this database, but for the harness' own."""
        return self.execute(
            "SELECT pid, application_name, state, query FROM pg_stat_activity WHERE datname = current_database() "
            f"AND backend_type = 'client backend' AND application_name <> 'harness' AND ({where})",
            *parameters,
        )
