"""The schema of a message class, taken on the driver, so that executors need not import the class; and what Spark's
columns of it are.

A class often lives beside models, and executors have no Django. ``describe`` turns it into plain values that travel
with the plan; ``rebuild`` makes a struct of them that validates and encodes alike. A class that a schema cannot express
(a ``__post_init__``, a factory that differs from row to row, a custom type) is imported on the executors, as before.
"""

from __future__ import annotations

import dataclasses
import datetime
import decimal
import enum
import uuid
from collections.abc import Sequence
from typing import Annotated, Any, Literal, Optional, Union  # noqa: F401

import msgspec
from msgspec import inspect
from pyspark.sql import types

from ...messages.types import CONSTANT_FACTORIES

#: ("kind", details …) of one type.
Schema = tuple[Any, ...]

_SIMPLE: dict[type, Any] = {
    inspect.AnyType: Any, inspect.NoneType: None, inspect.BoolType: bool, inspect.UUIDType: uuid.UUID,
    inspect.DecimalType: decimal.Decimal, inspect.DateType: datetime.date,
}  # fmt: skip
_BOUNDED: dict[type, Any] = {
    inspect.IntType: int, inspect.FloatType: float, inspect.StrType: str, inspect.BytesType: bytes,
    inspect.DateTimeType: datetime.datetime, inspect.TimeType: datetime.time, inspect.TimeDeltaType: datetime.timedelta,
}  # fmt: skip
_BOUNDS = ("ge", "gt", "le", "lt", "multiple_of", "pattern", "min_length", "max_length", "tz")
_NAMES = {kind.__name__: kind for kind in (*_SIMPLE, *_BOUNDED)}


class _Unsupported(Exception):
    """A part of a class that a schema does not express."""


def describe(cls: Any) -> Schema | None:
    """The schema of a struct or dataclass; None where it needs the class itself."""
    try:
        return _type(inspect.type_info(cls), ())
    except (_Unsupported, TypeError, NameError):
        return None


def _type(info: inspect.Type, outer: tuple[Any, ...]) -> Schema:
    kind = type(info)
    if kind is inspect.Metadata:
        return _type(info.type, outer)  # type: ignore[attr-defined]
    if kind in _SIMPLE:
        return (kind.__name__,)
    if kind in _BOUNDED:
        bounds = {name: getattr(info, name) for name in _BOUNDS if getattr(info, name, None) is not None}
        return (kind.__name__, tuple(bounds.items()))
    if isinstance(info, inspect.LiteralType):
        return ("Literal", info.values)
    if isinstance(info, inspect.EnumType):
        return ("Literal", tuple(member.value for member in info.cls))
    if isinstance(info, inspect.UnionType):
        return ("Union", tuple(_type(member, outer) for member in info.types))
    if isinstance(info, inspect.ListType | inspect.SetType | inspect.FrozenSetType | inspect.VarTupleType):
        bounds = {name: getattr(info, name) for name in ("min_length", "max_length") if getattr(info, name) is not None}
        kind_of_list = "Set" if isinstance(info, inspect.SetType | inspect.FrozenSetType) else "List"
        return (kind_of_list, _type(info.item_type, outer), tuple(bounds.items()))
    if isinstance(info, inspect.DictType):
        return ("Dict", _type(info.key_type, outer), _type(info.value_type, outer))
    if isinstance(info, inspect.StructType | inspect.DataclassType):
        return _struct(info, outer)
    raise _Unsupported


def _struct(info: Any, outer: tuple[Any, ...]) -> Schema:
    cls = info.cls
    if cls in outer or hasattr(cls, "__post_init__") or getattr(info, "array_like", False):
        raise _Unsupported
    config = getattr(cls, "__struct_config__", None)
    options = {
        "tag": getattr(info, "tag", None),
        "tag_field": getattr(info, "tag_field", None),
        "forbid_unknown_fields": getattr(info, "forbid_unknown_fields", False),
        "omit_defaults": bool(config is not None and config.omit_defaults),
    }
    fields = tuple(
        (field.name, field.encode_name, _type(field.type, (*outer, cls)), _default(field)) for field in info.fields
    )
    return ("Struct", cls.__name__, fields, tuple(options.items()))


def _default(field: Any) -> tuple[Any, ...]:
    """() for a required field, else (its default as plain values,)."""
    if field.required:
        return ()
    if field.default_factory is not msgspec.NODEFAULT:
        if field.default_factory not in CONSTANT_FACTORIES:
            raise _Unsupported
        return (msgspec.to_builtins(field.default_factory()),)
    if isinstance(field.default, enum.Enum | str | int | float | bool | None):
        return (field.default.value if isinstance(field.default, enum.Enum) else field.default,)
    if dataclasses.is_dataclass(field.default) or isinstance(field.default, msgspec.Struct):
        raise _Unsupported
    return (msgspec.to_builtins(field.default),)


def rebuild(schema: Schema) -> Any:
    """A type that validates and encodes as the described one."""
    kind, *details = schema
    if kind in _NAMES:
        found = _NAMES[kind]
        if found in _SIMPLE:
            return _SIMPLE[found]
        bounds = dict(details[0])
        return Annotated[_BOUNDED[found], msgspec.Meta(**bounds)] if bounds else _BOUNDED[found]
    if kind == "Literal":
        return Literal[tuple(details[0])]
    if kind == "Union":
        return Union[tuple(map(rebuild, details[0]))]  # noqa: UP007  made at run time
    if kind in ("List", "Set"):
        items: Any = (list if kind == "List" else set)[rebuild(details[0])]  # type: ignore[index]
        bounds = dict(details[1])
        return Annotated[items, msgspec.Meta(**bounds)] if bounds else items
    if kind == "Dict":
        return dict[rebuild(details[0]), rebuild(details[1])]  # type: ignore[misc]
    name, fields, options = details
    return _define(name, fields, dict(options))


def _define(name: str, fields: Sequence[Any], options: dict[str, Any]) -> Any:
    defined: list[Any] = []
    for field, _, schema, default in fields:
        value = default[0] if default else msgspec.NODEFAULT
        if isinstance(value, list | dict):
            defined.append((field, rebuild(schema), msgspec.field(default_factory=value.copy)))
        elif default:
            defined.append((field, rebuild(schema), value))
        else:
            defined.append((field, rebuild(schema)))
    names = {field: encoded for field, encoded, *_ in fields if field != encoded}
    # kw_only: a required field may follow one with a default.
    return msgspec.defstruct(name, defined, kw_only=True, rename=names or None, **options)


# -- as Spark's columns ------------------------------------------------------------------------------------------------

_SPARK: dict[str, types.DataType] = {
    "BoolType": types.BooleanType(),
    "IntType": types.LongType(),
    "FloatType": types.DoubleType(),
    "StrType": types.StringType(),
    "UUIDType": types.StringType(),
    "BytesType": types.BinaryType(),
    "DateTimeType": types.TimestampType(),
    "DateType": types.DateType(),
    "DecimalType": types.DecimalType(38, 18),
}


def spark_type(schema: Schema) -> types.DataType:
    """The Spark type of a described type. What Spark has not (a union, a duration, any value) is a string of JSON."""
    schema = _without_none(schema)
    kind, *details = schema
    if kind in _SPARK:
        return _SPARK[kind]
    if kind == "Literal":
        plain = {type(value) for value in details[0]}
        return types.LongType() if plain == {int} else types.StringType()
    if kind in ("List", "Set"):
        return types.ArrayType(spark_type(details[0]))
    if kind == "Dict" and details[0][0] == "StrType":
        return types.MapType(types.StringType(), spark_type(details[1]))
    if kind == "Struct":
        return types.StructType([types.StructField(name, spark_type(of)) for name, _, of, _ in details[1]])
    return types.StringType()


def plain_of(value: Any, schema: Schema) -> Any:
    """A decoded value as pyarrow takes it for ``spark_type``."""
    if value is None:
        return None
    kind, *details = schema = _without_none(schema)
    if kind == "UUIDType":
        return str(value)
    if kind in _SPARK:
        return value
    if kind == "Literal" and {type(literal) for literal in details[0]} in ({int}, {str}):
        return value
    if kind in ("List", "Set"):
        return [plain_of(item, details[0]) for item in value]
    if kind == "Dict" and details[0][0] == "StrType":
        return [(key, plain_of(item, details[1])) for key, item in value.items()]
    if kind == "Struct":
        return {name: plain_of(getattr(value, name), of) for name, _, of, _ in details[1]}
    return msgspec.json.encode(value).decode()


def _without_none(schema: Schema) -> Schema:
    """The type of an optional value; others as they are."""
    if schema[0] != "Union":
        return schema
    rest = tuple(member for member in schema[1] if member != ("NoneType",))
    return rest[0] if len(rest) == 1 else schema
