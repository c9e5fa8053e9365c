"""``workers`` must run under the name ``queueapp.workers`` too: nothing in it may say what it is called."""

from __future__ import annotations

import ast
import re
import tomllib
from collections.abc import Iterator
from pathlib import Path

import pytest
from django.apps import AppConfig, apps

from workers.apps import WorkersConfig

CHECKOUT = Path(__file__).parents[2]
WORKERS = CHECKOUT / "workers"
MODULES = sorted(WORKERS.rglob("*.py"))


def faults(code: str, depth: int) -> Iterator[str]:
    """What in a module, ``depth`` packages below ``workers``, would not hold under another name."""
    for node in ast.walk(ast.parse(code)):
        if isinstance(node, ast.Import):
            names = [alias.name for alias in node.names]
        elif isinstance(node, ast.ImportFrom):
            if node.level > depth + 1:
                yield f"line {node.lineno}: an import from above the package"
            names = [node.module or ""] if node.level == 0 else []
        elif isinstance(node, ast.Constant) and isinstance(node.value, str):
            # What import_module(), import_string() or `python -m` would be given.
            names = [name for name in re.findall(r"[\w.]+", node.value) if is_module(name)]
        else:
            continue
        for name in names:
            if name.startswith(("workers.", "queueapp.workers")) or name == "workers":
                yield f"line {node.lineno}: {name}"


def is_module(name: str) -> bool:
    """Whether this is the dotted name of one of our modules, or of something in it."""
    first, _, rest = name.strip(".").removeprefix("queueapp.").partition(".")
    below = rest.split(".")
    return first == "workers" and any(
        path.is_dir() or path.with_suffix(".py").is_file()
        for end in range(1, len(below) + 1)
        if (path := WORKERS.joinpath(*below[:end])) != WORKERS
    )


@pytest.mark.parametrize("module", MODULES, ids=lambda path: str(path.relative_to(WORKERS)))
def test_a_module_of_workers_never_names_its_package(module: Path) -> None:
    assert list(faults(module.read_text(), len(module.relative_to(WORKERS).parts) - 1)) == []


@pytest.mark.parametrize(
    "code",
    [
        "import workers",
        "import workers.processes.shared_memory as slots",
        "from workers import apps",
        "from workers.processes.shared_memory import InFlightSlots",
        "def late():\n    from workers.services import heartbeat",
        "import queueapp.workers.apps",
        "command = [sys.executable, '-m', 'workers.processes.child']",
        "import_string('queueapp.workers.processes.supervisor.Supervisor')",
        "from ... import registry",
    ],
)
def test_the_test_above_would_see(code: str) -> None:
    assert list(faults(code, depth=1))


@pytest.mark.parametrize(
    "code",
    [
        "from ..connections import dead_peers",
        "from queueapp.conf import settings",
        "log = logging.getLogger('queueapp.workers')",
        "connect(f, dispatch_uid='workers.dead_peers')",
        "pump.workers = 1",
    ],
)
def test_the_test_above_lets_pass(code: str) -> None:
    assert list(faults(code, depth=1)) == []


def test_the_list_of_packages_in_pyproject_is_complete() -> None:
    product = sorted(
        ".".join(folder.relative_to(CHECKOUT).parts)
        for package in (CHECKOUT / "queueapp", WORKERS)
        for folder in {path.parent for path in package.rglob("*.py")}
    )
    pyproject = tomllib.loads((CHECKOUT / "pyproject.toml").read_text())
    expected = {f"queueapp.{name}" if name.split(".")[0] == "workers" else name for name in product}
    assert set(pyproject["tool"]["setuptools"]["packages"]) == expected


def test_the_app_is_found_by_its_package_and_has_its_label_here() -> None:
    config = apps.get_app_config("queueapp_workers")
    assert isinstance(config, WorkersConfig)
    assert config.name == "workers"
    assert isinstance(AppConfig.create("workers"), WorkersConfig)
