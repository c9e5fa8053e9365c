"""Finds the Java that Spark needs: JAVA_HOME, then PATH, then the places where distributions put it.

`python -m project.java` installs the distribution's headless runtime where none is found and it is allowed to, and
otherwise says what to install. It always succeeds: without Java, everything but Spark works.
"""

import os
import re
import shutil
import subprocess
import sys
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path

from project.system_packages import install_first_available

MINIMUM_VERSION = 17
INSTALLATIONS = Path("/usr/lib/jvm")
_PACKAGES = ("openjdk-17-jre-headless", "openjdk-21-jre-headless", "default-jre-headless")


@dataclass(frozen=True)
class Java:
    """An installed Java runtime: its directory (for JAVA_HOME) and its feature version, e.g. 17."""

    home: Path
    version: int


def find_java(environment: Mapping[str, str] = os.environ) -> Java | None:
    """The first Java of at least MINIMUM_VERSION, or None."""
    for program in _candidates(environment):
        version = java_version(program)
        if version is not None and version >= MINIMUM_VERSION:
            return Java(home=program.resolve().parent.parent, version=version)
    return None


def _candidates(environment: Mapping[str, str]) -> Iterator[Path]:
    if environment.get("JAVA_HOME"):
        yield Path(environment["JAVA_HOME"], "bin", "java")
    on_path = shutil.which("java", path=environment.get("PATH", os.defpath))
    if on_path:
        yield Path(on_path)
    # Where an older Java is the default, a newer one may lie beside it.
    yield from sorted(INSTALLATIONS.glob("*/bin/java"), reverse=True)


def java_version(program: Path) -> int | None:
    """The feature version that `program` reports (8, 17, ...), or None when it is no working Java."""
    try:
        result = subprocess.run(
            [str(program), "-version"],
            stdin=subprocess.DEVNULL,
            capture_output=True,
            text=True,
            timeout=60,
            check=False,
        )
    except (OSError, subprocess.TimeoutExpired):
        return None
    return parse_version(result.stderr + result.stdout) if result.returncode == 0 else None


def parse_version(text: str) -> int | None:
    """The feature version in the output of `java -version`; up to Java 8 it is the second number ("1.8.0")."""
    match = re.search(r'version "(?:1\.)?(\d+)', text)
    return int(match[1]) if match else None


def main() -> int:
    if find_java() is not None:
        return 0
    print(f"Spark needs Java {MINIMUM_VERSION} or newer, and there is none; trying to install it ...", flush=True)
    installed = install_first_available(_PACKAGES)
    java = find_java()
    if java is not None:
        print(f"Installed {installed} (Java {java.version}).")
    else:
        print(
            f"It could not be installed. To have Spark too: sudo apt-get install {_PACKAGES[0]} "
            f"(or any Java {MINIMUM_VERSION} or newer, named by JAVA_HOME). Going on without Spark.",
            file=sys.stderr,
        )
    return 0


if __name__ == "__main__":
    sys.exit(main())
