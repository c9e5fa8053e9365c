"""The settings of the crash suite with a second database, at `CRASH_WAREHOUSE_URL`, in which one queue lies."""

import os

from project.database import database
from tests.crash.workload.settings import *  # noqa: F403

DATABASES["warehouse"] = database(os.environ["CRASH_WAREHOUSE_URL"])  # noqa: F405
if DATABASES["warehouse"]["ENGINE"] != "mssql":  # noqa: F405
    DATABASES["warehouse"]["OPTIONS"]["application_name"] = os.environ.get("CRASH_NAME", "crash")  # noqa: F405
DATABASE_ROUTERS = ["tests.crash.workload.routes.Routes"]
