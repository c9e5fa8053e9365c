"""What operators see of the journal: inactive messages, and what is kept of each topic."""

from __future__ import annotations

import io
import json
from typing import Any

import pytest
from django.core.management import CommandError, call_command

from queueapp.models import JournalEntry
from queueapp.operations import journal as figures
from queueapp.operations.statistics import queue_stats
from tests.in_process_worker import real_commits
from tests.queueapp.journal.filling import filled, put
from tests.queueapp.sql.server import Server
from tests.testapp.models import Deep, Leased, Recovered

pytestmark = real_commits


def test_inactive_message_count_is_what_waits_in_the_journal(server: Server) -> None:
    put(server, "journaled.deep", *range(1300))
    assert figures.inactive_messages(Deep, server.alias) == (1300, True), "before it is attached"
    filled(server, Deep)

    assert figures.inactive_messages(Deep, server.alias) == (300, True)
    assert figures.inactive_messages(Deep, server.alias, limit=100) == (100, False)
    assert figures.inactive_messages(Leased, server.alias) == (0, True)
    assert figures.inactive_messages(Recovered, server.alias) == (0, True)


def test_figures_of_the_journal_report_what_is_kept_of_each_topic(server: Server, settings: Any) -> None:
    put(server, "journaled.a", 1, 2, 3)
    put(server, "journaled.for ever", 4)

    found = figures.journal_stats(server.alias)
    first, second = found.topics
    rows = JournalEntry.objects.using(server.alias).order_by("seq")
    assert (first.topic, first.first_bookmark, first.last_bookmark) == ("journaled.a", rows[0].seq, rows[2].seq)
    assert (first.oldest, first.newest) == (rows[0].published_at, rows[2].published_at)
    assert (first.retention_seconds, second.retention_seconds) == (3600.0, None)
    assert found.bytes > 0
    assert json.loads(json.dumps(found.as_dict()))["topics"][1]["journaled"] is True

    settings.QUEUEAPP = {}
    assert [topic.journaled for topic in figures.journal_stats(server.alias).topics] == [False, False]


def test_queuestats_reports_what_waits_in_the_journal(server: Server) -> None:
    if server.alias != "default":
        pytest.skip("the command asks the router")
    put(server, "journaled.deep", *range(1300))
    filled(server, Deep)
    out = io.StringIO()
    call_command("queuestats", "testapp.Deep", stdout=out)
    assert "300 more in the journal" in out.getvalue()
    (stats,) = queue_stats([Deep])
    assert (stats.inactive, stats.inactive_exact, stats.error) == (300, True, "")
    (second_stats,) = queue_stats([Leased])
    assert second_stats.inactive is None


def test_queuestats_journal_shows_the_topics(server: Server) -> None:
    if server.alias != "default":
        pytest.skip("the command asks the router")
    put(server, "journaled.a", 1)
    out = io.StringIO()
    call_command("queuestats", "--journal", stdout=out)
    assert "journaled.a: bookmarks " in out.getvalue()
    assert "kept for 1h" in out.getvalue()
    out = io.StringIO()
    call_command("queuestats", "--journal", "--json", stdout=out)
    assert json.loads(out.getvalue())[0]["topics"][0]["topic"] == "journaled.a"
    with pytest.raises(CommandError, match="cannot be combined"):
        call_command("queuestats", "--journal", "testapp.Deep")
