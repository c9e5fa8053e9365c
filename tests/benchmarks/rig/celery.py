"""Brokers of Celery beside each other, and its workers as a user starts them."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from time import monotonic
from urllib.parse import quote

from django.conf import settings
from django.db import connection
from psycopg.conninfo import make_conninfo

from tests.benchmarks.celeryapp import PGMQ_DSN
from tests.benchmarks.rig.database import connection_parameters, raw_connection, wait_until
from tests.redis import find_redis, running_redis

PATIENCE = 300.0


@contextmanager
def redis_server() -> Iterator[str]:
    """The URL of a Redis that writes nothing to disk. Raises FileNotFoundError where there is none."""
    if find_redis() is None:
        raise FileNotFoundError("there is no redis-server here (Debian's package redis-server)")
    with tempfile.TemporaryDirectory() as folder, running_redis(Path(folder)) as url:
        yield url


def sqlalchemy_url() -> str:
    """The benchmarks' own database for kombu's transport on SQLAlchemy."""
    given = connection.get_connection_params()
    host = given.get("host") or "localhost"
    user, password = (quote(str(given.get(name) or ""), safe="") for name in ("user", "password"))
    name = connection.settings_dict["NAME"]
    if host.startswith("/"):
        return f"sqla+postgresql+psycopg://{user}:{password}@/{name}?host={quote(host, safe='')}&port={given.get('port') or 5432}"  # noqa: E501
    return f"sqla+postgresql+psycopg://{user}:{password}@{host}:{given.get('port') or 5432}/{name}"


def pgmq_url() -> str:
    """pgmq in the benchmarks' own database, as plain SQL: so no server needs its extension. Raises ImportError without
    its client."""
    from pgmq.install import get_embedded_install_sql, install_pgmq_sql

    with raw_connection() as raw:
        known = raw.execute("SELECT to_regnamespace('pgmq') IS NOT NULL").fetchone()
    if known == (False,):
        with raw_connection(autocommit=False) as raw:
            install_pgmq_sql(get_embedded_install_sql(), conn=raw)
    os.environ[PGMQ_DSN] = make_conninfo(**connection_parameters())
    return "pgmq://"


class Tally:
    """Counts what ran, in any process, by the size of a file."""

    def __init__(self) -> None:
        handle, self.path = tempfile.mkstemp()
        os.close(handle)

    @property
    def count(self) -> int:
        return os.stat(self.path).st_size

    def close(self) -> None:
        Path(self.path).unlink()


@contextmanager
def celery_worker(url: str, tally: Tally, *arguments: str, **environment: str) -> Iterator[subprocess.Popen[bytes]]:
    """``celery worker`` with its default pool, on this broker."""
    command = [
        sys.executable,
        "-m",
        "celery",
        "-A",
        "tests.benchmarks.celeryapp",
        "worker",
        "--loglevel",
        "ERROR",
        *arguments,
    ]
    worker = subprocess.Popen(
        command,
        cwd=settings.BASE_DIR,
        env=os.environ | {"BENCH_BROKER": url, "BENCH_TALLY": tally.path} | environment,
        stdin=subprocess.DEVNULL,
        stdout=subprocess.DEVNULL,
        process_group=0,
    )
    try:
        yield worker
    finally:
        worker.send_signal(signal.SIGTERM)
        try:
            worker.wait(30)
        except subprocess.TimeoutExpired:
            os.killpg(worker.pid, signal.SIGKILL)
            worker.wait()


def drained(url: str, tally: Tally, count: int, *arguments: str) -> float:
    """Tasks per second of a worker that finds ``count`` of them, from the first tenth to the last one."""
    before = tally.count
    first, last = before + count // 10, before + count
    with celery_worker(url, tally, *arguments):
        wait_until(lambda: tally.count >= first, "the first tasks", PATIENCE)
        began, at = monotonic(), tally.count
        wait_until(lambda: tally.count >= last, "the last task", PATIENCE)
        return (last - at) / (monotonic() - began)
