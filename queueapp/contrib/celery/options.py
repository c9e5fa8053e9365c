"""The ``broker_transport_options`` of this transport, and the system check of ``CELERY_BROKER_TRANSPORT_OPTIONS``.

Options of kombu and of other brokers are ignored, so that a project changes its URL and nothing else.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from django.conf import settings
from django.core.checks import Error, Tags, Warning, register

from ...errors import InvalidOption
from ...options import Option, read_all

OPTIONS: tuple[Option, ...] = (
    Option(
        "visibility_timeout",
        float,
        None,
        "Seconds of a lease, after which other workers receive the message. None: 30 with lock renewal, 3600 without.",
        low=1.0,
        high=7 * 86400.0,
        optional=True,
    ),
    Option(
        "use_lock_renewal",
        bool,
        True,
        "Whether a living worker renews its leases, however long a task takes.",
    ),
    Option(
        "max_prefetch",
        int,
        100,
        "Maximum number of messages per claim without a prefetch count, and of messages read ahead where tasks are "
        "fast.",
        low=1,
        high=3500,
    ),
    Option(
        "polling_interval",
        float,
        5.0,
        "Seconds between two polls of an idle worker that receives notifications. Without notifications it polls "
        "every 0.3 s.",
        low=0.05,
        high=60.0,
    ),
    Option(
        "transactional",
        bool,
        True,
        "Whether a publish inside a transaction of the same database takes effect with its commit. False: at once.",
    ),
    Option(
        "max_deliveries",
        int,
        20,
        "Deliveries without an ack or requeue after which a message becomes poison; 0: never.",
        low=0,
        high=1_000_000,
    ),
    Option(
        "keep_failed",
        bool,
        True,
        "Whether a task that has failed for good becomes poison, with its traceback. `keep_failed` of a task "
        "overrides it.",
    ),
    Option(
        "services",
        bool,
        True,
        "Whether this worker dispatches delayed messages and runs maintenance. False: `rundelayeddispatcher` does.",
    ),
)
_NAMES = {option.name for option in OPTIONS}
#: How alike an unknown name and one of these are, of 1, when it is taken for a typing error: other brokers have options
#: of similar names.
_MISTYPED = 0.85


def mistyped(given: Mapping[str, Any]) -> dict[str, str]:
    """Names that are none of these options and look like one, with the one that is meant."""
    from difflib import get_close_matches

    found = {name: get_close_matches(str(name).lower(), _NAMES, n=1, cutoff=_MISTYPED) for name in given}
    return {name: close[0] for name, close in found.items() if close and name not in _NAMES}


class TransportOptions:
    """The options of one connection, as attributes. Raises InvalidOption."""

    visibility_timeout: float | None
    use_lock_renewal: bool
    max_prefetch: int
    polling_interval: float
    transactional: bool
    max_deliveries: int
    keep_failed: bool
    services: bool

    def __init__(self, given: Mapping[str, Any]) -> None:
        # None means "not set" in kombu.
        options = {name: value for name, value in given.items() if name in _NAMES and value is not None}
        self.__dict__.update(read_all(OPTIONS, options, "broker_transport_options."))

    @property
    def lease_ms(self) -> int:
        """Duration of a lease."""
        seconds = self.visibility_timeout or (30.0 if self.use_lock_renewal else 3600.0)
        return int(seconds * 1000)


@register(Tags.compatibility)
def check_transport_options(**_: Any) -> list[Any]:
    """queueapp.E112: one of the broker's options is not accepted. W112: one is ignored that looks mistyped."""
    given = getattr(settings, "CELERY_BROKER_TRANSPORT_OPTIONS", None) or {}
    if not str(getattr(settings, "CELERY_BROKER_URL", "")).startswith("queueapp://"):
        return []
    try:
        TransportOptions(given)
    except InvalidOption as error:
        return [Error(str(error), id="queueapp.E112")]
    return [
        Warning(
            f"CELERY_BROKER_TRANSPORT_OPTIONS: {name!r} is none of this transport's options and is ignored.",
            hint=f"Did you mean {meant!r}?",
            id="queueapp.W112",
        )
        for name, meant in mistyped(given).items()
    ]
