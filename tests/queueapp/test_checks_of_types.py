"""Checks of the classes of messages, and of how their bodies are written."""

from __future__ import annotations

import uuid
from typing import Any

import msgspec
import pytest
from django.db import models
from django.test.utils import isolate_apps

from queueapp import Delivery, InvalidOption, Queue, checks, consumer, message_type, upcast
from queueapp.checks import consumers
from queueapp.registry import queues
from tests.testapp.models import Addressed, Interop, Leased, SecretOnce


@message_type("Stepping", version=4)
class Stepping(msgspec.Struct):
    number: int


@upcast(Stepping, 2)
def _same(body: Any) -> Any:
    return body


def test_versions_without_an_upcast_are_reported(no_consumers: None) -> None:
    assert checks.check_versions() == []

    @consumer(Leased)
    def take(message: Stepping) -> None: ...

    (found,) = checks.check_versions()
    assert found.id == "queueapp.W080"
    assert found.msg.startswith("Stepping has no upcast from version 1, 3:")
    assert found.hint is not None
    assert "@upcast(Stepping, 1)" in found.hint


def ids(problems: list[Any]) -> list[str]:
    return sorted(str(problem.id) for problem in problems)


def test_what_an_encrypted_queue_cannot_have_is_an_error(settings: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    assert checks.check_encoding() == []
    monkeypatch.setattr(SecretOnce.delivery, "filter", "/a = 1")
    monkeypatch.setattr(SecretOnce.delivery, "has_expressions", True)
    assert ids(checks.check_encoding()) == ["queueapp.E081"]
    settings.QUEUEAPP = {"JOURNAL": {"SecretOnce": None}}
    assert ids(checks.check_encoding()) == ["queueapp.E081", "queueapp.E082"]


def test_an_encoding_for_nservicebus_or_without_its_library_is_an_error(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(Interop.delivery, "encoding", ("zlib",))
    assert ids(checks.check_encoding()) == ["queueapp.E083"]
    monkeypatch.setattr(consumers, "find_spec", lambda name: None)
    assert ids(checks.check_encoding()).count("queueapp.E080") == 5


@pytest.mark.parametrize(
    "encoding",
    [
        ("zip",),
        ("zlib", "zstd"),
        ("encrypted", "zlib"),
        ("encrypted", "encrypted"),
        ("zlib", "zlib"),
        "zlib",
        None,
        (7,),
    ],
)
def test_an_encoding_that_makes_no_sense_is_refused(encoding: Any) -> None:
    with pytest.raises(InvalidOption, match="encoding"):
        Delivery({"encoding": encoding}, "x.")


def test_keys_that_a_queue_cannot_have_are_errors(monkeypatch: pytest.MonkeyPatch) -> None:
    assert checks.check_dedupe() == []
    monkeypatch.setattr(Addressed.delivery, "dedupe_key", True)
    assert ids(checks.check_dedupe()) == ["queueapp.E084"]
    monkeypatch.setattr(Addressed.delivery, "recipients", False)
    monkeypatch.setattr(Addressed.delivery, "target_queue_depth", 5)
    assert ids(checks.check_dedupe()) == ["queueapp.E085"]
    monkeypatch.setattr(Interop.delivery, "dedupe_key", True)
    monkeypatch.setattr(Interop._meta, "managed", False)
    assert ids(checks.check_dedupe()) == ["queueapp.E085", "queueapp.E086"]
    monkeypatch.setattr(Addressed.delivery, "target_queue_depth", None)
    monkeypatch.setattr(Addressed.delivery, "delayed_in", ("elsewhere",))
    assert ids(checks.check_dedupe()) == ["queueapp.E086", "queueapp.E087"]


def test_field_of_a_queue_whose_value_is_made_in_python_is_an_error() -> None:
    assert checks.check_fields() == []
    with queues.isolated(), isolate_apps("tests.testapp"):

        class Tagged(Queue):
            tag = models.UUIDField(default=uuid.uuid4)
            place = models.TextField()
            note = models.TextField(null=True)
            kind = models.TextField(db_default="x")

            class Meta:
                app_label = "testapp"

        found = checks.check_fields()

    assert ids(found) == ["queueapp.E011", "queueapp.E011"]
    assert [finding.msg.split()[0] for finding in found] == ["testapp.Tagged.tag", "testapp.Tagged.place"]


def test_what_becomes_of_keys_that_there_are_not_is_a_warning(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(Leased.delivery.given, "on_conflict", "error")
    assert ids(checks.check_dedupe()) == ["queueapp.W081"]
