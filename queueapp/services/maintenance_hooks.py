"""Where optional apps register the deletion of their old rows, which the maintenance of a database then runs."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

#: Called now and then with a database alias and a function that says whether to continue. Each works in batches that
#: skip locked rows and wait for no lock.
hooks: list[Callable[[str, Callable[[], bool]], Any]] = []
