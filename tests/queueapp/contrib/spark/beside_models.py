"""A message class in a module that imports a model, as many do: it cannot be imported without Django."""

from __future__ import annotations

import msgspec

from tests.testapp.models import Effect

EFFECT = Effect


class Renamed(msgspec.Struct):
    number: int
    name: str
