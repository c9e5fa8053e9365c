"""What is published to a journaled topic is kept in the publisher's transaction, whatever queues take it; other topics
pay nothing."""

from __future__ import annotations

from datetime import timedelta
from typing import Any

import pytest
from django.db import connections, transaction
from django.test.utils import CaptureQueriesContext

from queueapp import InvalidMessage, publish, publish_many, replay
from queueapp.conf import settings as conf
from queueapp.errors import InvalidOption
from queueapp.journal.append import is_journaled, journal_of, retention_of
from queueapp.messages import decode_headers
from queueapp.models import JournalEntry
from queueapp.sql.journal import BEGINNING, Position
from queueapp.sql.message_columns import SENT, Kind
from tests import column_values
from tests.queueapp.sql.server import Server, outgoing
from tests.testapp.models import Deep, Recovered, Wide


def entries(server: Server) -> list[JournalEntry]:
    return list(JournalEntry.objects.using(server.alias).order_by("seq"))


def test_journal_keeps_what_is_published_whether_or_not_a_queue_takes_it(server: Server) -> None:
    identity = publish("journaled.unrouted", {"n": 1}, using=server.alias)

    (entry,) = entries(server)
    assert (entry.topic, entry.message_id, entry.queues, entry.body) == ("journaled.unrouted", identity, "", b'{"n":1}')
    assert entry.txid > 0


def test_journal_states_which_queues_took_a_message(server: Server, delivery: Any) -> None:
    delivery(Wide, filter="/n > 1")
    publish("journaled.orders", {"n": 1}, using=server.alias)
    publish_many("journaled.orders", [{"n": n} for n in range(4)], using=server.alias)
    publish("journaled.deep", {"n": 1}, using=server.alias)

    both, item = "|testapp.Recovered|testapp.Wide|", "|testapp.Recovered|-testapp.Wide|"
    assert [entry.queues for entry in entries(server)] == [item, item, item, both, both, "|+testapp.Deep|"]
    assert (Recovered.objects.using(server.alias).count(), Wide.objects.using(server.alias).count()) == (5, 2)
    assert not Deep.objects.using(server.alias).exists(), "it takes them out of the journal, as it has room"


def test_journal_is_written_in_the_publishers_transaction(server: Server) -> None:
    with transaction.atomic(using=server.alias):
        publish("journaled.orders", {}, using=server.alias)
        transaction.set_rollback(True, using=server.alias)

    assert entries(server) == []
    assert not Recovered.objects.using(server.alias).exists()


def test_journal_keeps_headers_and_options(server: Server) -> None:
    publish(
        "journaled.orders",
        b"\0\xff",
        headers={"k": "ö"},
        expires_in=timedelta(hours=1),
        correlation_id="c",
        reply_to="r",
        using=server.alias,
    )

    (entry,) = entries(server)
    (message,) = Recovered.objects.using(server.alias).all()
    assert (decode_headers(entry.headers), entry.body) == (decode_headers(message.headers), message.body)
    assert (entry.correlation_id, entry.reply_to_address) == ("c", "r")
    assert abs(entry.expires - message.expires) < timedelta(minutes=1)


@pytest.mark.parametrize("count", [1, 3])
def test_journal_has_a_place_for_all_that_a_message_carries(server: Server, count: int) -> None:
    said = {
        item.outgoing: column_values.LIFETIME_MS if item.kind is Kind.TIME else column_values.said_of(item)
        for item in SENT
    }
    journal = journal_of(server.connection)

    seqs = journal.append(server.connection, "t", [outgoing(b"\0", **said) for _ in range(count)], [""] * count)

    assert seqs == sorted(seqs)
    assert len(seqs) == count
    horizon = journal.horizon(server.connection)
    for kept in journal.read(server.connection, ["t"], BEGINNING, horizon, 10):
        for column in SENT:
            if column.kind is not Kind.TIME:
                assert getattr(kept, column.name) == said[column.name]
        assert kept.expires > kept.published_at


def test_journal_of_many_keeps_their_order_and_bookmarks(server: Server) -> None:
    publish_many("journaled.unrouted", [{"n": n} for n in range(1200)], using=server.alias)

    assert [entry.decode()["n"] for entry in replay("journaled.unrouted", using=server.alias)] == list(range(1200))


def test_topic_that_is_not_journaled_pays_no_statement_more(server: Server, delivery: Any) -> None:
    delivery(Recovered, underlying_topic="plain")
    publish("plain", {}, using=server.alias)

    with CaptureQueriesContext(connections[server.alias]) as caught:
        publish("plain", {}, using=server.alias)

    assert [query["sql"] for query in caught if "journal" in query["sql"].lower()] == []
    assert entries(server) == []


def test_topic_without_subscriptions_or_journal_is_refused(server: Server) -> None:
    with pytest.raises(InvalidMessage, match="no queue collects it"):
        publish("plain.unrouted", {}, using=server.alias)


def test_delayed_message_is_kept_when_it_is_published(server: Server) -> None:
    publish("journaled.deep", {}, delay=timedelta(hours=1), using=server.alias)

    (entry,) = entries(server)
    assert entry.queues == "|testapp.Deep|", "it goes the way of all that is delayed"


# -- the setting ---------------------------------------------------------------------------------------------------


def test_retention_is_that_of_the_first_topic_that_fits(settings: Any) -> None:
    settings.QUEUEAPP = {"JOURNAL": {"orders": None, "^ord": timedelta(days=1), "a.b": timedelta(days=2)}}

    assert [retention_of(topic) for topic in ("orders", "orders2", "a.b")] == [
        None,
        timedelta(days=1),
        timedelta(days=2),
    ]
    assert [is_journaled(topic) for topic in ("orders", "a.b", "axb", "xorders")] == [True, True, False, False]


@pytest.mark.parametrize(
    "journal",
    [
        ["orders"], {"(": None}, {"": None}, {7: None}, {"a": 7}, {"a": timedelta(seconds=59)}, {"a\0": None}, {"a" * 256: None},  # noqa: E501
        {"a": timedelta(days=36501)},
    ],
)  # fmt: skip
def test_journal_setting_that_is_not_accepted_is_named(settings: Any, journal: Any) -> None:
    settings.QUEUEAPP = {"JOURNAL": journal}

    with pytest.raises(InvalidOption, match=r"QUEUEAPP.JOURNAL = .* is not accepted: it must be a dict of topics"):
        _ = conf.JOURNAL


def test_positions_are_ordered_by_transaction_and_then_by_bookmark() -> None:
    assert BEGINNING < Position(-5, 9) < Position(2, 1) < Position(2, 2) < Position(3, 1)
