"""What SQL Server is sent for wake-ups, where none is at hand: the parser knows no Service Broker, so its statements
are held against their documented syntax, word by word, and what stands around them against the rules for procedures."""

from __future__ import annotations

import re
from typing import Any

import pytest
from sqlglot import exp

from queueapp import notifier
from queueapp.sql.database import NotificationsUnavailable
from queueapp.sql.sqlserver import database as service_broker
from queueapp.sql.sqlserver.backend import SqlServerBackend
from queueapp.sql.sqlserver.database import PROCEDURES, RETRY_AFTER, SCRIPT
from tests.queueapp.sql.tsql import Recorder, columns, never_connected, parsed

THERE = [(2, 1, *range(1, 1 + len(PROCEDURES)))]
BARE = [(2, 1, *([None] * len(PROCEDURES)))]

#: Statements of the batches by what they begin with; None: the parser reads them.
GRAMMAR = {
    "CREATE QUEUE": r"CREATE QUEUE \[\w+\] WITH STATUS = ON, RETENTION = OFF, POISON_MESSAGE_HANDLING \(STATUS = OFF\)",
    "CREATE SERVICE": r"CREATE SERVICE \[\w+\] ON QUEUE \[\w+\] \(\[DEFAULT\]\)",
    "BEGIN DIALOG": r"BEGIN DIALOG CONVERSATION @\w+ FROM SERVICE \[\w+\] TO SERVICE N'\w+', N'CURRENT DATABASE' "
    r"ON CONTRACT \[DEFAULT\] WITH LIFETIME = \d+, ENCRYPTION = OFF",
    "SEND": r"SEND ON CONVERSATION @\w+ MESSAGE TYPE \[DEFAULT\] \((@\w+|N'')\)",
    "END CONVERSATION": r"END CONVERSATION @\w+ WITH CLEANUP",
    "WAITFOR": r"WAITFOR \( RECEIVE TOP \(\d+\) \[message_type_name\], CAST\(\[message_body\] AS nvarchar\(400\)\) "
    r"FROM \[\w+\] INTO @\w+ WHERE \[conversation_handle\] = @\w+ \), TIMEOUT \d+",
    "DECLARE": r"DECLARE (@\w+ uniqueidentifier(, @\w+ uniqueidentifier)*|@heard TABLE \(\[type\] nvarchar\(256\), "
    r"\[payload\] nvarchar\(400\)\)|\w+ CURSOR LOCAL FORWARD_ONLY STATIC READ_ONLY FOR (?P<select>SELECT .*))",
    "OPEN": r"OPEN \w+",
    "FETCH": r"FETCH NEXT FROM \w+ INTO @\w+",
    "CLOSE": r"CLOSE \w+",
    "DEALLOCATE": r"DEALLOCATE \w+",
    "SET": r"SET (NOCOUNT ON|@\w+ = (@\w+|NULL))",
    "SELECT": r"(?P<select>SELECT .*)",
}
PROCEDURE = re.compile(
    r"CREATE PROCEDURE \[(?P<name>\w+)\](?P<parameters>( @\w+ \w+(\(\d+\))?,?)*) WITH EXECUTE AS OWNER AS BEGIN "
    r"(?P<body>.*) END"
)
#: What opens and closes blocks.
BLOCKS = re.compile(r"(WHILE @@FETCH_STATUS = 0 BEGIN|BEGIN TRY|END TRY BEGIN CATCH|END CATCH|END)(?= |;|$)")


def statements(body: str) -> list[str]:
    """The statements of a body without its blocks, each of which was ended by a semicolon."""
    found: list[str] = []
    for piece in body.split(";"):
        text = piece.strip()
        while text and not text.startswith("END CONVERSATION") and (block := BLOCKS.match(text)):
            text = text[block.end() :].strip()
        if text:
            found.append(text)
    return found


@pytest.mark.parametrize("name", SCRIPT)
def test_batch_is_of_the_documented_syntax(name: str) -> None:
    batch = " ".join(SCRIPT[name].split())
    texts = [batch]
    if name in PROCEDURES:
        procedure = PROCEDURE.fullmatch(batch)
        assert procedure is not None
        assert procedure["name"] == name
        texts = statements(procedure["body"])
        declared = set(re.findall(r"@\w+(?= \w)", procedure["parameters"]))
        declared |= {item for text in texts if text.startswith("DECLARE @") for item in re.findall(r"@\w+", text)}
        assert set(re.findall(r"(?<!@)@\w+", procedure["body"])) <= declared
        assert batch.count("BEGIN TRY") == batch.count("END TRY") == batch.count("BEGIN CATCH")
    for text in texts:
        (begins,) = [item for item in GRAMMAR if text.startswith(item + " ")][:1] or ["?"]
        assert begins != "?", text
        matched = re.fullmatch(GRAMMAR[begins], text)
        assert matched is not None, text
        if select := matched.groupdict().get("select"):
            assert [type(statement) for statement in parsed(select)] == [exp.Select]
            assert columns(parsed(select)) <= {
                "conversation_handle", "conversation_id", "is_initiator", "far_service", "state", "type", "payload",
            }  # fmt: skip


def sent(answers: list[Any], act: Any) -> Recorder:
    """What the driver gets."""
    recorder = Recorder(answers=[list(answer) for answer in answers])
    act(never_connected(recorder))
    return recorder


def test_what_is_there_is_left_alone() -> None:
    (question,) = sent([THERE], SqlServerBackend().notifications.prepare).statements

    assert [type(statement) for statement in parsed(question.sql)] == [exp.Select]


def test_what_is_missing_is_made_in_its_order() -> None:
    recorder = sent([BARE, *[[(0,)], []] * len(SCRIPT)], SqlServerBackend().notifications.prepare)

    assert [statement.sql for statement in recorder.statements[2::2]] == list(SCRIPT.values())
    for question in recorder.statements[1::2]:
        assert [type(statement) for statement in parsed(question.sql)] == [exp.Select]


@pytest.mark.parametrize(
    ("answer", "why"),
    [([(5, 1, *[None] * 4)], "Azure SQL Database has no Service Broker"), ([(2, 0, *[None] * 4)], "is turned off")],
)
def test_where_it_cannot_be_had_nothing_is_made(answer: Any, why: str) -> None:
    recorder = Recorder(answers=[answer])

    with pytest.raises(NotificationsUnavailable, match=why):
        SqlServerBackend().notifications.prepare(never_connected(recorder))

    assert len(recorder.statements) == 1


def test_a_problem_with_a_remedy_is_reported_with_the_statement() -> None:
    backend = SqlServerBackend()

    def lack(answer: Any) -> Any:
        return backend.notifications.unavailable(never_connected(Recorder(answers=[answer])))

    assert lack(THERE) is None
    assert lack([(5, 1, *[None] * 4)]) is None, "no role can"
    assert "ENABLE_BROKER" in lack([(2, 0, *[None] * 4)]).remedy
    assert "CREATE QUEUE" in lack(BARE).remedy


def test_notification_is_one_batch_with_the_payload_as_a_parameter() -> None:
    backend = SqlServerBackend()
    (statement,) = sent(
        [[(7,)]], lambda connection: backend.notifications.notify(connection, "queueapp", "shop.Orders")
    ).statements

    assert statement.params == ("shop.Orders",)
    frame = re.fullmatch(
        r"DECLARE @there int = \((?P<select>SELECT .*)\); "
        r"IF @there IS NOT NULL EXEC \[queueapp_wake\] @payload = \?; SELECT @there",
        statement.sql,
    )
    assert frame is not None
    assert [type(item) for item in parsed(frame["select"])] == [exp.Select]


def test_a_sender_that_found_no_listener_does_nothing_more_for_minutes(
    monkeypatch: pytest.MonkeyPatch, settings: Any
) -> None:
    backend, now = SqlServerBackend(), [1000.0]
    monkeypatch.setattr(service_broker, "monotonic", lambda: now[0])
    monkeypatch.setattr(notifier, "backend_of", lambda connection: backend)
    recorder = Recorder(answers=[[(None,)], [(None,)], [(7,)]])
    connection = never_connected(recorder)
    connection.in_atomic_block = False

    notifier.sent_to("shop.Orders", connection)
    assert len(recorder.statements) == 1
    connection.in_atomic_block = True
    for _ in range(3):
        notifier.sent_to("shop.Orders", connection)
    assert (len(recorder.statements), connection.run_on_commit) == (1, [])

    now[0] += RETRY_AFTER + 1
    assert backend.notifications.may_notify(connection)
    backend.notifications.notify(connection, "queueapp", "shop.Orders")
    assert not backend.notifications.may_notify(connection)
    backend.notifications.notify(connection, "queueapp", "shop.Orders")
    assert backend.notifications.may_notify(connection)


def test_an_ear_waits_for_its_own_conversation_and_ends_it() -> None:
    ends = ("8a3f1c2e-0000-4000-8000-000000000001", "8a3f1c2e-0000-4000-8000-000000000002")
    recorder = Recorder(answers=[THERE, [ends], [("DEFAULT", "shop.Orders"), ("DEFAULT", "")], []])
    ear = SqlServerBackend().notifications.listener(never_connected(recorder), "queueapp")

    ear.connect()
    ear.listen()
    assert ear.received(1) == ["shop.Orders"]
    assert ear.broken is False
    ear.close()

    assert [statement.sql for statement in recorder.statements[1:]] == [
        "EXEC [queueapp_listen]",
        "EXEC [queueapp_hear] @receiver = ?",
        "SET NOCOUNT ON; EXEC [queueapp_stop_listening] @sender = ?, @receiver = ?; SELECT @@ROWCOUNT",
    ]
    assert [statement.params for statement in recorder.statements[2:]] == [(ends[1],), ends]


def test_a_listener_whose_conversation_has_ended_reports_it() -> None:
    ended = "http://schemas.microsoft.com/SQL/ServiceBroker/Error"
    ends = ("8a3f1c2e-0000-4000-8000-000000000001", "8a3f1c2e-0000-4000-8000-000000000002")
    ear = SqlServerBackend().notifications.listener(
        never_connected(Recorder(answers=[THERE, [ends], [(ended, None)]])), "queueapp"
    )
    ear.connect()
    ear.listen()

    with pytest.raises(Exception, match="conversation of this listener has ended"):
        ear.received(1)

    assert ear.broken is False, "the connection is fine: it listens again on another"
