"""The project's settings plus the queues that only tests need.

Read from the environment: QUEUEAPP_TEST_SQLSERVER_URL  a SQL Server, like DATABASE_URL: what runs on every database
also runs there, as "sqlserver"
"""

import os
from datetime import timedelta
from importlib.util import find_spec

from project.database import database
from project.settings import *  # noqa: F403

INSTALLED_APPS = [
    *INSTALLED_APPS,  # noqa: F405
    "queueapp.contrib.amps",
    "queueapp.contrib.tasks",
    "tests.testapp",
    "tests.guide_app",
]
# Its tables follow the models, by `migrate --run-syncdb`, which a test database runs.
MIGRATION_MODULES = {"testapp": None}
if find_spec("django.tasks") is None:
    INSTALLED_APPS.append("django_tasks")  # the backport, in requirements-dev.txt
TASKS = {
    "default": {"BACKEND": "queueapp.contrib.tasks.QueueBackend", "QUEUES": ["default", "queue-1"]},
    "immediate": {"BACKEND": "django.tasks.backends.immediate.ImmediateBackend" if find_spec("django.tasks")
                  else "django_tasks.backends.immediate.ImmediateBackend"},
}  # fmt: skip
# A queue of tests/testapp/ordering.py has recipients and barriers, and every command would say what that means.
SILENCED_SYSTEM_CHECKS = ["queueapp.W101"]
PASSWORD_HASHERS = ["django.contrib.auth.hashers.MD5PasswordHasher"]

if _sqlserver := os.environ.get("QUEUEAPP_TEST_SQLSERVER_URL"):
    DATABASES["sqlserver"] = database(_sqlserver)  # noqa: F405

# For the queues of tests/testapp/journaled.py, which would be declared wrongly without it.
QUEUEAPP = {"JOURNAL": {"journaled.for ever": None, "^journaled": timedelta(hours=1)}}  # type: ignore[dict-item]
