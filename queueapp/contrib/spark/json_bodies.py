"""Bodies of typed messages that Spark itself writes: no row of them is looked at by Python.

``typed_messages`` makes expressions of the class's schema (``typed.describe``). ``to_json`` alone would write some
kinds of value otherwise than ``send``: a decimal as a number, a time cut to milliseconds and in the session's time
zone, NaN as a text. Those are converted, or fail the job as ``send`` fails. A class of which a part cannot be checked
by an expression is refused on the driver; option ``message_type``, which checks each row in Python, accepts it.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING, Any, TypeGuard

from pyspark.sql import functions as f
from pyspark.sql import types

from ... import messages
from .columns import load_message_type
from .errors import InvalidDataFrame, listed
from .typed import Schema, describe

if TYPE_CHECKING:
    from pyspark.sql import Column, DataFrame

_WHOLE = (types.ByteType, types.ShortType, types.IntegerType, types.LongType)
_REAL = (types.FloatType, types.DoubleType)
_UUID = "^[0-9a-fA-F]{8}(-[0-9a-fA-F]{4}){3}-[0-9a-fA-F]{12}$"


def typed_messages(frame: DataFrame, message_type: str | type) -> DataFrame:
    """``queueapp.contrib.spark.typed_messages``."""
    cls = load_message_type(message_type) if isinstance(message_type, str) else message_type
    schema = describe(cls)
    if schema is None:
        raise _refused(cls.__name__, "the class has parts that no schema expresses, such as a __post_init__")
    headers = messages.encode_headers({**messages.type_headers(cls), messages.CONTENT_TYPE: messages.JSON})
    fields = _Fields(cls.__name__)
    body = fields.struct(schema, frame.schema, lambda name: frame[f"`{name}`"], "")
    return frame.select(f.to_json(body, {"ignoreNullFields": "false"}).alias("body"), f.lit(headers).alias("headers"))


def _refused(where: str, why: str) -> InvalidDataFrame:
    return InvalidDataFrame(f"{where}: {why}. Write it with option message_type, which checks each row in Python.")


def _has_texts_as_keys(kind: types.DataType) -> TypeGuard[types.MapType]:
    return isinstance(kind, types.MapType) and isinstance(kind.keyType, types.StringType)


class _Fields:
    """The fields of one class as expressions: values that ``to_json`` writes as ``send`` does."""

    def __init__(self, name: str) -> None:
        self._name = name

    def struct(self, schema: Schema, kind: types.StructType, get: Callable[[str], Column], where: str) -> Column:
        """A struct with the fields under their names in JSON. ``get`` returns a column of the given struct."""
        _, _, fields, options = schema
        given = {field.name: field.dataType for field in kind.fields}
        unknown = [name for name in given if name not in {name for name, *_ in fields}]
        if unknown:
            raise InvalidDataFrame(f"{self._at(where)} has no fields {listed(unknown)}.")
        made = []
        tag = dict(options)["tag"]
        if tag is not None:
            made.append(f.lit(tag).alias(dict(options)["tag_field"] or "type"))
        for name, encoded, of, default in fields:
            at = f"{where}.{name}" if where else name
            if name in given:
                column = self._value(of, given[name], get(name), at)
            elif default:
                column = self._default(default[0], at)
            else:
                raise InvalidDataFrame(f"{self._at(at)} is required, and there is no column for it.")
            made.append(column.alias(encoded))
        return f.struct(*made)

    def _value(self, schema: Schema, kind: types.DataType, column: Column, where: str) -> Column:
        optional = schema == ("NoneType",)
        if schema[0] == "Union":
            members = [member for member in schema[1] if member != ("NoneType",)]
            optional = len(members) < len(schema[1])
            if len(members) != 1:
                raise _refused(self._at(where), "a union is not written by Spark")
            (schema,) = members
        if optional and (isinstance(kind, types.NullType) or schema == ("NoneType",)):
            return f.lit(None).cast("string")
        value = self._of_kind(schema, kind, column, where)
        if optional:
            return f.when(column.isNotNull(), value)
        return self._checked(column.isNull(), value, where, "null")

    def _of_kind(self, schema: Schema, kind: types.DataType, column: Column, where: str) -> Column:
        name, *details = schema
        if name == "List" and isinstance(kind, types.ArrayType) and not details[1]:
            item = kind.elementType
            return f.transform(column, lambda value: self._value(details[0], item, value, f"{where}[]"))
        if name == "Dict" and details[0] == ("StrType", ()) and _has_texts_as_keys(kind):
            of = kind.valueType
            return f.transform_values(column, lambda _, value: self._value(details[1], of, value, f"{where}[]"))
        if name == "Struct" and isinstance(kind, types.StructType):
            return self.struct(schema, kind, lambda field: column.getField(field), where)
        if name == "Literal":
            plain = (types.StringType,) if {type(value) for value in details[0]} == {str} else _WHOLE
            if isinstance(kind, plain) and {type(value) for value in details[0]} in ({str}, {int}):
                return self._checked(~column.isin(*details[0]), column, where, "another value than those of the class")
        bounds = dict(details[0]) if details and name not in ("List", "Dict", "Struct", "Literal", "Set") else {}
        zone = bounds.pop("tz", None)
        if bounds:
            raise _refused(self._at(where), f"{listed(bounds)} of the class is not checked by Spark")
        return self._simple(name, zone, kind, column, where)

    def _simple(self, name: str, zone: bool | None, kind: types.DataType, column: Column, where: str) -> Column:
        if (
            (name == "BoolType" and isinstance(kind, types.BooleanType))
            or (name == "IntType" and isinstance(kind, _WHOLE))
            or (name == "StrType" and isinstance(kind, types.StringType))
            or (name == "BytesType" and isinstance(kind, types.BinaryType))
        ):
            return column
        if name == "FloatType" and isinstance(kind, _REAL):
            value = column.cast("double")
            infinite = value.isin(float("inf"), float("-inf"))
            return self._checked(f.isnan(value) | infinite, value, where, "NaN or an infinity, which JSON has not")
        if name == "DecimalType" and isinstance(kind, types.DecimalType):
            return column.cast("string")
        if name == "UUIDType" and isinstance(kind, types.StringType):
            return self._checked(~column.rlike(_UUID), f.lower(column), where, "a text that is no UUID")
        if name == "DateType" and isinstance(kind, types.DateType):
            return self._in_years(column, column.cast("string"), where)
        if name == "DateTimeType" and isinstance(kind, types.TimestampType) and zone is not False:
            # Its microseconds since 1970, without the session's time zone.
            utc = f.lit("1970-01-01").cast("timestamp_ntz") + f.make_dt_interval(
                f.lit(0), f.lit(0), f.lit(0), (f.unix_micros(column) / f.lit(1_000_000).cast("decimal(7,0)"))
            )
            return self._in_years(utc, f.concat(self._time(utc), f.lit("Z")), where)
        if name == "DateTimeType" and isinstance(kind, types.TimestampNTZType) and not zone:
            return self._in_years(column, self._time(column), where)
        raise _refused(self._at(where), f"a column {kind.simpleString()} is not written as this field by Spark")

    @staticmethod
    def _time(column: Column) -> Column:
        return f.replace(column.cast("string"), f.lit(" "), f.lit("T"))

    def _in_years(self, column: Column, value: Column, where: str) -> Column:
        return self._checked(~f.year(column).between(1, 9999), value, where, "a time outside of the years 1 to 9999")

    def _checked(self, is_bad: Column, value: Column, where: str, what: str) -> Column:
        text = f"A row is no {self._name}: {where} is {what}, which is not accepted."
        return f.when(is_bad, f.raise_error(f.lit(text))).otherwise(value)

    def _default(self, value: Any, where: str) -> Column:
        """The value of a field that has no column."""
        if value is None or isinstance(value, bool | int | float | str):
            return f.lit(value).cast("string") if value is None else f.lit(value)
        if value == []:
            return f.array().cast("array<string>")
        if value == {}:
            return f.create_map().cast("map<string,string>")
        raise InvalidDataFrame(f"{self._at(where)} has a default that Spark does not write: add a column for it.")

    def _at(self, where: str) -> str:
        return f"{self._name}.{where}" if where else self._name
