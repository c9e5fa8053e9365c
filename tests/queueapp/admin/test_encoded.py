"""Compressed and encrypted bodies in the admin: who sees them as they were sent, and that no page shows a key."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator
from typing import Any

import pytest
from django.test import Client

from queueapp import messages
from queueapp.encryption import erase_subject, keyring
from queueapp.models import PoisonMessage
from tests.testapp.models import Secret, SecretExpiring, Smaller

from .conftest import url
from .test_editing import edit
from .test_poison import poison

KEY = b"0123456789abcdefghijklmnopqrstuv"


@pytest.fixture(autouse=True)
def keys(settings: Any) -> Iterator[None]:
    settings.QUEUEAPP = {"KEYRING": lambda: {"only": KEY}}
    yield
    keyring.forget()


def page_of(client: Client, row: Any) -> str:
    return client.get(url(type(row), "change", row.pk)).content.decode()


def test_a_compressed_body_is_shown_as_it_was_sent_to_users_with_the_permission(staff: Callable[..., Client]) -> None:
    Smaller.send({"gate": "B" + "1" * 300})
    text = page_of(staff("testapp.view_smaller"), Smaller.objects.get())
    assert "1" * 300 in text
    assert "Decompressed for this page from application/json+zlib" in text


def test_an_encrypted_body_is_shown_with_the_permission_and_never_its_key(staff: Callable[..., Client]) -> None:
    SecretExpiring.send({"gate": "B77"}, headers={"encrypt-for": "zoe-without-a-key"})
    row = SecretExpiring.objects.get()

    text = page_of(staff("testapp.view_secretexpiring"), row)
    assert "B77" not in text
    assert "you lack the permission to read such bodies" in text

    text = page_of(staff("testapp.view_secretexpiring", "queueapp.decrypt_body"), row)
    assert "B77" in text
    assert "Decrypted for this page" in text
    assert "zoe-without-a-key" not in text
    assert KEY.decode() not in text

    erase_subject("zoe-without-a-key")
    text = page_of(staff("testapp.view_secretexpiring", "queueapp.decrypt_body"), row)
    assert "it cannot be read (erased: the key of its subject was destroyed)" in text


def test_a_body_that_states_it_is_encrypted_and_is_not_does_not_break_the_page(operator: Client) -> None:
    for content_type in ("application/json+aes256gcm", "application/json+zlib+zstd+aes256gcm", "x+zlib", "+zlib"):
        (number,) = poison(
            headers=json.dumps({"content-type": content_type, "encryption-key": "only"}), body=b"<b>no</b>"
        )
        text = operator.get(url(PoisonMessage, "change", number)).content.decode()
        assert "&lt;b&gt;no&lt;/b&gt;" in text


def test_an_encrypted_poison_message_is_edited_by_users_who_may_decrypt_it(staff: Callable[..., Client]) -> None:
    Secret.send({"gate": "B77"}, recipient="board", unknown_recipient=True)
    row = Secret.objects.get()
    Secret.objects.all().delete()
    (number,) = poison(queue=Secret._meta.label, headers=row.headers, body=row.body, recipient="board")
    PoisonMessage.objects.update(message_id=row.id)
    may = ("queueapp.view_poisonmessage", "queueapp.edit_poisonmessage", "testapp.view_secret")

    form = staff(*may).get(url(PoisonMessage, "edit", number)).context["form"]
    assert set(form.fields) == {"headers"}, "it would be bytes that no form gives back"

    reader = staff(*may, "queueapp.decrypt_body")
    assert reader.get(url(PoisonMessage, "edit", number)).context["form"].initial["body"] == '{"gate":"B77"}'
    edit(reader, number, body='{"gate":"C1"}')

    copy = Secret.objects.get()
    assert b"C1" not in bytes(copy.body)
    with Secret.receive(recipient="board") as batch:
        assert [message.body for message in batch] == [{"gate": "C1"}]
    assert messages.read_head(copy.headers)[1] == "application/json+zstd+aes256gcm"
