"""A message for an unknown consumer is refused where the consumers of its queue are known."""

from __future__ import annotations

import json
import uuid
from datetime import timedelta
from typing import Any

import pytest
from django.db import connection, transaction

from queueapp import consumer
from queueapp.errors import InvalidMessage
from queueapp.models import Now, Subscriber, Subscription
from queueapp.sending import validation
from tests.databases import only_on_postgresql
from tests.testapp.messages import Nop
from tests.testapp.models import Addressed, Leased

pytestmark = pytest.mark.django_db


@pytest.fixture(autouse=True)
def no_consumers(no_consumers: None) -> None:
    """Only the consumers that the test registers."""


def live(*names: str, **more: Any) -> Subscriber:
    consumers = json.dumps([[name, ""] for name in names]) if names else ""
    given = {"alive_until": Now() + timedelta(hours=1), "consumers": consumers} | more
    return Subscriber.objects.create(queue="testapp.Addressed", host="h", process=1, supervisor=uuid.uuid4(), **given)


def have(name: str) -> None:
    @consumer(Addressed, name=name)
    def handler(message: Nop) -> None:
        pass


def test_a_name_that_no_consumer_has_is_refused_with_those_that_there_are() -> None:
    have("shop.mail")
    live("stock.rebook")
    with pytest.raises(InvalidMessage, match=r"'shop\.mial' is not accepted by testapp\.Addressed") as caught:
        Addressed.send(Nop(1, ""), recipient="shop.mial")
    assert "Known: shop.mail, stock.rebook." in str(caught.value)
    assert "unknown_recipient=True" in str(caught.value)
    with pytest.raises(InvalidMessage):
        Addressed.send_many([Nop(1, "")], recipient="shop.mial")
    with pytest.raises(InvalidMessage):
        Addressed.send(Nop(1, ""), recipient="shop.mial", delay=timedelta(hours=1))
    assert not Addressed.objects.exists()


def test_it_is_sent_when_asked_for() -> None:
    have("shop.mail")
    Addressed.send(Nop(1, ""), recipient="shop.mial", unknown_recipient=True)
    Addressed.send_many([Nop(1, "")], recipient="shop.mial", unknown_recipient=True)
    assert Addressed.objects.filter(recipient="shop.mial").count() == 2


def test_a_producer_without_consumers_knows_those_of_live_workers() -> None:
    live("stock.rebook")
    Addressed.send(Nop(1, ""), recipient="stock.rebook")
    with pytest.raises(InvalidMessage):
        Addressed.send(Nop(1, ""), recipient="stock.rebok")


def test_a_name_that_only_a_subscription_has_is_known() -> None:
    Subscription.objects.create(queue="testapp.Addressed", consumer="stock.rebook", type_name="testapp.Nop")
    Addressed.send(Nop(1, ""), recipient="stock.rebook")
    with pytest.raises(InvalidMessage, match=r"Known: stock\.rebook\."):
        Addressed.send(Nop(1, ""), recipient="stock.rebok")


def test_what_was_known_once_is_known_while_the_workers_are_away() -> None:
    have("shop.mail")
    row = live("stock.rebook")
    Addressed.send(Nop(1, ""), recipient="stock.rebook")
    row.delete()
    Addressed.send(Nop(1, ""), recipient="stock.rebook")
    assert Addressed.objects.count() == 2


def test_without_known_consumers_no_recipient_is_refused() -> None:
    Addressed.send(Nop(1, ""), recipient="stock.rebook")
    Leased.send(Nop(1, ""), recipient="a.consumer")  # a queue without recipients does not look at it


def test_a_worker_that_does_not_report_may_have_it() -> None:
    have("shop.mail")
    live()
    Addressed.send(Nop(1, ""), recipient="stock.rebook")


def test_a_known_name_asks_the_database_once(django_assert_num_queries: Any) -> None:
    live("stock.rebook")
    Addressed.send(Nop(1, ""), recipient="stock.rebook")
    with django_assert_num_queries(0):  # beneath Django's cursor there is the INSERT
        Addressed.send(Nop(1, ""), recipient="stock.rebook")
    have("shop.mail")
    validation.forget()
    with django_assert_num_queries(0):
        Addressed.send(Nop(1, ""), recipient="shop.mail")


@only_on_postgresql
def test_a_producer_that_may_not_read_of_workers_can_send_and_its_transaction_goes_on() -> None:
    have("shop.mail")
    with transaction.atomic():
        with connection.cursor() as cursor:
            cursor.execute("ALTER TABLE queueapp_subscriber RENAME TO elsewhere")
        Addressed.send(Nop(1, ""), recipient="stock.rebook")
        assert Addressed.objects.count() == 1
