"""The seeded run: `python -m tests.crash.chaos --duration 1800 --seed 7` (`make chaos DURATION=1800 SEED=7`).

Real workers on the three semantics, a worker of Celery on our broker, and real producers, on a private server, under a
schedule of faults, and among the messages some whose handlers are rude. When the time is over, the faults stop,
everything drains, and the oracle compares the ledger with effects and tables. Ctrl-C ends it early, with the verdict so
far. The last line is one JSON object; the exit code is 0 when every promise was kept. `--rude` and `--faults` narrow
it: `--faults none` shows what rude handlers do by themselves, `--rude none` what faults do.

With `--server` the same happens in a database of its own on a SQL Server that is there already, by a login that may
make it and end its sessions; what that server does not know, or what is done to private ones only, is left out and
said.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import os
import shutil
import sys
import tempfile
import threading
import time
from collections.abc import Collection, Iterator, Mapping, Sequence
from datetime import timedelta
from pathlib import Path
from typing import Any

from django.core.exceptions import ImproperlyConfigured
from django.db import Error

from project.database import database

from .rig.explaining import Explanations
from .rig.fault_injection import FaultInjector
from .rig.holding import DATABASE_ERRORS
from .rig.processes import Program, Tree
from .rig.proxy import Proxy
from .rig.scene import Scene, make_template
from .rig.schedule import FAULTS, KILLS, schedule
from .rig.server import PrivateServer
from .rig.sqlserver import SqlServer
from .rig.waiting import wait_until
from .workload import ledger
from .workload.producers import KINDS
from .workload.rudeness import RUDENESSES
from .workload.rudeness import left_out as rudenesses_left_out

PRODUCERS = "tests.crash.workload.producers"

#: Short, so that crash tracking, expired leases and abandoned connections all happen often within minutes.
SETTINGS = {
    "heartbeat_interval": 1, "dead_after": 4, "crash_tracking_period": 3, "shutdown_grace": 4, "database_timeout": 3
}  # fmt: skip
CONCURRENCY, BATCH = 2, 100
#: ``lease_period`` of the test queue.
LEASE = timedelta(seconds=5)
DRAIN_SECONDS = 300.0
#: `--server` for the PostgreSQL that a run starts for itself.
PRIVATE = "private"
#: The server of who says nothing.
SERVER_VARIABLE = "QUEUEAPP_TEST_SQLSERVER_URL"
LOOK_SECONDS = 1.0
#: What a process writes that ends with code 70, and a receive task that ends with an error.
SERVICE_ENDED, TASK_FAILED = "ended without having been asked to.", "a receiver failed;"
LINE_EVERY_SECONDS = 60.0


class Run:
    """One seeded run on one scene. ``rude``: which rudenesses there are; ``faults``: which kinds of faults;
    ``left_out``: which of them the server does not allow, and why."""

    def __init__(
        self,
        scene: Scene,
        proxy: Proxy,
        seed: int,
        seconds: float,
        *,
        rude: Sequence[str] = (),
        faults: Collection[str] = FAULTS,
        left_out: Mapping[str, str] | None = None,
        drain_seconds: float = DRAIN_SECONDS,
    ) -> None:
        self.scene = scene
        self.proxy = proxy
        self.seed, self.seconds, self.drain_seconds = seed, seconds, drain_seconds
        self.left_out = dict(left_out or {})
        self.stopping = threading.Event()
        queues = (*ledger.QUEUES, f"--concurrency={CONCURRENCY}")
        self.trees: list[Tree] = [
            scene.tree(*queues, "--processes=2", **SETTINGS),
            scene.tree(*queues, port=proxy.port, parameters=scene.server.connects_within(3), **SETTINGS),
            scene.celery_tree(f"--concurrency={CONCURRENCY}", **SETTINGS),
        ]
        self.producers: list[Program] = [
            scene.program(kind, "-m", PRODUCERS, kind, str(seed), port=proxy.port if kind == "delayed" else None)
            for kind in KINDS
            if kind != "rude" or rude
        ]
        for producer in self.producers:
            producer.environment["CRASH_RUDE"] = ",".join(rude)
        self.injector = FaultInjector(scene, self.trees, self.producers, proxy)
        self.faults = schedule(seed, seconds, faults)
        self._began = 0.0
        self._said = 0.0

    def go(self) -> dict[str, Any]:
        """Run it to its end; returns the report."""
        self._began = time.monotonic()
        for program in (*self.trees, *self.producers):
            program.keep_running()
        interrupted = False
        try:
            self._strike_until_the_end()
            injected_for = time.monotonic() - self._began
            self._stop_producers()
            drained = self._drain()
        except KeyboardInterrupt:
            interrupted, drained = True, False
            injected_for = time.monotonic() - self._began
            self.stopping.set()
            print("\ninterrupted: the verdict so far", file=sys.stderr)
            self.proxy.resume()
            self._stop_producers()
        codes = [tree.stop(seconds=90) for tree in self.trees]
        events = (f"{event.began} {event.ended} {event.kind} {event.victim}\n" for event in self.injector.events)
        (self.scene.directory / "faults").write_text("".join(events))
        return self._report(injected_for, drained, interrupted, codes)

    # -- stages ---------------------------------------------------------------------------------------------------

    def _strike_until_the_end(self) -> None:
        faults = list(self.faults)
        # On a busy machine a strike may take longer than its place in the schedule: what is left then follows all the
        # same.
        while (now := time.monotonic() - self._began) < self.seconds or faults:
            if faults and faults[0].at <= now:
                self.injector.inject(faults.pop(0), self.stopping)
            self._progress()
            next_at = faults[0].at if faults else self.seconds
            time.sleep(min(max(0.02, next_at - (time.monotonic() - self._began)), LOOK_SECONDS))

    def _stop_producers(self) -> None:
        for producer in self.producers:
            producer.stop(seconds=90)

    def _drain(self) -> bool:
        def drained() -> bool:
            self._progress()
            with contextlib.suppress(Error):  # a SQL Server elsewhere may be out of reach for a moment
                return self.scene.waiting() == 0
            return False

        try:
            return wait_until(drained, "everything has drained", self.drain_seconds, pause=0.5)
        except AssertionError:
            return False

    def _progress(self) -> None:
        now = time.monotonic()
        if now - self._said < (LOOK_SECONDS if sys.stderr.isatty() else LINE_EVERY_SECONDS):
            return
        self._said = now
        try:
            sent, effects = self.scene.look(
                "SELECT (SELECT count(*) FROM crash_sent), (SELECT count(*) FROM crash_effect)"
            )[0]
            waiting = self.scene.waiting()
        except DATABASE_ERRORS:
            return
        kills = sum(self.injector.injected[kind] for kind in KILLS)
        text = f"{now - self._began:6.0f} s  {sent} sent  {effects} effects  {kills} kills  {waiting} waiting"
        print(f"\r{text}   " if sys.stderr.isatty() else text, end="" if sys.stderr.isatty() else "\n",
              file=sys.stderr, flush=True)  # fmt: skip

    # -- the verdict ----------------------------------------------------------------------------------------------

    def _report(self, injected_for: float, drained: bool, interrupted: bool, codes: list[int]) -> dict[str, Any]:
        if sys.stderr.isatty():
            print(file=sys.stderr)
        verdict = self.scene.verdict()
        injected = self.injector.injected
        kills = {kind: injected[kind] for kind in KILLS}
        why = Explanations(self.scene, self.injector.events, LEASE)
        doubled = verdict.duplicate_keys
        bare = why.unexplained_duplicates(doubled["at_least_once"])
        bare += why.unexplained_late_duplicates(doubled["acks_late"])
        bare += why.unexplained_kept_twice(verdict.kept_twice, self.trees[-1].name)
        bare += why.unexplained_early_duplicates(doubled["acks_early"]) + why.unexplained_losses(verdict.early_gone)
        poison = why.unexplained_poison(verdict.poison_to_explain)
        rude_wrong = [*verdict.rude_wrong, *why.unexplained_ends(verdict.rude_to_explain)]
        restless = why.restless()
        logs = [tree.log_text() for tree in self.trees]
        ended_70 = sum(text.count(SERVICE_ENDED) for text in logs)
        task_failures = sum(text.count(TASK_FAILED) for text in logs)
        # Each fault may cost an AT_MOST_ONCE queue what the tasks of its victims had claimed, and no more.
        tasks = 3 * CONCURRENCY
        bound = (sum(injected.values()) - injected["savepoint"]) * tasks * BATCH
        reported = sum(text.count("at-most-once message is lost") for text in logs)
        wrong = bare or poison or rude_wrong or restless or ended_70 or task_failures
        kept = (
            verdict.faultless
            and not wrong
            and len(verdict.at_most_once_gone) <= bound
            and (drained or interrupted)
            and not any(codes)
        )
        for title, keys in (
            ("lost", verdict.lost),
            ("ghosts", verdict.ghosts),
            ("in two places", verdict.in_two_places),
            ("unexplained", bare),
            ("transactional", verdict.duplicate_keys["transactional"]),
            ("poison without a reason", poison),
            ("rude and wrong", rude_wrong),
            ("restless", restless),
        ):
            if keys:
                print(f"{title}: {', '.join(keys[:20])}", file=sys.stderr)
        for key in bare[:20]:
            print(f"effects of {key}: {'; '.join(map(str, why.effects(key)))}", file=sys.stderr)
        return {
            "sent": verdict.sent,
            "effects": verdict.effects,
            "kills": {"total": sum(kills.values()), **kills},
            "other_faults": {kind: count for kind, count in injected.items() if kind not in KILLS},
            "missed": dict(self.injector.missed),
            "server": self.scene.server.vendor,
            "left_out": self.left_out,
            "lost": len(verdict.lost),
            "duplicates": verdict.duplicates,
            "unexplained_duplicates": len(bare),
            "poisoned": verdict.poisoned,
            "poisoned_by_kind": verdict.poisoned_by_kind,
            "unexplained_poison": len(poison),
            "rude": verdict.rude,
            "rude_wrong": len(rude_wrong),
            "restless": len(restless),
            "at_most_once_gone": len(verdict.at_most_once_gone),
            "at_most_once_reported": reported,
            "celery": verdict.celery,
            "celery_early_gone": len(verdict.early_gone),
            "in_two_places": len(verdict.in_two_places),
            "ghosts": len(verdict.ghosts),
            "waiting": verdict.waiting,
            "restarts": {tree.name: tree.restarts for tree in self.trees},
            "ended_70": ended_70,
            "task_failures": task_failures,
            "exit_codes": codes,
            "seed": self.seed,
            "seconds": round(injected_for),
            "drained": drained,
            "kept": kept,
        }


def named(text: str, known: Collection[str]) -> list[str]:
    """The names in "a,b,c", in "all" or in "none". Raises ValueError."""
    names = [*known] if text == "all" else [name for name in text.split(",") if name and name != "none"]
    if unknown := sorted({*names} - {*known}):
        raise ValueError(f"there is no {', '.join(unknown)}; there are: {', '.join(known)}")
    return names


def narrowed(server: Any, chosen: Sequence[str]) -> tuple[list[str], dict[str, str]]:
    """Those of the chosen faults and rudenesses that a server allows, and why not the others."""
    why = {**server.left_out, **rudenesses_left_out(server.vendor)}
    return [name for name in chosen if name not in why], {name: why[name] for name in chosen if name in why}


def server_of(url: str) -> type[PrivateServer] | SqlServer:
    """What `--server` names: the kind that is started for the run, or one that is there. Raises ValueError; its text
    does not have the password."""
    if url in ("", PRIVATE):
        return PrivateServer
    try:
        engine = database(url)["ENGINE"]
    except ImproperlyConfigured as error:
        raise ValueError(str(error).replace("DATABASE_URL", "--server")) from None
    if engine != "mssql":
        raise ValueError(f"a PostgreSQL is started for the run, so that it can be stopped: say {PRIVATE}, or nothing")
    # The backend of SQL Server wants settings, also for a session that none of them is about.
    os.environ.setdefault("DJANGO_SETTINGS_MODULE", "tests.settings")
    return SqlServer(url)


@contextlib.contextmanager
def running(server: type[PrivateServer] | SqlServer) -> Iterator[PrivateServer | SqlServer]:
    """The server, ready for scenes; SystemExit where there is none."""
    if isinstance(server, SqlServer):
        try:
            server.reach()
        except Error as error:
            raise SystemExit(f"{server.host}:{server.port} cannot be used: {error}") from None
        yield server
        return
    with server() as private:
        make_template(private)
        yield private


def main() -> int:
    parser = argparse.ArgumentParser(prog="python -m tests.crash.chaos", description=__doc__)
    parser.add_argument("--duration", type=float, default=300, metavar="SECONDS")
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--rude", default="all", metavar="NAME,...", help=f"all, none, or of: {', '.join(RUDENESSES)}")
    parser.add_argument("--faults", default="all", metavar="NAME,...", help=f"all, none, or of: {', '.join(FAULTS)}")
    parser.add_argument("--drain", type=float, default=DRAIN_SECONDS, metavar="SECONDS", help="how long it may drain")
    parser.add_argument("--keep-logs", type=Path, metavar="DIRECTORY", help="where the logs go, and stay")
    parser.add_argument("--print-schedule", action="store_true", help="print the faults of this seed and end")
    parser.add_argument(
        "--server",
        default=os.environ.get(SERVER_VARIABLE, PRIVATE),
        metavar="URL",
        help=f"mssql://..., a SQL Server, else that of {SERVER_VARIABLE}; {PRIVATE}: a PostgreSQL of its own, as "
        f"without both",
    )
    options = parser.parse_args()
    try:
        rude, faults = named(options.rude, RUDENESSES), named(options.faults, FAULTS)
        server = server_of(options.server)
    except ValueError as error:
        parser.error(str(error))
    rude, rude_left_out = narrowed(server, rude)
    faults, faults_left_out = narrowed(server, faults)
    left_out = faults_left_out | rude_left_out
    for name, why in left_out.items():
        print(f"left out: {name} ({why})", file=sys.stderr)
    if options.print_schedule:
        for fault in schedule(options.seed, options.duration, faults):
            print(f"{fault.at:8.1f} s  {fault.kind:10}  victim at {fault.victim:.2f}")
        return 0
    with tempfile.TemporaryDirectory(prefix="queueapp-chaos-") as temporary:
        directory = options.keep_logs or Path(temporary)
        directory.mkdir(parents=True, exist_ok=True)
        with running(server) as there, Proxy(there.port, there.host) as proxy, Scene(there, directory) as scene:
            run = Run(
                scene, proxy, options.seed, options.duration,
                rude=rude, faults=faults, left_out=left_out, drain_seconds=options.drain,
            )  # fmt: skip
            report = run.go()
        if not report["kept"] and not options.keep_logs:
            kept = shutil.copytree(directory, Path("build") / f"chaos-{options.seed}", dirs_exist_ok=True)
            print(f"Logs, faults and starts of handlers are in {kept}.", file=sys.stderr)
    print(json.dumps(report))
    return 0 if report["kept"] else 1


if __name__ == "__main__":
    sys.exit(main())
