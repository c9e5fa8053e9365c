"""The T-SQL of a priority of 64 bits and of barriers: read by the parser, as ``test_tsql_parses`` does for the other
verbs.

The parser knows no ``EXEC`` with an assignment and no blocks, so the frames of the locks are held against their syntax.
"""

from __future__ import annotations

import re
import uuid
from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import pytest
from sqlglot import exp

from queueapp.messages import new_id
from queueapp.models import DelayedMessage
from queueapp.sql.claims import MAX_ORDER_KEY, SeqRange, order_key
from queueapp.sql.message_columns import Outgoing, Row
from queueapp.sql.sqlserver.backend import SqlServerBackend
from queueapp.sql.sqlserver.claims import IndexRange, index_ranges_of
from queueapp.sql.tables import QueueTable, StoreTable
from tests.queueapp.sql.tsql import Recorder, columns, hints, never_connected, parsed
from tests.testapp.ordering import Fenced, FencedAddressed, FencedAtMostOnce, FencedByExpression, FencedInTurns, Ranked

TOKEN, OWNER = uuid.uuid4(), uuid.uuid4()
RANKED, FENCED = QueueTable.of(Ranked), QueueTable.of(Fenced)
LOCK = (
    r"EXEC @held = sp_getapplock @Resource = \?, @LockMode = '(Shared|Exclusive)', @LockOwner = 'Transaction', "
    r"@LockTimeout = (-1|0)"
)
LOCKING = re.compile(rf"SET NOCOUNT ON; DECLARE @held int; {LOCK}; SELECT @held")
INSERTING = re.compile(
    r"SET NOCOUNT ON; DECLARE @own bit = CASE WHEN @@TRANCOUNT = 0 THEN 1 ELSE 0 END; DECLARE @held int; BEGIN TRY "
    rf"IF @own = 1 BEGIN TRANSACTION; {LOCK}; IF @held = -3 THROW 51205, '[\w .]+', 1; "
    rf"IF @held < 0 THROW 51000, '[\w .]+', 1; (?P<insert>INSERT INTO .*); "
    r"IF @own = 1 COMMIT TRANSACTION; END TRY BEGIN CATCH IF @own = 1 AND @@TRANCOUNT > 0 ROLLBACK TRANSACTION; THROW; "
    r"END CATCH; SELECT @@ROWCOUNT"
)


def sent(table: QueueTable, answers: list[Any], verb: Callable[[Any, Any], Any]) -> list[Any]:
    """What a verb sends; all of it is T-SQL, and every value a parameter."""
    recorder = Recorder(answers=[list(answer) for answer in answers])
    connection = never_connected(recorder)
    connection.in_atomic_block = True
    verb(SqlServerBackend().queue(table), connection)
    found = []
    for statement in recorder.statements:
        assert statement.sql.count("?") == len(statement.params) == len(statement.sizes)
        assert None not in statement.params
        assert "%s" not in statement.sql
        assert "%%" not in statement.sql
        if LOCKING.fullmatch(statement.sql):
            continue
        framed = INSERTING.fullmatch(statement.sql)
        tree = [
            statement
            for statement in parsed(framed["insert"] if framed else statement.sql)
            if not isinstance(statement, exp.Set)
        ]
        found.append(SimpleNamespace(sql=statement.sql, params=statement.params, tree=tree))
    return found


def test_a_range_of_places_is_its_stretches_in_order() -> None:
    def place(priority: int, seq: int) -> int:
        return order_key(priority, seq)

    assert index_ranges_of(SeqRange(place(5, 7), place(5, 9))) == [IndexRange(False, 5, 7, 9)]
    assert index_ranges_of(SeqRange(place(5, 7), place(2, 3))) == [
        IndexRange(False, 5, 7, 2**63 - 1),
        IndexRange(True, 0, 3, 4),
        IndexRange(False, 2, -(2**63), 3),
    ]
    assert [index_range.between for index_range in index_ranges_of(SeqRange(place(5, 7), place(4, 3)))] == [
        False,
        False,
    ]
    assert index_ranges_of(SeqRange(3, 2)) == []


def test_priority_claims_are_by_key_for_places_and_one_statement_for_a_stretch() -> None:
    ranges = [
        SeqRange(order_key(9, 4), order_key(9, 4)),
        SeqRange(order_key(9, 1), order_key(9, 1)),
        SeqRange(order_key(3, 5), MAX_ORDER_KEY),
    ]

    by_key, *stretches = sent(RANKED, [], lambda s, c: s.claims.claim_by_lease(c, ranges, 10, TOKEN, OWNER, 1_000))

    assert [type(item.tree[0]) for item in (by_key, *stretches)] == [exp.Update] * 4
    assert by_key.params[-1] == "[4,1]"
    index = f"INDEX([{RANKED.claim_index}])"
    assert all(any(index in given for _, given in hints(item.tree)) for item in stretches)
    for stretch in stretches:
        order = stretch.tree[0].find(exp.Select).args["order"].expressions
        assert [(by.this.name, bool(by.args.get("desc"))) for by in order] == [("priority", True), ("seq", False)]
    assert stretches[0].params[-4:] == (10, 3, 5, 2**63 - 1)
    assert stretches[1].params[-3:] == (10, -(2**63) + 1, 2)


@pytest.mark.parametrize(
    ("verb", "kind"),
    [
        (lambda s, c: s.claims.claim_by_delete(c, [SeqRange(0, MAX_ORDER_KEY)], 5), exp.Delete),
        (lambda s, c: s.claims.claim_by_delete(c, [SeqRange(0, MAX_ORDER_KEY)], 5, whole=True), exp.Delete),
        (lambda s, c: s.claims.peek(c, [SeqRange(7, 7), SeqRange(9, MAX_ORDER_KEY)], [], 5), exp.Select),
        (lambda s, c: s.claims.read_heads(c, SeqRange(9, MAX_ORDER_KEY), 5), exp.Select),
        (lambda s, c: s.claims.read_heads_and_bodies(c, SeqRange(9, MAX_ORDER_KEY), 5), exp.Select),
        (lambda s, c: s.limits.lock_heads(c, [SeqRange(7, 7), SeqRange(9, MAX_ORDER_KEY)], 5, bodies=True), exp.Select),
        (lambda s, c: s.limits.lock_heads(c, [SeqRange(9, MAX_ORDER_KEY)], 5, bodies=False), exp.Select),
        (lambda s, c: s.claims.scan_order_keys(c, 1, 9, order_key(4, 4), 5), exp.Select),
        (lambda s, c: s.inserts.insert_many(c, [Outgoing(new_id(), "{}", b"")._replace(priority=2**62)]), exp.Insert),
    ],
)  # fmt: skip
def test_priority_of_64_bits_is_t_sql(verb: Callable[[Any, Any], Any], kind: type[exp.Expression]) -> None:
    found = sent(RANKED, [], verb)

    assert {type(item.tree[0]) for item in found} == {kind}
    assert "smallint" not in " ".join(statement.sql for statement in found)


def test_a_claim_reads_the_last_seq_and_then_the_first_barrier_and_ends_before_it() -> None:
    last, barrier, claim = sent(
        FENCED,
        [[(0,)], [], [(90,)], [(50,)]],
        lambda s, c: s.claims.claim_by_lease(c, [SeqRange(7)], 10, TOKEN, OWNER, 1_000),
    )[1:]

    assert "DESC" in last.sql
    assert columns(barrier.tree) == {"seq", "is_barrier", "expires"}
    assert claim.params[1:3] == (7, 49)


def test_a_claim_of_who_has_a_barrier_to_take_gets_nothing() -> None:
    (barred,) = sent(FENCED, [[(0,)], [(1,)]], lambda s, c: s.claims.claim_by_delete(c, [SeqRange()], 10, owner=OWNER))

    assert columns(barred.tree) == {"subscriber"}


def test_who_has_a_barrier_to_take_is_not_given_what_was_shared_out_to_him() -> None:
    table = QueueTable.of(FencedInTurns)

    (barred,) = sent(table, [[(0,)], [(1,)]], lambda s, c: s.limits.take_up(c, OWNER, 10, TOKEN, 1_000))
    assert columns(barred.tree) == {"subscriber"}

    *_, look, take = sent(table, [[(0,)], [], [(3,)]], lambda s, c: s.limits.take_up(c, OWNER, 10, TOKEN, 1_000))
    assert [type(item.tree[0]) for item in (look, take)] == [exp.Select, exp.Update]


def test_what_is_locked_to_be_shared_out_ends_before_the_first_barrier() -> None:
    last, barrier, heads = sent(
        QueueTable.of(FencedInTurns),
        [[(0,)], [(90,)], [(50,)]],
        lambda s, c: s.limits.lock_heads(c, [SeqRange(7)], 10, bodies=False),
    )

    assert "DESC" in last.sql
    assert columns(barrier.tree) == {"seq", "is_barrier", "expires"}
    assert heads.params == (10, 7, 49)


@pytest.mark.parametrize("table", [FENCED, QueueTable.of(FencedAddressed)], ids=["plain", "addressed"])
@pytest.mark.parametrize("is_barrier", [False, True])
def test_a_send_takes_its_lock_in_the_transaction_of_its_insert(table: QueueTable, is_barrier: bool) -> None:
    (insert,) = sent(
        table, [], lambda s, c: s.inserts.insert(c, Outgoing(new_id(), "{}", b"")._replace(is_barrier=is_barrier))
    )

    assert type(insert.tree[0]) is exp.Insert
    assert ("'Exclusive'" in insert.sql) is is_barrier


HELD = [(0,)]


@pytest.mark.parametrize(
    ("verb", "answers", "kinds"),
    [
        (lambda s, c: s.inserts.insert_many(c, [Outgoing(new_id(), "{}", b"")]), [HELD], [exp.Insert]),
        (lambda s, c: s.inserts.insert_row(c, Row(0, new_id(), "{}", b"")), [HELD], [exp.Insert]),
        (lambda s, c: s.inserts.insert_rows(c, [Row(0, new_id(), "{}", b"")]), [HELD], [exp.Insert]),
        (lambda s, c: s.inserts.insert_from(c, StoreTable.of(DelayedMessage, "due"), [1, 2]), [[], HELD], [exp.Select, exp.Insert]),  # noqa: E501
        (lambda s, c: s.claims.peek(c, [SeqRange()], [SeqRange(0, 9)], 5), [[(9,)], [], [(9,)], [], [(0, 0, None, None, None)]],  # noqa: E501
         [exp.Select] * 5),
        (lambda s, c: s.claims.read_heads(c, SeqRange(0, 9), 5), [[(9,)]], [exp.Select] * 3),
        (lambda s, c: s.claims.read_heads_and_bodies(c, SeqRange(0, 9), 5), [[(9,)]], [exp.Select] * 3),
        (lambda s, c: s.barriers.first(c), [], [exp.Select]),
        (lambda s, c: s.barriers.lock(c, 5), [HELD], [exp.Select]),
        (lambda s, c: s.barriers.first_seq(c, 1, 5), [], [exp.Select]),
        (lambda s, c: s.barriers.postpone(c, 5, 90_000_000), [], [exp.Update]),
    ],
)  # fmt: skip
def test_barriers_are_t_sql(
    verb: Callable[[Any, Any], Any], answers: list[Any], kinds: list[type[exp.Expression]]
) -> None:
    found = sent(FENCED, answers, verb)

    assert [type(item.tree[0]) for item in found] == kinds


def test_what_a_dead_worker_was_handing_out_at_most_once_is_deleted() -> None:
    _, delete = sent(
        QueueTable.of(FencedAtMostOnce), [[(4,), (5,)]], lambda s, c: s.limits.delete_in_flight(c, OWNER, 100)
    )

    assert type(delete.tree[0]) is exp.Delete


def test_what_is_held_may_be_a_barrier_so_a_claim_ends_before_it() -> None:
    *_, first_held, claim = sent(
        QueueTable.of(FencedByExpression),
        [HELD, [], [(90,)], [], [(40,)]],
        lambda s, c: s.claims.claim_by_lease(c, [SeqRange(7)], 10, TOKEN, OWNER, 1_000),
    )

    assert columns(first_held.tree) == {"seq", "lease_expires", "lease_token"}
    assert claim.params[1:3] == (7, 39)
