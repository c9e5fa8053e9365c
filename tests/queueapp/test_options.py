"""Options: what is accepted, and an error that says so; for settings, ``class Delivery`` and consumers alike."""

from __future__ import annotations

import enum
from datetime import timedelta
from typing import Any

import pytest

from queueapp import InvalidOption
from queueapp import conf as project_settings
from queueapp.conf import settings as conf
from queueapp.errors import UnknownOption
from queueapp.failures.recoverability import OPTIONS as CONSUMER_OPTIONS
from queueapp.models.delivery import OPTIONS as DELIVERY_OPTIONS
from queueapp.options import Option, read_all


class Colour(enum.Enum):
    RED = "red"


WHOLE = Option("COUNT", int, 4, "A count.", low=1, high=10)
TIME = Option("TIME", timedelta, None, "A time.", low=timedelta(0), high=timedelta(hours=1), seconds=True)
ALL = (*project_settings.OPTIONS, *DELIVERY_OPTIONS, *CONSUMER_OPTIONS)


@pytest.mark.parametrize("value", [1, 4, 10])
def test_a_value_in_bounds_is_read(value: int) -> None:
    assert WHOLE.read(value) == value


@pytest.mark.parametrize("value", [0, 11, -1, 2.0, "3", None, True])
def test_a_value_out_of_bounds_or_of_another_type_is_refused(value: Any) -> None:
    with pytest.raises(InvalidOption) as raised:
        WHOLE.read(value, "QUEUEAPP.")

    assert (raised.value.option, raised.value.value) == ("QUEUEAPP.COUNT", value)
    assert str(raised.value) == f"QUEUEAPP.COUNT = {value!r} is not accepted: it must be a whole number from 1 to 10."


@pytest.mark.parametrize(("value", "read"), [(5, 5), (0.5, 0.5), (timedelta(minutes=1), 60)])
def test_a_bare_number_is_seconds_only_where_the_option_allows_it(value: Any, read: float) -> None:
    assert TIME.read(value) == timedelta(seconds=read)

    strict = Option("time", timedelta, None, "", low=timedelta(0))
    if not isinstance(value, timedelta):
        with pytest.raises(InvalidOption, match="a timedelta"):
            strict.read(value)


@pytest.mark.parametrize("value", [True, "5", float("nan"), float("inf"), 1e300])
def test_what_is_no_duration_is_refused(value: Any) -> None:
    with pytest.raises(InvalidOption) as raised:
        TIME.read(value)

    assert raised.value.value is value


def test_an_optional_value_may_be_none() -> None:
    assert Option("x", int, 1, "", optional=True).read(None) is None
    assert Option("x", int, 1, "", optional=True).accepted.endswith("or None")


def test_an_enum_is_read_from_its_value_and_lists_what_it_accepts() -> None:
    option = Option("colour", Colour, Colour.RED, "")

    assert option.read("red") is Colour.RED
    assert option.read(Colour.RED) is Colour.RED
    with pytest.raises(InvalidOption, match="one of 'red'"):
        option.read("blue")


def test_an_unknown_name_is_refused_with_the_one_that_is_meant() -> None:
    with pytest.raises(UnknownOption) as raised:
        read_all([WHOLE, TIME], {"COUNTS": 1}, "QUEUEAPP.")
    assert str(raised.value) == "QUEUEAPP: unknown option 'COUNTS'; did you mean 'COUNT'?"
    assert (raised.value.option, raised.value.value, raised.value.known) == ("QUEUEAPP.COUNTS", 1, ("COUNT", "TIME"))


def test_an_unknown_name_like_no_other_is_refused_with_those_that_are_known() -> None:
    with pytest.raises(InvalidOption) as raised:
        read_all([WHOLE, TIME], {"xyz": 1}, "QUEUEAPP.")
    assert str(raised.value) == "QUEUEAPP: unknown option 'xyz'; known options are COUNT, TIME."


def test_a_mistyped_value_is_refused_with_the_one_that_is_meant() -> None:
    with pytest.raises(InvalidOption, match=r"one of 'transactional', .*; did you mean 'at-least-once'\?"):
        read_all(DELIVERY_OPTIONS, {"semantics": "at_least_onec"}, "Delivery.")


@pytest.mark.parametrize("option", ALL, ids=lambda option: option.name)
def test_every_default_is_accepted_by_its_own_option(option: Option) -> None:
    assert option.default is None or option.read(option.default) == option.default


@pytest.mark.parametrize("option", ALL, ids=lambda option: option.name)
def test_every_bound_is_checked_and_named(option: Option) -> None:
    assert option.doc.endswith(".")
    for bound, step in ((option.low, -1), (option.high, 1)):
        if bound is None:
            continue
        assert option.read(bound) == bound
        outside = bound + (timedelta(milliseconds=1) * step if option.kind is timedelta else step)
        with pytest.raises(InvalidOption, match=option.name) as raised:
            option.read(outside)
        assert str(bound) in str(raised.value)


# -- the settings --------------------------------------------------------------------------------------------------


def test_settings_have_defaults(settings: Any) -> None:
    settings.QUEUEAPP = {}

    assert conf.PEEK_DELAY.total_seconds() == 1
    assert conf.ATTEMPTS == 5


def test_settings_are_read_anew_after_an_override(settings: Any) -> None:
    settings.QUEUEAPP = {"ATTEMPTS": 7}
    assert conf.ATTEMPTS == 7
    settings.QUEUEAPP = {"ATTEMPTS": 8}
    assert conf.ATTEMPTS == 8


def test_one_bad_setting_is_reported_whichever_is_read(settings: Any) -> None:
    settings.QUEUEAPP = {"PEEK_DELAY": 0.05}

    with pytest.raises(InvalidOption, match=r"QUEUEAPP.PEEK_DELAY = 0.05 .* from 0:00:00.100000 to 1:00:00"):
        _ = conf.ATTEMPTS


def test_a_setting_that_does_not_exist_is_an_attribute_error() -> None:
    with pytest.raises(AttributeError, match="NO_SUCH_SETTING"):
        _ = conf.NO_SUCH_SETTING
