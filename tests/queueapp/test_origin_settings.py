"""Settings under AsyncMonolith's names: what they set, within which bounds, and what contradicts what."""

from __future__ import annotations

from datetime import timedelta
from time import monotonic
from typing import Any

import pytest

from queueapp.checks import check_settings
from queueapp.conf import OPTIONS
from queueapp.conf import settings as conf
from queueapp.conf.asyncmonolith_names import SETTINGS
from queueapp.errors import InvalidOption
from tests.in_process_worker import Worker, eventually, real_commits
from tests.testapp.messages import Nop
from tests.testapp.models import Leased


@pytest.mark.parametrize(
    ("name", "value", "settings_of_it", "expected"),
    [
        ("MaxAttempts", 3, "ATTEMPTS", 3),
        ("AttemptDelay", 30, "RETRY_DELAY", timedelta(seconds=30)),
        ("AttemptDelay", 0, "RETRY_DELAY", timedelta(0)),
        ("ProcessorMaxDelay", 1500, "PEEK_DELAY", timedelta(seconds=1.5)),
        ("ProcessorMinDelay", 10, "CLAIM_PAUSE", timedelta(milliseconds=10)),
        ("ProcessorBatchSize", 7, "MAX_BATCH", 7),
        ("ConsumerMessageBatchSize", 7, "MAX_BATCH", 7),
        ("ConsumerMessageBatchSize", 7, "AT_MOST_ONCE_BATCH", 7),
        ("ConsumerMessageProcessorCount", 2, "CONCURRENCY", 2),
        ("DefaultConsumerTimeout", 3600, "TIMEOUT", timedelta(hours=1)),
    ],
)
def test_each_sets_ours(settings: Any, name: str, value: int, settings_of_it: str, expected: Any) -> None:
    settings.QUEUEAPP = {name: value}
    assert getattr(conf, settings_of_it) == expected


@pytest.mark.parametrize("setting", SETTINGS, ids=lambda item: item.name)
def test_their_defaults_are_accepted_and_what_is_out_of_bounds_is_named_with_the_range(
    settings: Any, setting: Any
) -> None:
    settings.QUEUEAPP = {setting.name: setting.default}
    assert check_settings() == []
    for value in (setting.low - 1, setting.high + 1, "5", 1.5, True, None, timedelta(seconds=5)):
        settings.QUEUEAPP = {setting.name: value}
        with pytest.raises(InvalidOption) as caught:
            _ = conf.ATTEMPTS
        text = str(caught.value)
        assert f"QUEUEAPP.{setting.name}" in text
        assert repr(value) in text
        assert (
            f"a whole number{' of ' if setting.unit else ''}{setting.unit} from {setting.low} to {setting.high}" in text
        )
        assert f"AsyncMonolith: {setting.asyncmonolith_bound}" in text
        (found,) = check_settings()
        assert found.id == "queueapp.E001"


def test_the_bounds_are_those_that_ours_has_too() -> None:
    by_name = {option.name: option for option in OPTIONS}
    for setting in SETTINGS:
        for name in setting.settings:
            for value in (setting.low, setting.high, setting.default):
                by_name[name].read(setting.convert(value))


@pytest.mark.parametrize(
    ("given", "text"),
    [
        (
            {"MaxAttempts": 3, "ATTEMPTS": 5},
            "QUEUEAPP.MaxAttempts = 3 is not accepted: it must be the same as ATTEMPTS = 5",
        ),
        ({"AttemptDelay": 3, "RETRY_DELAY": 5}, "the same as RETRY_DELAY = 5"),
        ({"ProcessorBatchSize": 3, "ConsumerMessageBatchSize": 4}, "the same as ProcessorBatchSize = 3"),
        ({"ProcessorBatchSize": 3, "AT_MOST_ONCE_BATCH": 4}, "the same as AT_MOST_ONCE_BATCH = 4"),
        ({"DefaultConsumerTimeout": 3, "TIMEOUT": None}, "the same as TIMEOUT = None"),
        ({"ProcessorMinDelay": 501, "ProcessorMaxDelay": 500}, "from 0 to 500, which is ProcessorMaxDelay"),
        ({"ProcessorMinDelay": 1001}, "from 0 to 1000, which is ProcessorMaxDelay"),
        ({"ProcessorMinDelay": 300, "PEEK_DELAY": 0.2}, "from 0 to 200"),
    ],
)
def test_two_names_that_disagree_are_refused(settings: Any, given: dict[str, Any], text: str) -> None:
    settings.QUEUEAPP = given
    (found,) = check_settings()
    assert text in found.msg


def test_two_names_that_agree_are_one(settings: Any) -> None:
    settings.QUEUEAPP = {
        "MaxAttempts": 3,
        "ATTEMPTS": 3,
        "AttemptDelay": 5,
        "RETRY_DELAY": 5.0,
        "DefaultConsumerTimeout": 9,
        "TIMEOUT": timedelta(seconds=9),
        "ProcessorBatchSize": 4,
        "ConsumerMessageBatchSize": 4,
        "ProcessorMinDelay": 200,
        "ProcessorMaxDelay": 200,
    }
    assert check_settings() == []
    assert (conf.ATTEMPTS, conf.MAX_BATCH) == (3, 4)


def test_a_name_that_neither_has_is_refused_with_the_one_that_is_meant(settings: Any) -> None:
    settings.QUEUEAPP = {"MaxAttempts": 3, "maxAttempts": 3}
    (found,) = check_settings()
    assert "unknown option 'maxAttempts'; did you mean 'MaxAttempts'?" in found.msg


@real_commits
def test_a_pause_follows_each_full_batch_and_no_other(settings: Any) -> None:
    settings.QUEUEAPP = {"ProcessorBatchSize": 5, "ProcessorMinDelay": 100, "ProcessorMaxDelay": 100}
    Leased.send_many([Nop(n, "") for n in range(50)])
    started = monotonic()
    worker = Worker(Leased, concurrency=1).start()
    try:
        eventually(lambda: not Leased.objects.exists())
        assert monotonic() - started > 0.5, "ten full batches at most, with pauses between them"
        eventually(lambda: worker.pump.stats.handled == 50)
    finally:
        worker.stop()
