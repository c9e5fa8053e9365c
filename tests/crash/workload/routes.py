"""A router for two databases: one queue lies in the warehouse, everything else in the default one.

With `CRASH_NO_ARRIVALS` the warehouse belongs to another team, which allows no new tables there.
"""

from __future__ import annotations

import os
from typing import Any

WAREHOUSE = "warehouse"
THERE = "testapp.transactional"


class Routes:
    def db_for_read(self, model: Any, **hints: Any) -> str | None:
        return WAREHOUSE if model._meta.label_lower == THERE else None

    db_for_write = db_for_read

    def allow_migrate(self, db: str, app_label: str, **hints: Any) -> bool | None:
        return False if db == WAREHOUSE and os.environ.get("CRASH_NO_ARRIVALS") else None
