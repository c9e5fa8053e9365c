"""A project as `startproject` makes it, whose database is an SQLite file, named by SQLITE_FILE, and which knows about
it."""

import os

SECRET_KEY = "of the tests"
INSTALLED_APPS = ["django.contrib.auth", "django.contrib.contenttypes", "queueapp", "workers"]
DATABASES = {"default": {"ENGINE": "django.db.backends.sqlite3", "NAME": os.environ["SQLITE_FILE"]}}
DEFAULT_AUTO_FIELD = "django.db.models.BigAutoField"
SILENCED_SYSTEM_CHECKS = ["queueapp.E005"]
USE_TZ = True
