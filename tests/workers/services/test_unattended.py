"""An unattended service is logged once, again after ten minutes, and when it runs again."""

from __future__ import annotations

import logging
from typing import Any

import pytest

from queueapp.models import DISPATCHER
from tests.clock import Clock
from workers.services import heartbeat
from workers.services.heartbeat import Unattended


def test_an_unattended_service_is_logged_once_again_after_ten_minutes_and_when_it_is_over(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture, settings: Any
) -> None:
    settings.QUEUEAPP = {"DEAD_AFTER": 60}
    caplog.set_level(logging.INFO, logger="queueapp.workers")
    clock = Clock()
    monkeypatch.setattr(heartbeat, "monotonic", clock)
    unattended = Unattended(DISPATCHER, "default")

    def said(seconds: float, there: bool = False) -> list[str]:
        """With a check each second."""
        caplog.clear()
        for _ in range(round(seconds)):
            clock.now += 1
            unattended.check(is_alive=there)
        return [f"{record.levelname} {record.getMessage()}" for record in caplog.records]

    assert said(59) == [], "a process that starts at the same time has a minute"
    (line,) = said(1)
    assert line.startswith(
        "WARNING (dispatcher) in 'default': no dispatcher is running; delayed messages are not delivered. Next step: "
        "start "
    )
    assert said(599) == []
    assert said(1) == [line]
    assert said(10, there=True) == ["INFO (dispatcher) in 'default': one is running again."]
    assert said(59) == []
    assert said(601) == [line, line]
