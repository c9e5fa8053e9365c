"""What becomes of samples: values, verdicts and the closing line."""

from math import isnan, nan
from statistics import median

import pytest

from tests.benchmarks.figures import Absent, Beside, Figure, Ratio, Result
from tests.benchmarks.report import line, summary

SPEED = Figure("speed", ">= 2", "ratio", "ours / theirs")
FAILED = Figure("failed", "<= 0", "", "what must not happen", over_runs=sum)
REPORTED = Figure("info", "", "B", "what belongs to another figure")


def test_the_value_of_a_ratio_is_the_median_of_the_ratios() -> None:
    result = Result(SPEED, [Ratio(10, 5), Ratio(30, 10), Ratio(1, 1)])
    assert (result.value, result.ok) == (2.0, True)


@pytest.mark.parametrize("base", [0.0, -1.0, nan])
def test_a_ratio_to_nothing_is_an_error_of_its_measurement(base: float) -> None:
    with pytest.raises(ValueError, match="measured 3 beside"):
        Ratio(3.0, base)


def test_one_failure_in_one_of_many_runs_misses_the_bar() -> None:
    result = Result(FAILED, [0, 0, 1, 0, 0])
    assert median(result.values) == 0
    assert (result.value, result.ok) == (1, False)


def test_comparison_of_a_sample_is_reported_and_not_divided_by() -> None:
    result = Result(Figure("bytes", "<= 450", "B", "written"), [Beside(400.0, 600.0)])
    assert (result.value, result.compared, result.ok) == (400.0, (400.0, 600.0), True)
    assert result.as_json()["base"] == [600.0]


def test_what_this_machine_lacks_is_no_miss_and_is_named_with_its_reason() -> None:
    result = Result(SPEED, [Absent("no Python 3.12")])
    assert result.ok
    assert isnan(result.value)
    assert "no Python 3.12" in line(result)
    assert result.as_json()["absent"] == "no Python 3.12"
    assert summary([result]) == "0 of 0 bars hold; not measured here: speed."


def test_what_was_not_measured_without_a_reason_misses_the_bar() -> None:
    assert not Result(SPEED).ok
    assert not Result(REPORTED).ok
    assert not Result(SPEED, [Ratio(4, 1)], error="it broke").ok


def test_a_figure_without_a_bar_is_reported_and_not_judged() -> None:
    result = Result(REPORTED, [Beside(7.0, 9.0)])
    assert result.ok
    assert "info" in line(result)
    assert summary([result, Result(FAILED, [2])]) == "0 of 1 bars hold; missed: failed."
