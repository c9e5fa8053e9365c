"""A dispatcher in a process of its own, whose clock runs many times as fast as the database's.

``python -m tests.queueapp.schedules.dispatching NAME BASE ORIGIN FACTOR``: the clock is BASE plus FACTOR times what has
passed since ORIGIN. NAME makes the role its own, so that several of them lead at once, as two versions do in a deploy.
"""

from __future__ import annotations

import sys
import uuid
from datetime import datetime
from typing import Any

import django


def main(name: str, base: str, origin: str, factor: str) -> None:
    django.setup()
    from queueapp.schedules import runner, stored
    from queueapp.services.delayed_dispatcher import DelayedDispatcher

    plain, begun, since = stored.clock, datetime.fromisoformat(base), datetime.fromisoformat(origin)

    def clock(connection: Any) -> datetime:
        return begun + float(factor) * (plain(connection) - since)

    stored.clock = clock
    runner.POLL = 0.02
    dispatcher = DelayedDispatcher("default", uuid.uuid5(uuid.NAMESPACE_DNS, name))
    dispatcher.elector.role += f" {name}"
    dispatcher.start()
    print("started", flush=True)
    dispatcher.join()


if __name__ == "__main__":
    main(*sys.argv[1:])
