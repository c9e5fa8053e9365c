"""Editing a poison message in the admin: what the form offers, what it sends, and what it refuses."""

import json
from collections.abc import Callable
from typing import Any

import pytest
from django.contrib.admin.models import LogEntry
from django.http import HttpResponse
from django.test import Client

from queueapp.admin.edit_poison import LONGEST, editable
from queueapp.models import PoisonMessage
from tests.testapp.models import Leased

from .conftest import notes, url
from .test_poison import poison

EDITED = PoisonMessage.Status.EDITED


def edit(client: Client, number: int, **data: Any) -> HttpResponse:
    """Fetch the form, change these fields of it, and send it."""
    address = url(PoisonMessage, "edit", number)
    form = client.get(address).context["form"]
    fields = {name: form.initial[name] for name in form.fields}
    # As a browser does.
    sent = {name: value.replace("\r\n", "\n").replace("\n", "\r\n") for name, value in (fields | data).items()}
    return client.post(address, sent, follow=True)


def test_the_edited_message_is_sent_and_the_original_reports_it(operator: Client) -> None:
    (number,) = poison()

    response = edit(operator, number, body='{"gate":"B12"}')

    row = Leased.objects.get()
    assert (row.body, json.loads(row.headers)["type"]) == (b'{"gate":"B12"}', "shop.Board")
    assert notes(response) == [f"The edited message was requeued as {row.id}; the original is kept as edited."]
    original = PoisonMessage.objects.get()
    assert (original.status, original.edited_as) == (EDITED, row.id)
    page = operator.get(url(PoisonMessage, "change", number)).content.decode()
    assert str(row.id) in page
    assert "Edit and requeue" not in page
    entry = LogEntry.objects.get(object_id=str(number))
    assert entry.change_message == f"Edited and requeued as {row.id}."


def test_a_copy_that_is_poison_again_links_to_its_original(operator: Client) -> None:
    (number,) = poison()
    original = PoisonMessage.objects.get()
    (again,) = poison(edit_of=original.message_id)

    page = operator.get(url(PoisonMessage, "change", again)).content.decode()

    assert f'href="{url(PoisonMessage)}{number}/change/">{original.message_id}' in page


@pytest.mark.parametrize(
    "body",
    [
        b'{"a": 1.10,\n "b": [1]}',
        b"\xef\xbb\xbf{}",
        "žluť\r\nkůň\r\n".encode(),
        b"",
        b"<script>alert(1)</script>",
        b" x ",
    ],
)
def test_a_body_that_was_not_touched_goes_as_the_bytes_it_is(operator: Client, body: bytes) -> None:
    (number,) = poison(body=body, headers='{"a":"b"}')

    edit(operator, number, headers='{"a":"c"}')

    assert bytes(Leased.objects.get().body) == body


def test_line_ends_of_the_message_are_kept(operator: Client) -> None:
    unix, windows = poison(body=b"a\nb", headers="{}") + poison(body=b"a\r\nb", headers="{}")

    edit(operator, unix, body="a\nc")
    edit(operator, windows, body="a\nc")

    assert [bytes(row.body) for row in Leased.objects.order_by("seq")] == [b"a\nc", b"a\r\nc"]


@pytest.mark.parametrize("body", [None, b"\xff\x00", b"a\0b", b"a\rb", b"a\r\nb\nc", b"x" * (LONGEST + 1)])
def test_a_body_that_no_form_gives_back_is_not_offered_and_goes_as_it_is(operator: Client, body: bytes | None) -> None:
    assert editable(body) is None
    (number,) = poison(body=body, headers='{"a":"b"}')

    page = operator.get(url(PoisonMessage, "edit", number))
    assert "body" not in page.context["form"].fields
    assert "The body is sent unchanged" in page.content.decode()
    edit(operator, number, headers='{"a":"c"}')

    assert Leased.objects.get().body == body


@pytest.mark.parametrize(
    ("fields", "text"),
    [
        ({"headers": "{"}, "This is not a JSON object of strings"),
        ({"headers": '{"a": 1}'}, "This is not a JSON object of strings"),
        ({"headers": '{"edit-of": "x"}'}, "is locked"),
        ({"headers": '{"content-type": "application/json"}', "body": "{"}, "does not suit its content type"),
        ({"body": ""}, "The edited body is empty"),
    ],
)
def test_what_is_refused_is_shown_again_with_the_reason(operator: Client, fields: dict[str, str], text: str) -> None:
    (number,) = poison()

    response = edit(operator, number, **fields)

    assert text in response.content.decode()
    assert not Leased.objects.exists()
    assert PoisonMessage.objects.get().status == "unresolved"


def test_a_queue_that_is_no_more_is_reported(operator: Client) -> None:
    (number,) = poison(queue="gone.Queue")

    assert "gone.Queue" in edit(operator, number).content.decode()

    assert PoisonMessage.objects.get().status == "unresolved"


def test_a_message_that_another_operator_changed_is_reported(operator: Client) -> None:
    (number,) = poison()
    address = url(PoisonMessage, "edit", number)
    PoisonMessage.objects.update(status="archived")

    response = operator.post(address, {"headers": "{}", "body": "{}"}, follow=True)

    assert notes(response) == [f"Message {number} is no longer unresolved."]
    assert "is gone" in notes(operator.get(url(PoisonMessage, "edit", number + 1), follow=True))[0]


def test_editing_has_a_permission_of_its_own(staff: Callable[..., Client]) -> None:
    (number,) = poison()
    see = ("testapp.view_leased", "queueapp.view_poisonmessage")
    requeuer = staff(*see, "queueapp.requeue_poisonmessage", "queueapp.change_poisonmessage")
    editor = staff(*see, "queueapp.edit_poisonmessage")

    assert "Edit and requeue" not in requeuer.get(url(PoisonMessage, "change", number)).content.decode()
    assert requeuer.get(url(PoisonMessage, "edit", number)).status_code == 403
    assert requeuer.post(url(PoisonMessage, "edit", number), {"headers": "{}"}).status_code == 403
    assert "Edit and requeue" in editor.get(url(PoisonMessage, "change", number)).content.decode()
    edit(editor, number, body="{}")
    assert Leased.objects.count() == 1


def test_a_hostile_body_stays_text(operator: Client) -> None:
    (number,) = poison(body=b"</textarea><script>alert(1)</script>", headers='{"</textarea><script>":"x"}')

    page = operator.get(url(PoisonMessage, "edit", number)).content.decode()

    assert "<script>alert" not in page
    assert "&lt;/textarea&gt;&lt;script&gt;alert(1)" in page


def test_the_list_shows_edited_ones_when_asked(operator: Client) -> None:
    (number,) = poison(status=EDITED)
    for query, expected in (("", []), ("?status=edited", [number]), ("?status=archived", [])):
        response = operator.get(url(PoisonMessage) + query)
        assert [row.pk for row in response.context["cl"].result_list] == expected


def test_headers_that_are_too_large_for_a_form_are_reported(operator: Client) -> None:
    (number,) = poison(headers=json.dumps({"a": "x" * LONGEST}))

    for ask in (operator.get, lambda address, **_: operator.post(address, {"headers": "{}"}, follow=True)):
        response = ask(url(PoisonMessage, "edit", number), follow=True)
        assert notes(response) == [f"Message {number} is too large to be edited here."]

    assert not Leased.objects.exists()


@pytest.mark.parametrize(("body", "said"), [("a\u202eb", True), ("plain\n\tž", False)])
def test_characters_that_a_form_does_not_show_are_reported(operator: Client, body: str, said: bool) -> None:
    (number,) = poison(body=body.encode())

    page = operator.get(url(PoisonMessage, "edit", number)).content.decode()

    assert ("characters that are invisible here" in page) is said
