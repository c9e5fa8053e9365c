"""What was sent and what it did, in two plain tables beside the queues, and the oracle that compares them.

A producer writes ``crash_sent`` in the transaction that sends; a handler writes ``crash_effect`` where it does its
work. The oracle reads these two and the tables of queue, delayed and poison messages, and nothing else: no code of
the engine takes part in its verdict. Rude messages are accounted for separately: what has to become of each is in
``rudeness``, and which one it is in the ledger.
"""

from __future__ import annotations

import json
import os
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any, NamedTuple

from django.db import connections

from .rudeness import RUDENESSES, TAKEN, Fate

QUEUES = {"testapp.Leased": "testapp_leased", "testapp.Transactional": "testapp_transactional",
          "testapp.AtMostOnce": "testapp_atmostonce"}  # fmt: skip
#: Tasks of Celery, which all wait in one table: those that ack when they have ended, and those that ack before they
#: begin.
LATE, EARLY = "celery.late", "celery.early"
CELERY_TABLE, CELERY_QUEUE, CELERY_LABEL = "queueapp_celery_message", "crash", "queueapp_celery.BrokerQueue"
SEMANTICS = {"testapp.Leased": "at_least_once", "testapp.Transactional": "transactional",
             "testapp.AtMostOnce": "at_most_once", LATE: "acks_late", EARLY: "acks_early"}  # fmt: skip

TABLES = f"""
CREATE TABLE crash_sent (
    key text PRIMARY KEY, queue text NOT NULL, how text NOT NULL, sent_at timestamptz DEFAULT clock_timestamp());
CREATE TABLE crash_effect (
    number bigint GENERATED ALWAYS AS IDENTITY PRIMARY KEY, key text NOT NULL, queue text NOT NULL,
    attempt int NOT NULL, worker text NOT NULL, process int NOT NULL, at timestamptz DEFAULT clock_timestamp());
CREATE INDEX ON crash_effect (key);
INSERT INTO auth_group (name) VALUES ('{TAKEN}');
"""
#: ``crash_sent.how`` of a rude message, with its name.
RUDE = "rude: "
#: In the place of a key in the file of starts: a process that a handler is about to kill, as the others of its tree.
VICTIM = "killed"


def sent(alias: str, key: str, queue: str, how: str) -> bool:
    """Note a message that is sent in the same transaction. False: it was sent before, by a hand-out of the same message
    whose ack was lost; a handler that is made for AT_LEAST_ONCE does not send it again."""
    connection = connections[alias]
    with connection.cursor() as cursor:
        cursor.execute(WORDS[connection.vendor].sent, (key, queue, how))
        return bool(cursor.rowcount)


def sent_many(alias: str, keys: Sequence[str], queue: str, how: str) -> None:
    """Note many that are sent in the same transaction."""
    connection = connections[alias]
    words = WORDS[connection.vendor]
    with connection.cursor() as cursor:
        cursor.execute(words.sent_many.replace("{how}", how), [words.list_of(keys), queue])


def some_of(vendor: str, table: str, limit: int) -> str:
    """SELECT of so many rows of a table, which waits for no lock."""
    return WORDS[vendor].first_rows.format(table=table, most=limit)


def sleep(alias: str, seconds: float) -> None:
    """Let the database sleep, so that the connection is busy."""
    connection = connections[alias]
    with connection.cursor() as cursor:
        if connection.vendor == "postgresql":
            cursor.execute("SELECT pg_sleep(%s)", (seconds,))
        else:
            cursor.execute(delay_in_tsql(seconds))


def delay_in_tsql(seconds: float) -> str:
    """WAITFOR, which takes a constant; for less than an hour."""
    minutes, rest = divmod(seconds, 60)
    return f"WAITFOR DELAY '00:{int(minutes):02}:{rest:06.3f}'"


def effect(alias: str, key: str, queue: str, attempt: int) -> None:
    """Leave the effect of a handler."""
    with connections[alias].cursor() as cursor:
        cursor.execute(
            'INSERT INTO crash_effect ("key", queue, attempt, worker, process) VALUES (%s, %s, %s, %s, %s)',
            (key, queue, attempt, os.environ.get("CRASH_NAME", ""), os.getpid()),
        )


# -- the oracle ----------------------------------------------------------------------------------------------------

#: What is due after this is never going to be handled.
FAR_FUTURE = "now() + interval '1 year'"
#: The key in a body, on SQL Server. The bodies of this suite are ASCII, so any code page reads them.
_BODY_IN_TSQL = "CONVERT(varchar(max), body)"
_KEY_IN_TSQL = f"COALESCE(JSON_VALUE({_BODY_IN_TSQL}, '$.key'), JSON_VALUE({_BODY_IN_TSQL}, '$[0][0]'))"


def _here_in_tsql() -> str:
    """``_HERE`` on SQL Server."""
    body, key = _BODY_IN_TSQL, _KEY_IN_TSQL
    kinds = " ".join(
        f"WHEN {condition} THEN '{kind}'"
        for condition, kind in (
            (f"JSON_VALUE({body}, '$.die') <> ''", "poison_pill"),
            (f"JSON_VALUE({body}, '$.rude') <> ''", "rude"),
            (f"CAST(JSON_VALUE({body}, '$.fail') AS int) > 0", "failing"),
        )
    )
    later = f"CASE WHEN due > {'DATEADD(year, 1, SYSUTCDATETIME())'} THEN 'delayed for ever' ELSE 'delayed' END"
    return " UNION ALL ".join(
        [
            *(f"SELECT {key}, '{label}', 'queue' FROM {table}" for label, table in QUEUES.items()),
            f"SELECT {key}, '', 'queue' FROM {CELERY_TABLE} WHERE recipient = '{CELERY_QUEUE}'",
            f"SELECT {key}, destination, {later} FROM queueapp_delayedmessage",
            f"SELECT {key}, queue, 'poison: ' + CASE {kinds} ELSE 'bystander' END FROM queueapp_poisonmessage",
        ]
    )


#: The key in a body: of a task it is the first argument.
KEY = "COALESCE(convert_from(body, 'UTF8')::json->>'key', convert_from(body, 'UTF8')::json->0->>0)"
_HERE = " UNION ALL ".join(f"SELECT {KEY}, '{label}', 'queue' FROM {table}" for label, table in QUEUES.items()) + (
    f" UNION ALL SELECT {KEY}, '', 'queue' FROM {CELERY_TABLE} WHERE recipient = '{CELERY_QUEUE}'"
    f" UNION ALL SELECT {KEY}, destination, "
    f"CASE WHEN due > {FAR_FUTURE} THEN 'delayed for ever' ELSE 'delayed' END FROM queueapp_delayedmessage"
    " UNION ALL SELECT COALESCE(body->>'key', body->0->>0), queue, 'poison: ' || CASE WHEN body->>'die' <> '' THEN "
    "'poison_pill' "
    "WHEN body->>'rude' <> '' THEN 'rude' WHEN (body->>'fail')::int > 0 THEN 'failing' ELSE 'bystander' END "
    "FROM (SELECT queue, convert_from(body, 'UTF8')::json AS body FROM queueapp_poisonmessage) p"
)


class Words(NamedTuple):
    """What the ledger says otherwise on each database."""

    tables: Sequence[str]
    #: Notes what is sent, unless it is noted already.
    sent: str
    #: Notes many, with ``how`` in the text: a list as ``list_of`` makes it, and the queue.
    sent_many: str
    list_of: Callable[[Sequence[str]], Any]
    #: So many rows of a table.
    first_rows: str
    far_future: str
    #: Said where the oracle looks, for one snapshot of all tables: before its transaction, and first in it.
    before: str
    begin: str
    #: The key in a body.
    key: str
    #: (key, queue, place) of everything that is in a table.
    here: str


WORDS = {
    "postgresql": Words(
        tables=[TABLES],
        sent="INSERT INTO crash_sent (key, queue, how) VALUES (%s, %s, %s) ON CONFLICT DO NOTHING",
        sent_many="INSERT INTO crash_sent (key, queue, how) SELECT unnest(%s::text[]), %s, '{how}'",
        list_of=list,
        first_rows="SELECT 1 FROM {table} LIMIT {most}",
        far_future=FAR_FUTURE,
        before="",
        begin="SET TRANSACTION ISOLATION LEVEL REPEATABLE READ, READ ONLY",
        key=KEY,
        here=_HERE,
    ),
    "microsoft": Words(
        tables=[
            "CREATE TABLE crash_sent ([key] nvarchar(200) NOT NULL PRIMARY KEY, queue nvarchar(200) NOT NULL, "
            "how nvarchar(100) NOT NULL, sent_at datetime2 DEFAULT SYSUTCDATETIME())",
            "CREATE TABLE crash_effect (number bigint IDENTITY PRIMARY KEY, [key] nvarchar(200) NOT NULL, "
            "queue nvarchar(200) NOT NULL, attempt int NOT NULL, worker nvarchar(100) NOT NULL, process int NOT NULL, "
            "at datetime2 DEFAULT SYSUTCDATETIME())",
            "CREATE INDEX crash_effect_key ON crash_effect ([key])",
            f"INSERT INTO auth_group (name) VALUES (N'{TAKEN}')",
        ],
        sent="INSERT INTO crash_sent ([key], queue, how) SELECT n.k, n.q, n.h FROM (VALUES (%s, %s, %s)) AS n(k, q, h) "
        "WHERE NOT EXISTS (SELECT 1 FROM crash_sent AS s WITH (FORCESEEK, UPDLOCK) WHERE s.[key] = n.k)",
        sent_many="INSERT INTO crash_sent ([key], queue, how) SELECT k.[value], n.q, '{how}' "
        "FROM OPENJSON(%s) AS k CROSS JOIN (VALUES (%s)) AS n(q)",
        list_of=json.dumps,
        # What an open transaction has changed is passed by, whether or not the database keeps row versions for every
        # reader.
        first_rows="SELECT TOP ({most}) 1 AS n FROM {table} WITH (READPAST, ROWLOCK, READCOMMITTEDLOCK)",
        far_future="DATEADD(year, 1, SYSUTCDATETIME())",
        # A transaction that has begun otherwise cannot become one.
        before="SET TRANSACTION ISOLATION LEVEL SNAPSHOT",
        begin="",
        key=_KEY_IN_TSQL,
        here=_here_in_tsql(),
    ),
}


@dataclass
class Verdict:
    """What became of everything that was sent; ``faultless`` says whether every promise was kept."""

    sent: int = 0
    effects: int = 0
    #: Sent, and neither in effect nor in any table. AT_MOST_ONCE messages are not lost but gone, by contract.
    lost: list[str] = field(default_factory=list)
    at_most_once_gone: list[str] = field(default_factory=list)
    #: The same of tasks that ack before they begin.
    early_gone: list[str] = field(default_factory=list)
    #: Tasks of Celery: sent, and with an effect.
    celery: dict[str, int] = field(default_factory=lambda: {"sent": 0, "effects": 0})
    #: Effects beyond the first, by semantics, and the keys that have them.
    duplicates: dict[str, int] = field(default_factory=dict)
    duplicate_keys: dict[str, list[str]] = field(default_factory=dict)
    poisoned: int = 0
    #: Messages that kill, that are rude, that fail, of AT_MOST_ONCE queues, and bystanders that did nothing wrong.
    poisoned_by_kind: dict[str, int] = field(default_factory=dict)
    #: Poison that no message has earned by itself: a fault must have interrupted an attempt.
    poison_to_explain: list[str] = field(default_factory=list)
    #: What became of the rude ones, by name: how many are poison, handled, waiting, gone.
    rude: dict[str, dict[str, int]] = field(default_factory=dict)
    #: Rude ones that came to another end than they had to.
    rude_wrong: list[str] = field(default_factory=list)
    #: Rude AT_MOST_ONCE messages with an effect that are not poison: a fault must have come between the two.
    rude_to_explain: list[str] = field(default_factory=list)
    #: Still in a queue, or in the delayed store.
    waiting: int = 0
    #: In two tables at once, or an effect of a TRANSACTIONAL message that is also in a table.
    in_two_places: list[str] = field(default_factory=list)
    #: Tasks that were handed out twice and failed both times, so that poison has them twice: to be explained as two
    #: effects are.
    kept_twice: list[str] = field(default_factory=list)
    #: An effect, or a message, whose sender was rolled back.
    ghosts: list[str] = field(default_factory=list)

    @property
    def faultless(self) -> bool:
        """Whether nothing happened that must never happen."""
        return not (
            self.lost
            or self.in_two_places
            or self.ghosts
            or self.rude_wrong
            or self.duplicates["transactional"]
            or self.duplicates["at_most_once"]
        )

    @property
    def handled(self) -> int:
        """Messages with an effect. AT_LEAST_ONCE promises one effect at least: after an outage a message may have
        two."""
        return self.effects - self.duplicates["at_least_once"]

    def __str__(self) -> str:
        named = {"lost": self.lost, "in two places": self.in_two_places, "ghosts": self.ghosts,
                 "rude and wrong": self.rude_wrong}  # fmt: skip
        return "; ".join(
            [f"{self.sent} sent, {self.effects} effects, {self.poisoned} poison, {self.waiting} waiting"]
            + [f"duplicates {self.duplicates}", f"at most once gone: {len(self.at_most_once_gone)}"]
            + [f"{name}: {len(keys)} {keys[:5]}" for name, keys in named.items() if keys]
        )


def judge(*databases: Any) -> Verdict:
    """Compare ledger, effects and tables, in one snapshot; several databases are one ledger, looked at one after the
    other."""
    sent_rows: list[Any] = []
    effects: Counter[str] = Counter()
    here: list[Any] = []
    vendor = "postgresql"
    for connection in databases:
        vendor = getattr(connection, "vendor", vendor)
        words = WORDS[vendor]
        if words.before:
            connection.execute(words.before)
        with connection.transaction():
            if words.begin:
                connection.execute(words.begin)
            sent_rows += connection.execute('SELECT "key", queue, how FROM crash_sent').fetchall()
            effects.update(key for (key,) in connection.execute('SELECT "key" FROM crash_effect').fetchall())
            here += connection.execute(words.here).fetchall()
    places: dict[str, list[str]] = {}
    for key, _, place in here:
        places.setdefault(key, []).append(place)
    verdict = Verdict(sent=len(sent_rows), effects=sum(effects.values()))
    verdict.duplicates = dict.fromkeys(SEMANTICS.values(), 0)
    verdict.duplicate_keys = {name: [] for name in SEMANTICS.values()}
    poisoned: Counter[str] = Counter()
    known = set()
    for key, queue, how in sent_rows:
        known.add(key)
        semantics, count, at = SEMANTICS[queue], effects.get(key, 0), places.get(key, [])
        rude = RUDENESSES[how.removeprefix(RUDE)].fate(semantics, vendor) if how.startswith(RUDE) else None
        fate = Fate.HANDLED if rude is None else rude
        if rude is not None:
            _judge_rude(verdict, key, how, semantics, rude, count, at)
        if queue in (LATE, EARLY):
            verdict.celery["sent"] += 1
            verdict.celery["effects"] += bool(count)
        if not count and not at:
            gone = {"at_most_once": verdict.at_most_once_gone, "acks_early": verdict.early_gone}
            gone.get(semantics, verdict.lost).append(key)
        # A leased one that has to fail leaves an effect in each attempt.
        if count > 1 and (fate is Fate.HANDLED or semantics != "at_least_once"):
            verdict.duplicates[semantics] += count - 1
            verdict.duplicate_keys[semantics].append(key)
        if len(at) > 1 and queue in (LATE, EARLY) and all(place.startswith("poison") for place in at):
            verdict.kept_twice.append(key)
        elif len(at) > 1 or (at and count and semantics == "transactional"):
            verdict.in_two_places.append(key)
        if at and at[0].startswith("poison"):
            kind = at[0].removeprefix("poison: ")
            # An AT_MOST_ONCE message is poison after its first failure, whatever it was.
            poisoned["at_most_once" if semantics == "at_most_once" and kind != "rude" else kind] += 1
            if kind != "poison_pill" and fate is Fate.HANDLED:
                verdict.poison_to_explain.append(key)
        elif at:
            verdict.waiting += 1
    verdict.ghosts = [key for key in {*effects, *places} if key not in known]
    verdict.poisoned, verdict.poisoned_by_kind = sum(poisoned.values()), dict(poisoned)
    return verdict


def _judge_rude(verdict: Verdict, key: str, how: str, semantics: str, fate: Fate, count: int, at: list[str]) -> None:
    """Account for one rude message, of which this has to become."""
    name = how.removeprefix(RUDE)
    if at:
        became = "poison" if at[0].startswith("poison") else at[0] if at[0] == "delayed for ever" else "waiting"
    else:
        became = "handled" if count else "gone"
    tally = verdict.rude.setdefault(name, {})
    tally[became] = tally.get(became, 0) + 1
    handled_after_all = became == "handled" and fate is Fate.POISON
    if handled_after_all and semantics == "at_most_once":
        verdict.rude_to_explain.append(key)
    elif handled_after_all or became == "delayed for ever":
        verdict.rude_wrong.append(f"{key} ({name}, {semantics}, {became})")
