"""The subscriptions of consumers: who writes them, what is shown of them, and what an operator does with one that is no
more."""

from __future__ import annotations

import io
import json
import uuid
from datetime import timedelta
from typing import Any

import pytest
from django.core.management import CommandError, call_command
from django.db import connection
from django.test import Client
from django.utils import timezone

from queueapp import InvalidMessage, InvalidOption, consumer
from queueapp.consuming.registry import registered
from queueapp.models import DelayedMessage, Now, Subscriber, Subscription
from queueapp.operations import subscriptions
from queueapp.operations.statistics import queue_stats
from tests.in_process_worker import Worker, real_commits
from tests.queueapp.admin.conftest import operate, operator, staff, url  # noqa: F401  (fixtures)
from tests.testapp.messages import Nop
from tests.testapp.models import Addressed, AddressedUrgent, Leased

pytestmark = pytest.mark.django_db
LABEL = Addressed._meta.label
KIND = "tests.testapp.messages.Nop"


@pytest.fixture(autouse=True)
def no_consumers(no_consumers: None) -> None:
    """Only the consumers that the test registers."""


def have(*names: str, queue: Any = Addressed) -> None:
    def handle(message: Nop) -> None: ...

    for name in names:
        consumer(queue, name=name)(handle)


def live(*names: str, queue: Any = Addressed) -> None:
    """A live worker that has these consumers; without any it does not say."""
    reported = json.dumps([[name, KIND] for name in names]) if names else ""
    Subscriber.objects.create(
        queue=queue._meta.label, host="h", process=1, supervisor=uuid.uuid4(), alive_until=Now() + timedelta(hours=1),
        consumers=reported,
    )  # fmt: skip


def run(command: str, *args: str, **options: Any) -> str:
    out = io.StringIO()
    call_command(command, *args, stdout=out, stderr=io.StringIO(), **options)
    return out.getvalue()


# -- who writes them -------------------------------------------------------------------------------------------------


def test_each_consumer_of_the_code_gets_a_row_per_type_once() -> None:
    have("one", "two")
    have("elsewhere", queue=Leased)

    assert subscriptions.register("default") == 2
    assert subscriptions.register("default") == 0

    rows = list(Subscription.objects.values_list("queue", "consumer", "type_name"))
    assert rows == [(LABEL, "one", KIND), (LABEL, "two", KIND)]


def test_code_that_starts_again_is_noted_and_nothing_of_other_code_goes() -> None:
    have("one")
    subscriptions.register("default")
    long_ago = timezone.now() - timedelta(days=9)
    Subscription.objects.update(seen_at=long_ago, made_at=long_ago)
    registered.remove("one")
    have("two")
    subscriptions.register("default")
    have("one")
    subscriptions.register("default")

    item, two = Subscription.objects.order_by("consumer")
    assert item.seen_at > long_ago
    assert item.made_at == long_ago
    assert two.consumer == "two"


@real_commits
def test_a_worker_writes_those_of_its_queues_at_its_start() -> None:
    have("one")
    have("other queue's", queue=AddressedUrgent)
    worker = Worker(Addressed, heartbeat=True).start()
    try:
        assert [row.consumer for row in Subscription.objects.all()] == ["one"]
    finally:
        worker.stop()


@pytest.mark.django_db(transaction=True)
def test_migrate_writes_those_of_its_database() -> None:
    have("one")
    call_command("migrate", verbosity=0)

    assert [row.consumer for row in Subscription.objects.all()] == ["one"]
    have("two")
    call_command("migrate", verbosity=0, plan=True)
    assert Subscription.objects.count() == 1


def test_the_command_writes_them_and_those_of_scripts() -> None:
    have("one")
    assert run("registerconsumers") == "1 new subscription.\n"
    assert run("registerconsumers", LABEL, "reports", type=KIND) == "reports subscribes.\n"
    assert run("registerconsumers", LABEL, "reports", type=KIND) == "reports subscribed already.\n"

    Addressed.send(Nop(1, ""))

    assert sorted(Addressed.objects.values_list("recipient", flat=True)) == ["one", "reports"]
    with pytest.raises(CommandError, match="a queue with Delivery"):
        run("registerconsumers", Leased._meta.label, "reports")
    with pytest.raises(InvalidOption, match="1 to 200 characters"):
        subscriptions.subscribe(Addressed, "x" * 201)
    with pytest.raises(CommandError, match="--type needs"):
        run("registerconsumers", LABEL, type=KIND)


def test_an_alias_that_is_new_is_noted_so_that_older_code_knows_it() -> None:
    have("new")
    subscriptions.register("default")
    before = Subscription.objects.get()
    registered.remove("new")

    def handle(message: Nop) -> None: ...

    consumer(Addressed, name="new", aliases=["old"])(handle)
    subscriptions.register("default")
    after = Subscription.objects.get()
    assert (json.loads(after.aliases), after.mark != before.mark) == (["old"], True)


# -- what is shown ---------------------------------------------------------------------------------------------------


def test_figures_report_who_is_served_and_what_waits() -> None:
    for name in ("served", "lone"):
        subscriptions.subscribe(Addressed, name, KIND)
    subscriptions.subscribe(Addressed, "lone", "another.Type")
    for _ in range(3):
        Addressed.send(Nop(1, ""))
    live("served")

    (found,) = queue_stats([Addressed])

    lone, served = found.consumers
    assert (lone.consumer, lone.active, lone.waiting, lone.exact) == ("lone", False, 3, True)
    assert lone.types == ["another.Type", KIND]
    assert lone.oldest_seconds is not None
    assert (served.active, served.waiting) == (True, 3)
    assert [rest.name for rest in found.unroutable] == ["lone"]
    assert found.consumers_without_worker == [], "what waits is said already"
    reported = run("listconsumers", LABEL)
    assert "lone (another.Type, " + KIND + "): NO LIVE WORKER, 3 waiting, the oldest " in reported


def test_a_subscription_without_a_consumer_has_a_line_before_a_message_waits_for_it() -> None:
    subscriptions.subscribe(Addressed, "served", KIND)
    subscriptions.subscribe(Addressed, "lone", KIND)
    text = f"{LABEL}: consumer 'lone' has no live worker; 0 copies wait\n"
    assert text not in run("queuestats", LABEL), "no worker receives the queue"

    live("served")

    assert text in run("queuestats", LABEL)
    (load,) = json.loads(run("queuestats", LABEL, json=True))
    assert [(notification["consumer"], notification["active"]) for notification in load["consumers"]] == [
        ("lone", False),
        ("served", True),
    ]
    assert "lone (" + KIND + "): NO LIVE WORKER, 0 waiting" in run("listconsumers")
    assert [item["active"] for item in json.loads(run("listconsumers", LABEL, json=True))] == [False, True]


def test_of_a_worker_without_a_report_nothing_is_claimed() -> None:
    subscriptions.subscribe(Addressed, "lone", KIND)
    live()

    (found,) = queue_stats([Addressed])

    assert found.consumers[0].active is None
    assert found.consumers_without_worker == []
    assert "a worker does not report" in run("listconsumers")


def test_copies_of_all_levels_are_counted() -> None:
    subscriptions.subscribe(AddressedUrgent, "one", KIND)
    for priority in (0, 2, 1, 2):
        AddressedUrgent.send(Nop(1, ""), priority=priority)

    (found,) = queue_stats([AddressedUrgent])

    assert found.consumers[0].waiting == 4


def test_a_queue_without_recipients_is_not_asked(django_assert_num_queries: Any) -> None:
    (found,) = queue_stats([Leased])
    assert found.consumers == []


# -- what an operator does -------------------------------------------------------------------------------------------


def waiting(*names: str) -> None:
    """Copies for these, one delayed."""
    for name in names:
        subscriptions.subscribe(Addressed, name, KIND)
    Addressed.send(Nop(1, ""))
    Addressed.send(Nop(2, ""))
    for name in names:
        Addressed.send(Nop(3, ""), recipient=name, delay=timedelta(hours=1))


def remaining() -> list[str]:
    return sorted(Addressed.objects.values_list("recipient", flat=True))


def test_a_consumer_is_removed_and_its_copies_stay() -> None:
    waiting("old", "new")
    assert run("removeconsumer", LABEL, "old") == f"1 subscription of old removed from {LABEL}.\n"

    Addressed.send(Nop(3, ""))

    assert remaining() == ["new", "new", "new", "old", "old"]
    assert DelayedMessage.objects.filter(recipient="old").count() == 1


def test_its_copies_are_purged_but_those_in_flight() -> None:
    waiting("old", "new")
    with Addressed.receive(recipient="old") as batch:
        assert len(batch) == 1
        assert "2 copies deleted" in run("removeconsumer", LABEL, "old", purge=True)
        assert remaining() == ["new", "new", "old"]
    assert not DelayedMessage.objects.filter(recipient="old").exists()


def test_its_copies_are_moved_to_another() -> None:
    waiting("old", "new")
    assert "3 copies moved to new" in run("removeconsumer", LABEL, "old", move_to="new")
    assert remaining() == ["new"] * 4
    assert DelayedMessage.objects.filter(recipient="new").count() == 2
    with Addressed.receive(max_backlog=10, recipient="new") as batch:
        assert len(batch) == 4


def test_it_is_renamed_with_its_row_and_copies() -> None:
    waiting("old")
    assert run("removeconsumer", LABEL, "old", rename_to="new") == "old was renamed to new; 3 copies moved.\n"
    assert list(Subscription.objects.values_list("consumer", "type_name")) == [("new", KIND)]
    assert remaining() == ["new", "new"]


def test_one_that_a_live_worker_has_is_not_removed_unless_forced() -> None:
    waiting("old")
    live("old")
    with pytest.raises(CommandError, match="has the consumer 'old'"):
        run("removeconsumer", LABEL, "old", purge=True)
    assert Subscription.objects.count() == 1
    run("removeconsumer", LABEL, "old", force=True)
    assert Subscription.objects.count() == 0


def test_while_a_live_worker_does_not_report_which_it_has_none_is_removed() -> None:
    waiting("old")
    live()
    with pytest.raises(CommandError, match="does not report its consumers"):
        run("removeconsumer", LABEL, "old", purge=True)
    assert Subscription.objects.count() == 1
    assert len(remaining()) == 2
    run("removeconsumer", LABEL, "old", purge=True, force=True)
    assert (Subscription.objects.count(), remaining()) == (0, [])


def test_copies_are_not_moved_to_who_is_no_consumer() -> None:
    waiting("old", "new")
    for to in ("unknown", "old"):
        with pytest.raises(InvalidMessage, match="must be another consumer of the queue"):
            subscriptions.move_copies(Addressed, "old", to)
        with pytest.raises(CommandError, match="must be another consumer"):
            run("removeconsumer", LABEL, "old", move_to=to)
    assert Subscription.objects.count() == 2


@pytest.mark.parametrize("what", [{}, {"purge": True}, {"move_to": "new"}, {"rename_to": "new"}])
def test_a_misspelt_consumer_is_refused_and_one_that_only_has_copies_is_not(what: dict[str, Any]) -> None:
    waiting("old", "new")
    with pytest.raises(CommandError, match=r"has no consumer 'olld'.*Subscribed: new, old\."):
        run("removeconsumer", LABEL, "olld", **what)
    assert Subscription.objects.count() == 2

    subscriptions.unsubscribe(Addressed, "old")
    assert LABEL in run("removeconsumer", LABEL, "old")
    assert remaining() == ["new", "new", "old", "old"]


# -- the admin -------------------------------------------------------------------------------------------------------


def test_the_page_shows_who_is_served_and_the_overview_has_a_mark(operator: Client) -> None:  # noqa: F811
    waiting("served", "lone")
    live("served")

    text = operator.get(url(Subscription)).content.decode()

    for expected in ("lone", ">no live worker</span>", ">active consumer</span>", KIND):
        assert expected in text
    overview = operator.get("/admin/queueapp/queuecontrol/").content.decode()
    assert "consumer without worker" in overview
    assert operator.get(url(Subscription), {"consumer__regex": "["}).status_code == 400
    assert operator.get(url(Subscription, "add")).status_code == 403


def test_copies_are_purged_and_moved_and_consumers_removed_on_the_page(operator: Client) -> None:  # noqa: F811
    waiting("old", "new")
    old, new = (Subscription.objects.get(consumer=name).pk for name in ("old", "new"))
    refused = operate(operator, Subscription, "move_copies", old, to="unknown")
    assert "cannot be moved" in " ".join(str(item) for item in refused.context["messages"])

    operate(operator, Subscription, "move_copies", old, to="new")
    assert remaining() == ["new"] * 4
    operate(operator, Subscription, "purge_copies", new)
    assert remaining() == []
    operate(operator, Subscription, "remove", old, new)
    assert not Subscription.objects.exists()

    for answer in ({}, {"confirmed": "yes"}):  # a colleague, who still has them on the screen
        late = operator.post(
            url(Subscription), {"action": "remove", "_selected_action": [old, new], **answer}, follow=True
        )
        assert "Another operator has handled them" in " ".join(str(item) for item in late.context["messages"])


def test_a_message_without_a_name_for_its_queue_is_shown(operator: Client) -> None:  # noqa: F811
    Subscription.objects.create(queue="gone.Queue", consumer="<b>x</b>", type_name="")
    text = operator.get(url(Subscription)).content.decode()
    assert "no such queue" in text
    assert "<b>x</b>" not in text


def test_each_action_needs_its_permission(staff: Any) -> None:  # noqa: F811
    waiting("old", "new")
    key = Subscription.objects.get(consumer="old").pk
    post = {"_selected_action": [key], "confirmed": "yes", "to": "new"}
    viewer, worker = staff("queueapp.view_subscription"), staff("queueapp.operate_queue")
    remover = staff("queueapp.view_subscription", "queueapp.delete_subscription")
    for action in ("purge_copies", "move_copies", "remove"):
        viewer.post(url(Subscription), {"action": action, **post})
    worker.post(url(Subscription), {"action": "remove", **post})
    remover.post(url(Subscription), {"action": "purge_copies", **post})
    assert (len(remaining()), Subscription.objects.count()) == (4, 2)
    assert staff().get(url(Subscription)).status_code == 403
    worker.post(url(Subscription), {"action": "purge_copies", **post})
    remover.post(url(Subscription), {"action": "remove", **post})
    assert (remaining(), Subscription.objects.count()) == (["new", "new"], 1)
    assert connection.vendor
