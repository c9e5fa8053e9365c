"""Celery's own integration tests, as they are in its source distribution, with our broker and our results.

A part of them runs with all the tests; ``make celery-suite`` runs the whole. What cannot pass is named here, with the
reason.
"""

from __future__ import annotations

import os
import shutil
import socket
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from tests.in_process_worker import eventually, real_commits
from tests.upstream import sources

APPS = [*real_commits.kwargs["available_apps"], "queueapp.contrib.celery"]
pytestmark = [pytest.mark.django_db(transaction=True, available_apps=APPS), pytest.mark.timeout(3000)]

WHOLE = os.environ.get("QUEUEAPP_CELERY_SUITE") == "whole"
HERE = Path(__file__).parent

_CHANNELS = "looks for Redis' own channels of results"
_MEMORY = "a task that is not due is in the database here, not in the memory of a worker"
#: What is not run -> why.
DESELECTED = {
    "test_tasks.py::test_task_redis_result_backend": _CHANNELS,
    "test_tasks.py::test_tasks::test_revoked_by_headers_complex_canvas": "sleeps for longer than its own limit of 20 "
    "seconds; on "
    "Redis as well",
    "test_tasks.py::test_trace_log_arguments::test_task_failed": "reads a log line that Celery writes after the result "
    "that it waits "
    "for; fails on Redis as well",
    "test_inspect.py::test_Inspect::test_scheduled": _MEMORY,
    "test_canvas.py::test_chord::test_error_propagates_from_chord": "Celery's issue 6437, which it expects of Redis as "
    "well",
    "test_canvas.py::test_chord::test_chord_on_error": "reads Redis' own keys of the chord",
    "test_canvas.py::test_chain::test_chord_header_id_duplicated_on_rabbitmq_msg_duplication": "sends a signal as a "
    "property of the message, which only AMQP's own client drops; of Redis Celery itself expects it to fail",
}

#: File -> which of its tests run with all the others ('': all of them, None: none). Not its ``trace_log``: it expects a
#: line of the log that the worker writes after it has stored the result, as soon as it sees the result.
FILES: dict[str, str | None] = {
    "test_inspect.py": "",
    "test_tasks.py": "basic_task or retry_once or reject or revoked_by_headers_simple",
    "test_canvas.py": "nested_chord_group or parallel_chords or error_propagates_to_chord_from_simple",
    # Allows two seconds for what two tries and a pause of one take: on a machine of its own.
    "test_request_backend_down.py": None,
    "test_beat.py": "failing_entry or heap_top or cron_starting",
    "test_worker.py": None,
    "test_connection_recovery.py": None,
    "test_group_chains.py": None,
    "test_loader.py": None,
    "test_logfile_format.py": None,
    "test_serialization.py": None,
    "test_upgrade.py": None,
    "test_security.py": None,
    "test_mem_leak_in_exception_handling.py": None,
    "test_events_state_memory_leak.py": None,
}


@pytest.fixture(scope="module")
def redis_port(tmp_path_factory: pytest.TempPathFactory) -> Iterator[str]:
    """Where many of the tests count; '' where there is no Redis to be started."""
    server = shutil.which("redis-server")
    if server is None:
        yield ""
        return
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    command = [server, "--port", str(port), "--bind", "127.0.0.1", "--save", "", "--appendonly", "no"]
    process = subprocess.Popen(command, cwd=tmp_path_factory.mktemp("redis"), stdout=subprocess.DEVNULL)
    eventually(lambda: _answers(port))
    yield str(port)
    process.terminate()
    process.wait()


def _answers(port: int) -> bool:
    with socket.socket() as tried:
        return tried.connect_ex(("127.0.0.1", port)) == 0


@pytest.fixture
def run(
    redis_port: str, child_environment: dict[str, str], request: pytest.FixtureRequest, tmp_path: Path
) -> Callable[..., None]:
    """Runs some of their files in a process of their own, and fails with them."""
    folder = sources("celery", request.config)
    environment = child_environment | {
        "DJANGO_SETTINGS_MODULE": "tests.celery_suite.settings",
        "PYTHONPATH": f"{HERE / 'site'}{os.pathsep}{HERE.parent.parent}",
        "PATH": f"{Path(sys.executable).parent}{os.pathsep}{os.environ['PATH']}",
        "TEST_BROKER": "queueapp://",
        "TEST_BACKEND": "redis+queueapp://",  # see plugin.py
        "CELERY_SOURCES": str(folder),
        "REDIS_PORT": redis_port,
        "WORKER_LOGLEVEL": "INFO",
    }
    command = [sys.executable, "-m", "pytest", "-c", str(HERE / "suite.ini"), "--rootdir", str(folder)]
    command += ["--import-mode=append", "-p", "no:django", "-p", "no:cacheprovider", "-p", "celery.contrib.pytest"]
    command += ["-p", "tests.celery_suite.plugin", "-v", "--tb=short", "-rsfE"]
    for name in DESELECTED:
        command += ["--deselect", f"t/integration/{name}"]

    def run(*files: str, chosen: str = "") -> None:
        paths = [str(folder / "t" / "integration" / file) for file in files]
        log = tmp_path / "log"
        with log.open("w") as out:
            # Not in the folder itself: its ``celery`` would be the one that is tested.
            done = subprocess.run(
                [*command, *(["-k", chosen] if chosen else []), *paths],
                env=environment,
                cwd=tmp_path,
                stdout=out,
                stderr=out,
            )
        assert done.returncode == 0, log.read_text()[-20_000:]

    return run


def test_a_part_of_celerys_own(run: Callable[..., None]) -> None:
    """In one process: each of them takes seconds to start."""
    if WHOLE:
        pytest.skip("the whole runs by file")
    parts = {file: chosen for file, chosen in FILES.items() if chosen is not None}
    run(*parts, chosen=" or ".join(f"({file} and ({chosen}))" if chosen else file for file, chosen in parts.items()))


@pytest.mark.parametrize("file", FILES)
def test_celerys_own(file: str, run: Callable[..., None]) -> None:
    if not WHOLE:
        pytest.skip("runs with `make celery-suite`")
    run(file)


def test_the_deselected_tests_exist(request: pytest.FixtureRequest) -> None:
    folder = sources("celery", request.config) / "t" / "integration"
    for name in DESELECTED:
        file, *parts = name.split("::")
        text = (folder / file).read_text()
        assert all(f"def {part}" in text or f"class {part}" in text for part in parts), name


def test_the_deselected_tests_are_on_the_page() -> None:
    page = (HERE.parent.parent / "docs" / "explanation" / "celery-tests.md").read_text()
    assert [name for name in DESELECTED if f"| `{name}` |" not in page] == []
