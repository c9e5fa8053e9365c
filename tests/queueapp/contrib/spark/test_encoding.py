"""Encoding of Arrow batches, without Spark and without a database."""

from __future__ import annotations

import time
import uuid
from datetime import UTC, date, datetime

import msgspec
import pyarrow as pa
import pytest

from queueapp import messages
from queueapp.contrib.spark import encoding
from queueapp.contrib.spark.columns import Plan
from queueapp.contrib.spark.encoding import IdSource, RowEncoder, python_values
from queueapp.contrib.spark.errors import InvalidDataFrame
from queueapp.errors import InvalidMessage


def plan(*staged: str, priorities: int = 1) -> Plan:
    return Plan("a.B", staged, priorities=priorities)


def test_ids_are_version_7_rise_strictly_and_do_not_repeat_between_attempts() -> None:
    before = time.time_ns() // 1_000_000
    source = IdSource()
    texts = [uuid.UUID(bytes=value) for value in [*source.take(5000).to_pylist(), *source.take(5000).to_pylist()]]
    assert texts == sorted(texts)
    assert len(set(texts)) == 10_000
    assert {(text.version, text.variant) for text in texts} == {(7, uuid.RFC_4122)}
    assert before <= texts[0].int >> 80 <= time.time_ns() // 1_000_000
    assert not set(texts) & {uuid.UUID(bytes=value) for value in IdSource().take(10_000).to_pylist()}


def test_taking_no_ids_is_an_empty_array() -> None:
    assert len(IdSource().take(0)) == 0


def test_given_ids_are_kept_and_missing_ones_made() -> None:
    given = uuid.uuid4()
    batch = pa.record_batch({"body": ["x", "y"], "id": [str(given).upper(), None]})
    encoded = RowEncoder(plan("id", "body")).encode(batch)
    first, second = (uuid.UUID(bytes=value) for value in encoded["id"].to_pylist())
    assert first == given
    assert second.version == 7


def test_bytes_of_bodies_are_counted() -> None:
    encoder = RowEncoder(plan("id", "body"))
    for bodies in (["x", None], ["grün"]):
        encoder.encode(pa.record_batch({"body": bodies}))
    assert encoder.body_bytes == 6


def test_headers_that_many_rows_share_are_checked_and_kept_in_order() -> None:
    given = ['{"a": "1"}', None, '{"a": "2"}', '{"a": "1"}', None]
    batch = pa.record_batch({"body": ["x"] * 5, "headers": given})
    encoded = RowEncoder(plan("headers", "body")).encode(batch)
    assert encoded["headers"].to_pylist() == [text or "{}" for text in given]


def test_nulls_become_what_the_columns_default_to() -> None:
    batch = pa.record_batch(
        {
            "body": pa.array([None], pa.string()),
            "headers": pa.array([None], pa.string()),
            "recipient": pa.array([None], pa.string()),
            "priority": pa.array([None], pa.int64()),
            "is_barrier": pa.array([None], pa.bool_()),
        }
    )
    (row,) = RowEncoder(plan("headers", "body", "recipient", "priority", "is_barrier")).encode(batch).to_pylist()
    assert row == {"headers": "{}", "body": None, "recipient": "", "priority": 0, "is_barrier": False}


def test_large_strings_and_wide_integers_fit() -> None:
    batch = pa.record_batch({"body": pa.array(["x"], pa.large_string()), "priority": pa.array([1], pa.int64())})
    encoded = RowEncoder(plan("body", "priority", priorities=2)).encode(batch)
    assert encoded.schema.types == [pa.binary(), pa.int16()]


@pytest.mark.parametrize("header", ['{"a": "x\\u0000"}', '{"a": null}', "not json", "[]"])
def test_headers_that_no_receiver_could_read_are_refused(header: str) -> None:
    with pytest.raises(InvalidDataFrame, match=r"Column headers for queue a\.B"):
        RowEncoder(plan("headers", "body")).encode(pa.record_batch({"body": ["x"], "headers": [header]}))


def test_a_priority_that_no_receiver_looks_at_is_refused() -> None:
    for bad in (-1, 3):
        with pytest.raises(InvalidDataFrame, match=f"{bad} is not accepted, it must be from 0 to 2"):
            RowEncoder(plan("body", "priority", priorities=3)).encode(
                pa.record_batch({"body": ["x", "y"], "priority": [0, bad]})
            )


@pytest.mark.parametrize(("name", "longest"), [("recipient", 200), ("correlation_id", 255), ("reply_to_address", 255)])
def test_a_text_too_long_for_its_column_is_refused(name: str, longest: int) -> None:
    RowEncoder(plan("body", name)).encode(pa.record_batch({"body": ["x"], name: ["ü" * longest]}))
    with pytest.raises(InvalidDataFrame, match=f"a text of {longest + 1} characters; at most {longest} are accepted"):
        RowEncoder(plan("body", name)).encode(pa.record_batch({"body": ["x"], name: ["ü" * (longest + 1)]}))


def test_times_and_dates_are_what_pyarrow_makes_of_them() -> None:
    times = [datetime(1969, 12, 31, 23, 59, 59, 1, tzinfo=UTC), None, datetime(9999, 12, 31, tzinfo=UTC)]
    for unit in ("ms", "us"):
        column = pa.array(times, pa.timestamp("us", "America/New_York")).cast(
            pa.timestamp(unit, "America/New_York"), safe=False
        )
        assert python_values(column) == column.to_pylist()
    naive = pa.array([datetime(2013, 1, 1, 5, 15), None], pa.timestamp("us"))
    assert python_values(naive) == naive.to_pylist()
    days = pa.array([date(1, 1, 1), None, date(9999, 12, 31)], pa.date32())
    assert python_values(days) == days.to_pylist()


class Reading(msgspec.Struct):
    n: int
    f: float | None = None
    at: datetime | None = None


def typed() -> RowEncoder:
    headers = messages.encode_headers({**messages.type_headers(Reading), messages.CONTENT_TYPE: messages.JSON})
    return RowEncoder(Plan("a.B", ("id", "body"), headers, f"{__name__}.Reading"))


@pytest.mark.parametrize("number", [float("nan"), float("inf"), float("-inf")])
def test_a_number_that_json_has_not_is_refused_in_the_words_of_send(number: float) -> None:
    with pytest.raises(InvalidMessage) as sent:
        messages.encode(Reading(1, number))
    with pytest.raises(InvalidDataFrame) as raised:
        typed().encode(pa.record_batch({"n": [1, 2], "f": [0.5, number]}))
    assert str(sent.value) in str(raised.value)


def test_a_typed_row_without_a_number_is_stored_with_null() -> None:
    encoded = typed().encode(pa.record_batch({"n": [1], "f": pa.array([None], pa.float64())}))
    assert encoded["body"].to_pylist() == [b'{"n":1,"f":null,"at":null}']


def test_a_time_that_python_cannot_read_is_refused_in_a_typed_row() -> None:
    kind = pa.timestamp("us", "UTC")
    late = pa.array([253_402_318_800_000_000], pa.int64()).cast(kind)  # the year 10000
    with pytest.raises(InvalidDataFrame, match="years 1 to 9999"):
        typed().encode(pa.record_batch({"n": [1], "at": late}))


@pytest.mark.parametrize("micros", [253_402_318_799_000_000, 253_402_318_800_000_000, -62_135_600_000_000_000])
def test_expires_that_no_reader_can_load_is_refused(micros: int) -> None:
    column = pa.array([micros], pa.int64()).cast(pa.timestamp("us", "UTC"))
    with pytest.raises(InvalidDataFrame, match=r"expires .* must be at most 100 years from now"):
        RowEncoder(plan("body", "expires")).encode(pa.record_batch({"body": ["x"], "expires": column}))


def test_expires_of_next_year_and_of_last_year_are_stored() -> None:
    now = datetime.now(UTC).replace(microsecond=0)
    times = [now.replace(year=now.year + 1, day=1), now.replace(year=now.year - 1, day=1), None]
    batch = pa.record_batch({"body": ["x"] * 3, "expires": pa.array(times, pa.timestamp("us", "UTC"))})
    assert RowEncoder(plan("body", "expires")).encode(batch)["expires"].to_pylist() == times


def test_the_bound_of_expires_is_that_of_send() -> None:
    from queueapp.sending import validation

    assert validation.FAR_FUTURE == encoding.FAR_FUTURE


def test_a_text_with_a_nul_is_refused() -> None:
    with pytest.raises(InvalidDataFrame, match="NUL"):
        RowEncoder(plan("body", "correlation_id")).encode(pa.record_batch({"body": ["x"], "correlation_id": ["a\0b"]}))
