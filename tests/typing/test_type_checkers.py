"""mypy and pyright read an example project as its author would: nothing that is right is called wrong, and the
reverse."""

from __future__ import annotations

import importlib.util
import json
import os
import re
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

CHECKOUT = Path(__file__).parents[2]
EXAMPLE = Path(__file__).parent / "example"

Places = set[tuple[str, int]]


def marked() -> Places:
    return {
        (file.name, number)
        for file in EXAMPLE.glob("*.py")
        for number, line in enumerate(file.read_text().splitlines(), 1)
        if line.endswith("# wrong")
    }


def run(*command: str) -> subprocess.CompletedProcess[str]:
    environment = os.environ | {"PYTHONPATH": str(CHECKOUT)}
    return subprocess.run(
        command, cwd=CHECKOUT, env=environment, capture_output=True, text=True, timeout=280, check=False
    )


@pytest.mark.timeout(600)
def test_mypy_finds_what_is_wrong_and_nothing_else() -> None:
    done = run(sys.executable, "-m", "mypy", "--show-absolute-path", "--no-error-summary", str(EXAMPLE))

    assert done.stderr == ""
    found = re.findall(r"^(.+?):(\d+): error:", done.stdout, re.MULTILINE)
    assert {(Path(file).name, int(line)) for file, line in found} == marked(), done.stdout


@pytest.mark.timeout(600)
def test_pyright_finds_what_is_wrong_and_nothing_else() -> None:
    pyright = (
        [sys.executable, "-m", "pyright"] if importlib.util.find_spec("pyright") else [shutil.which("pyright") or ""]
    )
    if not pyright[0]:
        pytest.skip("pyright is not installed")
    done = run(*pyright, "--outputjson", "--pythonpath", sys.executable, str(EXAMPLE))

    found = [load for load in json.loads(done.stdout)["generalDiagnostics"] if load["severity"] == "error"]
    places = {(Path(item["file"]).name, item["range"]["start"]["line"] + 1) for item in found}
    assert places == marked(), json.dumps(found, indent=1)
