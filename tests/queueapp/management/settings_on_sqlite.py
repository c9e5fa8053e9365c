"""A project as `startproject` makes it: its database is an SQLite file, named by SQLITE_FILE."""

import os

SECRET_KEY = "of the tests"
INSTALLED_APPS = ["django.contrib.auth", "django.contrib.contenttypes", "queueapp", "workers"]
DATABASES = {"default": {"ENGINE": "django.db.backends.sqlite3", "NAME": os.environ["SQLITE_FILE"]}}
DEFAULT_AUTO_FIELD = "django.db.models.BigAutoField"
USE_TZ = True
