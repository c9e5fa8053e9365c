"""`make test-matrix`: the tests on each Python found (3.11-3.14) with each Django that it allows (5.2-6.1).

Every environment is the locked one but for Django, whose newest release of the series is taken.
"""

import os
import re
import shutil
import subprocess
import sys
from pathlib import Path

import nox

# Django's own table of the Pythons that a series supports.
DJANGO = {"3.11": ["5.2"], "3.12": ["5.2", "6.0", "6.1"], "3.13": ["5.2", "6.0", "6.1"], "3.14": ["5.2", "6.0", "6.1"]}


def found_pythons() -> dict[str, str]:
    """Version -> path of each interpreter that starts; a version manager's launcher may have nothing behind it."""
    found = {}
    versions_of_pyenv = Path(os.environ.get("PYENV_ROOT") or Path.home() / ".pyenv", "versions")
    for version in DJANGO:
        candidates = [shutil.which(f"python{version}"), f"/usr/bin/python{version}"]
        candidates += sorted(str(path) for path in versions_of_pyenv.glob(f"{version}.*/bin/python"))
        for candidate in filter(None, candidates):
            try:
                output = subprocess.run([candidate, "--version"], capture_output=True, text=True, check=True).stdout
            except (OSError, subprocess.CalledProcessError):
                continue
            if output.startswith(f"Python {version}."):
                found[version] = candidate
                break
    return found


PYTHONS = found_pythons()


UV = (sys.executable, "-m", "uv")
CHECKOUT = Path(__file__).resolve().parent


@nox.session(python=False)
@nox.parametrize(("version", "django"), [(version, django) for version in PYTHONS for django in DJANGO[version]])
def tests(session: nox.Session, version: str, django: str) -> None:
    environment = Path(session.cache_dir, f"python-{version}-django-{django}")
    python = str(environment / "bin" / "python")
    # Children of the tests find the packages wherever they start.
    session.env["PYTHONPATH"] = str(CHECKOUT)
    session.run(*UV, "venv", "--quiet", "--allow-existing", "--python", PYTHONS[version], str(environment))
    pins = environment / "pins.txt"
    pins.write_text(_pins_without_django("requirements.txt") + _pins_without_django("requirements-dev.txt"))
    session.run(*UV, "pip", "install", "--quiet", "--python", python, "-r", str(pins), f"django=={django}.*")
    session.run(python, "-c", "import django, sys; print(f'Python {sys.version}, Django {django.__version__}')")
    session.run(python, "-m", "pytest", *session.posargs)


def _pins_without_django(path: str) -> str:
    """The lines `name==version ; marker` of a locked file, without hashes: the other Django has none there."""
    lines = re.findall(r"^([\w.-]+==[^\\\n]+?) *\\?$", Path(path).read_text(), flags=re.MULTILINE)
    return "".join(f"{line}\n" for line in lines if not line.lower().startswith("django=="))
