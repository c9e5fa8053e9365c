"""The pages of the API and of the commands have every public name and every command, and are made from the code."""

from __future__ import annotations

import os
import re
from io import StringIO
from unittest import mock

import pytest
from django.core.management import get_commands, load_command_class

import queueapp

from .pages import DOCS

API, COMMANDS = DOCS / "reference" / "api.md", DOCS / "reference" / "commands.md"
#: Options that Django adds to every command; Django documents them.
DJANGOS = "--version|-v|--settings|--pythonpath|--traceback|--no-color|--force-color|--skip-checks"
#: Apps whose commands are listed, in the page's order.
APPS = ("workers", "queueapp", "queueapp.contrib.celery", "queueapp.contrib.amps")


def test_every_public_name_is_on_the_page_of_the_api() -> None:
    shown = set(re.findall(r"^::: queueapp\.(\w+)$", API.read_text(), re.MULTILINE)) | set(dir(queueapp.errors))
    assert [name for name in queueapp.__all__ if name not in shown and name != "NEVER"] == []


def help_of(app: str, name: str) -> str:
    command = load_command_class(app, name)
    with mock.patch.dict(os.environ, {"COLUMNS": "100"}):
        parser = command.create_parser("manage.py", name)
        out = StringIO()
        parser.print_help(out)
    text = re.sub(rf"\s*\[(?:{DJANGOS})(?: [A-Z]+| \{{0,1,2,3\}})?\]", "", out.getvalue())
    return re.sub(rf"^  (?:{DJANGOS})[ ,].*\n(?:    {{10,}}.*\n)*", "", text, flags=re.MULTILINE)


def page() -> str:
    text = """# Commands

Every command of `manage.py`, as `--help` prints it, without the options that Django adds to each. Made by
`UPDATE_DOCS=1 python -m pytest tests/docs/test_reference_pages.py`.
"""
    commands = get_commands()
    for app in APPS:
        for name in sorted(name for name, owner in commands.items() if owner == app):
            text += f"\n## {name}\n\n```text\n{help_of(app, name).rstrip()}\n```\n"
    return text


def test_the_page_of_the_commands_is_what_their_help_shows() -> None:
    if os.environ.get("UPDATE_DOCS"):
        COMMANDS.write_text(page())
    assert COMMANDS.read_text() == page(), "run UPDATE_DOCS=1 python -m pytest tests/docs"


@pytest.mark.parametrize("app", APPS)
def test_each_app_of_the_page_has_commands(app: str) -> None:
    assert app in get_commands().values()
