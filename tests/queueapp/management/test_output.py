"""Commands in a shell: pipes that end early, Ctrl-C, locales without our characters, arguments that are no text."""

from __future__ import annotations

import os
import pty
import select
import signal
import subprocess
import sys
import uuid
from collections.abc import Callable
from time import monotonic

import pytest
from django.core.management import CommandError, call_command

from queueapp.models import PoisonMessage, QueueControl
from tests.in_process_worker import eventually, patience
from tests.queueapp.management.processes import CHECKOUT
from tests.testapp.models import Leased

Environment = dict[str, str]


@pytest.fixture
def environment(child_environment: Environment) -> Environment:
    """As in a shell: Python keeps what goes into a pipe until there is much of it, or the end."""
    return {name: value for name, value in child_environment.items() if name != "PYTHONUNBUFFERED"}


def shell(line: str, environment: Environment) -> subprocess.CompletedProcess[str]:
    """A line of a shell, in which ``manage`` is the command; it must end by itself."""
    return subprocess.run(
        ["bash", "-c", f'set -o pipefail; manage() {{ "{sys.executable}" manage.py "$@"; }}; {line}'],
        cwd=CHECKOUT,
        env=environment,
        stdin=subprocess.DEVNULL,
        capture_output=True,
        encoding="utf-8",
        timeout=patience(60),
        check=False,
    )


def bury(count: int, **fields: str) -> None:
    PoisonMessage.objects.bulk_create(
        [
            PoisonMessage(**{"queue": "testapp.Leased", "reason": "x" * 300} | fields, message_id=uuid.uuid4())
            for _ in range(count)
        ],
        batch_size=500,
    )


@pytest.mark.parametrize("rows", [3, 3000], ids=["noticed at the end", "noticed while writing"])
@pytest.mark.parametrize("unbuffered", [False, True])
def test_a_reader_that_has_seen_enough_is_no_error(environment: Environment, rows: int, unbuffered: bool) -> None:
    bury(rows)
    more = {"PYTHONUNBUFFERED": "1"} if unbuffered else {}

    done = shell(f"manage listpoison --limit 5000 | {'head -1' if rows > 3 else 'true'}", environment | more)

    assert done.stderr == ""
    assert done.returncode == 141
    assert len(done.stdout.splitlines()) == (1 if rows > 3 else 0)


def test_a_full_disk_is_one_line(environment: Environment) -> None:
    done = shell("manage queuestats testapp.Leased > /dev/full", environment)

    assert done.stderr == "CommandError: The output cannot be written: No space left on device.\n"
    assert done.returncode == 1


def test_what_a_locale_lacks_is_shown_by_its_code(environment: Environment) -> None:
    bury(1, reason="b\x1bo\u00f8m")

    done = shell("manage listpoison && manage queuestats testapp.Leased", environment | {"PYTHONIOENCODING": "ascii"})

    assert (done.stderr, done.returncode) == ("", 0)
    assert r"b\u27e8U+001B\u27e9o\xf8m" in done.stdout
    assert r"\u2013" in done.stdout, "no age of the oldest message"


@pytest.mark.django_db
@pytest.mark.parametrize("text", ["\udcff", "a\0b"])
@pytest.mark.parametrize(
    "command",
    [
        ["listpoison", "--queue"],
        ["listpoison", "--group"],
        ["requeuepoison", "--consumer"],
        ["requeuepoison", "--all", "--to"],
        ["queuestats"],
    ],
)
def test_an_argument_that_is_no_text_is_refused(command: list[str], text: str) -> None:
    with pytest.raises(CommandError, match="is not accepted: it is not text"):
        call_command(*command, text)


# -- a terminal ----------------------------------------------------------------------------------------------------


def at_a_terminal(
    environment: Environment, wait_for: str, typed: bytes, answer: bytes, *arguments: str
) -> tuple[int, str]:
    """(exit code, what the terminal showed) of a command at which this is typed once it has said ``wait_for``.

    It is typed again each second until the ``answer`` is seen, as a person would: a SIGINT between the prompt and the
    read is kept by CPython until that read returns.
    """
    child, terminal = pty.fork()
    if child == 0:
        os.chdir(CHECKOUT)
        os.execve(sys.executable, [sys.executable, "manage.py", *arguments], environment)
    shown = b""

    def has_said(text: bytes) -> Callable[[], bool]:
        def look() -> bool:
            nonlocal shown
            shown += os.read(terminal, 65_536)
            return text in shown

        return look

    try:
        eventually(has_said(wait_for.encode()), seconds=60)
        begun = monotonic()
        os.write(terminal, typed)
        try:
            while monotonic() < begun + 60:
                if not select.select([terminal], [], [], 1.0)[0]:
                    if answer not in shown:
                        os.write(terminal, typed)
                elif part := os.read(terminal, 65_536):
                    shown += part
                else:
                    break
            else:
                os.kill(child, signal.SIGKILL)
        except OSError:
            pass  # the other side of it is closed
    finally:
        os.close(terminal)
        code = os.waitstatus_to_exitcode(os.waitpid(child, 0)[1])
    return code, shown.decode(errors="replace")


@pytest.mark.parametrize(("key", "code"), [(b"\x04", 1), (b"\x03", 130)], ids=["Ctrl-D", "Ctrl-C"])
def test_an_unanswered_question_changes_nothing(environment: Environment, key: bytes, code: int) -> None:
    Leased.send({})

    ended, shown = at_a_terminal(
        environment, "confirm: ", key, b"Nothing was done.", "purgequeue", "testapp.Leased", "--no-color"
    )

    assert ended == code
    assert shown.rstrip().endswith("CommandError: Nothing was done.")
    assert "Traceback" not in shown
    assert Leased.objects.count() == 1


@pytest.mark.django_db
@pytest.mark.parametrize("watch", [False, True])
def test_figures_that_were_interrupted_are_a_success_only_if_they_were_watched(
    monkeypatch: pytest.MonkeyPatch, watch: bool
) -> None:
    def interrupted(*_: object) -> None:
        raise KeyboardInterrupt

    monkeypatch.setattr("queueapp.management.commands.queuestats.queue_stats", interrupted)
    if watch:
        call_command("queuestats", watch=True)
        return
    with pytest.raises(CommandError, match=r"Stopped by Ctrl-C\.") as raised:
        call_command("queuestats")
    assert raised.value.returncode == 130


def test_a_question_without_a_standard_input_at_all(environment: Environment) -> None:
    done = shell("manage purgequeue testapp.Leased <&-", environment)

    assert done.stderr.startswith("CommandError: There is no terminal for the confirmation")
    assert done.returncode == 1


# -- numbers -------------------------------------------------------------------------------------------------------


@pytest.mark.django_db
@pytest.mark.parametrize("tasks", ["0", "257", "None", "1.5", "", "-1", "9" * 5000])
def test_tasks_that_cannot_be_are_refused_with_what_can_be(tasks: str) -> None:
    with pytest.raises(CommandError, match="a whole number from 1 to 256, or: default") as raised:
        call_command("setconcurrency", "testapp.Leased", "--", tasks)
    assert len(str(raised.value)) < 200
    assert not QueueControl.objects.exists()


# -- mistyped names ------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(("name", "meant"), [("testapp.Leasd", "testapp.Leased"), ("Leased", "testapp.Leased")])
def test_a_mistyped_queue_is_answered_with_the_one_that_is_meant(name: str, meant: str) -> None:
    with pytest.raises(CommandError, match=f"Did you mean '{meant}'"):
        call_command("queuestats", name)


def test_a_mistyped_option_is_answered_with_the_one_that_is_meant(capsys: pytest.CaptureFixture[str]) -> None:
    from queueapp.management.commands.queuestats import Command

    with pytest.raises(SystemExit):
        Command().run_from_argv(["manage.py", "queuestats", "--watc"[:6] + "hh"])
    assert "did you mean '--watch'" in capsys.readouterr().err
