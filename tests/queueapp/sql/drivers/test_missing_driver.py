"""Where the driver of SQL Server or a library of its own is missing, one line says what to install."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest
from django.core.exceptions import ImproperlyConfigured
from django.db import DatabaseError
from django.db.utils import load_backend

from queueapp.errors import UnsupportedServer
from queueapp.sql.sqlserver.backend import SqlServerBackend
from queueapp.sql.sqlserver.errors import missing_driver
from tests import odbc
from tests.in_process_worker import patience
from tests.queueapp.sql.drivers.test_error_kinds import sql_server_at


def says_what_to_install(line: str | None) -> bool:
    return bool(line) and "queueapp[sqlserver]" in str(line) and "libodbc2" in str(line) and "\n" not in str(line)


@pytest.mark.parametrize("module", ["mssql", "pyodbc"])
def test_package_that_is_not_installed(monkeypatch: pytest.MonkeyPatch, module: str) -> None:
    for name in [name for name in sys.modules if name.partition(".")[0] == "mssql"]:
        monkeypatch.delitem(sys.modules, name)
    monkeypatch.setitem(sys.modules, module, None)

    with pytest.raises(ImproperlyConfigured) as raised:
        load_backend("mssql")

    assert says_what_to_install(missing_driver(raised.value))
    assert module in str(missing_driver(raised.value))


@pytest.mark.django_db
def test_driver_that_is_not_installed_is_reported_at_start(monkeypatch: pytest.MonkeyPatch) -> None:
    odbc.required()
    connection = sql_server_at(1)
    monkeypatch.setitem(sys.modules, "mssql_python", None)

    with pytest.raises(UnsupportedServer) as raised:
        SqlServerBackend().check_server(connection)

    assert says_what_to_install(str(raised.value))


@pytest.mark.parametrize("library", ["libltdl.so.7", "libgssapi_krb5.so.2", "libodbc.so.2"])
def test_system_library_that_is_not_installed(library: str) -> None:
    odbc.required()
    found = sorted(Path("/usr/lib").glob(f"*/{library}"))
    if os.geteuid() != 0 or shutil.which("unshare") is None or not found:
        pytest.skip(f"needs root, unshare and {library}, to hide the library from one process")
    # In a mount namespace of its own the child finds an empty file in the library's place.
    child = subprocess.run(
        ["unshare", "--mount", "sh", "-c", f'mount --bind /dev/null "$(readlink -f {found[0]})" && exec "$0" -c "$1"',
         sys.executable, _CONNECT],
        capture_output=True, text=True, timeout=patience(60), check=False, cwd=Path(__file__).parents[4],
        env=os.environ | {"DJANGO_SETTINGS_MODULE": "tests.settings"},
    )  # fmt: skip
    if "mount:" in child.stderr:
        pytest.skip(f"mounting is not allowed here: {child.stderr.strip()}")

    assert says_what_to_install(child.stdout.strip()), child.stdout + child.stderr


_CONNECT = """
import django
django.setup()
from queueapp.sql.sqlserver.errors import missing_driver
try:
    from tests.queueapp.sql.drivers.test_error_kinds import sql_server_at
    sql_server_at(1).ensure_connection()
except BaseException as error:
    print(missing_driver(error))
"""


def test_other_errors_are_not_about_the_driver() -> None:
    assert missing_driver(ValueError("no")) is None
    assert missing_driver(DatabaseError("Invalid object name 'orders'.")) is None
