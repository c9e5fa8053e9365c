"""The store of docs/delayed_store.md passes the suite, and moves messages from a view to their queue."""

from __future__ import annotations

import unittest
import uuid
from datetime import timedelta
from pathlib import Path
from typing import Any

import pytest

from queueapp import Semantics, delayed
from queueapp.delayed import DelayedStore
from queueapp.models import DelayedMessage
from queueapp.operations.statistics import queue_stats
from queueapp.services.delayed_dispatcher import DelayedDispatcher
from queueapp.testing.delayed_store import DelayedStoreConformance
from tests.docs.pages import DOCS
from tests.docs.running import module_of
from tests.in_process_worker import DEADLINE, eventually, real_commits
from tests.testapp.models import Leased, Transactional

PAGE = module_of(DOCS / "delayed_store.md", "tests.docs.delayed_store_page")
FileStore: Any = PAGE.FileStore
pytestmark = real_commits


@pytest.fixture(autouse=True)
def _in_a_directory_of_its_own(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(FileStore, "root", tmp_path / "delayed")


class TestFileStore(DelayedStoreConformance):
    semantics = (Semantics.AT_LEAST_ONCE, Semantics.AT_MOST_ONCE)

    def make_store(self) -> DelayedStore:
        store: DelayedStore = FileStore(self.alias)
        return store


def test_the_suite_runs_under_unittest_as_the_page_states(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(PAGE.FileStoreTests, "available_apps", ["queueapp", "tests.testapp"])
    suite = unittest.TestSuite([PAGE.FileStoreTests("test_the_oldest_is_fetched_first")])

    result = unittest.TextTestRunner().run(suite)

    assert (result.testsRun, result.errors, result.failures) == (1, [], [])


@pytest.fixture
def configured(settings: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    """The project uses this store."""
    monkeypatch.setattr("tests.docs.FileStore", FileStore, raising=False)
    settings.QUEUEAPP = {"DELAYED_STORE": "tests.docs.FileStore", "DISPATCH_INTERVAL": 0.05}


@pytest.mark.usefixtures("configured")
def test_it_works_in_a_project_of_several_semantics() -> None:
    sent = [Leased.send({"n": n}, delay=timedelta(milliseconds=50 * n)) for n in range(3)]
    later = Leased.send({"n": 9}, delay=timedelta(hours=1))
    (stats,) = [item for item in queue_stats([Leased]) if item.queue == "testapp.Leased"]
    assert (stats.delayed, stats.error) == (4, "")
    assert not DelayedMessage.objects.exists()

    dispatcher = DelayedDispatcher("default", uuid.uuid4())
    dispatcher.start()
    try:
        eventually(lambda: Leased.objects.count() == 3)
        assert delayed.reschedule(later, delay=timedelta(0)) == 1
        eventually(lambda: Leased.objects.count() == 4)
    finally:
        assert dispatcher.stop(DEADLINE)

    assert set(Leased.objects.values_list("id", flat=True)) == {*sent, later}
    assert delayed.cancel(later) == 0


@pytest.mark.usefixtures("configured")
def test_a_transactional_queue_is_refused_by_it() -> None:
    with pytest.raises(NotImplementedError, match="take no part in a transaction"):
        Transactional.send({}, delay=timedelta(hours=1))
