"""The built-in store passes the suite that we ship for those of third parties, and the suite finds what is wrong with
one."""

from __future__ import annotations

from datetime import datetime
from typing import Any

import pytest

from queueapp.delayed import Delayed, DelayedStore, SqlDelayedStore
from queueapp.models import DelayedMessage
from queueapp.testing.delayed_store import DelayedStoreConformance
from tests.in_process_worker import real_commits


@real_commits
class TestSqlStore(DelayedStoreConformance):
    def make_store(self) -> DelayedStore:
        return SqlDelayedStore(self.alias)


class Unlocked(SqlDelayedStore):
    def fetch_next_due(self, at: datetime) -> Delayed | None:
        row = DelayedMessage.objects.using(self.alias).filter(due__lte=at).order_by("due").first()
        return row and Delayed(row.message_id, row.destination, row.due, row.headers, row.body, handle=row.number)


class TakesAnything(SqlDelayedStore):
    def remove(self, message: Delayed) -> bool:
        super().remove(message)
        return True


class Forgetful(SqlDelayedStore):
    def store(self, message: Delayed) -> None:
        message.correlation_id = None
        super().store(message)


class Uncounted(SqlDelayedStore):
    def increment_failure_count(self, message: Delayed) -> bool:
        return True


@real_commits
@pytest.mark.parametrize(
    ("faulty", "test"),
    [
        (Unlocked, "test_what_is_fetched_is_locked_against_other_dispatchers"),
        (TakesAnything, "test_a_removed_message_is_gone_and_remove_returns_whether_it_was_there"),
        (Forgetful, "test_a_message_comes_back_whole"),
        (Uncounted, "test_a_failed_dispatch_is_counted"),
    ],
)
def test_a_fault_is_found(faulty: Any, test: str) -> None:
    suite = DelayedStoreConformance()
    suite.make_store = lambda: faulty("default")  # type: ignore[method-assign]

    with pytest.raises(AssertionError):
        getattr(suite, test)()
