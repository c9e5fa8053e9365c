"""The kinds of values that a message may be given, by the ways in: what ``send`` makes of each is the reference."""

from __future__ import annotations

import enum
import uuid
from datetime import UTC, date, datetime, time, timedelta, timezone
from decimal import Decimal
from typing import Any


class Colour(enum.Enum):
    RED = "red"


def nested(depth: int) -> Any:
    """A list in a list, so many times."""
    value: Any = 1
    for _ in range(depth):
        value = [value]
    return value


#: No value of Python; only SQL, Spark or a text can say it.
ABSENT: Any = object()

#: kind -> (value in Python, the same in PostgreSQL's SQL or "" where no type of it says that)
KINDS: dict[str, tuple[Any, str]] = {
    "none": (None, "NULL::text"),
    "true": (True, "true"),
    "small whole number": (5, "5"),
    "64-bit whole number": (2**63 - 1, "9223372036854775807::bigint"),
    "2**63": (2**63, "'{\"x\": 9223372036854775808}'::jsonb -> 'x'"),
    "2**64": (2**64, "'18446744073709551616'::jsonb"),
    "30 digits": (-(10**30), "'-1000000000000000000000000000000'::json"),
    "1e400 as a whole number": (10**400, "'1e400'::jsonb"),
    "1e400 in json": (10**400, "'1e400'::json"),
    "float": (0.1, "0.1::float8"),
    "large float": (1e20, "1e20::float8"),
    "whole float": (3.0, "3::float8"),
    "minus zero": (-0.0, "'-0'::float8"),
    "float4": (1.5, "1.5::float4"),
    "NaN": (float("nan"), "'NaN'::float8"),
    "infinity": (float("inf"), "'Infinity'::float8"),
    "minus infinity": (float("-inf"), "'-Infinity'::float4"),
    "NaN in a list": ([1.0, float("nan")], "ARRAY[1, 'NaN']::float8[]"),
    "decimal": (Decimal("1.50"), "1.50::numeric"),
    "decimal NaN": (Decimal("NaN"), "'NaN'::numeric"),
    "decimals": ([Decimal("1.50"), None], "ARRAY[1.50, NULL]::numeric[]"),
    "text": ('a"b\\c\n\x01é', "E'a\"b\\\\c\\n\\u0001é'"),
    "NUL in text": ("a\0b", ""),
    "NUL in json": ({"x": "a\0b"}, '\'{"x": "a\\u0000b"}\'::json'),
    "half an emoji": ("a\ud83d", ""),
    "half an emoji in json": ({"x": "a\ud83d"}, '\'{"x": "a\\ud83d"}\'::json'),
    "an emoji in json": ({"x": "\U0001f600"}, '\'{"x": "\\ud83d\\ude00"}\'::json'),
    "a backslash in json": ({"x": "\\ud83d"}, '\'{"x": "\\\\ud83d"}\'::json'),
    "U+FFFE": ("\ufffe", "U&'\\FFFE'"),
    "emoji": ("\U0001f600", "U&'\\+01F600'"),
    "empty text": ("", "''::text"),
    "bytes": (b"\x00\xff", "'\\x00ff'::bytea"),
    "empty bytes": (b"", "''::bytea"),
    "array of bytes": ([b"ab", None, b""], "ARRAY['\\x6162', NULL, '']::bytea[]"),
    "date": (date(2026, 1, 2), "DATE '2026-01-02'"),
    "first date": (date(1, 1, 1), "DATE '0001-01-01'"),
    "last date": (date(9999, 12, 31), "DATE '9999-12-31'"),
    "dates": ([date(1, 1, 1), None], "ARRAY['0001-01-01', NULL]::date[]"),
    "year 10000": (ABSENT, "DATE '10000-01-01'"),
    "years 10000": (ABSENT, "ARRAY['10000-01-01']::date[]"),
    "year 1 before Christ": (ABSENT, "DATE '0001-01-01 BC'"),
    "date infinity": (ABSENT, "DATE 'infinity'"),
    "aware time": (datetime(2026, 1, 2, 3, 4, 5, 600000, UTC), "TIMESTAMPTZ '2026-01-02 03:04:05.6+00'"),
    "aware time of a whole second": (datetime(2026, 1, 2, 3, tzinfo=UTC), "TIMESTAMPTZ '2026-01-02 05:00+02'"),
    "aware time with an offset": (datetime(2026, 1, 2, tzinfo=timezone(timedelta(hours=2))), ""),
    "naive time": (datetime(2026, 1, 2, 3, 4, 5, 6), "TIMESTAMP '2026-01-02 03:04:05.000006'"),
    "naive time of a whole second": (datetime(2026, 1, 2, 3), "TIMESTAMP '2026-01-02 03:00'"),
    "first time": (datetime(1, 1, 1, tzinfo=UTC), "TIMESTAMPTZ '0001-01-01 00:00+00'"),
    "last time": (datetime(9999, 12, 31, 23, 59, 59, 999999, UTC), "TIMESTAMPTZ '9999-12-31 23:59:59.999999+00'"),
    "times": ([datetime(2026, 1, 2, tzinfo=UTC), None], "ARRAY['2026-01-02 00:00+00', NULL]::timestamptz[]"),
    "naive times": ([datetime(2026, 1, 2)], "ARRAY['2026-01-02']::timestamp[]"),
    "aware year 10000": (ABSENT, "TIMESTAMPTZ '10000-01-01 00:00+00'"),
    "naive year 10000": (ABSENT, "TIMESTAMP '10000-01-01 00:00'"),
    "time infinity": (ABSENT, "TIMESTAMPTZ '-infinity'"),
    "time of day": (time(1, 2, 3, 400000), "TIME '01:02:03.4'"),
    "midnight": (time(0), "TIME '00:00'"),
    "times of day": ([time(1, 2, 3, 4), None], "ARRAY['01:02:03.000004', NULL]::time[]"),
    "24 o'clock": (ABSENT, "TIME '24:00'"),
    "duration": (timedelta(hours=30, seconds=1.5), "interval '30 hours 1.5 s'"),
    "negative duration": (timedelta(days=-1, seconds=5), "interval '-1 day' + interval '5 s'"),
    "microsecond": (timedelta(microseconds=-1), "interval '-0.000001 s'"),
    "zero duration": (timedelta(0), "interval '0'"),
    "no duration": (None, "NULL::interval"),
    "more than a month": (timedelta(days=400, microseconds=7), "interval '400 days 0.000007 s'"),
    "months": (timedelta(days=60, hours=1), "interval '2 months 1 hour'"),
    "years and months": (timedelta(days=396), "interval '13 months 1 day'"),
    "negative years": (timedelta(days=-365 - 30), "interval '-13 months'"),
    "longest duration": (timedelta.max, "interval '999999999 days 23:59:59.999999'"),
    "durations": ([timedelta(hours=1), timedelta(seconds=-1)], "ARRAY['1 hour', '-1 s']::interval[]"),
    "longer than Python's": (ABSENT, "interval '1000000000 days'"),
    "UUID": (uuid.UUID(int=7), "'00000000-0000-0000-0000-000000000007'::uuid"),
    "enum": (Colour.RED, "'red'::text"),
    "whole numbers in a list": ([1, None, 3], "ARRAY[1, NULL, 3]"),
    "empty list": ([], "'{}'::float8[]"),
    "nested lists": ([[1, 2], [3, 4]], "ARRAY[[1, 2], [3, 4]]"),
    "nested lists of floats": (ABSENT, "ARRAY[[1.5, 2], [3, 4]]::float8[]"),
    "nested": ({"a": [1, {"b": None}]}, '\'{"a": [1, {"b": null}]}\'::jsonb'),
    "whole numbers as keys": ({1: "a"}, "jsonb_build_object(1, 'a')"),
    "UUIDs as keys": ({uuid.UUID(int=7): 1}, ""),
    "truths as keys": ({True: "a"}, ""),
    "tuples as keys": ({(1, 2): "a"}, ""),
    "900 deep": (nested(900), f"'{'[' * 900}1{']' * 900}'::jsonb"),
    "endless": (nested(100_000), ""),
    "ten million characters": ("x" * 10_000_000, "repeat('x', 10000000)"),
    "an object": (object(), ""),
    "set": ({1}, ""),
}
