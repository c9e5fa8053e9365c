"""The filter of a subscriber."""

from __future__ import annotations

import msgspec
import pytest

from queueapp.flow.filters import SubscriberFilter, filter_of
from tests.testapp.models import Leased, Packed


def test_filter_passes_an_unreadable_body_so_that_it_becomes_poison() -> None:
    assert SubscriberFilter("/n > 3", Leased._meta.label).passes("{}", b"{")
    assert not SubscriberFilter("/n > 3", Leased._meta.label).passes("{}", b'{"n":3}')


def test_filter_reads_a_body_without_a_content_type_as_its_queue_does() -> None:
    packed = msgspec.msgpack.encode({"n": 4})
    assert SubscriberFilter("/n = 4", Packed._meta.label).passes("{}", packed)
    assert not SubscriberFilter("/n = 5", Packed._meta.label).passes("{}", packed)


@pytest.mark.parametrize("text", ["", "/a ="])
def test_filter_in_a_row_that_is_none_or_cannot_be_read_here_is_none(text: str) -> None:
    assert filter_of(text, Leased._meta.label) is None
