"""What operators ask of a delayed store goes to the store that is configured; what it lacks is said with its name."""

from __future__ import annotations

import uuid
from datetime import UTC, datetime, timedelta
from io import StringIO

import pytest
from django.core.management import CommandError, call_command

from queueapp import consumer, delayed
from queueapp.errors import MissingVerb
from queueapp.models import DelayedMessage, Now
from queueapp.operations.statistics import LIMIT, queue_stats
from tests.in_process_worker import real_commits
from tests.queueapp.delayed.stores import SampleStore, WholeStore
from tests.testapp.models import AtMostOnce, Leased
from workers.management.commands.runqueueworker import Command
from workers.processes.until_empty import is_empty, remaining

pytestmark = real_commits
HOUR = timedelta(hours=1)
Sample, Whole = type[SampleStore], type[WholeStore]
NAME = "tests.queueapp.delayed.stores.SampleStore"


def delayed_of(queue: type) -> tuple[int | None, bool | None, str]:
    (stats,) = queue_stats([queue])
    return stats.delayed, stats.delayed_exact, stats.error


def test_cancel_and_reschedule_reach_the_store(whole: Whole) -> None:
    first, second = (Leased.send({}, delay=HOUR) for _ in range(2))
    store = delayed.store_of("default")
    then = datetime(2050, 1, 1, tzinfo=UTC)

    assert delayed.reschedule(first, at=then) == 1
    assert {message.due for message in store.connection if message.message_id == first} == {then}  # type: ignore[attr-defined]
    assert delayed.reschedule(first, delay=-HOUR) == 1
    due = store.next()
    assert due is not None
    assert due < datetime.now(UTC)
    assert (delayed.cancel(second), delayed.cancel(second)) == (1, 0)
    assert delayed.reschedule(second, delay=HOUR) == 0


def test_a_delayed_retry_is_in_the_table_and_found_there_whatever_the_store_lacks(sample: Sample) -> None:
    for _ in range(2):
        DelayedMessage.objects.create(destination="testapp.Leased", due=Now() + HOUR, message_id=uuid.uuid4())
    first, second = DelayedMessage.objects.values_list("message_id", flat=True)

    assert delayed.reschedule(first, delay=2 * HOUR) == 1
    assert delayed.cancel(second) == 1


def test_a_verb_that_is_missing_is_reported_with_the_stores_name(sample: Sample) -> None:
    sent = Leased.send({}, delay=HOUR)

    for verb, call in (
        ("cancel", lambda: delayed.cancel(sent)),
        ("reschedule", lambda: delayed.reschedule(sent, delay=HOUR)),
        ("count", lambda: delayed.waiting("default", "testapp.Leased", 10)),
    ):
        with pytest.raises(MissingVerb, match=rf"{NAME} .*no {verb}\(\)") as raised:
            call()
        assert (raised.value.store, raised.value.verb) == (NAME, verb)


def test_messages_for_a_queue_that_is_no_more_are_moved_in_the_store_and_in_the_table(whole: Whole) -> None:
    for _ in range(3):
        Leased.send({}, delay=HOUR)
    for item in delayed.store_of("default").connection:  # type: ignore[attr-defined]
        item.destination = "gone.Shop"
    DelayedMessage.objects.create(destination="gone.Shop", due=Now() + HOUR, message_id=uuid.uuid4())
    out = StringIO()

    call_command("movedelayed", "gone.Shop", "testapp.Leased", "--dry-run", stdout=out)
    call_command("movedelayed", "gone.Shop", "testapp.Leased", stdout=out)

    assert out.getvalue().splitlines() == [
        "4 delayed messages would go to testapp.Leased.",
        "4 delayed messages of gone.Shop go to testapp.Leased now.",
    ]
    assert delayed_of(Leased) == (4, True, "")


def test_a_store_that_cannot_move_messages_is_named_and_those_of_the_table_go(sample: Sample) -> None:
    DelayedMessage.objects.create(destination="gone.Shop", due=Now() + HOUR, message_id=uuid.uuid4())
    with pytest.raises(CommandError, match=rf"{NAME} .*no readdress\(\)"):
        call_command("movedelayed", "gone.Shop", "testapp.Leased", stdout=StringIO())
    assert DelayedMessage.objects.get().destination == "testapp.Leased"


# -- figures ---------------------------------------------------------------------------------------------------------


def test_figures_count_what_is_in_the_store_and_in_the_table(whole: Whole) -> None:
    for _ in range(2):
        Leased.send({}, delay=HOUR)
    AtMostOnce.send({}, delay=HOUR)
    DelayedMessage.objects.create(destination="testapp.Leased", due=Now() + HOUR, message_id=uuid.uuid4())

    assert delayed_of(Leased) == (3, True, "")
    assert delayed_of(AtMostOnce) == (1, True, "")
    assert delayed.waiting("default", "testapp.Leased", 2) == 2


def test_a_figure_that_the_store_cannot_report_is_unknown_and_gives_the_reason(sample: Sample) -> None:
    count, exact, error = delayed_of(Leased)

    assert (count, exact) == (None, None)
    assert NAME in error
    assert "count()" in error


def test_a_store_that_is_away_costs_no_other_figure(whole: Whole) -> None:
    Leased.send({"now": True})
    whole.faults = {"count": ConnectionError("refused by 10.0.0.7")}

    (stats,) = queue_stats([Leased])

    assert (stats.delayed, stats.waiting) == (None, 1)
    assert "refused by 10.0.0.7" in stats.error


def test_figures_stop_at_their_limit(whole: Whole, monkeypatch: pytest.MonkeyPatch) -> None:
    Leased.send({}, delay=HOUR)
    monkeypatch.setattr(WholeStore, "count", lambda self, destination, limit: limit)

    assert delayed_of(Leased) == (LIMIT, False, "")


# -- working until all is done ---------------------------------------------------------------------------------------


def test_until_empty_waits_for_what_is_in_the_store(whole: Whole) -> None:
    assert is_empty([Leased])
    sent = Leased.send({}, delay=HOUR)

    assert not is_empty([Leased])
    rest = remaining([Leased], runs_maintenance=True)
    assert (rest.words, rest.hopeless) == ("testapp.Leased: 1 delayed, in another store", False)

    delayed.cancel(sent)
    assert is_empty([Leased])


def test_until_empty_does_not_end_while_the_store_is_away(whole: Whole) -> None:
    whole.faults = {"count": ConnectionError("away")}

    assert not is_empty([Leased])
    rest = remaining([Leased], runs_maintenance=True)
    assert "away" in rest.words
    assert not rest.hopeless


def test_until_empty_is_refused_where_the_store_cannot_count(sample: Sample, no_consumers: None) -> None:

    @consumer(Leased)
    def anything(message: object) -> None: ...

    with pytest.raises(CommandError, match=rf"--until-empty .*{NAME} .*count\(\)"):
        call_command(Command(), "testapp.Leased", "--until-empty")
