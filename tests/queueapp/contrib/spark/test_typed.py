"""The schema of a message class on the driver is on an executor what the class is: it validates and encodes alike."""

from __future__ import annotations

import dataclasses
import enum
import pickle
import uuid
from datetime import UTC, date, datetime
from typing import Annotated, Any, Literal

import msgspec
import pytest

from queueapp.contrib.spark.typed import describe, rebuild


class Colour(enum.Enum):
    RED = "red"
    BLUE = "blue"


class Part(msgspec.Struct, rename="camel"):
    part_number: int
    weight: Annotated[float, msgspec.Meta(ge=0)] = 1.5


class Order(msgspec.Struct, tag="order", omit_defaults=False):
    number: int
    placed: datetime
    day: date | None = None
    key: uuid.UUID | None = None
    colour: Colour = Colour.RED
    size: Literal["s", "m"] = "s"
    parts: list[Part] = []
    notes: dict[str, str] = msgspec.field(default_factory=dict)
    code: Annotated[str, msgspec.Meta(max_length=3)] = "x"


@dataclasses.dataclass
class Reading:
    n: int
    f: float = 0.5
    tags: list[str] = dataclasses.field(default_factory=list)
    marks: set[int] = dataclasses.field(default_factory=set)


class Checked(msgspec.Struct):
    n: int

    def __post_init__(self) -> None:
        if self.n < 0:
            raise ValueError("negative")


class Random(msgspec.Struct):
    n: int
    key: uuid.UUID = msgspec.field(default_factory=uuid.uuid4)


NOW = datetime(2026, 1, 2, 3, 4, 5, 6, tzinfo=UTC)
ORDER = {"number": 1, "placed": NOW}


@pytest.mark.parametrize(
    ("cls", "row"),
    [
        (Order, ORDER),
        (Order, ORDER | {"day": date(2026, 1, 2), "key": uuid.UUID(int=7), "colour": "blue", "size": "m"}),
        (Order, ORDER | {"parts": [{"partNumber": 1}, {"partNumber": 2, "weight": 2.0}], "notes": {"a": "b"}}),
        (Order, ORDER | {"number": "no number"}), (Order, {"number": 1}), (Order, ORDER | {"colour": "green"}),
        (Order, ORDER | {"code": "long"}), (Order, ORDER | {"parts": [{"partNumber": 1, "weight": -1.0}]}),
        (Order, ORDER | {"size": "xl"}), (Order, ORDER | {"parts": None}),
        (Reading, {"n": 1, "f": 0.5}), (Reading, {"n": 1, "f": 2.0, "tags": ["a"]}), (Reading, {"n": None}),
        (Reading, {"n": 1, "f": 1.0, "marks": [2, 2]}),
    ],
)  # fmt: skip
def test_it_validates_and_encodes_as_the_class_does(cls: Any, row: dict[str, Any]) -> None:
    schema = pickle.loads(pickle.dumps(describe(cls)))
    assert schema is not None

    def outcome(kind: Any) -> Any:
        try:
            return msgspec.json.decode(msgspec.json.encode(msgspec.convert(row, kind)))
        except msgspec.ValidationError as error:
            return str(error)

    assert outcome(rebuild(schema)) == outcome(cls)


def test_lists_of_defaults_are_not_shared() -> None:
    kind = rebuild(describe(Order))  # type: ignore[arg-type]
    first, second = (msgspec.convert(ORDER, kind) for _ in range(2))
    first.parts.append(1)
    assert second.parts == []


@pytest.mark.parametrize("cls", [Checked, Random])
def test_a_class_that_a_schema_does_not_express_is_imported_on_executors(cls: Any) -> None:
    assert describe(cls) is None
