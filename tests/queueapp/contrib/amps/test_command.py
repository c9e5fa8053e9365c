"""``manage.py importamps``: what it prints where, and its exit codes."""

from __future__ import annotations

import ast
import json
import subprocess
import sys
from io import StringIO
from pathlib import Path

import pytest
from django.core.management import CommandError, call_command, load_command_class

from tests.queueapp.management.processes import CHECKOUT

from .importing import configuration, queue


def run(*arguments: str) -> tuple[str, str, CommandError | None]:
    """(stdout, stderr, the error that it ended with)."""
    out, err = StringIO(), StringIO()
    try:
        call_command("importamps", *arguments, stdout=out, stderr=err, no_color=True)
    except CommandError as error:
        return out.getvalue(), err.getvalue(), error
    return out.getvalue(), err.getvalue(), None


@pytest.fixture
def config(tmp_path: Path) -> Path:
    return tmp_path / "config.xml"


def test_all_mapped_is_exit_code_0_and_nothing_on_stderr(config: Path) -> None:
    config.write_text(queue())
    out, err, error = run(str(config), "--app-label", "shop")
    assert (err, error) == ("", None)
    assert f"# LocalQueue orders, {config}:1" in out
    assert 'app_label = "shop"' in out
    assert 'db_table = "orders"' in out


def test_not_all_mapped_is_exit_code_3_and_reported_with_file_and_line(config: Path) -> None:
    config.write_text(queue("<MaxBacklog>x</MaxBacklog>\n<Colour>red</Colour>"))
    out, err, error = run(str(config))
    assert error is not None
    assert (error.returncode, str(error)) == (3, "2 elements not mapped.")
    assert err.splitlines() == [
        f"{config}:4: orders: MaxBacklog: 'x' is no whole number, with k or M for a thousand or a million",
        f"{config}:5: orders: Colour: it is unknown",
    ]
    assert "class Orders(Queue):" in out


def test_what_cannot_be_read_is_exit_code_1_and_no_queue_is_printed(config: Path) -> None:
    for text in ("<a", "<Configuration/>", '<!DOCTYPE a [<!ENTITY x "y">]><a/>'):
        config.write_text(text)
        out, err, error = run(str(config))
        assert error is not None
        assert (error.returncode, out, err) == (1, "", "")
        assert str(error).startswith(f"{config}:1: ")

        out, _, error = run(str(config), "--json")
        assert json.loads(out) == {"error": str(error)}


def test_a_note_is_reported_and_no_failure(config: Path) -> None:
    config.write_text(configuration(queue()))
    _, err, error = run(str(config))
    assert error is None
    assert err == (
        f"{config}:4: orders: LocalQueue: no topic of the TransactionLog is its topic 'orders', which AMPS requires (a "
        "note)\n"
    )


def test_a_configuration_without_a_queue_reports_it(config: Path) -> None:
    config.write_text("<AMPSConfig/>")
    _, err, error = run(str(config))
    assert (err, error) == (f"{config}: no queue in it could be converted.\n", None)


def test_json_has_everything(config: Path) -> None:
    logged = "<Topic><Name>orders</Name></Topic>"
    config.write_text(configuration(queue("<MaxBacklog>x</MaxBacklog>"), more="<Actions/>", logged=logged))
    out, _, error = run(str(config), "--json", "--app-label", "shop")
    assert error is not None
    said = json.loads(out)
    assert said["file"] == str(config)
    (item,) = said["queues"]
    assert (item["name"], item["class"], item["table"], item["element"], item["line"]) == (
        "orders",
        "Orders",
        "orders",
        "LocalQueue",
        4,
    )
    assert item["options"]["lease_period"] == "None"
    assert said["journal"] == ["orders"]
    assert [(entry["file"], entry["line"], entry["queue"], entry["element"]) for entry in said["unmapped"]] == [
        (str(config), 7, "orders", "MaxBacklog")
    ]
    assert [entry["element"] for entry in said["notes"]] == ["Actions"]
    assert said["source"] == run(str(config), "--app-label", "shop")[0]


def test_output_goes_into_a_new_file(config: Path, tmp_path: Path) -> None:
    config.write_text(queue())
    printed = run(str(config))[0]
    written = tmp_path / "models.py"
    assert run(str(config), "--output", str(written)) == ("", "", None)
    assert written.read_text() == printed


def test_output_with_json_has_both(config: Path, tmp_path: Path) -> None:
    config.write_text(queue())
    out, _, _ = run(str(config), "--json", "--output", str(tmp_path / "models.py"))
    assert json.loads(out)["source"] == (tmp_path / "models.py").read_text()


def test_output_leaves_a_file_alone_that_is_there(config: Path, tmp_path: Path) -> None:
    config.write_text(queue())
    (tmp_path / "models.py").write_text("mine")
    _, _, error = run(str(config), "--output", str(tmp_path / "models.py"))
    assert error is not None
    assert str(error) == f"--output {tmp_path / 'models.py'} cannot be written: File exists."
    assert (tmp_path / "models.py").read_text() == "mine"


@pytest.mark.parametrize("label", ["a b", "class", "a.b", "1a", '"'])
def test_an_app_label_that_is_none_is_refused(label: str, config: Path) -> None:
    with pytest.raises(CommandError, match=r"--app-label .* is not accepted: it must be the label of a Django app"):
        call_command("importamps", str(config), "--app-label", label)


def test_in_a_shell(config: Path, child_environment: dict[str, str]) -> None:
    config.write_text(queue("<Filter>/a = '${MARK}'</Filter><Expiration>x</Expiration>", name="a\u202eb"))
    done = subprocess.run(
        [sys.executable, "manage.py", "importamps", str(config)],
        cwd=CHECKOUT,
        env=child_environment | {"MARK": "m"},
        capture_output=True,
        encoding="utf-8",
    )
    assert done.returncode == 3
    assert "\"/a = 'm'\"" in done.stdout
    assert "Traceback" not in done.stderr
    assert "\u202e" not in done.stdout + done.stderr
    ast.parse(done.stdout)


def test_help_states_what_the_exit_codes_mean() -> None:
    reported = (
        load_command_class("queueapp.contrib.amps", "importamps").create_parser("manage.py", "importamps").format_help()
    )
    reported = " ".join(reported.split())
    assert "Exit codes: 0 everything was mapped, 3 an element was not" in reported
    assert "1 the file cannot be read or is no configuration of AMPS" in reported
