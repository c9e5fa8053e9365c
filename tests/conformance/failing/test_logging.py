"""Every failed attempt is in the log, with its traceback and with what it is about."""

from __future__ import annotations

import json
import logging
from logging.config import DictConfigurator

import pytest

from project import settings as site
from queueapp import Poison, RetryNow
from tests.conformance.endpoint import Endpoint, modes
from tests.in_process_worker import eventually


class Broken(Exception):
    """What the handlers here raise."""


@modes("NRS")
def test_every_failed_attempt_is_logged_with_its_traceback(
    endpoint: Endpoint, caplog: pytest.LogCaptureFixture
) -> None:
    def act(*_: object) -> None:
        raise Broken("so it is")

    caplog.set_level(logging.INFO, logger="queueapp")
    endpoint.handle(act, policy=lambda failure: RetryNow() if failure.attempt == 1 else Poison("seen"))
    message_id = endpoint.send(1)
    endpoint.start()
    eventually(endpoint.poison.exists)

    def logged() -> list[logging.LogRecord]:
        return [record for record in caplog.records if "attempt" in record.__dict__]

    attempts = 1 if endpoint.queue.delivery.semantics.value == "at-most-once" else 2
    eventually(lambda: len(logged()) == attempts)
    for number, record in enumerate(logged(), 1):
        assert record.exc_info is not None
        assert record.exc_info[0] is Broken
        assert "act" in caplog.text
        assert "in act\n" in logging.Formatter().formatException(record.exc_info)
        said = record.__dict__
        assert said["message_id"] == str(message_id)
        assert said["message_type"] == "tests.conformance.endpoint.Note"
        assert said["queue"] == endpoint.queue._meta.label
        assert said["consumer"]
        assert said["attempt"] == number
    assert [(record.levelname, record.__dict__["verdict"]) for record in logged()] == [
        ("INFO", "RetryNow"), ("ERROR", "Poison"),
    ][-attempts:]  # fmt: skip


@modes("NRS")
def test_a_failed_attempt_is_one_object_a_line_where_the_log_is_json(
    endpoint: Endpoint, caplog: pytest.LogCaptureFixture
) -> None:
    def act(*_: object) -> None:
        raise Broken('a "quoted"\nand broken line')

    formatter = DictConfigurator(site.LOGGING).configure_formatter(dict(site.LOGGING["formatters"]["json"]))
    endpoint.handle(act, policy=lambda failure: Poison("seen"))
    message_id = endpoint.send(1)
    endpoint.start()
    record = eventually(lambda: next((record for record in caplog.records if "attempt" in record.__dict__), None))

    (line,) = formatter.format(record).splitlines()
    found = json.loads(line)
    assert found["message_id"] == str(message_id)
    assert (found["queue"], found["consumer"], found["attempt"]) == (endpoint.queue._meta.label, "conformance", 1)
    assert (found["levelname"], found["verdict"]) == ("ERROR", "Poison")
    assert "in act" in found["exc_info"]
    assert found["exc_info"].endswith('Broken: a "quoted"\nand broken line')
