"""A text that no column can hold is refused by every reader, with its name, its value and what is accepted: the
database's own error names neither, and on SQL Server it would be another one."""

from __future__ import annotations

import uuid
from collections.abc import Callable
from typing import Any

import pytest

from queueapp import InvalidMessage, InvalidOption
from queueapp.encryption import subject_keys
from queueapp.failures import poison_operations
from queueapp.models import Subscription
from queueapp.operations import move_messages, running_handlers, subscriptions
from queueapp.schedules import stored
from tests.testapp.models import Addressed, Leased

pytestmark = pytest.mark.django_db

LOOK_UPS: dict[str, Callable[[Any], Any]] = {
    "recipient": lambda text: Addressed.receive(recipient=text),
    "consumer": lambda text: subscriptions.subscribe(Addressed, text),
    "consumer to remove": lambda text: subscriptions.unsubscribe(Addressed, text),
    "consumer to purge": lambda text: subscriptions.purge_copies(Addressed, text),
    "consumer to move": lambda text: subscriptions.move_copies(Addressed, text, "other"),
    "to": lambda text: subscriptions.move_copies(Addressed, "consumer", text),
    "to of a rename": lambda text: subscriptions.rename(Addressed, "consumer", text),
    "consumer that is known": lambda text: subscriptions.require_known_consumer(Addressed, "default", text),
    "type": lambda text: subscriptions.subscribe(Addressed, "consumer", text),
    "source": lambda text: move_messages.move_delayed(text, Leased),
    "subject": subject_keys.erase_subject,
    "subject to find": subject_keys.find,
    "name": lambda text: stored.run_now("default", text),
    "name to pause": lambda text: stored.pause("default", [text]),
    "name to resume": lambda text: stored.resume("default", [text]),
}


@pytest.mark.parametrize("look_up", LOOK_UPS)
@pytest.mark.parametrize("text", ["\ud83d", "a\0b", "x" * 100_000, None, 7, ["a"]], ids=lambda text: repr(text)[:9])
def test_a_text_that_no_column_holds_is_refused_by_its_name(look_up: str, text: Any) -> None:
    with pytest.raises(
        InvalidOption, match=rf"^{look_up.split()[0]} = .* is not accepted: it must be a text of"
    ) as error:
        LOOK_UPS[look_up](text)
    assert len(str(error.value)) < 500


@pytest.mark.parametrize("text", ["\ud83d", "a\0b"])
def test_poison_is_not_found_by_what_no_column_holds(text: str) -> None:
    with pytest.raises(InvalidOption, match=r"queue = .* is not accepted: it must be a text without NUL"):
        poison_operations.find(queue=text)
    assert not poison_operations.find(queue="x" * 100_000).exists()


def test_a_message_is_looked_up_by_an_id() -> None:
    with pytest.raises(InvalidMessage, match="message_id = '7' is not accepted"):
        running_handlers.progress_of("7")  # type: ignore[arg-type]
    assert running_handlers.progress_of(uuid.uuid4()) is None


def test_a_consumer_that_is_renamed_to_its_own_name_keeps_its_subscription() -> None:
    subscriptions.subscribe(Addressed, "billing", "shop.Order")
    with pytest.raises(InvalidOption, match="another name"):
        subscriptions.rename(Addressed, "billing", "billing")
    assert Subscription.objects.get().consumer == "billing"
