"""What optional apps keep that grows old: they say so here when they are loaded, and who keeps house sees to it."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

#: Called with a database's alias now and then, until the second argument says no. Each in batches that wait for nobody.
pieces: list[Callable[[str, Callable[[], bool]], Any]] = []
