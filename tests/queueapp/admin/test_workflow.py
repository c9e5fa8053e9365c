"""What the admin shows of follow-ups and results."""

from __future__ import annotations

import zlib
from collections.abc import Callable
from datetime import timedelta
from typing import Any

import pytest
from django.db import connection
from django.test import Client
from django.test.utils import CaptureQueriesContext

from queueapp import Chain
from queueapp.messages import WORKFLOW, encode_headers, new_id
from queueapp.models import MessageResult, Now
from tests.testapp.models import Followed, Leased

from .conftest import url

pytestmark = pytest.mark.django_db


def result(**columns: Any) -> MessageResult:
    return MessageResult.objects.create(
        id=new_id(),
        queue="testapp.Followed",
        finished_at=Now(),
        expires_at=Now() + timedelta(days=1),
        **columns,
    )


def test_a_message_shows_which_queues_follow(operator: Client) -> None:
    Chain([Followed.prepare("first"), Followed.prepare("second"), Leased.prepare("third")]).send()
    page = operator.get(url(Followed, "change", Followed.objects.get().pk)).content.decode()
    assert "testapp.Followed, testapp.Leased" in page

    Followed.objects.update(headers=encode_headers({WORKFLOW: "[" * 9}))
    page = operator.get(url(Followed, "change", Followed.objects.get().pk)).content.decode()
    assert "Followed by" not in page


def test_results_are_listed_found_and_shown(operator: Client) -> None:
    handled = result(body=b'{"text": "<b>bold</b>"}', attempts=2)
    failed = result(error="builtins.ValueError: <i>wrong</i>", attempts=3)

    listed = operator.get(url(MessageResult)).content.decode()
    assert ">handled<" in listed
    assert ">failed<" in listed
    found = operator.get(url(MessageResult), {"q": str(failed.pk)}).content.decode()
    assert str(failed.pk) in found
    assert str(handled.pk) not in found
    assert str(handled.pk) not in operator.get(url(MessageResult), {"q": "no id"}).content.decode()

    page = operator.get(url(MessageResult, "change", str(handled.pk))).content.decode()
    assert "&lt;b&gt;bold&lt;/b&gt;" in page
    page = operator.get(url(MessageResult, "change", str(failed.pk))).content.decode()
    assert "&lt;i&gt;wrong&lt;/i&gt;" in page


def test_a_compressed_value_is_shown_as_its_handler_returned_it(operator: Client) -> None:
    body = b'"small and smaller"'
    small = result(body=zlib.compress(body), headers=encode_headers({"content-type": "application/json+zlib"}))
    broken = result(body=body, headers=encode_headers({"content-type": "application/json+zlib"}))
    assert "small and smaller" in operator.get(url(MessageResult, "change", str(small.pk))).content.decode()
    assert "The value cannot be read" in operator.get(url(MessageResult, "change", str(broken.pk))).content.decode()


def test_the_list_takes_as_many_statements_however_many_results_there_are(operator: Client) -> None:
    def statements() -> int:
        with CaptureQueriesContext(connection) as captured:
            operator.get(url(MessageResult))
        return len(captured)

    result(error="builtins.ValueError: wrong")
    few = statements()
    for _ in range(9):
        result()
    assert statements() == few


def test_a_value_is_shown_to_who_may_view_its_queue_and_never_decrypted(staff: Callable[..., Client]) -> None:
    plain = result(body=b'"plain text"')
    secret = result(body=b"\0\xff", headers=encode_headers({"content-type": "application/json+aes256gcm"}))

    def shown(row: MessageResult, *permissions: str) -> str:
        client = staff("queueapp.view_messageresult", *permissions)
        page: str = client.get(url(MessageResult, "change", str(row.pk))).content.decode()
        return page

    assert "plain text" not in shown(plain)
    assert "plain text" in shown(plain, "testapp.view_followed")
    assert "The value is encrypted." in shown(secret, "testapp.view_followed")
