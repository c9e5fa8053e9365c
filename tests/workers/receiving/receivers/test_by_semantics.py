"""Which class receives a queue: one for each semantics, and none for a semantics that has no class."""

from __future__ import annotations

from copy import copy

import pytest

from tests.testapp.models import AtMostOnce, Leased, Transactional
from workers.receiving.handlers import HandlerTable
from workers.receiving.receivers import (
    AtLeastOnceReceiver,
    AtMostOnceReceiver,
    TransactionalReceiver,
    TransactionBatchReceiver,
    receiver_class_for,
)

pytestmark = pytest.mark.usefixtures("no_consumers")


def test_each_semantics_has_its_receiver() -> None:
    found = [receiver_class_for(queue.delivery, HandlerTable(queue)) for queue in (Leased, AtMostOnce, Transactional)]

    assert found == [AtLeastOnceReceiver, AtMostOnceReceiver, TransactionalReceiver]


def test_several_messages_in_one_transaction_have_a_receiver_of_their_own() -> None:
    delivery = copy(Transactional.delivery)
    delivery.transaction_size = 10

    assert receiver_class_for(delivery, HandlerTable(Transactional)) is TransactionBatchReceiver


def test_semantics_without_a_receiver_is_an_error() -> None:
    delivery = copy(Leased.delivery)
    delivery.__dict__["semantics"] = "a fourth one"

    with pytest.raises(NotImplementedError, match="a fourth one has no receiver: add a class"):
        receiver_class_for(delivery, HandlerTable(Leased))
