"""Erasing a subject: by users with the permission, after two questions, on every database, and without a word of whose
it was afterwards."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from io import StringIO
from typing import Any

import pytest
from django.contrib.admin.models import LogEntry
from django.core.management import CommandError, call_command
from django.db import transaction
from django.test import Client

from queueapp.encryption import keyring
from queueapp.errors import ErasedMessage
from queueapp.models import SubjectKey
from tests.testapp.models import SecretExpiring

from .conftest import notes, url

KEY = b"0123456789abcdefghijklmnopqrstuv"
pytestmark = pytest.mark.django_db


@pytest.fixture(autouse=True)
def keys(settings: Any) -> Iterator[None]:
    settings.QUEUEAPP = {"KEYRING": lambda: {"only": KEY}}
    yield
    keyring.forget()


def send(subject: str) -> None:
    SecretExpiring.send({"gate": "B77"}, headers={"encrypt-for": subject})


def readable() -> list[Any]:
    """What a receiver gets of each message: its body, or that it is erased."""
    found: list[Any] = []
    with transaction.atomic():
        with SecretExpiring.receive(max_backlog=10) as batch:
            for message in batch:
                try:
                    found.append(message.body["gate"])
                except ErasedMessage:
                    found.append("erased")
                message.ack()
        transaction.set_rollback(True)  # they are wanted once more
    return found


# -- in the admin -----------------------------------------------------------------------------------------------------


def test_a_subject_is_erased_after_two_questions(staff: Callable[..., Client]) -> None:
    send("zoe <b>unknown</b>")
    send("ada")
    client = staff("queueapp.erase_subject")
    page = url(SubjectKey)
    first = client.get(page)
    assert "Look for its keys" in first.content.decode()
    assert "zoe" not in first.content.decode(), "there is no list of whose keys there are"

    second = client.post(page, {"subject": "zoe <b>unknown</b>", "confirmed": "yes"})
    text = second.content.decode()
    assert "Destroy its keys" in text
    assert "zoe &lt;b&gt;unknown&lt;/b&gt;" in text
    assert "<b>unknown" not in text
    assert readable() == ["B77", "B77"], "nothing is done before the second answer"

    hidden = dict(second.context["hidden"])
    done = client.post(page, {**hidden, "confirmed": "yes"}, follow=True)

    assert notes(done) == ["1 key destroyed."]
    assert readable() == ["erased", "B77"]
    entry = LogEntry.objects.get()
    assert entry.change_message == "Key of a subject destroyed."
    erased = SubjectKey.objects.get(erased_at__isnull=False)
    assert (entry.object_id, entry.object_repr) == (str(erased.pk), f"key {erased.pk}")
    assert "zoe" not in f"{entry.object_repr} {entry.change_message}"
    assert client.get(url(SubjectKey) + "?q=zoe").status_code == 200


def test_a_subject_without_a_key_is_reported_and_nothing_is_done(staff: Callable[..., Client]) -> None:
    send("ada")
    client = staff("queueapp.erase_subject")

    for data in ({"subject": "adda"}, {"subject": "adda", "sure": "yes"}, {"subject": ""}, {"subject": "a\0"}):
        answer = client.post(url(SubjectKey), {**data, "confirmed": "yes"})
        assert answer.status_code == 200
        assert answer.context["form"].errors

    assert readable() == ["B77"]
    assert not LogEntry.objects.exists()


def test_without_the_permission_there_is_no_such_page(staff: Callable[..., Client], operator: Client) -> None:
    send("ada")
    client = staff("queueapp.decrypt_body", "queueapp.view_subjectkey", "queueapp.delete_subjectkey")

    assert client.get(url(SubjectKey)).status_code == 403
    assert client.post(url(SubjectKey), {"subject": "ada", "sure": "yes", "confirmed": "yes"}).status_code == 403
    key = SubjectKey.objects.get()
    for page in ("change", "delete", "history"):
        assert operator.get(url(SubjectKey, page, key.pk)).status_code == 403

    assert readable() == ["B77"]


# -- the command ------------------------------------------------------------------------------------------------------


def test_the_command_erases_and_does_not_log_whom(caplog: pytest.LogCaptureFixture) -> None:
    send("ada")
    out = StringIO()
    call_command("erasesubject", "ada", "--yes", stdout=out)

    assert out.getvalue() == "default: 1 key destroyed.\n"
    assert readable() == ["erased"]
    assert "Destroyed 1 encryption key of a subject in database 'default'." in caplog.text
    assert "ada" not in caplog.text
    with pytest.raises(CommandError, match=r"'ada' has no key\. Nothing was done\."):
        call_command("erasesubject", "ada", "--yes")


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        (["ada"], "There is no terminal for the confirmation: pass --yes"),
        (["ada", "--yes", "--database", "nowhere"], "database = 'nowhere' is not accepted: it must be one that has "
                                                    "queues"),
        (["", "--yes"], "subject = '' is not accepted"),
        (["a" * 201, "--yes"], "is not accepted: it must be a text of 1 to 200 characters"),
        (["Ada", "--yes"], "'Ada' has no key"),
    ],
)  # fmt: skip
def test_what_is_not_clear_erases_nothing(arguments: list[str], words: str) -> None:
    send("ada")
    with pytest.raises(CommandError, match=words):
        call_command("erasesubject", *arguments)

    assert readable() == ["B77"]
