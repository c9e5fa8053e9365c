"""An endpoint of NServiceBus beside us, on a table of ours or of its own."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import pytest

from tests.nservicebus import Endpoint
from tests.queueapp.sql.server import Server
from tests.testapp.models import ForeignPostgres, ForeignSqlServer

FOREIGN = {"postgresql": ForeignPostgres, "microsoft": ForeignSqlServer}


@pytest.fixture
def endpoint_at(server: Server) -> Iterator[Callable[[Any], Endpoint]]:
    """Endpoints on the tables of queues."""
    endpoints: list[Endpoint] = []

    def make(queue: Any) -> Endpoint:
        endpoints.append(Endpoint.at(server.alias, queue._meta.db_table))
        return endpoints[-1]

    yield make
    for endpoint in endpoints:
        endpoint.close()


@pytest.fixture
def their_queue(server: Server, endpoint_at: Callable[[Any], Endpoint]) -> Iterator[Any]:
    """A queue in a table that the transport's script has made."""
    queue = FOREIGN[server.vendor]
    maker = endpoint_at(queue)
    maker.create()
    yield queue
    maker.drop()


@pytest.fixture
def delayed_table(server: Server, endpoint_at: Callable[[Any], Endpoint]) -> Iterator[None]:
    """The table in which an endpoint keeps its delayed messages, made by the transport's script."""
    maker = endpoint_at(FOREIGN[server.vendor])
    maker.create()
    yield
    maker.drop()
