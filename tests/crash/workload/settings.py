"""Settings of the worker processes and producers of the crash suite: short times, and a name for their connections.

Read from the environment: `CRASH_NAME`, what the connections of this process are called in `pg_stat_activity`;
`CRASH_QUEUEAPP`, a JSON object that overrides QUEUEAPP (durations in seconds). A second alias, "elsewhere", leads to
the same database: its sessions are the handlers' own.
"""

import json
import os

from tests.settings import *  # noqa: F403

INSTALLED_APPS = [*INSTALLED_APPS, "tests.crash.workload"]  # noqa: F405
QUEUEAPP = {
    **QUEUEAPP,  # noqa: F405
    "CONCURRENCY": 2,
    "PEEK_DELAY": 0.2,
    "HEARTBEAT_INTERVAL": 1,
    "DEAD_AFTER": 3,
    "SHUTDOWN_GRACE": 5,
    "DISPATCH_INTERVAL": 0.5,
    **json.loads(os.environ.get("CRASH_QUEUEAPP", "{}")),
}
if DATABASES["default"]["ENGINE"] != "mssql":  # noqa: F405 - there sessions are known by the process that has them
    DATABASES["default"]["OPTIONS"]["application_name"] = os.environ.get("CRASH_NAME", "crash")  # noqa: F405
DATABASES["elsewhere"] = DATABASES["default"]  # noqa: F405
