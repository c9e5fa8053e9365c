"""``replay(topic, since=…, filter=…)``: an ordinary iterator of what was published."""

from __future__ import annotations

import threading
import uuid
from datetime import UTC, datetime, timedelta
from time import monotonic
from typing import Any

import msgspec
import pytest
from django.db import transaction

from queueapp import BookmarkNotFound, InvalidOption, publish, publish_many, replay
from queueapp.errors import InvalidExpression
from queueapp.journal import replay_reader
from queueapp.journal.append import journal_of
from queueapp.models import JournalCursor, JournalEntry
from tests.in_process_worker import DEADLINE, eventually, real_commits
from tests.queueapp.sql.server import Server, outgoing

pytestmark = real_commits
TOPIC = "journaled.for ever"


class Order(msgspec.Struct):
    n: int


def put(server: Server, *numbers: int, topic: str = TOPIC) -> None:
    publish_many(topic, [{"n": n} for n in numbers], using=server.alias)


def numbers(server: Server, topic: str = TOPIC, **options: Any) -> list[int]:
    return [entry.decode()["n"] for entry in replay(topic, using=server.alias, **options)]


def bookmark_of(server: Server, number: int) -> int:
    return next(entry.bookmark for entry in replay(TOPIC, using=server.alias) if entry.decode()["n"] == number)


def test_replay_since_epoch_reads_all_that_is_kept(server: Server) -> None:
    put(server, *range(25))
    put(server, 99, topic="journaled.other")

    assert numbers(server, batch=10) == list(range(25))
    assert numbers(server, since="epoch", batch=25) == list(range(25))


def test_entry_has_what_was_published(server: Server) -> None:
    identity = publish(TOPIC, Order(n=7), headers={"k": "v"}, using=server.alias)

    (entry,) = replay(TOPIC, using=server.alias)
    assert (entry.topic, entry.id, entry.body, entry.decode(Order)) == (TOPIC, identity, b'{"n":7}', Order(7))
    assert entry.headers["k"] == "v"
    assert entry.headers["topic"] == TOPIC
    assert abs(entry.published_at - server.backend.now(server.connection)) < timedelta(minutes=1)
    assert entry.bookmark == JournalEntry.objects.using(server.alias).get().seq


def test_replay_since_a_bookmark_begins_behind_it(server: Server) -> None:
    put(server, 1, 2, 3)

    assert numbers(server, since=bookmark_of(server, 1)) == [2, 3]
    assert numbers(server, since=str(bookmark_of(server, 2))) == [3]


def test_replay_since_now_reads_what_comes(server: Server) -> None:
    put(server, 1)
    assert numbers(server, since="now") == []

    following = replay(TOPIC, since="now", follow=True, using=server.alias)
    seen: list[int] = []
    thread = threading.Thread(target=lambda: seen.extend(entry.decode()["n"] for entry in following))
    thread.start()
    try:
        eventually(lambda: JournalCursor.objects.using(server.alias).filter(name__startswith="replay").exists())
        put(server, 2)
        eventually(lambda: seen)
    finally:
        following.stop()
        thread.join(DEADLINE)
    assert seen == [2]


def test_replay_since_now_leaves_out_what_was_committed_while_an_older_transaction_is_open(server: Server) -> None:
    older = server.another()
    with server.transaction(older):
        journal_of(older).append(older, TOPIC, [outgoing(b'{"n":1}')], [""])
        put(server, 2)
        following = replay(TOPIC, since="now", follow=True, batch=1, using=server.alias)
        following._fetch()
        put(server, 3)

    found = [next(following).decode()["n"] for _ in range(2)]
    following.close()
    assert found == [1, 3], "the first was committed later"


def test_replay_since_a_time_begins_with_what_was_published_then(server: Server) -> None:
    put(server, 1)
    server.passed(lambda: JournalEntry.objects.using(server.alias).order_by("-published_at")[0].published_at)
    then = server.backend.now(server.connection)
    put(server, 2, 3)

    assert numbers(server, since=then) == [2, 3]
    assert numbers(server, since=then.astimezone(UTC).isoformat()) == [2, 3]
    assert numbers(server, since=then.astimezone(UTC).replace(tzinfo=None).isoformat()) == [2, 3], "UTC, as in AMPS"
    assert numbers(server, since="2099-01-01") == []


@pytest.mark.parametrize(("instead", "found"), [("now", []), ("epoch", [1, 2])])
def test_bookmark_not_found_is_what_was_asked_for(
    server: Server, instead: str, found: list[int], caplog: pytest.LogCaptureFixture
) -> None:
    """And that is said: what was kept behind it may have been removed."""
    put(server, 1, 2)

    assert numbers(server, since=10**15, bookmark_not_found=instead) == found
    assert f"has no entry {10**15}; reading begins at '{instead}' instead" in caplog.text


def test_bookmark_not_found_fails_if_asked_to(server: Server) -> None:
    put(server, 1)

    with pytest.raises(BookmarkNotFound, match="The journal has no entry 1000000"):
        numbers(server, since=10**6, bookmark_not_found="fail")


def test_replay_of_a_regular_expression_reads_all_topics_in_one_order(server: Server) -> None:
    for n in range(6):
        put(server, n, topic=f"journaled.{'ab'[n % 2]}")
    put(server, 7, topic="journaled.c")

    assert numbers(server, topic="[.](a|b)$", batch=2) == list(range(6))
    assert numbers(server, topic="[.]nothing") == []


def test_replay_with_a_filter_reads_what_matches(server: Server) -> None:
    put(server, *range(10))
    publish(TOPIC, b"no json", using=server.alias)
    journal_of(server.connection).append(server.connection, TOPIC, [outgoing(b"{", "no headers")], [""])

    assert numbers(server, filter="/n > 6", batch=3) == [7, 8, 9]


@pytest.mark.parametrize(
    ("options", "text"),
    [
        ({"since": "yesterday"}, "since = 'yesterday' is not accepted: it must be 'epoch'"),
        ({"since": datetime(2026, 1, 1)}, "since"),
        ({"since": True}, "since"),
        ({"since": -1}, "since"),
        ({"batch": 0}, "batch = 0 is not accepted"),
        ({"rate": 0}, "rate = 0 is not accepted"),
        ({"bookmark_not_found": "x"}, "bookmark_not_found"),
        ({"topic": "("}, "topic = '\\('"),
    ],
)
def test_replay_refuses_what_means_nothing(options: dict[str, Any], text: str) -> None:
    with pytest.raises(InvalidOption, match=text):
        replay(**{"topic": TOPIC} | options)


def test_replay_refuses_a_filter_that_is_none() -> None:
    with pytest.raises(InvalidExpression, match="Column 6"):
        replay(TOPIC, filter="/n > ")


def test_rate_is_kept_to(server: Server) -> None:
    put(server, *range(6))
    started = monotonic()

    assert numbers(server, rate=25) == list(range(6))

    assert monotonic() - started > 0.19, "five waits of 40 ms"


def test_replay_in_a_transaction_sees_what_it_has_published_itself_when_that_is_committed(server: Server) -> None:
    with transaction.atomic(using=server.alias):
        put(server, 1)
        assert numbers(server) == []
    assert numbers(server) == [1]


def test_long_replay_is_noted_and_its_note_goes_with_it(server: Server) -> None:
    put(server, *range(10))
    notes = JournalCursor.objects.using(server.alias).filter(name__startswith=replay_reader.REPLAY)

    with replay(TOPIC, batch=3, using=server.alias) as reading:
        assert next(reading).decode() == {"n": 0}
        (note,) = notes.all()
        assert uuid.UUID(note.name.removeprefix(replay_reader.REPLAY))
        assert note.topic == TOPIC
    assert not notes.all().exists()

    assert len(numbers(server, batch=20)) == 10
    assert not notes.all().exists()
