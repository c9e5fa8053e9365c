"""An order is packed, and then there is a parcel."""

import msgspec

from queueapp import Context, consumer
from tests.testapp.models import Effect, Leased, Transactional


class Order(msgspec.Struct):
    name: str


class Parcel(msgspec.Struct):
    name: str


@consumer(Leased, name="traced.pack")
def pack(order: Order) -> None:
    Transactional.send(Parcel(order.name))


@consumer(Transactional, name="traced.ship")
def ship(parcel: Parcel, context: Context) -> None:
    Effect.objects.create(name=parcel.name, detail=context.headers.get("traceparent", ""))
