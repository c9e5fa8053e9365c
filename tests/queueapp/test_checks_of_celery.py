"""What ``manage.py check`` says of a broker of Celery's, with its id."""

from __future__ import annotations

from typing import Any

import pytest

from queueapp.checks import check_celery
from queueapp.contrib.celery.checks import check_transport_options


def test_a_broker_that_is_right_or_another_one_is_fine(settings: Any) -> None:
    settings.CELERY_BROKER_TRANSPORT_OPTIONS = {"max_prefetch": 5, "fanout_prefix": True}
    for url in ("queueapp://", "queueapp://default", "redis://elsewhere", None):
        settings.CELERY_BROKER_URL = url
        assert check_celery() == []
        assert check_transport_options() == []


def test_the_app_that_has_the_tables_is_asked_for(settings: Any) -> None:
    settings.CELERY_BROKER_URL = "queueapp://"
    settings.INSTALLED_APPS = [app for app in settings.INSTALLED_APPS if app != "queueapp.contrib.celery"]

    assert [one.id for one in check_celery()] == ["queueapp.E110"]


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
