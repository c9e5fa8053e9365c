"""The judges of the suite themselves: what the oracle calls wrong, what faults explain, and what each rudeness
does."""

from __future__ import annotations

import threading
import uuid
from collections.abc import Iterator
from datetime import UTC, datetime, timedelta
from types import SimpleNamespace
from typing import Any

import msgspec
import pytest
from django.db import connections, transaction
from psycopg.pq import TransactionStatus

from tests.testapp.models import Leased

from .rig.explaining import RESTLESS, Explanations
from .rig.fault_injection import ALL_TREES, HOLDER, Event, FaultInjector
from .rig.holding import holding
from .rig.proxy import Proxy
from .rig.scene import Scene
from .rig.schedule import Fault
from .rig.servers import on_both, shared_on_both
from .rig.sqlserver import name_of
from .rig.waiting import wait_until
from .workload import ledger
from .workload.messages import Act, Rude
from .workload.rudeness import ELSEWHERE, RUDENESSES, Fate

LABELS = {ledger.SEMANTICS[label]: label for label in ledger.QUEUES}
LEASE = timedelta(seconds=5)
DIED = "ProcessDied: The worker process was killed by SIGKILL while handling this message."


@pytest.fixture(scope="module")
def books(shared_scene: Scene) -> Books:
    return Books(shared_scene)


class Books:
    """Entries of the ledger, effects and rows, made up."""

    def __init__(self, scene: Scene) -> None:
        self.scene = scene

    def sent(self, semantics: str, rude: str = "", effects: int = 0) -> str:
        """Note a message as sent, with so many effects; returns its key."""
        key, label = str(uuid.uuid4()), LABELS[semantics]
        how = f"{ledger.RUDE}{rude}" if rude else "single"
        self.note(key, label, how, effects, "tree1")
        return key

    def note(self, key: str, label: str, how: str, effects: int, worker: str) -> None:
        """Note a message as sent, with so many effects that this worker has made."""
        self.scene.execute('INSERT INTO crash_sent ("key", queue, how) VALUES (%s, %s, %s)', key, label, how)
        for attempt in range(1, effects + 1):
            self.effect(key, label, attempt, worker, 1)

    def effect(self, key: str, label: str, attempt: int, worker: str, process: int) -> None:
        """Note an effect that this process of this worker has made now."""
        self.scene.execute(
            'INSERT INTO crash_effect ("key", queue, attempt, worker, process) VALUES (%s, %s, %s, %s, %s)',
            key, label, attempt, worker, process,
        )  # fmt: skip

    def poison(self, key: str, semantics: str, rude: str = "", *failures: str) -> None:
        """Put it into the poison table, with the exceptions of its attempts."""
        history = [{"exception": text, "at": datetime.now(UTC).isoformat()} for text in failures]
        self.scene.execute(
            "INSERT INTO queueapp_poisonmessage (message_id, queue, body, reason, failures) VALUES (%s, %s, %s, '', "
            "%s)",
            uuid.uuid4(), LABELS[semantics], msgspec.json.encode(Rude(key, rude) if rude else Act(key)),
            msgspec.json.encode(history).decode(),
        )  # fmt: skip

    def delay(self, key: str, semantics: str, rude: str, years: int) -> None:
        """Put it into the delayed store."""
        private = self.scene.server.vendor == "postgresql"
        due = "now() + make_interval(years => %s)" if private else "DATEADD(year, %s, SYSUTCDATETIME())"
        self.scene.execute(
            f"INSERT INTO queueapp_delayedmessage (message_id, destination, body, due) VALUES (%s, %s, %s, {due})",
            uuid.uuid4(), LABELS[semantics], msgspec.json.encode(Rude(key, rude)), years,
        )  # fmt: skip

    def judge(self) -> ledger.Verdict:
        """The verdict; the books are empty afterwards."""
        verdict = self.scene.verdict()
        for table in ("crash_sent", "crash_effect", "queueapp_poisonmessage", "queueapp_delayedmessage"):
            self.scene.execute(f"DELETE FROM {table}")
        return verdict


# -- the oracle ----------------------------------------------------------------------------------------------------


@shared_on_both
@pytest.mark.parametrize("semantics", LABELS)
def test_a_rude_message_that_ends_as_it_has_to_is_nobodys_fault(books: Books, semantics: str) -> None:
    effects = {"transactional": 0, "at_least_once": 3, "at_most_once": 1}[semantics]
    books.poison(books.sent(semantics, "set-rollback", effects), semantics, "set-rollback")
    books.sent(semantics, "open-savepoint", effects=1)

    verdict = books.judge()
    assert verdict.faultless, verdict
    assert verdict.rude == {"set-rollback": {"poison": 1}, "open-savepoint": {"handled": 1}}
    assert verdict.poisoned_by_kind == {"rude": 1}
    assert verdict.poison_to_explain == verdict.rude_to_explain == []
    assert verdict.duplicates["at_least_once"] == 0


@shared_on_both
@pytest.mark.parametrize("semantics", ["transactional", "at_least_once"])
def test_a_rude_message_that_is_acked_though_it_has_failed_is_wrong(books: Books, semantics: str) -> None:
    key = books.sent(semantics, "open-atomic", effects=1)
    verdict = books.judge()
    assert not verdict.faultless
    assert [wrong.split()[0] for wrong in verdict.rude_wrong] == [key]


@shared_on_both
def test_a_rude_message_without_effect_and_row_is_lost_as_any_other(books: Books) -> None:
    key = books.sent("transactional", "swallowed-sql")
    verdict = books.judge()
    assert verdict.lost == [key]


@shared_on_both
def test_poison_with_a_transactional_effect_is_in_two_places_however_rude(books: Books) -> None:
    key = books.sent("transactional", "close", effects=1)
    books.poison(key, "transactional", "close")
    assert books.judge().in_two_places == [key]


@shared_on_both
def test_two_effects_of_a_harmless_rudeness_are_a_duplicate_and_those_of_a_failing_one_are_attempts(
    books: Books,
) -> None:
    handled = books.sent("at_least_once", "swallowed-sql", effects=2)
    books.poison(books.sent("at_least_once", "set-rollback", effects=2), "at_least_once", "set-rollback")
    assert books.judge().duplicate_keys["at_least_once"] == [handled]


@shared_on_both
def test_what_is_delayed_for_ever_is_not_waited_for_and_wrong(books: Books) -> None:
    key = books.sent("at_least_once", "retry-max")
    books.delay(key, "at_least_once", "retry-max", years=100)
    assert books.scene.waiting() == 0
    verdict = books.judge()
    assert [wrong.split()[0] for wrong in verdict.rude_wrong] == [key]


@shared_on_both
def test_innocent_poison_and_that_of_a_harmless_rudeness_have_to_be_explained(books: Books) -> None:
    innocent, harmless = books.sent("at_least_once"), books.sent("at_most_once", "swallowed-sql")
    books.poison(innocent, "at_least_once")
    books.poison(harmless, "at_most_once", "swallowed-sql")
    verdict = books.judge()
    assert sorted(verdict.poison_to_explain) == sorted([innocent, harmless])
    assert verdict.poisoned_by_kind == {"bystander": 1, "rude": 1}


# -- tasks of Celery -----------------------------------------------------------------------------------------------


def task(books: Books, label: str, effects: int = 0) -> str:
    """Note a task as sent, with so many effects; returns its key."""
    key = str(uuid.uuid4())
    books.note(key, label, "celery", effects, "tree3")
    return key


def in_three_tables(vendor: str) -> list[str]:
    """Statements that put a task, by id and body, into the broker's table, the delayed store and poison."""
    now = "now()" if vendor == "postgresql" else "SYSUTCDATETIME()"
    return [
        f"INSERT INTO {ledger.CELERY_TABLE} (id, recipient, body) VALUES (%s, '{ledger.CELERY_QUEUE}', %s)",
        "INSERT INTO queueapp_delayedmessage (message_id, destination, due, body) "
        f"VALUES (%s, '{ledger.CELERY_LABEL}', {now}, %s)",
        "INSERT INTO queueapp_poisonmessage (message_id, queue, reason, failures, body) "
        f"VALUES (%s, '{ledger.CELERY_LABEL}', '', '', %s)",
    ]


@shared_on_both
def test_a_task_without_effect_and_row_is_lost_if_it_acks_late_and_else_gone(books: Books) -> None:
    late, early = task(books, ledger.LATE), task(books, ledger.EARLY)
    verdict = books.judge()
    assert verdict.lost == [late]
    assert verdict.early_gone == [early]
    assert verdict.celery == {"sent": 2, "effects": 0}
    assert Explanations(books.scene, [], LEASE).unexplained_losses([early]) == [early]
    assert Explanations(books.scene, [fault_event()], LEASE).unexplained_losses([early]) == []


@shared_on_both
def test_a_task_is_found_in_the_broker_in_the_delayed_store_and_in_poison(books: Books) -> None:
    waiting, later, poisoned = (task(books, ledger.LATE) for _ in range(3))
    for key, statement in zip((waiting, later, poisoned), in_three_tables(books.scene.server.vendor), strict=True):
        books.scene.execute(statement, uuid.uuid4(), f'[["{key}"], {{"sleep_ms": 1}}, {{}}]'.encode())
    assert books.scene.waiting() == 2
    verdict = books.judge()
    books.scene.execute(f"DELETE FROM {ledger.CELERY_TABLE}")
    assert verdict.lost == verdict.ghosts == []
    assert verdict.waiting == 2
    assert verdict.poison_to_explain == [poisoned]


@shared_on_both
def test_a_killed_child_explains_two_effects_of_a_task_that_acks_late_and_none_of_one_that_acks_early(
    books: Books,
) -> None:
    key = task(books, ledger.EARLY, effects=2)
    child = fault_event("tree3")
    main = Event("supervisor", "tree3", child.began, child.ended)
    assert Explanations(books.scene, [child], LEASE).unexplained_duplicates([key]) == []
    assert Explanations(books.scene, [child], LEASE).unexplained_early_duplicates([key]) == [key]
    assert Explanations(books.scene, [child, main], LEASE).unexplained_early_duplicates([key]) == []
    assert books.judge().duplicate_keys["acks_early"] == [key]


# -- explanations --------------------------------------------------------------------------------------------------


def fault_event(
    victim: str = ALL_TREES, ago: timedelta = timedelta(seconds=1), kind: str = "child", lasts: timedelta = timedelta()
) -> Event:
    """Something that happened a moment ago."""
    at = datetime.now(UTC) - ago
    return Event(kind, victim, at, at + lasts)


CUT_OFF = "WorkerStopped: crash.atmostonce was interrupted: the worker stops."
LOST = (
    "LeakedState: The session on 'default' was lost while the handler ran, which swallowed the error: do not catch it."
)


@shared_on_both
@pytest.mark.parametrize(
    ("failures", "events", "explained"),
    [
        ((DIED, "OperationalError: terminating connection"), [fault_event()], True),
        ((DIED,), [], False),
        ((DIED, LOST), [fault_event()], True),
        ((LOST,), [], False),
        (("LeakedState: The handler left a transaction open on 'default'",), [fault_event()], False),
        ((DIED,), [fault_event(HOLDER)], False),
        ((DIED,), [fault_event(ago=timedelta(days=-1))], False),
        (("TransactionManagementError: an error occurred in the current transaction",), [fault_event()], False),
        ((DIED, "InternalError: current transaction is aborted"), [fault_event()], False),
        (("ProcessDied: It was replaced because one of its services ended",), [fault_event()], False),
        (("Failed: attempt 1",), [], True),
        ((CUT_OFF,), [fault_event(kind="supervisor", lasts=timedelta(hours=1))], True),
        ((CUT_OFF,), [fault_event(kind="deploy", lasts=timedelta(hours=1))], True),
        ((CUT_OFF,), [fault_event(lasts=timedelta(hours=1))], False),
        ((CUT_OFF,), [fault_event(ago=timedelta(minutes=1), kind="deploy")], False),
        ((CUT_OFF.replace("atmostonce", "leased"),), [fault_event(kind="deploy", lasts=timedelta(hours=1))], False),
    ],
)
def test_poison_is_explained_by_attempts_that_a_strike_can_fail_and_by_nothing_else(
    books: Books, failures: tuple[str, ...], events: list[Event], explained: bool
) -> None:
    key = books.sent("at_least_once")
    books.poison(key, "at_least_once", "", *failures)
    poison = Explanations(books.scene, events, LEASE).unexplained_poison([key])
    books.judge()
    assert (poison == []) is explained


@shared_on_both
def test_an_effect_without_poison_is_explained_by_a_strike_at_its_worker(books: Books) -> None:
    key = books.sent("at_most_once", "set-rollback", effects=1)
    assert books.scene.verdict().rude_to_explain == [key]
    now = timedelta()
    assert Explanations(books.scene, [fault_event("tree1", now)], LEASE).unexplained_ends([key]) == []
    assert Explanations(books.scene, [fault_event("tree2", now)], LEASE).unexplained_ends([key]) == [key]
    books.judge()


@shared_on_both
def test_two_effects_are_explained_by_a_handler_that_killed_the_tree_of_the_first(books: Books) -> None:
    key = books.sent("at_least_once", effects=2)
    starts = books.scene.starts_file

    starts.write_text(f"{key} label 1 1 0.0\n{key} label 2 1 0.0\n")
    bare = Explanations(books.scene, [], LEASE)
    starts.write_text(starts.read_text() + f"{ledger.VICTIM} pill-0 0 1 0.0\n" * (RESTLESS + 1))
    explained = Explanations(books.scene, [], LEASE)
    starts.unlink()

    assert bare.unexplained_duplicates([key]) == [key]
    assert explained.unexplained_duplicates([key]) == []
    assert explained.restless() == []
    books.judge()


@shared_on_both
def test_two_effects_are_explained_by_a_strike_while_the_first_handler_ran_however_long(books: Books) -> None:
    key = books.sent("at_least_once", effects=2)
    starts, ago = books.scene.starts_file, LEASE + timedelta(seconds=5)
    during = datetime.now(UTC) - ago

    def unexplained(began: datetime) -> list[str]:
        starts.write_text(f"{key} label 1 1 {began.timestamp()}\n")
        explained = Explanations(books.scene, [fault_event("tree1", ago)], LEASE).unexplained_duplicates([key])
        starts.unlink()
        return explained

    assert unexplained(during - timedelta(seconds=1)) == []
    assert unexplained(during + LEASE + timedelta(seconds=1)) == [key]
    books.judge()


@shared_on_both
def test_two_effects_are_explained_by_the_stall_of_the_first_process_though_its_effect_came_last(
    books: Books,
) -> None:
    key = books.sent("at_least_once", effects=0)
    starts, now = books.scene.starts_file, datetime.now(UTC)
    ago = now - LEASE - timedelta(seconds=2)
    for worker, process in (("tree2", 2), ("tree1", 1)):
        books.effect(key, LABELS["at_least_once"], 1, worker, process)
    starts.write_text(f"{key} label 1 1 {ago.timestamp()}\n{key} label 2 2 {now.timestamp()}\n")

    def unexplained(tree: str) -> list[str]:
        stall = Event("stall", tree, ago + timedelta(seconds=1), now)
        return Explanations(books.scene, [stall], LEASE).unexplained_duplicates([key])

    stalled, second = unexplained("tree1"), unexplained("tree2")
    starts.unlink()

    assert stalled == []
    assert second == [key], "the one that began second has made no other of it"
    books.judge()


@shared_on_both
def test_two_effects_of_a_task_are_explained_by_a_strike_after_its_first_start_which_was_retried(books: Books) -> None:
    keys = [task(books, label, effects=2) for label in (ledger.LATE, ledger.EARLY)]
    starts, ago = books.scene.starts_file, LEASE + timedelta(seconds=5)
    main = Event("celery", "tree3", datetime.now(UTC) - ago, datetime.now(UTC) - ago)

    def unexplained(began: datetime) -> list[str]:
        starts.write_text("".join(f"{key} label 1 7 {began.timestamp()}\n" for key in keys))
        why = Explanations(books.scene, [main], LEASE)
        starts.unlink()
        return why.unexplained_late_duplicates(keys[:1]) + why.unexplained_early_duplicates(keys[1:])

    assert unexplained(main.began - timedelta(seconds=1)) == []
    assert unexplained(main.ended + LEASE + timedelta(seconds=1)) == keys
    books.judge()


@shared_on_both
def test_a_task_that_failed_in_two_deliveries_is_explained_by_the_faults_of_its_worker(books: Books) -> None:
    key = task(books, ledger.EARLY)
    poison = in_three_tables(books.scene.server.vendor)[2]
    for _ in range(2):
        books.scene.execute(poison, uuid.uuid4(), f'[["{key}"], {{}}, {{}}]'.encode())
    verdict = books.judge()
    assert (verdict.kept_twice, verdict.in_two_places) == ([key], [])
    starts, now = books.scene.starts_file, datetime.now(UTC)

    starts.write_text("".join(f"{key} label 1 7 {now.timestamp() + after}\n" for after in (0, 1)))
    whys = [
        Explanations(books.scene, events, LEASE)
        for events in ([], [fault_event()], [fault_event("tree1")], [fault_event("tree3")])
    ]
    starts.unlink()

    assert [why.unexplained_kept_twice([key], "tree3") for why in whys] == [[key], [], [key], []]


@shared_on_both
def test_a_message_that_is_started_again_and_again_is_restless(books: Books) -> None:
    books.scene.starts_file.write_text(
        "".join(f"again label {n} 1 0.0\n" for n in range(RESTLESS + 1)) + "once label 1 1 0.0\n"
    )
    restless = Explanations(books.scene, [], LEASE).restless()
    books.scene.starts_file.unlink()
    assert [entry.split()[0] for entry in restless] == ["again"]


# -- the strike ----------------------------------------------------------------------------------------------------


@on_both
def test_the_savepoint_fault_holds_free_rows_and_releases_them(scene: Scene) -> None:
    for number in range(3):
        scene.send(Leased, f"held {number}")

    def free() -> int:
        with holding(scene.server, scene.name) as second:
            return second.hold_all("testapp_leased")

    stopping = threading.Event()
    with Proxy(scene.server.port, scene.server.host) as proxy:
        injector = FaultInjector(scene, [], [], proxy)
        injector.inject(Fault(0.0, "savepoint", victim=0.0, how=0.99, long=1.0), stopping)
        assert injector.injected == {"savepoint": 1}
        assert [event.victim for event in injector.events] == [HOLDER]
        assert free() == 0
        stopping.set()  # it lasts some seconds, or until the run is over
        wait_until(lambda: free() == 3, "the rows are free again")
        injector.inject(Fault(0.0, "savepoint", victim=0.99, how=0.0, long=0.0), stopping)
        assert injector.missed == {"savepoint": 1}, "there is nothing to hold in an empty queue"


@on_both
def test_the_backend_strike_kills_sessions_of_a_program_and_names_it(
    scene: Scene, monkeypatch: pytest.MonkeyPatch
) -> None:
    tree = scene.workers("testapp.Leased", "--no-dispatcher", "--no-maintenance")
    sessions = wait_until(lambda: scene.server.sessions(scene.name), "it has a session")
    # Which ones is noted: a worker that starts opens and closes more of them than were seen here.
    ended: list[Any] = []
    end = scene.server.end_sessions

    def noting(database: str, chosen: list[Any]) -> Any:
        ended.extend(chosen)
        return end(database, chosen)

    monkeypatch.setattr(scene.server, "end_sessions", noting)
    # That is how a session of SQL Server finds its name.
    assert {name_of(process.pid) for process in tree.children()} == {tree.name} == {name for _, name in sessions}
    with Proxy(scene.server.port, scene.server.host) as proxy:
        injector = FaultInjector(scene, [tree], [], proxy)
        injector.inject(Fault(0.0, "backend", victim=0.0, how=0.0, long=0.0), threading.Event())
    assert injector.injected == {"backend": 1}
    assert [event.victim for event in injector.events] == [tree.name]
    assert len(ended) == 1
    wait_until(lambda: ended[0] not in dict(scene.server.sessions(scene.name)), "it is gone")
    scene.send(Leased, "after it")
    wait_until(lambda: scene.effects("after it") == 1, "it goes on")
    assert tree.restarts == 0


@on_both
def test_the_poison_pill_fault_sends_a_message_as_a_foreign_producer_does_and_records_it(scene: Scene) -> None:
    with Proxy(scene.server.port, scene.server.host) as proxy:
        injector = FaultInjector(scene, [], [], proxy)
        injector.inject(Fault(0.0, "poison_pill", victim=0.0, how=0.0, long=0.0), threading.Event())
    assert injector.injected == {"poison_pill": 1}
    verdict = scene.verdict()
    assert (verdict.sent, verdict.waiting, verdict.lost, verdict.ghosts) == (1, 1, [], [])
    assert b'"die": "exit"' in bytes(Leased.objects.get().body)


# -- the rudenesses ------------------------------------------------------------------------------------------------

#: These need a watchdog, or a lease and time.
NOT_BY_ITSELF = ("time-limit", "extend-in-atomic")


@pytest.fixture
def elsewhere(shared_scene: Scene) -> Iterator[None]:
    connections.settings[ELSEWHERE] = connections.settings["default"]
    yield
    for alias in (ELSEWHERE, "default"):
        raw = connections[alias].connection
        if raw is not None:
            raw.close()
        del connections[alias]  # with whatever state is left in it
    del connections.settings[ELSEWHERE]


def spoiled(alias: str, in_transaction: bool) -> bool:
    """Whether a connection is not as it was handed out."""
    connection = connections[alias]
    if connection.connection is None:
        return in_transaction
    status = connection.connection.info.transaction_status
    if in_transaction:
        return connection.needs_rollback or bool(connection.savepoint_ids) or status is not TransactionStatus.INTRANS
    # A session that has died outside of a transaction has taken nothing with it.
    at_rest = status in (TransactionStatus.IDLE, TransactionStatus.UNKNOWN)
    return connection.in_atomic_block or not connection.get_autocommit() or not at_rest


@pytest.mark.parametrize("in_transaction", [True, False], ids=["transaction", "autocommit"])
@pytest.mark.parametrize("name", [name for name in RUDENESSES if name not in NOT_BY_ITSELF])
def test_a_rudeness_that_ends_as_poison_raises_or_spoils_and_a_harmless_one_does_neither(
    elsewhere: None, name: str, in_transaction: bool
) -> None:
    rudeness = RUDENESSES[name]
    fate = rudeness.transactional if in_transaction else rudeness.other_queues
    context: Any = SimpleNamespace(alias="default", items={}, headers=rudeness.headers, message_id=uuid.uuid4())
    remaining = []
    raised = None

    def leave() -> None:
        remaining.append(name)
        with connections["default"].cursor() as cursor:
            cursor.execute("SELECT 1")

    if in_transaction:
        transaction.atomic().__enter__()
    with connections[ELSEWHERE].cursor() as cursor:
        cursor.execute("SELECT 1")
    try:
        rudeness.act(leave, context)
    except BaseException as error:
        raised = error
    harmed = raised is not None or spoiled("default", in_transaction) or spoiled(ELSEWHERE, in_transaction=False)
    if fate is not Fate.EITHER:
        assert harmed is (fate is Fate.POISON), raised
    assert remaining or raised, "a handler that returns has left its effect"
