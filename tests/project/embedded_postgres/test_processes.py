"""The embedded PostgreSQL under real processes: shared, stopped, killed and raced for."""

import os
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path

import psutil
import psycopg

from project.embedded_postgres.clients import stop
from project.embedded_postgres.daemon import LINGER_SECONDS
from project.embedded_postgres.data_directory import is_running
from project.paths import CHECKOUT
from tests.project.embedded_postgres.users import (
    DEADLINE_SECONDS,
    USER,
    User,
    home_of,
    is_stopped,
    keepers_of,
    postmaster_of,
    shut_down,
    until,
)


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
    until(lambda: is_stopped(data), LINGER_SECONDS + DEADLINE_SECONDS)
    assert not is_running(postmaster)
    assert not Path(url.partition("host=")[2]).exists()


def test_socket_is_out_of_reach_of_others_and_nothing_listens_on_the_network(start: Callable[..., User]) -> None:
    url = start().url()
    assert Path(url.partition("host=")[2]).stat().st_mode & 0o777 == 0o700
    with psycopg.connect(url) as connection:
        assert connection.execute("SHOW listen_addresses").fetchone() == ("",)
        assert connection.execute("SHOW fsync").fetchone() == ("on",)


def test_only_the_server_of_a_folder_that_is_named_expendable_does_not_wait_for_the_disk(
    data: Path, start: Callable[..., User]
) -> None:
    environment = os.environ | {"PYTHONPATH": str(CHECKOUT), "EXPENDABLE_DATA_DIR": str(data)}
    with psycopg.connect(start(env=environment).url()) as connection:
        assert connection.execute("SHOW fsync").fetchone() == ("off",)


def test_server_stops_when_its_only_user_is_killed(data: Path, start: Callable[..., User]) -> None:
    user = start()
    user.url()
    user.kill()
    until(lambda: is_stopped(data), LINGER_SECONDS + DEADLINE_SECONDS)


def test_stop_waits_for_the_keeper_too(data: Path, start: Callable[..., User]) -> None:
    user = start()
    user.url()
    user.leave()
    assert stop(data)
    assert home_of(data).is_free("keeper"), "it may still remove files of the home"


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
    until(lambda: is_stopped(data), LINGER_SECONDS + DEADLINE_SECONDS)


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
    until(lambda: is_stopped(data), LINGER_SECONDS + DEADLINE_SECONDS)
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
    until(lambda: is_stopped(data), LINGER_SECONDS + DEADLINE_SECONDS)


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
    until(lambda: is_stopped(data), LINGER_SECONDS + DEADLINE_SECONDS)
    (home_of(data).data / "PG_VERSION").write_text("17\n")
    error = start().error()
    assert "was made by PostgreSQL 17" in error
    assert len(error.splitlines()) == 1
