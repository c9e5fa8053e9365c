"""The project's settings plus the queues that only tests need.

Read from the environment:
    QUEUEAPP_TEST_SQLSERVER_URL  a SQL Server, like DATABASE_URL: what runs on every database also runs there, as "sqlserver"
"""

import os

from project.database import database
from project.settings import *  # noqa: F403

INSTALLED_APPS = [*INSTALLED_APPS, "tests.testapp", "tests.shop"]  # noqa: F405
PASSWORD_HASHERS = ["django.contrib.auth.hashers.MD5PasswordHasher"]

if _sqlserver := os.environ.get("QUEUEAPP_TEST_SQLSERVER_URL"):
    DATABASES["sqlserver"] = database(_sqlserver)  # noqa: F405
