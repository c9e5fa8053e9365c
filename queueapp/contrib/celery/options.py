"""``broker_transport_options`` that are ours. Others are kombu's or another broker's, and are left alone: a project changes its URL,
and nothing else."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from ...options import Option, read_all

OPTIONS: tuple[Option, ...] = (
    Option(
        "visibility_timeout",
        float,
        None,
        "Seconds that a message belongs to its worker before others may have it. None: 30 where leases are renewed, 3600 where not.",
        low=1.0,
        high=7 * 86400.0,
        optional=True,
    ),
    Option(
        "use_lock_renewal",
        bool,
        True,
        "Whether leases are renewed while their worker lives, however long a task takes.",
    ),
    Option(
        "max_prefetch",
        int,
        100,
        "Most messages that are taken at a time where there is no prefetch count, and most that are read ahead where tasks are fast.",
        low=1,
        high=3500,
    ),
    Option(
        "polling_interval",
        float,
        5.0,
        "Seconds between two looks of an idle worker; wake-ups come in between. Without wake-ups it looks every 0.3 s.",
        low=0.05,
        high=60.0,
    ),
    Option(
        "transactional",
        bool,
        True,
        "Whether what is published in an open transaction of the same database is published with its commit. False: at once.",
    ),
    Option(
        "max_deliveries",
        int,
        20,
        "A message that was handed out so often, and neither acked nor put back, is kept as poison; 0: never.",
        low=0,
        high=1_000_000,
    ),
    Option(
        "keep_failed",
        bool,
        True,
        "Whether a task that has failed for good is kept as poison, with its traceback; a task's own `keep_failed` goes before it.",
    ),
    Option(
        "services",
        bool,
        True,
        "Whether this worker takes part in dispatching delayed messages and keeping house. False: others do, as `rundelayeddispatcher`.",
    ),
)
_NAMES = {option.name for option in OPTIONS}


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
        ours = {name: value for name, value in given.items() if name in _NAMES}
        # None is what kombu itself takes for "not said".
        ours = {name: value for name, value in ours.items() if value is not None}
        self.__dict__.update(read_all(OPTIONS, ours, "broker_transport_options."))

    @property
    def lease_ms(self) -> int:
        """How long a lease lasts."""
        seconds = self.visibility_timeout or (30.0 if self.use_lock_renewal else 3600.0)
        return int(seconds * 1000)
