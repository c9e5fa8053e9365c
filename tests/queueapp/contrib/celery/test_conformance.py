"""The integration tests of kombu itself, as they are in its source distribution, against this transport."""

from __future__ import annotations

import importlib.util
import inspect
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from types import ModuleType
from typing import Any

import kombu
import pytest

import queueapp.contrib.celery  # noqa: F401 - makes the URL known
from tests.databases import known_as
from tests.upstream import CHECKOUT, sources

MIXINS = {
    "BasicFunctionality": 13,
    "BaseExchangeTypes": 5,
    "BasePriority": 4,
    "BaseMessage": 4,
    "BaseTimeToLive": 3,
    "BaseEventLoop": 1,
}
#: All of them, by name: known without the sources, so that what is skipped is skipped by name.
NAMES = [
    *(
        f"BasicFunctionality.test_{name}"
        for name in (
            "connect",
            "failed_connect",
            "failed_connection",
            "failed_channel",
            "failed_default_channel",
            "default_channel_autoconnect",
            "channel",
            "default_channel",
            "autoretry_default_channel",
            "publish_consume",
            "consume_empty_queue",
            "simple_queue_publish_consume",
            "simple_buffer_publish_consume",
        )
    ),
    *(
        f"BaseExchangeTypes.test_{name}"
        for name in ("direct", "direct_routing_keys", "fanout", "topic", "publish_empty_exchange")
    ),
    *(
        f"BasePriority.test_{name}"
        for name in (
            "publish_consume",
            "publish_requeue_consume",
            "simple_queue_publish_consume",
            "simple_buffer_publish_consume",
        )
    ),
    *(f"BaseMessage.test_{name}" for name in ("ack", "reject_no_requeue", "reject_requeue", "requeue")),
    *(
        f"BaseTimeToLive.test_{name}"
        for name in ("publish_consume", "simple_queue_publish_consume", "simple_buffer_publish_consume")
    ),
    "BaseEventLoop.test_ack_from_another_thread",
]


@pytest.fixture(scope="session")
def common(pytestconfig: pytest.Config) -> ModuleType:
    path = sources("kombu", pytestconfig) / "t" / "integration" / "common.py"
    spec = importlib.util.spec_from_file_location("kombu_integration_common", path)
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    sys.modules[spec.name] = module
    spec.loader.exec_module(module)
    return module


@pytest.fixture
def unreachable(alias: str) -> Iterator[str]:
    """An alias whose server is not there."""
    with known_as("unreachable", of=alias, HOST="127.0.0.1", PORT="1") as unreachable:
        yield unreachable


@pytest.mark.timeout(240)
@pytest.mark.parametrize("name", NAMES)
def test_of_kombu(name: str, alias: str, unreachable: str, common: ModuleType) -> None:
    mixin, _, method = name.partition(".")
    test: Callable[..., Any] = getattr(getattr(common, mixin)(), method)
    given = {
        "connection": lambda: kombu.Connection(f"queueapp://{alias}"),
        "invalid_connection": lambda: kombu.Connection(f"queueapp://{unreachable}", connect_timeout=1),
    }
    test(**{wanted: given[wanted]() for wanted in inspect.signature(test).parameters})


def test_the_mixins_have_as_many_tests_as_are_named_here(common: ModuleType) -> None:
    found = {f"{mixin}.{name}" for mixin in MIXINS for name in vars(getattr(common, mixin)) if name.startswith("test_")}
    assert found == set(NAMES)
    assert len(NAMES) == sum(MIXINS.values()) == 30


def test_nothing_of_it_is_copied_in(common: ModuleType) -> None:
    assert common.__file__ is not None
    assert CHECKOUT / "tests" not in Path(common.__file__).parents
