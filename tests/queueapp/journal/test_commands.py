"""``manage.py replay`` and ``manage.py rebuildqueue``."""

from __future__ import annotations

import base64
import io
import json
from typing import Any

import pytest
from django.core.management import CommandError, call_command

from queueapp import publish
from queueapp.management.base_command import Progress
from queueapp.models import DelayedMessage, JournalEntry, PoisonMessage
from queueapp.operations import control
from queueapp.topics.backfill import QueueFeeder
from tests.in_process_worker import real_commits
from tests.queueapp.journal.filling import filled, numbers, put, take
from tests.queueapp.sql.server import Server
from tests.testapp.models import Deep, Recovered

pytestmark = real_commits
TOPIC = "journaled.orders"


class Terminal(io.StringIO):
    def isatty(self) -> bool:
        return True


@pytest.fixture
def here(server: Server, monkeypatch: pytest.MonkeyPatch, settings: Any) -> Server:
    """The queues lie in the database under test."""
    if server.alias != "default":
        settings.DATABASE_ROUTERS = [_Router(server.alias)]
    return server


class _Router:
    def __init__(self, alias: str) -> None:
        self.alias = alias

    def db_for_write(self, model: Any, **hints: Any) -> str:
        return self.alias

    db_for_read = db_for_write


def run(name: str, *args: str, **options: Any) -> str:
    out = io.StringIO()
    call_command(name, *args, stdout=out, **options)
    return out.getvalue()


# -- replay --------------------------------------------------------------------------------------------------------


def test_replay_prints_a_line_for_each_message(here: Server) -> None:
    put(here, TOPIC, 1)
    publish("journaled.orders.2", "\x1b[31mred\nline", using=here.alias)

    first, second = run("replay", "^journaled").splitlines()
    entry = JournalEntry.objects.using(here.alias).order_by("seq")[0]
    shown = [str(entry.seq), entry.published_at.isoformat(), TOPIC, str(entry.message_id), '{"n":1}']
    assert first == "  ".join(shown)
    assert "\x1b" not in second, "what a message says cannot write on the terminal"
    assert "red" in second


def test_replay_prints_json_for_scripts(here: Server) -> None:
    put(here, TOPIC, 1, 2, 3)
    since = str(JournalEntry.objects.using(here.alias).order_by("seq")[0].seq)

    found = [json.loads(line) for line in run("replay", TOPIC, "--since", since, "--limit", "1", "--json").splitlines()]
    assert [(base64.b64decode(item["body"]), item["topic"]) for item in found] == [(b'{"n":2}', TOPIC)]
    assert found[0]["headers"]["topic"] == TOPIC


def test_replay_prints_what_matches_a_filter(here: Server) -> None:
    put(here, TOPIC, 1, 2, 3)

    assert len(run("replay", TOPIC, "--filter", "/n > 1").splitlines()) == 2


def test_replay_into_a_queue_puts_copies_in(here: Server) -> None:
    put(here, TOPIC, 1, 2)

    assert run("replay", TOPIC, "--to", "testapp.Recovered") == "2 messages were inserted into testapp.Recovered.\n"
    assert numbers(here, Recovered) == [1, 2, 1, 2]
    ids = Recovered.objects.using(here.alias).values_list("id", flat=True)
    assert len(set(ids)) == 2


@pytest.mark.parametrize(
    ("args", "text"),
    [
        (["x", "--since", "yesterday"], "since = 'yesterday' is not accepted"),
        (["x", "--since", "99999999"], "The journal has no entry 99999999"),
        (["x", "--limit", "0"], "--limit 0 is not accepted"),
        (["x", "--filter", "/n >"], "Column 5"),
        (["x", "--to", "no-such-queue"], "There is no queue 'no-such-queue'"),
        (["("], "topic = '\\(' is not accepted"),
    ],
)
def test_replay_states_in_a_line_what_is_wrong(here: Server, args: list[str], text: str) -> None:
    with pytest.raises(CommandError, match=text):
        run("replay", *args)


@pytest.mark.parametrize("name", ["replay", "rebuildqueue"])
def test_help_has_examples(name: str, capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit):
        call_command(name, "--help")

    assert f"manage.py {name} " in capsys.readouterr().out


# -- rebuildqueue --------------------------------------------------------------------------------------------------


def test_rebuildqueue_fills_what_never_entered(here: Server, delivery: Any) -> None:
    delivery(Recovered, filter="/n > 2")
    put(here, TOPIC, 1, 2, 3)
    filled(here, Recovered)
    take(here, Recovered, 1)
    delivery(Recovered, filter="/n > 1")

    text = "1 messages were inserted into testapp.Recovered; 2 entries were read.\n"
    assert run("rebuildqueue", "testapp.Recovered") == text
    assert numbers(here, Recovered) == [2]
    assert json.loads(run("rebuildqueue", "testapp.Recovered", "--json"))["copied"] == 0


def test_rebuildqueue_from_a_point_leaves_what_is_before(here: Server, delivery: Any) -> None:
    delivery(Recovered, recovery_point="now")
    delivery(Recovered, underlying_topic="nothing")
    put(here, TOPIC, 1, 2, 3)
    delivery(Recovered, underlying_topic=TOPIC)
    filled(here, Recovered)
    third = str(JournalEntry.objects.using(here.alias).order_by("seq")[2].seq)

    found = json.loads(run("rebuildqueue", "testapp.Recovered", "--from", third, "--json"))
    assert found == {"queue": "testapp.Recovered", "read": 1, "copied": 1, "remaining": 0}
    assert numbers(here, Recovered) == [3]


def test_rebuildqueue_again_puts_in_what_is_no_longer_there_and_doubles_nothing_that_waits(here: Server) -> None:
    put(here, TOPIC, 1, 2, 3, 4, 5)
    filled(here, Recovered)
    take(here, Recovered, 1)
    rows = list(Recovered.objects.using(here.alias).order_by("seq"))
    DelayedMessage.objects.using(here.alias).create(
        message_id=rows[0].id, destination="testapp.Recovered", due=here.backend.now(here.connection)
    )
    rows[0].delete()
    control.move_to_poison(Recovered, [rows[1].seq], reason="by a test", using=here.alias)
    assert PoisonMessage.objects.using(here.alias).count() == 1

    found = json.loads(run("rebuildqueue", "testapp.Recovered", "--again", "--yes", "--json"))
    assert found["copied"] == 1, "the one that was acked"
    assert numbers(here, Recovered) == [4, 5, 1]
    assert json.loads(run("rebuildqueue", "testapp.Recovered", "--again", "--yes", "--json"))["copied"] == 0
    assert filled(here, Recovered) == 0
    take(here, Recovered, 3)
    assert json.loads(run("rebuildqueue", "testapp.Recovered", "--again", "--yes", "--json"))["copied"] == 3
    assert numbers(here, Recovered) == [1, 4, 5], "the first of them was copied before"


def test_rebuildqueue_again_asks_first(here: Server) -> None:
    put(here, TOPIC, 1)
    with pytest.raises(CommandError, match="There is no terminal for the confirmation: pass --yes"):
        run("rebuildqueue", "testapp.Recovered", "--again")


def test_rebuildqueue_of_a_queue_with_target_queue_depth_fills_what_it_has_room_for(here: Server) -> None:
    put(here, "journaled.deep", *range(1200))

    text = run("rebuildqueue", "testapp.Deep")
    assert text == "1000 messages were inserted into testapp.Deep; 1000 entries were read. 200 more in the journal.\n"
    with pytest.raises(CommandError, match="target_queue_depth = 1000 is not accepted"):
        run("rebuildqueue", "testapp.Deep", "--again", "--yes")
    assert Deep.objects.using(here.alias).count() == 1000


def test_rebuildqueue_of_a_queue_without_a_journal_reports_it(here: Server) -> None:
    with pytest.raises(CommandError, match=r"testapp.Leased collects 'Leased', which is not journaled"):
        run("rebuildqueue", "testapp.Leased")
    with pytest.raises(CommandError, match="--from = 'x' is not accepted"):
        run("rebuildqueue", "testapp.Recovered", "--from", "x")


def test_rebuildqueue_that_is_stopped_goes_on_where_it_was(
    here: Server, monkeypatch: pytest.MonkeyPatch, delivery: Any
) -> None:
    delivery(Recovered, underlying_topic="nothing")
    put(here, TOPIC, *range(3))
    delivery(Recovered, underlying_topic=TOPIC)
    fill = QueueFeeder.fill
    monkeypatch.setattr(QueueFeeder, "fill", lambda self: fill(self, 2))
    calls: list[int] = []

    def stopped(self: Progress, count: int) -> None:
        calls.append(count)
        if len(calls) == 1:
            raise KeyboardInterrupt

    monkeypatch.setattr(Progress, "at", stopped)
    with pytest.raises(CommandError, match="Stopped; 0 messages"):
        run("rebuildqueue", "testapp.Recovered")
    run("rebuildqueue", "testapp.Recovered")
    assert numbers(here, Recovered) == [0, 1, 2]


def test_progress_is_a_bar_on_a_terminal_and_nothing_elsewhere() -> None:
    from django.core.management.base import OutputWrapper

    for stream, shown in (
        (Terminal(), "\r[###############               ]  50% 5 of 10 entries\n"),
        (io.StringIO(), ""),
    ):
        progress = Progress(OutputWrapper(stream), "entries", 10)
        progress.at(5)
        progress.at(6)
        progress.end()
        assert stream.getvalue() == shown
    assert Progress(OutputWrapper(io.StringIO()), "messages").line(7) == "7 messages"


def test_rebuildqueue_again_does_not_double_what_moves_into_the_queue_meanwhile(here: Server) -> None:
    """A delayed message becomes due between two looks: a reader that looked at the queue first would find it
    nowhere."""
    put(here, TOPIC, 1)
    filled(here, Recovered)
    (row,) = Recovered.objects.using(here.alias)
    DelayedMessage.objects.using(here.alias).create(
        message_id=row.id, destination="testapp.Recovered", due=here.backend.now(here.connection)
    )
    row.delete()
    table = DelayedMessage._meta.db_table

    def becomes_due(execute: Any, sql: str, params: Any, many: bool, context: Any) -> Any:
        if sql.startswith("SELECT") and table in sql and Recovered._meta.db_table not in sql:
            with here.connection.cursor() as cursor:
                cursor.execute(f"DELETE FROM {table}")
            Recovered.objects.using(here.alias).bulk_create([row])
        return execute(sql, params, many, context)

    with here.connection.execute_wrapper(becomes_due):
        run("rebuildqueue", "testapp.Recovered", "--again", "--yes")

    in_queue = Recovered.objects.using(here.alias).count()
    assert in_queue + DelayedMessage.objects.using(here.alias).count() == 1


def test_rebuildqueue_again_of_a_queue_that_cannot_be_is_refused_before_anything_is_done(here: Server) -> None:
    put(here, "journaled.deep", 1)
    with pytest.raises(CommandError, match="target_queue_depth = 1000 is not accepted"):
        run("rebuildqueue", "testapp.Deep", "--again", "--yes")
    assert not Deep.objects.using(here.alias).exists()
