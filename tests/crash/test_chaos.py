"""The seeded run, short: the same program that `make chaos` runs for half an hour."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

from tests import odbc

from .chaos import narrowed, server_of
from .rig.processes import CHECKOUT
from .rig.schedule import FAULTS, KILLS, schedule
from .rig.server import PrivateServer
from .rig.servers import SQLSERVER
from .rig.sqlserver import SqlServer
from .workload.rudeness import RUDENESSES, Fate

NOWHERE = "mssql://sa:p%40ss@127.0.0.1:1/queueapp?TrustServerCertificate=yes"
#: Runs that were made with a seed can be made again.
FIRST_OF_SEED_5 = [
    (3.0, "backend", 0.742), (7.46, "poison_pill", 0.029), (11.555, "cut", 0.113), (15.231, "backend", 0.013),
]  # fmt: skip


@pytest.mark.timeout(400)
@pytest.mark.parametrize("server", [pytest.param("private", id="postgresql"), SQLSERVER])
def test_a_short_chaos_run_keeps_every_promise(tmp_path: Path, server: str) -> None:
    command = [
        sys.executable,
        "-m",
        "tests.crash.chaos",
        "--duration",
        "16",
        "--seed",
        "3454",  # one that kills a child and the main process of Celery's worker, among others
        "--keep-logs",
        str(tmp_path),
        # The other one is named by the environment.
        *(["--server", server] if server == "private" else []),
    ]
    done = subprocess.run(command, cwd=CHECKOUT, capture_output=True, text=True, timeout=380)

    assert done.stdout, done.stderr
    report = json.loads(done.stdout.splitlines()[-1])
    assert report["kept"], (report, done.stderr)
    assert done.returncode == 0
    assert report["lost"] == report["ghosts"] == report["in_two_places"] == report["waiting"] == 0
    assert report["duplicates"]["transactional"] == report["duplicates"]["at_most_once"] == 0
    assert report["unexplained_duplicates"] == 0
    assert report["kills"]["total"] >= 1
    assert report["sent"] > 100
    assert report["effects"] > 100
    assert report["celery"]["effects"] > 50
    assert report["kills"]["celery"] >= 2
    private = server == "private"
    assert report["server"] == ("postgresql" if private else "microsoft")
    assert set(report["left_out"]) == (set() if private else {"server", "discard-all", "infinite-expiry"})


def test_a_seed_makes_the_same_schedule_again_and_half_an_hour_has_more_than_two_hundred_kills() -> None:
    once, again = schedule(7, 1800), schedule(7, 1800)
    assert once == again
    assert once != schedule(8, 1800)
    assert {fault.kind for fault in once} == set(FAULTS)
    assert sum(fault.kind in KILLS for fault in once) > 250


def test_a_strike_that_is_left_out_leaves_the_others_of_a_seed_as_they_are() -> None:
    server = SqlServer(NOWHERE)
    faults, left_out = narrowed(server, [*FAULTS])
    assert [*left_out] == ["server"]
    assert "must not be stopped" in left_out["server"]
    assert schedule(7, 600, faults) == [fault for fault in schedule(7, 600) if fault.kind != "server"]
    assert narrowed(server, ["cut"]) == (["cut"], {}), "faults that were not chosen are not left out"


def test_on_its_own_postgresql_nothing_is_left_out_and_a_seed_is_what_it_was() -> None:
    assert narrowed(PrivateServer, [*FAULTS, *RUDENESSES]) == ([*FAULTS, *RUDENESSES], {})
    first = [(round(fault.at, 3), fault.kind, round(fault.victim, 3)) for fault in schedule(5, 20)]
    assert first == FIRST_OF_SEED_5


def test_each_rudeness_that_sqlserver_does_not_know_gives_the_reason_and_one_may_end_otherwise_there() -> None:
    rude, left_out = narrowed(SqlServer(NOWHERE), [*RUDENESSES])
    assert set(left_out) == {"discard-all", "infinite-expiry"}
    assert all(left_out.values())
    elsewhere = {
        name: RUDENESSES[name].fate("transactional", "microsoft")
        for name in rude
        if RUDENESSES[name].fate("transactional", "microsoft") != RUDENESSES[name].fate("transactional", "postgresql")
    }
    assert elsewhere == {"swallowed-sql": Fate.HANDLED}, "there one statement has failed, and the transaction goes on"


def test_the_server_is_a_private_one_or_a_sqlserver_and_an_error_keeps_the_password() -> None:
    assert server_of("private") is server_of("") is PrivateServer
    there = server_of(NOWHERE)
    assert isinstance(there, SqlServer)
    assert (there.host, there.port) == ("127.0.0.1", 1)
    for url in ("postgresql://user:secret@db/name", "mssql://user:secret@db", "mysql://user:secret@db/name"):
        with pytest.raises(ValueError) as refused:
            server_of(url)
        assert "secret" not in str(refused.value)


def chaos(*arguments: str, **environ: str) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, "-m", "tests.crash.chaos", *arguments]
    unnamed = {name: value for name, value in os.environ.items() if name != "QUEUEAPP_TEST_SQLSERVER_URL"}
    return subprocess.run(command, cwd=CHECKOUT, env=unnamed | environ, capture_output=True, text=True, timeout=120)


def test_the_environment_names_the_server_and_an_argument_goes_before_it() -> None:
    arguments = ("--print-schedule", "--duration", "60", "--seed", "5")
    there = chaos(*arguments, QUEUEAPP_TEST_SQLSERVER_URL=NOWHERE)
    here = chaos(*arguments, "--server", "private", QUEUEAPP_TEST_SQLSERVER_URL=NOWHERE)
    assert here.stdout == chaos(*arguments).stdout
    assert here.stderr == ""
    assert there.stdout.splitlines() == [line for line in here.stdout.splitlines() if " server " not in line]
    assert "left out: server (" in there.stderr


def test_a_server_that_is_not_there_is_named_in_one_line() -> None:
    odbc.required()
    done = chaos("--duration", "5", "--server", NOWHERE)
    assert done.returncode == 1
    assert done.stderr.splitlines()[-1].startswith("127.0.0.1:1 cannot be used: ")
    assert "Traceback" not in done.stderr
    assert "p@ss" not in done.stderr
