"""What lies between the messages that a verb takes is not locked by it: its holder acks it while that verb is open."""

from __future__ import annotations

import uuid
from collections.abc import Callable
from typing import Any

import pytest

from queueapp.sql import queue_sql
from tests.queueapp.sql.server import Server, levels, within
from tests.testapp.models import AddressedUrgent

RANGES = levels(3)
OWNER = uuid.uuid4()
#: Each in an open transaction of its own, with what of ten messages, every other one leased by another owner, it takes.
VERBS: dict[str, tuple[Callable[[Any, Any], Any], int]] = {
    "lease": (lambda sql, c: sql.claims.claim_by_lease(c, RANGES, 4, uuid.uuid4(), uuid.uuid4(), 60_000), 4),
    "delete": (lambda sql, c: sql.claims.claim_by_delete(c, RANGES, 4), 4),
    "purge": (lambda sql, c: sql.maintenance.purge(c, 4), 4),
    "purge of what has expired": (lambda sql, c: sql.maintenance.purge_expired(c, 10), 0),
    "release of another's": (lambda sql, c: sql.maintenance.release_owner(c, OWNER, 10), 0),
    "priorities": (lambda sql, c: sum(sql.maintenance.clamp_priorities(c, [""], 10).values()), 0),
}


@pytest.mark.parametrize("verb", VERBS)
def test_what_is_passed_by_is_not_locked(server: Server, verb: str) -> None:
    run, expected = VERBS[verb]
    seqs = server.put(AddressedUrgent, 10, priority=1)
    held = []
    for seq in seqs[::2]:
        at = [item._replace(low=seq, high=seq) for item in RANGES]
        held.append(server.lease(AddressedUrgent, 1, ranges=at))

    second_session = server.another()
    with server.rolled_back(second_session):
        took = run(queue_sql(AddressedUrgent, second_session), second_session)
        assert (len(took) if isinstance(took, list) else took) == expected
        with within():
            for token, leased in held:
                assert server.sql(AddressedUrgent).acks.ack(server.connection, leased, token) == 1

    assert server.seqs(AddressedUrgent) == seqs[1::2]


def test_purge_continues_past_locked_rows(server: Server) -> None:
    seqs = server.put(AddressedUrgent, 6)
    holder = server.another()
    with server.rolled_back(holder):
        # A lock for a verdict: a look does not see it, the one who takes passes over it.
        assert queue_sql(AddressedUrgent, holder).failures.lock(holder, seqs[0], None, 1_000) is not None
        with within():
            assert server.sql(AddressedUrgent).maintenance.purge(server.connection, 100) == 5

    assert server.seqs(AddressedUrgent) == seqs[:1]
