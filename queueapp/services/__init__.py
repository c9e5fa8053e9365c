"""The long-running parts that every receiving process has, a worker's or Celery's: listener, dispatcher, maintenance,
and the heartbeat of these.

Each is a ``Service``. Nothing in this package needs the process tree or a receiver.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

#: Where apps register, by name, the deletion of their old rows, which the maintenance of a database then runs. Called
#: now and then with the database's alias and a function that says whether to continue. Each works in batches that skip
#: locked rows and wait for no lock.
maintenance_hooks: dict[str, Callable[[str, Callable[[], bool]], Any]] = {}
