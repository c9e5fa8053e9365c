"""The conformance suite of delayed stores: what every store must do, as tests to run against one's own.

A class to inherit from; it needs neither pytest nor unittest and works with both. Each test makes instances of the
store of its own, as two processes would, on a database that it may write to, with real commits:

>>> class TestMyStore(DelayedStoreConformance, TransactionTestCase):
...     semantics = (Semantics.AT_LEAST_ONCE, Semantics.AT_MOST_ONCE)
...     def make_store(self):
...         return MyStore(self.alias)

With pytest leave out ``TransactionTestCase`` and mark the class ``django_db(transaction=True)``.
"""

from __future__ import annotations

import json
import threading
import uuid
from collections.abc import Callable
from contextlib import suppress
from dataclasses import fields, replace
from datetime import timedelta
from typing import Any

from django.db import connections, transaction
from django.utils import timezone

from ..delayed import Delayed, DelayedStore, DelayedStoreWithInfrastructure
from ..errors import MissingVerb
from ..models.delivery import Semantics

#: Longer than a call of a store may take.
PATIENCE_SECONDS = 30.0
_HOUR = timedelta(hours=1)
_A_MOMENT = timedelta(milliseconds=1)


class DelayedStoreConformance:
    """Tests of one store. Say how to make one, and which semantics it honours."""

    alias = "default"
    #: Those that ``initialize`` accepts; for the others it has to raise.
    semantics: tuple[Semantics, ...] = tuple(Semantics)

    def make_store(self) -> DelayedStore:
        """A new instance for ``self.alias``, not yet initialized. All instances of one test see the same messages, and
        none of another test's; ``self.endpoint`` is another one in each test."""
        raise NotImplementedError

    def let_locks_expire(self) -> None:
        """For a store whose locks end by time: bring about the end of those whose process is gone, by waiting if need
        be."""

    # -- what tests are made of ----------------------------------------------------------------------------------

    @property
    def endpoint(self) -> str:
        """The name that this test's stores are initialized with."""
        return str(self.__dict__.setdefault("_endpoint", f"conformance.{uuid.uuid4().hex}"))

    @property
    def store(self) -> DelayedStore:
        """The store under test, opened."""
        found: DelayedStore | None = self.__dict__.get("_store")
        if found is None:
            found = self.__dict__["_store"] = self.open_another()
        return found

    def open_another(self, semantics: Semantics | None = None) -> DelayedStore:
        """Another instance on the same messages, opened as another process would."""
        store = self.make_store()
        if isinstance(store, DelayedStoreWithInfrastructure):
            store.setup_infrastructure()
        store.initialize(self.endpoint, semantics or self.semantics[0])
        return store

    def message(self, **values: Any) -> Delayed:
        """A message that has been due for an hour, unless ``values`` say otherwise."""
        given: dict[str, Any] = {
            "message_id": uuid.uuid4(),
            "destination": "shop.Orders",
            "due": timezone.now() - _HOUR,
        }
        return Delayed(**given | {"headers": "{}", "body": b"{}"} | values)

    def fetch(self, store: DelayedStore | None = None, at: Any = None) -> Delayed | None:
        """Fetch in a transaction of its own, as a dispatcher may."""
        with transaction.atomic(using=self.alias):
            return (store or self.store).fetch_next_due(at or timezone.now())

    def fetch_one(self) -> Delayed:
        """Fetch what has to be there."""
        fetched = self.fetch()
        assert fetched is not None, "a message was due and was not fetched"
        return fetched

    def drain(self) -> list[Delayed]:
        """Fetch and remove whatever is due, in order."""
        found: list[Delayed] = []
        while True:
            with transaction.atomic(using=self.alias):
                message = self.store.fetch_next_due(timezone.now())
                if message is None:
                    return found
                assert self.store.remove(message), "what was fetched could not be removed"
                found.append(message)
            assert len(found) < 10_000, "what was removed is fetched again and again"

    def elsewhere(self, work: Callable[[], Any]) -> Any:
        """Run it on another thread, which has database connections of its own, and ends as a process does."""
        outcome: list[Any] = []

        def run() -> None:
            try:
                outcome.append((work(), None))
            except BaseException as error:
                outcome.append((None, error))
            finally:
                connections.close_all()

        thread = threading.Thread(target=run)
        thread.start()
        thread.join(PATIENCE_SECONDS)
        assert outcome, f"the store did not answer within {PATIENCE_SECONDS:.0f} s: it waits for a lock"
        result, error = outcome[0]
        if error is not None:
            raise error
        return result

    # -- opening -------------------------------------------------------------------------------------------------

    def test_opening_again_keeps_what_is_stored(self) -> None:
        stored = self.message()
        self.store.store(stored)
        self.open_another()
        assert [row.message_id for row in self.drain()] == [stored.message_id]

    def test_semantics_that_it_does_not_honour_are_refused(self) -> None:
        for semantics in Semantics:
            refused = False
            try:
                self.open_another(semantics)
            except Exception:
                refused = True
            assert refused is (semantics not in self.semantics), f"{semantics} was {'' if refused else 'not '}refused"

    # -- storing and fetching ------------------------------------------------------------------------------------

    def test_an_empty_store_has_nothing(self) -> None:
        assert self.fetch() is None
        assert self.store.next() is None

    def test_a_message_is_not_fetched_before_it_is_due(self) -> None:
        due = timezone.now() + _HOUR
        self.store.store(self.message(due=due))
        assert self.fetch(at=due - timedelta(seconds=1)) is None
        fetched = self.fetch(at=due + _A_MOMENT)
        assert fetched is not None
        assert abs(fetched.due - due) < _A_MOMENT

    def test_the_oldest_is_fetched_first(self) -> None:
        ages = (1, 3, 2)
        stored = {age: self.message(due=timezone.now() - age * _HOUR) for age in ages}
        for message in stored.values():
            self.store.store(message)
        assert [row.message_id for row in self.drain()] == [stored[age].message_id for age in (3, 2, 1)]

    def test_messages_that_are_due_at_the_same_time_are_all_kept(self) -> None:
        due = timezone.now() - _HOUR
        stored = [self.message(due=due) for _ in range(5)]
        for message in stored:
            self.store.store(message)
        assert {row.message_id for row in self.drain()} == {row.message_id for row in stored}

    def test_a_message_comes_back_whole(self) -> None:
        now = timezone.now()
        stored = self.message(
            headers='{"type":"Grüße","k":"\\u0000"}',
            body=bytes(range(256)) * 4096,
            expires=now + _HOUR,
            recipient="ship",
            priority=3,
            correlation_id="c",
            reply_to_address="r",
            is_barrier=True,
            enqueued_at=now - _HOUR,
            deliveries=2,
            cancels=1,
            failures=json.dumps([{"attempt": 2}]),
        )
        self.store.store(replace(stored))
        fetched = self.fetch_one()
        for field in fields(stored):
            if field.name == "handle":
                continue
            kept, given = getattr(fetched, field.name), getattr(stored, field.name)
            same = abs(kept - given) < _A_MOMENT if hasattr(given, "tzinfo") and kept is not None else kept == given
            assert same, f"{field.name} was stored as {given!r} and came back as {kept!r}"
            assert type(kept) is type(given), f"{field.name} came back as a {type(kept).__name__}"

    def test_a_message_without_body_and_options_comes_back_as_that(self) -> None:
        stored = self.message(body=None)
        self.store.store(stored)
        fetched = self.fetch_one()
        assert fetched.body is None
        assert (fetched.expires, fetched.correlation_id, fetched.failures) == (None, None, None)
        assert fetched.retries == 0

    def test_an_empty_body_is_not_none(self) -> None:
        self.store.store(self.message(body=b""))
        assert self.fetch_one().body == b""

    def test_next_is_when_the_first_is_due(self) -> None:
        first = timezone.now() + _HOUR
        for due in (first + _HOUR, first, first + 2 * _HOUR):
            self.store.store(self.message(due=due))
        earliest = self.store.next()
        assert earliest is not None
        assert earliest.tzinfo is not None, "next() must return an aware time"
        assert abs(earliest - first) < _A_MOMENT

    # -- ending --------------------------------------------------------------------------------------------------

    def test_a_removed_message_is_gone_and_remove_returns_whether_it_was_there(self) -> None:
        self.store.store(self.message())
        with transaction.atomic(using=self.alias):
            fetched = self.store.fetch_next_due(timezone.now())
            assert fetched is not None
            assert self.store.remove(fetched) is True
            assert self.store.remove(fetched) is False
            assert self.store.increment_failure_count(fetched) is False
        assert self.fetch() is None
        assert self.store.next() is None

    def test_a_failed_dispatch_is_counted(self) -> None:
        stored = self.message()
        self.store.store(stored)
        for failed in range(3):
            with transaction.atomic(using=self.alias):
                fetched = self.store.fetch_next_due(timezone.now())
                assert fetched is not None, "after a failed dispatch the message is to be fetched again"
                assert (fetched.message_id, fetched.retries) == (stored.message_id, failed)
                assert self.store.increment_failure_count(fetched) is True

    def test_a_message_that_was_fetched_and_not_removed_is_fetched_again(self) -> None:
        stored = self.message()
        self.store.store(stored)
        self.elsewhere(lambda: self.fetch(self.open_another()))  # it dies before it sends
        self.let_locks_expire()
        assert self.fetch_one().message_id == stored.message_id

    # -- several processes and threads ---------------------------------------------------------------------------

    def test_what_one_process_stores_another_one_fetches(self) -> None:
        stored = self.message()
        self.elsewhere(lambda: self.open_another().store(stored))
        assert self.fetch_one().message_id == stored.message_id

    def test_what_is_fetched_is_locked_against_other_dispatchers(self) -> None:
        first, second = self.message(due=timezone.now() - 2 * _HOUR), self.message()
        self.store.store(first)
        self.store.store(second)
        with transaction.atomic(using=self.alias):
            fetched = self.store.fetch_next_due(timezone.now())
            fetched_elsewhere = self.elsewhere(lambda: self.fetch(self.open_another()))
            assert fetched is not None
            assert fetched.message_id == first.message_id
            assert fetched_elsewhere is not None, "a locked message hides those behind it"
            assert fetched_elsewhere.message_id == second.message_id
            assert self.store.remove(fetched)

    def test_many_threads_lose_and_double_nothing(self) -> None:
        stored = [self.message(due=timezone.now() - timedelta(seconds=n)) for n in range(40)]
        store, start = self.store, threading.Barrier(4)
        errors: list[BaseException] = []
        fetched: list[uuid.UUID] = []

        def work(part: list[Delayed]) -> None:
            try:
                start.wait(PATIENCE_SECONDS)
                for row in part:
                    store.store(row)
                while True:
                    with transaction.atomic(using=self.alias):
                        found = store.fetch_next_due(timezone.now())
                        if found is None:
                            return
                        assert store.remove(found)
                    fetched.append(found.message_id)
            except BaseException as error:
                errors.append(error)
            finally:
                connections.close_all()

        threads = [threading.Thread(target=work, args=(stored[n::4],)) for n in range(4)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join(PATIENCE_SECONDS)
        if errors:
            raise errors[0]
        fetched += [row.message_id for row in self.drain()]
        assert sorted(fetched) == sorted(message.message_id for message in stored)

    # -- transactions --------------------------------------------------------------------------------------------

    def test_a_transactional_store_takes_part_in_the_transaction(self) -> None:
        if Semantics.TRANSACTIONAL not in self.semantics:
            return
        store = self.open_another(Semantics.TRANSACTIONAL)
        with transaction.atomic(using=self.alias):
            store.store(self.message())
            transaction.set_rollback(True, using=self.alias)
        assert self.fetch(store) is None, "what was stored outlived the rollback"
        stored = self.message()
        store.store(stored)
        with transaction.atomic(using=self.alias):
            fetched = store.fetch_next_due(timezone.now())
            assert fetched is not None
            assert store.remove(fetched)
            transaction.set_rollback(True, using=self.alias)
        again = self.fetch(store)
        assert again is not None, "what was removed did not come back with the rollback"
        assert again.message_id == stored.message_id

    # -- what operators ask for; a store may lack it -------------------------------------------------------------

    def _has(self, verb: str, *arguments: Any) -> bool:
        if getattr(type(self.store), verb) is not getattr(DelayedStore, verb):
            return True
        with suppress(MissingVerb):
            getattr(self.store, verb)(*arguments)
            raise AssertionError(f"{verb}() is not there and says nothing")
        return False

    def test_a_message_can_be_cancelled(self) -> None:
        stored, later = self.message(due=timezone.now() + _HOUR), self.message()
        if not self._has("cancel", stored.message_id):
            return
        self.store.store(stored)
        self.store.store(later)
        assert self.store.cancel(stored.message_id) == 1
        assert self.store.cancel(stored.message_id) == 0
        assert [row.message_id for row in self.drain()] == [later.message_id]
        assert self.store.next() is None

    def test_a_message_can_be_rescheduled_and_its_expiry_moves_with_it(self) -> None:
        due = timezone.now() + _HOUR
        stored = self.message(due=due, expires=due + _HOUR)
        if not self._has("reschedule", stored.message_id, due):
            return
        self.store.store(stored)
        sooner = timezone.now() - _HOUR
        assert self.store.reschedule(stored.message_id, sooner) == 1
        assert self.store.reschedule(uuid.uuid4(), sooner) == 0
        fetched = self.fetch_one()
        assert fetched.message_id == stored.message_id
        assert abs(fetched.due - sooner) < _A_MOMENT
        assert abs(fetched.expires - fetched.due - _HOUR) < 2 * _A_MOMENT

    def test_messages_are_counted_by_destination(self) -> None:
        if not self._has("count", "shop.Orders", 10):
            return
        for due in (-_HOUR, _HOUR, 2 * _HOUR):
            self.store.store(self.message(due=timezone.now() + due))
        self.store.store(self.message(destination="shop.Mails"))
        assert self.store.count("shop.Orders", 10) == 3
        assert self.store.count("shop.Orders", 2) == 2
        assert self.store.count("shop.Nothing", 10) == 0

    def test_messages_for_a_destination_are_readdressed_to_another(self) -> None:
        if not self._has("readdress", "shop.Orders", "shop.Mails", 10):
            return
        stored = [self.message(due=timezone.now() - n * _HOUR) for n in (3, 2, 1)]
        letter = self.message(destination="shop.Letters", due=timezone.now() - 4 * _HOUR)
        for message in (*reversed(stored), letter):
            self.store.store(message)
        assert self.store.readdress("shop.Orders", "shop.Mails", 2) == 2
        assert self.store.readdress("shop.Nothing", "shop.Mails", 2) == 0
        found = {row.message_id: row.destination for row in self.drain()}
        assert found == {letter.message_id: "shop.Letters"} | {
            message.message_id: "shop.Orders" if message is stored[2] else "shop.Mails" for message in stored
        }
