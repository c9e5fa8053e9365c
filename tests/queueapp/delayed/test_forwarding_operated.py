"""Forwarding as operators meet it: by hand, in figures and in the admin, as a service and as processes."""

from __future__ import annotations

import uuid
from collections.abc import Iterator
from datetime import timedelta
from io import StringIO

import pytest
from django.contrib.auth.models import User
from django.core.management import CommandError, call_command
from django.db import connections
from django.test import Client, override_settings
from django.urls import reverse
from django.utils import timezone

from queueapp import delayed
from queueapp.circuit_breaker import State
from queueapp.models import DelayedMessage, ForwardedMessage, Now
from queueapp.operations import statistics
from queueapp.services.delayed_dispatcher import DelayedDispatcher, Forwarder
from queueapp.services.service import stop_all
from tests.crash.rig.two_databases import TwoDatabases
from tests.crash.rig.waiting import wait_until
from tests.crash.workload.routes import WAREHOUSE
from tests.in_process_worker import DEADLINE, eventually
from tests.queueapp.delayed.forwarded import ADDRESS, HOUR, NOW, forward, keep, old_notes, there
from tests.testapp.models import AtMostOnce, Leased, Transactional
from workers.processes import until_empty
from workers.processes.supervisor import Supervisor

pytestmark = pytest.mark.usefixtures("two")


# -- by hand -----------------------------------------------------------------------------------------------------------


def test_it_is_cancelled_and_rescheduled_where_it_is_kept() -> None:
    first, second = keep(delay=HOUR), keep(delay=HOUR, expires_in=HOUR)

    assert delayed.cancel(first) == 1
    assert delayed.cancel(second, using=WAREHOUSE) == 0
    assert delayed.reschedule(second, delay=NOW) == 1
    assert forward() == (1, 0, 0)

    (row,) = there()
    assert row.id == second
    assert row.expires is not None


def test_figures_and_until_empty_count_what_others_keep_for_a_queue() -> None:
    keep(delay=HOUR)
    keep(delay=HOUR)
    Transactional.send({}, delay=HOUR)

    (figures,) = statistics.queue_stats([Transactional])
    assert (figures.delayed, figures.delayed_exact, figures.error) == (3, True, "")

    DelayedMessage.objects.using(WAREHOUSE).all().delete()
    assert not until_empty.is_empty([Transactional])
    assert (
        until_empty.remaining([Transactional], runs_maintenance=True).words
        == "testapp.Transactional: 2 delayed in 'default'"
    )
    DelayedMessage.objects.all().delete()
    assert until_empty.is_empty([Transactional])
    assert until_empty.is_empty([AtMostOnce])


def test_a_store_that_does_not_answer_makes_the_figure_unknown(two: TwoDatabases) -> None:
    two.here.execute("ALTER TABLE queueapp_delayedmessage RENAME TO later")

    (figures,) = statistics.queue_stats([Transactional])

    assert figures.delayed is None
    assert "delayed" in figures.error


def test_delayed_messages_that_no_process_forwards_any_more_are_named(monkeypatch: pytest.MonkeyPatch) -> None:
    keep()
    DelayedMessage.objects.update(due=Now() - HOUR)
    monkeypatch.setattr(Transactional.delivery, "delayed_in", ())

    assert delayed.undeliverable("default") == {ADDRESS: 1}


# -- the service -------------------------------------------------------------------------------------------------------


@pytest.fixture
def movers() -> Iterator[tuple[DelayedDispatcher, Forwarder]]:
    holder = uuid.uuid4()
    with override_settings(QUEUEAPP={"DISPATCH_INTERVAL": 0.05}):
        both = DelayedDispatcher("default", holder), Forwarder("default", WAREHOUSE, holder)
        for item in both:
            item.start()
        yield both
        assert stop_all(both, DEADLINE)


def test_a_target_that_hangs_keeps_nothing_else_waiting(
    two: TwoDatabases, movers: tuple[DelayedDispatcher, Forwarder]
) -> None:
    dispatcher, forwarder = movers
    with two.there.server.connect(two.there.name) as blocker, blocker.transaction():
        blocker.execute("LOCK TABLE testapp_transactional IN SHARE MODE")
        keep()
        eventually(lambda: two.there.backends("wait_event_type = 'Lock'"))

        for _ in range(20):
            Leased.send({}, delay=NOW)
        eventually(lambda: Leased.objects.count() == 20)
        assert there() == []

    eventually(lambda: len(there()) == 1)
    assert dispatcher.dispatched == 20
    eventually(lambda: forwarder.dispatched == 1)


def test_a_target_that_is_away_feeds_the_breaker_of_its_own(
    two: TwoDatabases, movers: tuple[DelayedDispatcher, Forwarder]
) -> None:
    dispatcher, forwarder = movers
    forwarder.dispatch_breaker.waits = dict.fromkeys(State, 0.05)
    two.here.server.execute(f"ALTER DATABASE {two.there.name} ALLOW_CONNECTIONS false")
    two.here.server.terminate("datname = %s", two.there.name)
    keep()

    eventually(lambda: forwarder.dispatch_breaker.failures > 2)

    trouble = forwarder.dispatch_breaker.report()
    assert trouble is not None
    assert trouble["name"] == "Dispatch of due messages in default for warehouse"
    assert forwarder.fetch_breaker.failures == dispatcher.dispatch_breaker.failures == 0
    two.here.server.execute(f"ALTER DATABASE {two.there.name} ALLOW_CONNECTIONS true")
    eventually(lambda: forwarder.dispatch_breaker.state is State.CLOSED)
    connections[WAREHOUSE].close()
    eventually(lambda: len(there()) == 1)


def test_what_a_killed_forwarder_has_noted_the_next_one_forgets(request: pytest.FixtureRequest) -> None:
    keep()
    forward()
    old_notes()

    request.getfixturevalue("movers")

    eventually(lambda: not ForwardedMessage.objects.using(WAREHOUSE).exists())
    assert len(there()) == 1


def test_workers_of_the_queue_forward_what_the_other_database_keeps_for_it(two: TwoDatabases) -> None:
    """With their own dispatcher, until nothing is left anywhere."""
    two.send("now")
    two.send("soon", delay=timedelta(seconds=2))
    tree = two.workers("--until-empty")

    wait_until(lambda: two.there.effects() == 2, "both are handled")
    verdict = two.drained()
    assert verdict.faultless, (verdict, tree.log_text())


def test_a_database_with_only_delayed_messages_is_maintained_by_the_dispatching_tree() -> None:
    dispatching = Supervisor([Transactional]).children[-1].options
    maintenance = Supervisor([Transactional], dispatcher=False).children[-1].options

    assert (dispatching.role, dispatching.aliases) == ("dispatcher", ["default", WAREHOUSE])
    assert (maintenance.role, maintenance.aliases) == ("maintenance", [WAREHOUSE])


def test_a_worker_states_at_start_that_a_database_which_keeps_messages_for_it_was_not_migrated(
    two: TwoDatabases,
) -> None:
    two.here.execute("ALTER TABLE queueapp_delayedmessage RENAME TO away")
    try:
        with pytest.raises(
            CommandError, match=r"'default' lacks queueapp_delayedmessage: run `manage.py migrate` first"
        ):
            call_command("runqueueworker", "testapp.Transactional")
    finally:
        two.here.execute("ALTER TABLE away RENAME TO queueapp_delayedmessage")


def test_the_command_names_the_figures(two: TwoDatabases) -> None:
    keep(delay=HOUR)
    out = StringIO()

    call_command("queuestats", "testapp.Transactional", "--json", stdout=out)

    assert '"delayed": 1' in out.getvalue()


def test_the_admin_shows_where_it_goes_and_filters_by_that(client: Client) -> None:
    client.force_login(User.objects.create_superuser("root", last_login=timezone.now()))
    keep(delay=HOUR)
    page = reverse("admin:queueapp_delayedmessage_changelist")

    assert "testapp.Transactional in warehouse" in client.get(page).content.decode()
    for chosen, count in ((ADDRESS, 1), ("testapp.Transactional", 0), ("(no such queue)", 0)):
        shown = client.get(page, {"destination": chosen}).content.decode()
        assert shown.count('class="action-select"') == count, chosen
    number = DelayedMessage.objects.get().pk
    detail = client.get(reverse("admin:queueapp_delayedmessage_change", args=[number])).content.decode()
    assert "testapp.Transactional in warehouse" in detail
