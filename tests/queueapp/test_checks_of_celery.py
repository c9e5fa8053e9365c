"""What ``manage.py check`` says of a broker of Celery's, with its id."""

from __future__ import annotations

import subprocess
import sys
from typing import Any

import pytest

from queueapp.checks import check_celery
from queueapp.contrib.celery.options import check_transport_options


def test_a_broker_that_is_right_or_another_one_is_fine(settings: Any) -> None:
    settings.CELERY_BROKER_TRANSPORT_OPTIONS = {"max_prefetch": 5, "fanout_prefix": True}
    for url in ("queueapp://", "queueapp://default", "redis://elsewhere", None):
        settings.CELERY_BROKER_URL = url
        assert check_celery() == []
        assert check_transport_options() == []


@pytest.mark.parametrize("name", ["CELERY_BROKER_URL", "CELERY_RESULT_BACKEND"])
def test_the_app_that_has_the_tables_is_asked_for(settings: Any, name: str) -> None:
    setattr(settings, name, "queueapp://")
    settings.INSTALLED_APPS = [app for app in settings.INSTALLED_APPS if app != "queueapp.contrib.celery"]

    found = [error for error in check_celery() if error.msg.startswith(f"{name} = ")]
    assert [error.id for error in found] == ["queueapp.E110"]


def test_the_transport_names_the_app_that_is_not_installed() -> None:
    code = (
        "from django.conf import settings; settings.configure(INSTALLED_APPS=['queueapp']); import django; "
        "django.setup()\n"
        "import kombu, queueapp.contrib.celery; kombu.Connection('queueapp://').connect()"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=60)
    assert "The broker queueapp:// needs 'queueapp.contrib.celery' in INSTALLED_APPS" in done.stderr


def test_a_database_that_is_none_is_named(settings: Any) -> None:
    settings.CELERY_BROKER_URL = "queueapp://nowhere"

    (found,) = check_celery()

    assert found.id == "queueapp.E111"
    assert "'queueapp://nowhere' names no database: DATABASES has default" in found.msg


@pytest.mark.parametrize("options", [{"max_prefetch": 0}, {"use_lock_renewal": 1}, {"polling_interval": 1e9}])
def test_an_option_out_of_its_bounds_is_named(settings: Any, options: dict[str, Any]) -> None:
    settings.CELERY_BROKER_URL = "queueapp://"
    settings.CELERY_BROKER_TRANSPORT_OPTIONS = options

    (found,) = check_transport_options()

    assert found.id == "queueapp.E112"
    assert f"broker_transport_options.{next(iter(options))}" in found.msg


def test_an_option_that_is_ignored_and_looks_mistyped_is_named(settings: Any) -> None:
    settings.CELERY_BROKER_URL = "queueapp://"
    settings.CELERY_BROKER_TRANSPORT_OPTIONS = {"max_prefech": 5, "Keep_Failed": False, "max_retries": 3, "socket": 1}

    found = check_transport_options()

    assert [(row.id, row.hint) for row in found] == [
        ("queueapp.W112", "Did you mean 'max_prefetch'?"),
        ("queueapp.W112", "Did you mean 'keep_failed'?"),
    ]
