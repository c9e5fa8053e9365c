"""A Spark session inside this process, for jobs that run where the database is: quick to start, quiet, no web page.

A cluster does not need it: there ``spark-submit`` creates the session and ``queueapp.contrib.spark.register`` is all.
One JVM lives as long as this Python process, also when that is killed; a second session reuses it.
"""

from __future__ import annotations

import atexit
import os
import re
import shlex
import shutil
import subprocess
import sys
import tempfile
import warnings
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from functools import cache
from pathlib import Path
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from pyspark.sql import SparkSession

#: The optimizing compiler and a parallel collector pay off after a minute; without them the first job is done 3 s
#: earlier, and 14 s of processor time go into the JVM instead of 25.
_QUICK_START = "-XX:TieredStopAtLevel=1 -XX:+UseSerialGC"

_STOP_SECONDS = 10

_SETTINGS = {
    "spark.ui.enabled": "false",
    "spark.ui.showConsoleProgress": "false",
    "spark.log.level": "ERROR",
    "spark.sql.catalogImplementation": "in-memory",
    "spark.sql.shuffle.partitions": "2",
    "spark.sql.session.timeZone": "UTC",
    "spark.driver.host": "127.0.0.1",
    "spark.driver.bindAddress": "127.0.0.1",
    "spark.driver.extraJavaOptions": _QUICK_START,
}


class SparkDidNotStart(RuntimeError):
    """The JVM ended before Spark was up. The text has the last lines that it wrote."""


class SparkJobFailed(RuntimeError):
    """A Spark job ended with an error. The text is the reason alone, without the stack traces of three languages."""


def local_session(
    name: str,
    *,
    cores: int = 2,
    task_attempts: int = 3,
    java_home: Path | None = None,
    log: Path | None = None,
    settings: Mapping[str, Any] | None = None,
) -> SparkSession:
    """A session on this machine. ``log``: the file that takes what the JVM and its workers print, else our stderr.

    Its Python workers run this interpreter, and import from where this process does. Raises SparkDidNotStart, and
    ImportError without PySpark.
    """
    from pyspark.sql import SparkSession

    builder = SparkSession.builder.appName(name).master(f"local[{cores},{task_attempts}]")
    for key, value in {**_SETTINGS, **(settings or {})}.items():
        builder = builder.config(key, str(value))
    changed = {"PYTHONPATH": os.pathsep.join(_own_paths())} | ({"JAVA_HOME": str(java_home)} if java_home else {})
    if "PYSPARK_PYTHON" not in os.environ:
        # Spark asks for "python3" on PATH otherwise, which is another one unless the virtual environment is active.
        changed["PYSPARK_PYTHON"] = _interpreter()
    with _environment(changed), _stderr_in(log), warnings.catch_warnings():
        # pandas is not used here, whatever version of it is installed.
        warnings.filterwarnings("ignore", message="PySpark does not yet fully support pandas", category=FutureWarning)
        try:
            return builder.getOrCreate()
        except Exception as error:
            # PySpark has a class for this error, and other texts than it for a broken Java.
            raise SparkDidNotStart(f"Spark did not start: {_last_lines(log) or error}") from error


@contextmanager
def temporary_session(name: str, **options: Any) -> Iterator[SparkSession]:
    """A ``local_session`` for the length of the block; a session that is there already is used, and left running."""
    from pyspark.sql import SparkSession

    existing = SparkSession.getActiveSession()
    if existing is not None:
        yield existing
        return
    spark = local_session(name, **options)
    try:
        yield spark
    finally:
        stop_session(spark)


@contextmanager
def job_session(name: str, **options: Any) -> Iterator[SparkSession]:
    """The session of ``spark-submit`` where that runs this program, with its settings; else a ``temporary_session``."""
    from pyspark.sql import SparkSession

    if "PYSPARK_GATEWAY_PORT" not in os.environ:
        with temporary_session(name, **options) as spark:
            yield spark
        return
    spark = SparkSession.builder.appName(name).getOrCreate()
    try:
        yield spark
    finally:
        spark.stop()


@contextmanager
def readable_errors() -> Iterator[None]:
    """Raise SparkJobFailed instead of what Spark raises: its text is asked of the JVM, and that may be gone by then."""
    from py4j.protocol import Py4JError  # type: ignore[import-untyped]
    from pyspark.errors import PySparkException

    try:
        yield
    except (Py4JError, PySparkException) as error:
        raise SparkJobFailed(_reason(str(error))) from None


def _reason(text: str) -> str:
    """The line that a Python worker's exception ends with, where it is one of ours; else the first line."""
    lines = [line.strip() for line in text.splitlines() if line.strip()]
    errors = [line for line in lines if re.match(r"queueapp\.[\w.]+: ", line)]
    return errors[0].partition(": ")[2] if errors else lines[0] if lines else "Spark gave no reason"


def stop_session(spark: SparkSession) -> None:
    """Stop Spark and its JVM (half a gigabyte), so that neither outlives the job. A later session starts a new one."""
    from pyspark import SparkContext

    gateway = SparkContext._gateway
    spark.stop()
    if gateway is None:
        return
    gateway.shutdown()
    SparkContext._gateway = SparkContext._jvm = None
    process = getattr(gateway, "proc", None)
    if process is not None:
        # The JVM ends when its standard input does.
        process.stdin.close()
        try:
            process.wait(_STOP_SECONDS)
        except subprocess.TimeoutExpired:
            process.kill()
            process.wait()


@cache
def _interpreter() -> str:
    """A script that runs this interpreter with the installed PySpark; the interpreter where a script is not allowed.

    Spark puts its ``pyspark.zip`` in front of the path. What is imported from a zip is compiled in each process anew,
    which took 0.6 s of processor time in each of the five interpreters that a job starts.
    """
    import py4j  # type: ignore[import-untyped]
    import pyspark

    packages = {"pyspark.zip": pyspark, "py4j-*-src.zip": py4j}
    zips = [name for name, package in packages.items() if os.path.isfile(package.__file__ or "")]
    lines = ["#!/bin/sh", *(f"PYTHONPATH=${{PYTHONPATH#*{name}:}}" for name in zips)]
    lines.append(f'exec {shlex.quote(sys.executable)} "$@"')
    folder = Path(tempfile.mkdtemp(prefix="queueapp-spark-"))
    atexit.register(shutil.rmtree, folder, ignore_errors=True)
    script = folder / "python"
    script.write_text("".join(f"{line}\n" for line in lines))
    script.chmod(0o700)
    return str(script) if os.access(script, os.X_OK) else sys.executable


def _own_paths() -> list[str]:
    """Where this process imports from, apart from its interpreter and environment: the workers have those too."""
    homes = (sys.prefix, sys.base_prefix)
    paths = [os.path.abspath(path) for path in sys.path if not path.endswith(".zip")]
    return [path for path in dict.fromkeys(paths) if os.path.isdir(path) and not path.startswith(homes)]


@contextmanager
def _environment(changed: Mapping[str, str]) -> Iterator[None]:
    """The JVM inherits these variables when it is launched; this process and its other children do not keep them."""
    before = {name: os.environ.get(name) for name in changed}
    os.environ.update(changed)
    try:
        yield
    finally:
        for name, value in before.items():
            if value is None:
                del os.environ[name]
            else:
                os.environ[name] = value


@contextmanager
def _stderr_in(log: Path | None) -> Iterator[None]:
    """Point file descriptor 2 at the log while the JVM is launched: it keeps the descriptor, we get ours back."""
    if log is None:
        yield
        return
    log.parent.mkdir(parents=True, exist_ok=True)
    sys.stderr.flush()
    stderr = os.dup(2)
    try:
        with log.open("wb") as file:
            os.dup2(file.fileno(), 2)
        yield
    finally:
        sys.stderr.flush()
        os.dup2(stderr, 2)
        os.close(stderr)


def _last_lines(log: Path | None) -> str:
    if log is None or not log.exists():
        return ""
    return " | ".join(line for line in log.read_text(errors="replace").splitlines()[-3:] if line.strip())
