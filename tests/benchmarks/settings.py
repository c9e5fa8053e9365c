"""The site's settings with the benchmarks' queues, on a database of their own on the same server.

Read from the environment, because worker processes are given it so: ``BENCH_DATABASE`` (name of that database) and
``BENCH_QUEUEAPP`` (``QUEUEAPP`` as JSON; the defaults otherwise).
"""

import json
import os
from importlib.util import find_spec

from project.settings import *  # noqa: F403

INSTALLED_APPS = [*INSTALLED_APPS, "queueapp.contrib.tasks", "tests.benchmarks"]  # noqa: F405
if find_spec("django.tasks") is None:
    INSTALLED_APPS.append("django_tasks")
TASKS = {"default": {"BACKEND": "queueapp.contrib.tasks.QueueBackend"}}
# As in production: with DEBUG Django's cursors keep every statement.
DEBUG = False
SILENCED_SYSTEM_CHECKS = ["queueapp.W002"]  # workers that look for messages only when woken, on purpose
MIGRATION_MODULES = {"benchmarks": None}
DATABASES["default"]["NAME"] = os.environ.get("BENCH_DATABASE", "queueapp_bench")  # noqa: F405
QUEUEAPP = json.loads(os.environ.get("BENCH_QUEUEAPP", "{}"))
for _logger in LOGGING["loggers"].values():  # noqa: F405
    _logger["level"] = os.environ.get("LOG_LEVEL", "WARNING")
