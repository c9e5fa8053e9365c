"""A move under load, there and back, whose migrator is killed.

Producers send to the broker that is moved from, workers of both brokers run, and a quarter of the tasks has an ETA.
Some were handed to a worker that was killed. Each task writes a row: in the end each must have written one.
"""

from __future__ import annotations

import contextlib
import random
import signal
import subprocess
import sys
import threading
from collections import Counter
from collections.abc import Iterator
from datetime import UTC, datetime, timedelta
from pathlib import Path
from time import monotonic
from typing import Any, NamedTuple

import kombu
import redis
from celery import Celery
from django.db import connections

from queueapp.contrib.celery.models import BrokerQueue, PendingMove
from tests.in_process_worker import eventually
from tests.testapp.models import Effect
from tests.workers.trees import CHECKOUT

APP = "tests.queueapp.contrib.celery.celeryapp"
QUEUES = ("celery", "orphans")


class Plan(NamedTuple):
    """How much."""

    tasks: int
    unacked: int
    kills: int
    eta_seconds: float
    #: Seconds after which a killed migrator is gone.
    term: float = 15.0
    #: Seconds between two tasks of a producer that sends meanwhile: a slow machine takes longer for the move, and has
    #: more to do.
    pause: float = 0.005
    seed: int = 1


class Outcome(NamedTuple):
    """What became of it."""

    lost: int
    doubled: int
    kills: int
    longest_send_seconds: float


class Load:
    """One run. ``environment`` leads child processes to the database."""

    def __init__(self, redis_url: str, environment: dict[str, str], folder: Path, plan: Plan) -> None:
        self.redis, self.queueapp_url = redis_url, "queueapp://"
        self.environment, self.folder, self.plan = environment, folder, plan
        self.random = random.Random(plan.seed)
        self.sent: set[str] = set()
        self.longest = 0.0
        self.kills = 0
        self.client = redis.Redis.from_url(redis_url)

    def run(self) -> Outcome:
        """There and back."""
        half = self.plan.tasks // 2
        self.send(self.redis, "there", half)
        self.left_by_a_killed_worker("orphan", self.plan.unacked)
        with self.sending(self.redis, "while there"), self.workers(self.queueapp_url):
            self.move(self.redis, self.queueapp_url)
        self.move(self.redis, self.queueapp_url, kills=0)
        self.send(self.queueapp_url, "back", half)
        with self.sending(self.queueapp_url, "while back"), self.workers(self.redis):
            self.move(self.queueapp_url, self.redis)
        self.move(self.queueapp_url, self.redis, kills=0)
        with self.workers(self.redis), self.workers(self.queueapp_url):
            # To read all of them takes a second when they are many, and the workers need the core.
            done = lambda: Effect.objects.count() >= len(self.sent) and len(self.effects()) >= len(self.sent)  # noqa: E731
            eventually(done, 120 + self.plan.tasks / 200)
        count = self.effects()
        lost = len(self.sent - set(count))
        return Outcome(lost, sum(number - 1 for number in count.values()), self.kills, self.longest)

    def effects(self) -> Counter[str]:
        return Counter(Effect.objects.values_list("name", flat=True).iterator())

    def send(self, url: str, what: str, count: int) -> None:
        """Publish; a quarter is due later."""
        with _celery(url) as app, app.producer_pool.acquire(block=True) as producer:
            for number in range(count):
                self._send(app, producer, f"{what} {number}")

    def _send(self, app: Celery, producer: Any, name: str) -> None:
        eta = None
        if self.random.random() < 0.25:
            eta = datetime.now(UTC) + timedelta(seconds=self.random.random() * self.plan.eta_seconds)
        began = monotonic()
        app.send_task(f"{APP}.record", [name], producer=producer, eta=eta, priority=self.random.choice([0, 0, 3, 9]))
        self.longest = max(self.longest, monotonic() - began)
        self.sent.add(name)

    @contextlib.contextmanager
    def sending(self, url: str, what: str) -> Iterator[None]:
        """A producer that goes on."""
        stop = threading.Event()

        def work() -> None:
            with _celery(url) as app, app.producer_pool.acquire(block=True) as producer:
                number = 0
                while not stop.wait(self.plan.pause):
                    self._send(app, producer, f"{what} {number}")
                    number += 1
            connections.close_all()

        thread = threading.Thread(target=work)
        thread.start()
        try:
            yield
        finally:
            stop.set()
            thread.join()

    def left_by_a_killed_worker(self, what: str, count: int) -> None:
        """Messages that a consumer has taken from Redis and not acked when it is killed."""
        with _celery(self.redis) as app, app.producer_pool.acquire(block=True) as producer:
            for number in range(count):
                name = f"{what} {number}"
                app.send_task(f"{APP}.record", [name], producer=producer, queue="orphans")
                self.sent.add(name)
        code = (
            "import kombu, os, signal\n"
            f"channel = kombu.Connection({self.redis!r}).default_channel\n"
            f"got = [channel.basic_get('orphans') for _ in range({count})]\n"
            "assert None not in got\n"
            "os.kill(os.getpid(), signal.SIGKILL)\n"
        )
        ended = subprocess.run([sys.executable, "-c", code], cwd=CHECKOUT, env=self.environment, check=False)
        assert ended.returncode == -signal.SIGKILL

    @contextlib.contextmanager
    def workers(self, url: str) -> Iterator[None]:
        """A worker of Celery with threads; it ends in its own time, so nothing that it has is lost."""
        log = self.folder / f"worker {self.random.random()}.log"
        command = [
            sys.executable, "-m", "celery", "-A", APP, "worker", "--pool", "threads", "--concurrency", "4",
            "--queues", "celery,orphans", "--hostname", f"w{log.stem[-6:]}@tests", "--loglevel", "WARNING",
        ]  # fmt: skip
        with log.open("wb") as output:
            worker = subprocess.Popen(
                command, cwd=CHECKOUT, env=self.environment | {"TEST_BROKER_URL": url}, stdout=output, stderr=output,
                stdin=subprocess.DEVNULL, process_group=0,
            )  # fmt: skip
        try:
            yield
        finally:
            worker.terminate()
            assert worker.wait(300) == 0, log.read_text()

    def move(self, source: str, target: str, kills: int | None = None) -> None:
        """``movebroker``, killed now and then and restarted; the last one finishes, or is stopped."""
        for _ in range(self.plan.kills if kills is None else kills):
            known = self._in_flight(source)
            migrator = self._mover(source, target, "--follow")
            eventually(lambda known=known: self._in_flight(source) not in ([], known), 60)  # type: ignore[misc]
            migrator.kill()
            migrator.wait()
            self.kills += 1
        known = self._in_flight(source)
        migrator = self._mover(source, target, *(["--follow"] if kills is None else []))
        if kills is None:
            eventually(
                lambda: self._in_flight(source) not in ([], known), 60
            )  # it is at work, and knows what SIGTERM means
            eventually(lambda: self._remaining(source) < 50, 600)
            migrator.terminate()
        assert migrator.wait(900) == 0, (self.folder / "migrator.log").read_text()[-5000:]

    def _mover(self, source: str, target: str, *arguments: str) -> subprocess.Popen[bytes]:
        command = [sys.executable, "manage.py", "movebroker", "--from", source, "--to", target, *arguments]
        command += ["--term", str(self.plan.term)]
        with (self.folder / "migrator.log").open("ab") as log:
            return subprocess.Popen(
                command,
                cwd=CHECKOUT,
                env=self.environment,
                stdout=log,
                stderr=log,
                stdin=subprocess.DEVNULL,
                process_group=0,
            )

    def _in_flight(self, source: str) -> list[Any]:
        """What a migrator has set aside last: not what a killed one has left."""
        if source == self.queueapp_url:
            return list(PendingMove.objects.order_by("-number").values_list("number", flat=True)[:1])
        return [last for queue in QUEUES if (last := self.client.lindex(f"queueapp.moving.{queue}", 0)) is not None]

    def _remaining(self, source: str) -> int:
        if source == self.queueapp_url:
            return BrokerQueue.objects.count()
        return sum(int(self.client.llen(f"celery{suffix}")) for suffix in ["", "\x06\x163", "\x06\x166", "\x06\x169"])  # type: ignore[arg-type]


@contextlib.contextmanager
def _celery(url: str) -> Iterator[Celery]:
    app = Celery("load", broker=url, set_as_current=False)
    app.conf.task_create_missing_queues = True
    try:
        yield app
    finally:
        app.close()
        kombu.pools.reset()
