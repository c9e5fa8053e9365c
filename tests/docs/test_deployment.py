"""What the page about deployment says and shows, against real workers."""

from __future__ import annotations

import configparser
import os
import re
import subprocess
import sys
from time import monotonic

import pytest
from django.core.management import get_commands, load_command_class

from queueapp.conf import OPTIONS
from queueapp.operations import connection_limits
from tests.crash.rig.scene import Scene
from tests.crash.rig.waiting import holds_for, wait_until
from tests.testapp.models import AtMostOnce, Leased, Transactional

from .pages import CHECKOUT, DOCS, blocks

PAGE = DOCS / "howto" / "deployment.md"
FILES = {block.title.rpartition("/")[2]: block.code for block in blocks(PAGE, "ini", "yaml", "dockerfile", "python")}
CHECK = ["manage.py", "healthcheck"]
PAGES_OF_A_TREE = ("/healthz", "/readyz", "/metrics")
#: What the page adds to SHUTDOWN_GRACE.
MARGIN = 15


def test_a_tree_has_as_many_connections_as_the_formula_states(scene: Scene) -> None:
    module: dict[str, object] = {}
    exec(FILES["connections.py"], module)
    queues = [Leased, Transactional, AtMostOnce]
    expected = module["connections_of_a_tree"](queues, processes=2, concurrency=3)
    assert expected == 2 * (3 * 4 + 3) + 4 + 1 + 1 + 1, (
        "some queues of the tests have expressions, and there is a journal"
    )
    for number in range(60):
        for queue in queues:
            scene.send(queue, f"{queue.__name__} {number}", sleep_ms=20_000)

    # Until empty: so the supervisor looks into the database, which otherwise it only does after a crash.
    labels = [queue._meta.label for queue in queues]
    tree = scene.tree(*labels, "--processes", "2", "--concurrency", "3", "--until-empty")
    tree.start()

    def there() -> int:
        return len(scene.backends("application_name = %s", tree.name))

    # Held, as a listener proves that it hears with a second connection, and renewals connect when a lease is half over.
    wait_until(lambda: there() == expected and holds_for(lambda: there() == expected, 4), f"{expected} connections")


def test_the_formula_without_wake_ups_and_with_at_most_once_alone(settings: object) -> None:
    module: dict[str, object] = {}
    exec(FILES["connections.py"], module)
    settings.QUEUEAPP = {"NOTIFY": False, "CONCURRENCY": 4}
    assert module["connections_of_a_tree"]([AtMostOnce], dispatcher=False) == (1 + 4) + 1 + 3 + 1
    assert module["connections_of_a_tree"]([AtMostOnce], maintenance=False) == (1 + 4) + 1 + 2 + 1
    assert module["connections_of_a_tree"]([AtMostOnce], dispatcher=False, maintenance=False) == (1 + 4) + 1 + 1


@pytest.mark.parametrize(
    "changed", [{}, {"NOTIFY": False}, {"ALERTS": {"max_waiting": 5}}, {"JOURNAL": {"a": None}}, {"CONCURRENCY": 9}]
)
@pytest.mark.parametrize("dispatcher", [True, False])
@pytest.mark.parametrize("maintenance", [True, False])
def test_the_command_compares_by_the_formula_of_the_page(
    settings: object, changed: dict[str, object], dispatcher: bool, maintenance: bool
) -> None:
    module: dict[str, object] = {}
    exec(FILES["connections.py"], module)
    settings.QUEUEAPP = {**settings.QUEUEAPP, **changed}
    for queues in ([Leased, Transactional, AtMostOnce], [AtMostOnce]):
        assert connection_limits.of_tree(queues, 2, dispatcher=dispatcher, maintenance=maintenance) == module[
            "connections_of_a_tree"
        ](queues, 2, None, dispatcher, maintenance)


def test_a_tree_whose_handlers_ignore_everything_is_gone_in_the_time_that_the_page_gives(scene: Scene) -> None:
    scene.send(Leased, "deaf", sleep_ms=120_000)  # one long call: nothing interrupts it
    tree = scene.workers(Leased._meta.label, shutdown_grace=1)
    wait_until(lambda: scene.starts("deaf"), "the handler runs")
    asked = monotonic()
    tree.stop()
    assert monotonic() - asked < 1 + MARGIN


def test_each_way_of_running_waits_long_enough_before_it_kills() -> None:
    (grace,) = (option.default.total_seconds() for option in OPTIONS if option.name == "SHUTDOWN_GRACE")
    given = {
        "mysite-worker.service": r"^TimeoutStopSec=(\d+)$",
        "compose.yaml": r"stop_grace_period: (\d+)s",
        "worker.yaml": r"terminationGracePeriodSeconds: (\d+)",
    }
    for name, pattern in given.items():
        (seconds,) = re.findall(pattern, FILES[name], re.MULTILINE)
        assert int(seconds) >= grace + MARGIN, name


def test_every_command_line_of_the_page_is_one_that_the_commands_take() -> None:
    lines = [
        re.findall(r"manage\.py (\w+)((?: --?[\w-]+(?: \d+)?)*)", text.replace('", "', " ")) for text in FILES.values()
    ]
    found = [(command, arguments.split()) for line in lines for command, arguments in line]
    assert [command for command, _ in found].count("runqueueworker") == 3
    for command, arguments in found:
        load_command_class(get_commands()[command], command).create_parser("manage.py", command).parse_args(arguments)


def test_the_unit_signals_the_supervisor_alone() -> None:
    unit = configparser.ConfigParser(interpolation=None)
    unit.optionxform = str
    unit.read_string(FILES["mysite-worker.service"])
    assert unit["Service"]["KillMode"] == "mixed"
    assert unit["Service"]["Restart"] == "always"


@pytest.mark.parametrize("name", ["compose.yaml", "worker.yaml"])
def test_the_yaml_is_yaml_and_its_health_check_is_the_page_s(name: str) -> None:
    yaml = pytest.importorskip("yaml", reason="PyYAML comes with `make docs`")
    document = yaml.safe_load(FILES[name])
    if name == "compose.yaml":
        assert document["services"]["worker"]["healthcheck"]["test"] == ["CMD", "python", *CHECK]
    else:
        pod = document["spec"]["template"]["spec"]
        (container,) = pod["containers"]
        (port,) = container["ports"]
        assert container["command"][-2:] == ["--http", f"0.0.0.0:{port['containerPort']}"]
        for probe, path in (("livenessProbe", "/healthz"), ("startupProbe", "/healthz"), ("readinessProbe", "/readyz")):
            assert container[probe]["httpGet"] == {"path": path, "port": port["name"]}
            assert path in PAGES_OF_A_TREE
        assert {item["name"] for item in container["volumeMounts"]} == {item["name"] for item in pod["volumes"]}


def test_the_health_check_distinguishes_a_live_worker_from_none(scene: Scene) -> None:
    tree = scene.workers(Leased._meta.label)

    def code() -> int:
        done = subprocess.run(
            [sys.executable, *CHECK], cwd=CHECKOUT, env=os.environ | tree.environment, capture_output=True, text=True
        )
        assert "Traceback" not in done.stderr, done.stderr
        return done.returncode

    wait_until(lambda: code() == 0, "the worker has a heartbeat")
    tree.stop()
    assert code() == 1
