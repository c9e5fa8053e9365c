"""Delayed messages that one database keeps for a queue of another one: real processes, killed between the two
commits."""

from __future__ import annotations

import random
from datetime import timedelta

import psutil

from tests.testapp.models import Leased

from .rig.servers import on_both
from .rig.standstill import WORDS
from .rig.two_databases import TwoDatabases
from .rig.waiting import wait_until

MANY = 300


def die_between_the_commits(two: TwoDatabases) -> str:
    """Send messages, let a dispatcher deliver all of them and kill it before it can remove them from the store; then
    let the next one have them. Returns the log."""
    for number in range(MANY):
        two.send(f"message {number}")
    dispatcher = two.dispatcher()
    with two.removal_held():
        wait_until(two.standing_still, "the dispatcher is about to remove what it has forwarded")
        assert (two.arrived(), two.kept()) == (MANY, MANY), "committed there, and not yet here"
        two.child_of(dispatcher).kill()
    wait_until(lambda: two.kept() == 0, "the store is empty")
    return dispatcher.log_text()


def test_what_was_forwarded_by_a_process_that_died_before_it_removed_it_is_not_delivered_again(
    two: TwoDatabases,
) -> None:
    log = die_between_the_commits(two)

    assert two.arrived() == MANY
    assert f"{MANY} delayed messages for testapp.Transactional@warehouse had arrived there already" in log
    two.workers("--no-dispatcher")
    verdict = two.drained()
    assert verdict.faultless, verdict
    assert verdict.effects == MANY


def test_a_target_without_our_tables_gets_them_twice_and_none_is_lost(two: TwoDatabases) -> None:
    two.environ["CRASH_NO_ARRIVALS"] = "1"

    log = die_between_the_commits(two)

    assert two.arrived() == 2 * MANY
    assert "may be there twice after a crash" in log
    assert two.there.execute("SELECT count(DISTINCT id) FROM testapp_transactional") == [(MANY,)]


@on_both
def test_a_process_that_died_before_it_committed_anything_has_delivered_nothing(two: TwoDatabases) -> None:
    server, name = two.there.server, two.there.name

    def waiting() -> object:
        if server.vendor == "postgresql":
            return two.there.backends("wait_event_type = 'Lock'")
        return server.waiting(name, "LCK[_]M[_]%", "%testapp_transactional%")

    with server.connect(name) as blocker, blocker.transaction():
        blocker.execute(WORDS[server.vendor].from_writing.format("testapp_transactional"))  # no session may insert
        two.send("message")
        dispatcher = two.dispatcher()
        wait_until(waiting, "the forwarder waits for the queue's table")
        two.child_of(dispatcher).kill()
        assert (two.arrived(), two.kept()) == (0, 1)

    wait_until(lambda: two.kept() == 0, "the next one has moved it")
    assert two.arrived() == 1


@on_both
def test_however_often_its_processes_are_killed_each_message_has_its_effect_once(two: TwoDatabases) -> None:
    workers, dispatcher = two.workers("--no-dispatcher"), two.dispatcher()
    dice = random.Random(4711)
    sent = 0
    for kills in range(6):
        for _ in range(40):
            two.send(f"message {sent}", delay=timedelta(milliseconds=dice.randrange(400)))
            sent += 1
        arrived = two.kept() // 2
        wait_until(lambda arrived=arrived: two.kept() <= arrived, "it is in the middle of its work", pause=0.002)
        victim = two.child_of(dispatcher) if kills % 3 else psutil.Process(workers.pid)
        victim.kill()
    verdict = two.drained()

    assert verdict.sent == sent
    assert verdict.faultless, verdict
    assert verdict.poisoned == 0


def test_a_target_that_is_away_keeps_no_messages_for_others_waiting_and_gets_its_own_later(two: TwoDatabases) -> None:
    server, name = two.here.server, two.there.name
    dispatcher = two.dispatcher()
    two.child_of(dispatcher)
    server.execute(f"ALTER DATABASE {name} ALLOW_CONNECTIONS false")
    server.terminate("datname = %s", name)

    two.send("far")
    for number in range(20):
        two.send(f"near {number}", Leased)

    wait_until(lambda: two.here.execute("SELECT count(*) FROM testapp_leased") == [(20,)], "the near ones are moved")
    wait_until(
        lambda: two.here.execute(
            "SELECT 1 FROM queueapp_subscriber WHERE breakers LIKE '%Dispatch of due messages in default for "
            "warehouse%'"
        ),
        "its breaker is reported",
    )
    assert two.kept() == 1
    server.execute(f"ALTER DATABASE {name} ALLOW_CONNECTIONS true")
    wait_until(lambda: two.kept() == 0, "it has gone over")
    assert two.arrived() == 1
