"""System checks: they report wrong settings and queues at start, each with an id. docs/checks.md lists all.

Each module registers its own as it is imported.
"""

from .consumers import (
    check_batches,
    check_checkpoints,
    check_dedupe,
    check_encoding,
    check_served,
    check_subscriptions,
    check_types,
    check_versions,
    check_workers_installed,
)
from .flow import check_flow, check_order
from .queues import (
    check_consumers,
    check_databases,
    check_fields,
    check_forwarding,
    check_leases,
    check_pools,
    check_queues,
    check_tables,
)
from .settings import check_celery, check_settings
from .topics import check_entering, check_journal, check_topics

__all__ = [
    "check_batches",
    "check_celery",
    "check_checkpoints",
    "check_consumers",
    "check_databases",
    "check_dedupe",
    "check_encoding",
    "check_entering",
    "check_fields",
    "check_flow",
    "check_forwarding",
    "check_journal",
    "check_leases",
    "check_order",
    "check_pools",
    "check_queues",
    "check_served",
    "check_settings",
    "check_subscriptions",
    "check_tables",
    "check_topics",
    "check_types",
    "check_versions",
    "check_workers_installed",
]
