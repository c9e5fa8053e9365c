"""What a dead process was handling is read from the memory that it shared with its supervisor."""

from __future__ import annotations

import os
import uuid
from collections.abc import Iterator

import pytest

from queueapp.conf.options import GROUPS
from workers.processes.shared_memory import InFlightSlots


@pytest.fixture
def slots() -> Iterator[InFlightSlots]:
    slots = InFlightSlots(3)
    yield slots
    slots.close()


def test_nothing_is_in_flight_at_first(slots: InFlightSlots) -> None:
    assert list(slots.in_flight()) == []
    assert slots.subscribers() == []


def test_message_in_flight_is_seen_with_its_lease_and_its_queue(slots: InFlightSlots) -> None:
    owner, token = uuid.uuid4(), uuid.uuid4()
    slot = slots.slot(1)
    slot.describe(2, owner)
    slot.lease(token)

    slot.begin(77)

    (in_flight,) = slots.in_flight()
    assert (in_flight.queue, in_flight.seq, in_flight.token, in_flight.subscriber) == (2, 77, token, owner)


def test_message_that_has_ended_is_not_in_flight(slots: InFlightSlots) -> None:
    slot = slots.slot(0)
    slot.begin(77)
    slot.end()

    assert list(slots.in_flight()) == []


def test_subscribers_of_all_slots_are_known_once_each(slots: InFlightSlots) -> None:
    first, second = uuid.uuid4(), uuid.uuid4()
    slots.slot(0).describe(0, first)
    slots.slot(1).describe(0, first)
    slots.slot(2).describe(1, second)

    assert slots.subscribers() == [(0, first), (1, second)]


@pytest.mark.parametrize("headers", ['{"type":"x"}', "{" + "é" * 10_000 + "}", "\udce4 undecodable"])
def test_headers_of_a_message_that_is_nowhere_else_are_kept_as_far_as_they_fit(
    slots: InFlightSlots, headers: str
) -> None:
    identity = uuid.uuid4()
    slot = slots.slot(0)
    slot.keep(identity.bytes, headers)
    slot.begin(1)

    (in_flight,) = slots.in_flight()
    assert str(identity) in in_flight.text
    assert headers[:10].encode(errors="replace").decode() in in_flight.text
    assert len(in_flight.text.encode()) <= 4200


def test_every_message_of_the_largest_batch_that_the_settings_allow_is_seen_as_leased(slots: InFlightSlots) -> None:
    """The supervisor renews these leases while the process stands still."""
    (largest,) = {option.high for options in GROUPS.values() for option in options if option.name == "MAX_BATCH"}
    seqs = range(1, largest + 1)

    slots.slot(1).lease(uuid.uuid4(), seqs, 5000)

    (leased,) = slots.leased()
    assert leased.seqs == tuple(seqs)


def test_clearing_forgets_everything(slots: InFlightSlots) -> None:
    slot = slots.slot(0)
    slot.describe(0, uuid.uuid4())
    slot.lease(uuid.uuid4(), [1, 2], 5000)
    slot.begin(1)

    slots.clear()

    assert list(slots.in_flight()) == []
    assert list(slots.leased()) == []
    assert slots.subscribers() == []


def test_what_a_killed_process_had_in_flight_is_seen_by_the_survivor(slots: InFlightSlots) -> None:
    child = os.fork()
    if child == 0:
        InFlightSlots(slots.count, slots.fd).slot(2).begin(4711)
        os._exit(9)
    os.waitpid(child, 0)

    assert [in_flight.seq for in_flight in slots.in_flight()] == [4711]
