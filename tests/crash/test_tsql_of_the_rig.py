"""The statements of the rig, its faults and its workload for a SQL Server are T-SQL, as the driver would get it. A
server is needed to see what it does there: the tests that are marked ``on_both`` and the seeded run."""

from __future__ import annotations

import re
import subprocess
import sys
import threading
import uuid
from collections.abc import Callable, Iterator
from datetime import UTC, datetime, timedelta
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from django.db import connections
from sqlglot import exp

from queueapp.sql import queue_sql
from queueapp.sql.claims import SeqRange
from tests.in_process_worker import eventually
from tests.queueapp.sql.tsql import Recorder, hints, never_connected, parsed, placeholders
from tests.testapp.models import Leased, Transactional

from .rig import sqlserver
from .rig.explaining import Explanations
from .rig.fault_injection import HOLDER, FaultInjector
from .rig.holding import WORDS as HOLDING
from .rig.holding import Holder
from .rig.scene import Scene
from .rig.schedule import Fault
from .rig.sqlserver import DROP, MAKE, Session, SqlServer
from .rig.standstill import WORDS as STANDSTILL
from .test_oracle import Books, in_three_tables
from .test_server_faults import ACCOUNTS
from .workload import ledger, producers, rudeness
from .workload.ledger import QUEUES, WORDS

WORDS_OF_IT = WORDS["microsoft"]
URL = "mssql://sa:p%40ss@db.example/queueapp?TrustServerCertificate=yes"
#: What the parser does not know is held against its documented syntax, letter by letter.
GRAMMAR = (
    r"SAVE TRANSACTION \w{1,32}",
    r"SET TRANSACTION ISOLATION LEVEL (READ COMMITTED|SNAPSHOT|SERIALIZABLE)",
    r"ALTER DATABASE \[[^]]+\] SET (ALLOW_SNAPSHOT_ISOLATION ON|SINGLE_USER WITH ROLLBACK IMMEDIATE)",
    r"WAITFOR DELAY '\d\d:[0-5]\d:[0-5]\d\.\d{3}'",
    r"RAISERROR \(N'[^'%]+', (1[0-9]|2[0-5]), 1\) WITH LOG",
)


def is_tsql(sql: str) -> bool:
    """Whether each statement of a batch, as the driver gets it, is one. Fails where the parser says why not."""
    return all(re.fullmatch("|".join(GRAMMAR), word) or len(parsed(word)) == 1 for word in sql.split("; "))


@pytest.mark.parametrize(
    "statement",
    [
        *WORDS_OF_IT.tables,
        WORDS_OF_IT.sent,
        WORDS_OF_IT.sent_many,
        *(f"SELECT count(*) FROM ({ledger.some_of('microsoft', table, 3000)}) x" for table in QUEUES.values()),
        WORDS_OF_IT.before,
        WORDS_OF_IT.here,
        f"SELECT 1 FROM queueapp_poisonmessage WHERE {WORDS_OF_IT.key} = %s",
        f"SELECT count(*) FROM queueapp_delayedmessage WHERE due < {WORDS_OF_IT.far_future}",
        *(item.format("crash_1_scene_1") for item in (*MAKE, *DROP)),
        *(
            getattr(sqlserver, name)
            for name in ("SESSIONS", "HAS_SESSION", "NOW", "SNAPSHOT", "BEGIN", "COMMIT", "LEAVE")
        ),
        sqlserver.KILL.format(51),
        sqlserver.WAITING,
        ACCOUNTS["microsoft"],
        *in_three_tables("microsoft"),
        *(item.format("testapp_leased") for item in STANDSTILL["microsoft"][:3]),
        *HOLDING["microsoft"].begin,
        *(item.format(table="testapp_leased") for item in HOLDING["microsoft"][1:]),
        *(said["microsoft"] for said in rudeness.SAID.values()),
        ledger.delay_in_tsql(0.005),
        ledger.delay_in_tsql(61.5),
    ],
)
def test_statement_is_read_completely(statement: str) -> None:
    assert is_tsql(statement.replace("%s", "?"))


def test_a_delay_is_as_long_as_it_is_meant_to_be() -> None:
    assert ledger.delay_in_tsql(0.005) == "WAITFOR DELAY '00:00:00.005'"
    assert ledger.delay_in_tsql(61.5) == "WAITFOR DELAY '00:01:01.500'"


def test_both_databases_get_the_same_statements() -> None:
    assert WORDS.keys() == HOLDING.keys() == STANDSTILL.keys() == {"postgresql", "microsoft"}
    assert all(said.keys() == WORDS.keys() for said in rudeness.SAID.values())


def test_the_oracle_looks_where_it_looks_on_postgresql() -> None:
    def tables(vendor: str, dialect: str) -> set[str]:
        from sqlglot import parse_one

        return {item.name for item in parse_one(WORDS[vendor].here, dialect=dialect).find_all(exp.Table)} - {"p"}

    assert tables("microsoft", "tsql") == tables("postgresql", "postgres") >= set(QUEUES.values())


def test_a_scene_lies_in_a_database_of_its_own_and_may_be_reached_through_a_proxy() -> None:
    server = SqlServer(URL)
    direct, proxied = server.url("scene_1"), server.url("scene_1", port=4711)
    assert direct.startswith("mssql://sa:p%40ss@db.example/crash_")
    assert direct.endswith("_scene_1?TrustServerCertificate=yes")
    assert "@127.0.0.1:4711/crash_" in proxied
    assert (server.host, server.port) == ("db.example", 1433)
    assert server.url("scene_1", port=4711, **server.connects_within(3)) == proxied + "&connection_timeout=3"


# -- what reaches the driver ---------------------------------------------------------------------------------------


class Recorded(Session):
    """A session whose statements are kept, and run nowhere."""

    def __init__(self, connection: Any) -> None:
        super().__init__(URL)
        sharing, self._connection = self._connection.allow_thread_sharing, connection
        if sharing and not connection.allow_thread_sharing:
            connection.inc_thread_sharing()

    def close(self) -> None:
        self.execute(sqlserver.LEAVE)


class RecordedServer(SqlServer):
    """A SQL Server whose sessions are all that one."""

    def __init__(self, connection: Any) -> None:
        super().__init__(URL)
        self._recorded = connection
        self._ahead = timedelta(hours=1)

    def connect(self, database: str) -> Session:
        return Recorded(self._recorded)

    def make(self, database: str) -> None:
        pass


@pytest.fixture
def recorder() -> Recorder:
    return Recorder()


@pytest.fixture
def server(recorder: Recorder) -> RecordedServer:
    return RecordedServer(never_connected(recorder))


@pytest.fixture
def injector(server: RecordedServer) -> FaultInjector:
    scene: Any = SimpleNamespace(server=server, name="scene_1")
    proxy: Any = None
    return FaultInjector(scene, [], [], proxy)


def statements(recorder: Recorder) -> list[str]:
    """What has reached the driver: all of it T-SQL, with as many values as places for them."""
    for statement in recorder.statements:
        assert is_tsql(statement.sql), statement.sql
        assert statement.sql.count("?") == len(statement.params), statement
        if statement.params:
            assert placeholders(parsed(statement.sql)) == len(statement.params)
    return [item.sql for item in recorder.statements]


def fault(kind: str, how: float) -> Fault:
    return Fault(0.0, kind, victim=0.0, how=how, long=0.0)


@pytest.mark.parametrize(("how", "end"), [(0.0, "ROLLBACK TRANSACTION held"), (0.9, "COMMIT TRANSACTION")])
def test_rows_are_held_by_a_transaction_with_a_savepoint_that_is_ended_at_last(
    recorder: Recorder, injector: FaultInjector, how: float, end: str
) -> None:
    recorder.answers = [[], [], [(1,), (2,)]]
    stopping = threading.Event()
    injector.inject(fault("savepoint", how), stopping)
    assert injector.injected == {"savepoint": 1}
    assert [event.victim for event in injector.events] == [HOLDER]
    stopping.set()
    for thread in threading.enumerate():
        if thread.name == HOLDER:
            thread.join()

    begin, save, held, *rest = statements(recorder)
    assert [begin, save] == ["BEGIN TRANSACTION", "SAVE TRANSACTION held"]
    assert [*hints(parsed(held))] == [("testapp_leased", {"UPDLOCK", "READPAST", "ROWLOCK", "READCOMMITTEDLOCK"})]
    assert rest == [end, sqlserver.LEAVE], "or the transaction would go on in the driver's pool"
    assert [statement.params for statement in recorder.statements[:3]] == [(), (), (1 + int(20 * how),)]


def test_nothing_to_hold_ends_the_transaction_too(recorder: Recorder, server: RecordedServer) -> None:
    holder = Holder(server, "scene_1")
    assert holder.hold_free("testapp_leased", 5) == holder.hold_all("testapp_leased") == 0
    holder.close()
    assert statements(recorder)[-1] == sqlserver.LEAVE


def test_a_poison_pill_and_its_ledger_entry_are_one_transaction(recorder: Recorder, injector: FaultInjector) -> None:
    injector.inject(fault("poison_pill", 0.0), threading.Event())
    assert injector.injected == {"poison_pill": 1}
    begin, entry, message, commit, leave = statements(recorder)
    assert (begin, commit, leave) == (sqlserver.BEGIN, sqlserver.COMMIT, sqlserver.LEAVE)
    assert "crash_sent" in entry
    assert message.startswith("INSERT INTO testapp_leased (id, headers, body)")


def test_only_sessions_of_the_run_are_killed_by_their_number(
    recorder: Recorder, server: RecordedServer, monkeypatch: pytest.MonkeyPatch
) -> None:
    names = {100: "tree1", 101: "", 102: "tree2"}
    monkeypatch.setattr(sqlserver, "name_of", names.__getitem__)
    recorder.answers = [[(51, 100), (52, 101), (53, 102)]]
    scene: Any = SimpleNamespace(server=server, name="scene_1")
    proxy: Any = None
    injector = FaultInjector(scene, [], [], proxy)
    injector.inject(fault("backend", 0.99), threading.Event())

    assert [event.victim for event in injector.events] == ["tree1", "tree2"]
    killed = [statement.sql for statement in recorder.statements if "KILL" in statement.sql]
    assert killed == [sqlserver.KILL.format(51), sqlserver.KILL.format(53)]
    assert all(not statement.params for statement in recorder.statements if "KILL" in statement.sql), "it takes none"
    assert statements(recorder)


def test_a_process_of_a_run_is_known_by_its_environment() -> None:
    child = subprocess.Popen([sys.executable, "-c", "input()"], stdin=subprocess.PIPE, env={"CRASH_NAME": "tree7"})
    try:
        eventually(lambda: sqlserver.name_of(child.pid) == "tree7")  # between fork and exec it has no environment
    finally:
        child.communicate(b"\n")
    assert sqlserver.name_of(child.pid) == "", "it has ended"


def test_the_oracle_sees_all_tables_in_one_snapshot_that_is_set_before_its_transaction(
    recorder: Recorder, server: RecordedServer
) -> None:
    with server.connect("scene_1") as connection:
        ledger.judge(connection)
    said = statements(recorder)
    assert said[:2] == [sqlserver.SNAPSHOT, sqlserver.BEGIN]
    assert said[-2:] == [sqlserver.COMMIT, sqlserver.LEAVE]
    assert len(said) == 7


def test_a_question_takes_no_lock(recorder: Recorder, server: RecordedServer) -> None:
    server.look("SELECT count(*) FROM crash_sent", database="scene_1")
    assert statements(recorder) == [sqlserver.SNAPSHOT, "SELECT count(*) FROM crash_sent", sqlserver.LEAVE]


def test_times_of_the_server_are_converted_to_the_clock_of_the_faults(
    recorder: Recorder, server: RecordedServer
) -> None:
    at = datetime(2026, 1, 1, 12)
    recorder.answers = [[("tree1", 1, at)]]
    scene: Any = SimpleNamespace(server=server, name="scene_1", starts_file=SimpleNamespace(read_text=lambda: ""))
    scene.execute = lambda sql, *parameters: server.execute(sql, *parameters, database="scene_1")
    why = Explanations(scene, [], timedelta(seconds=5))
    assert why.effects("key") == [("tree1", 1, datetime(2026, 1, 1, 11, tzinfo=UTC))]
    recorder.answers = [[(None, "django.db.utils.OperationalError", "gone", at)]]
    assert why._history("key") == [{"exception": "OperationalError: gone", "at": "2026-01-01T11:00:00+00:00"}]
    assert statements(recorder)


def test_what_a_scene_asks_and_what_the_tests_of_the_oracle_write_is_tsql(
    recorder: Recorder, server: RecordedServer, tmp_path: Path
) -> None:
    scene = Scene(server, tmp_path)
    # Each question is three statements, of which the second one is answered.
    recorder.answers = [[], [(3,)], [], [], [(2,)], []]
    assert scene.waiting() == 3
    assert scene.effects("key") == 2
    books = Books(scene)
    key = books.sent("at_least_once", "close", effects=1)
    books.poison(key, "at_least_once", "close", "Failed: it did")
    books.delay(key, "at_least_once", "close", years=100)
    books.judge()
    assert len(statements(recorder)) > 20


@pytest.fixture
def default(recorder: Recorder) -> Iterator[None]:
    """Django's default connection is the recorded one."""
    before = connections["default"]
    connections["default"] = never_connected(recorder)
    yield
    connections["default"] = before


@pytest.mark.usefixtures("default")
@pytest.mark.parametrize(
    "say",
    [
        lambda: ledger.sent_many("default", ["a", "b"], "testapp.Leased", "bulk"),
        lambda: ledger.sent("default", "a", "testapp.Leased", "single"),
        lambda: ledger.effect("default", "a", "testapp.Leased", 1),
        lambda: ledger.sleep("default", 0.3),
        lambda: rudeness._say("session-settings", "default"),
        lambda: rudeness._say("read-only", "default"),
        lambda: rudeness._say("elsewhere-dies", "default"),
        lambda: rudeness.insert_foreign(
            "default", "testapp_leased", "0190", rudeness.RUDENESSES["nul-header"], "type", b"{}"
        ),
    ],
)
def test_the_workload_is_tsql(recorder: Recorder, say: Callable[[], object]) -> None:
    say()
    assert len(statements(recorder)) == 1


def test_the_backlog_is_counted_past_the_locks_of_others(recorder: Recorder) -> None:
    recorder.answers = [[(7,)]]
    assert producers.backlog(never_connected(recorder)) == 7
    (sql,) = statements(recorder)
    assert [given for _, given in hints(parsed(sql))] == [{"READPAST", "ROWLOCK", "READCOMMITTEDLOCK"}] * len(QUEUES)


# -- where a worker is killed --------------------------------------------------------------------------------------


def is_like(sql: str, pattern: str) -> bool:
    """What LIKE says."""
    wild = {"%": ".*", "_": "."}
    return re.fullmatch("".join(wild.get(item, re.escape(item)) for item in pattern), sql, re.DOTALL) is not None


@pytest.mark.parametrize("queue", [Leased, Transactional])
def test_a_worker_that_waits_is_found_in_the_statement_that_is_meant_and_in_no_other(
    recorder: Recorder, queue: Any
) -> None:
    connection, table = never_connected(recorder), queue._meta.db_table
    sql, token, held = queue_sql(queue, connection), uuid.uuid4(), STANDSTILL["microsoft"]
    verbs: dict[str, Callable[[], object]] = {
        "look": lambda: sql.claims.peek(connection, [SeqRange(0)], [SeqRange(0, 9)], 100),
        "claim": lambda: (
            sql.claims.claim_by_lease(connection, [SeqRange(0)], 10, token, token, 5000)
            if queue is Leased
            else sql.claims.claim_by_delete(connection, [SeqRange(0)], 10)
        ),
        "ack": lambda: sql.acks.ack(connection, [1], token),
        "extend": lambda: sql.acks.extend(connection, [1], token, 5000),
        "record": lambda: sql.failures.lock(connection, 1, token, 5000),
        "record at once": lambda: sql.failures.rollback_and_lock(connection, 1, 5000),
    }
    found: dict[str, list[str]] = {"claims": [], "acking": [], "recording": []}
    for verb, run in verbs.items():
        recorder.statements.clear()
        recorder.answers = [[(0, 0, None, None, None)]] if verb == "look" else []
        run()
        for statement in recorder.statements:
            for what, pattern in (
                ("claims", held.claims[table]),
                ("acking", held.acking),
                ("recording", held.recording[table]),
            ):
                if is_like(statement.sql, pattern.format(table)):
                    found[what].append(verb)
    assert found == {"claims": ["claim"], "acking": ["ack"], "recording": ["record", "record at once"]}
