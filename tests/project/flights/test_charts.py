"""Where bars stand, as numbers."""

from __future__ import annotations

import pytest

from project.flights.charts import bars, columns
from project.flights.figures import Figure


def test_longest_bar_fills_the_width_and_the_others_are_in_proportion() -> None:
    chart = bars([Figure("UA", "United", late=60, cancelled=20), Figure("AA", "American", late=40)])
    long, short = chart.marks
    assert (long["late"], long["cancelled_x"], long["cancelled"]) == ("75.000%", "75.000%", "25.000%")
    assert (short["late"], short["cancelled"]) == ("50.000%", "0.000%")
    assert short["y"] > long["y"]
    assert chart.height > short["y"]


def test_columns_stand_on_one_floor_and_reach_their_line_of_the_scale() -> None:
    chart = columns([Figure("00", ""), Figure("01", "", late=200, cancelled=100), Figure("02", "", late=400)])
    lines = {line["label"]: float(line["y"]) for line in chart.grid}
    empty, stacked, high = chart.marks
    for mark in chart.marks:
        assert float(mark["late_y"]) + float(mark["late"]) == pytest.approx(lines["0"], abs=0.01)
        assert float(mark["cancelled_y"]) + float(mark["cancelled"]) == pytest.approx(float(mark["late_y"]), abs=0.01)
    assert float(high["late_y"]) == pytest.approx(lines["400"], abs=0.01)
    assert float(stacked["cancelled_y"]) == pytest.approx(lines["300"], abs=0.01)
    assert float(empty["late"]) == 0


@pytest.mark.parametrize("highest", [0, 1, 4, 7, 99, 100, 101, 8001, 123_456])
def test_scale_has_few_round_lines_and_covers_every_column(highest: int) -> None:
    chart = columns([Figure("00", "", late=highest)])
    values = [int(line["label"].replace(",", "")) for line in chart.grid]
    assert values[0] == 0
    assert values[-1] >= highest
    assert 2 <= len(values) <= 6
    assert float(chart.marks[0]["late_y"]) >= 0


def test_nothing_counted_yet_is_drawn_as_nothing() -> None:
    assert bars([]).marks == []
    assert [mark["late"] for mark in columns([Figure("00", "")]).marks] == ["0.00"]
