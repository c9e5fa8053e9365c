"""A worker whose database user lacks a right: no retry mends that, so it is said once with the statement that does."""

from __future__ import annotations

import re
import uuid
from collections.abc import Callable, Iterator
from typing import Any, NamedTuple
from urllib.parse import urlsplit

import pytest
from django.core.management import call_command
from django.core.management.base import CommandError
from django.db import connection

from queueapp.models import NO_QUEUES, Subscriber
from queueapp.operations.privileges import missing_privileges, remedy_of
from queueapp.sql import backend_of
from tests.databases import url_of_database
from tests.in_process_worker import eventually
from tests.queueapp.test_privileges import acting_as, grants
from tests.testapp.messages import Ping
from tests.testapp.models import Effect, Leased
from tests.workers.trees import Tree
from workers.processes.supervisor import REFUSED
from workers.processes.until_empty import remaining

Start = Callable[..., Tree]
PASSWORD = "Only-4-tests"
#: How a role that may only log in is made, and removed.
LOGINS = {
    "postgresql": (
        f"CREATE ROLE \"{{0}}\" LOGIN PASSWORD '{PASSWORD}'", 'DROP OWNED BY "{0}"; DROP ROLE "{0}"'
    ),
    "microsoft": (
        f"CREATE LOGIN [{{0}}] WITH PASSWORD = '{PASSWORD}'; CREATE USER [{{0}}] FOR LOGIN [{{0}}]",
        "DROP USER [{0}]; DROP LOGIN [{0}]",
    ),
}  # fmt: skip


class User(NamedTuple):
    """A user of the database, and the URL that it connects with."""

    name: str
    url: str


def run(text: str) -> None:
    with connection.cursor() as cursor:
        for statement in filter(None, text.split(";")):
            cursor.execute(statement)


@pytest.fixture
def user(transactional_db: Any) -> Iterator[User]:
    name = f"worker_{uuid.uuid4().hex[:12]}"
    make, drop = (text.format(name) for text in LOGINS[connection.vendor])
    given = urlsplit(url_of_database())
    place = given.netloc.rpartition("@")[2]
    query = re.sub(r"(^|&)password=[^&]*", "", given.query)
    url = f"{given.scheme}://{name}:{PASSWORD}@{place}{given.path}?{query}"
    run(make)
    yield User(name, url)
    run(drop)


@pytest.fixture
def child_environment(child_environment: dict[str, str], user: User) -> dict[str, str]:
    return child_environment | {"DATABASE_URL": user.url}


def grants_in(output: str) -> list[str]:
    return re.findall(r"GRANT [^;]+;", output)


def test_a_worker_that_may_not_receive_ends_and_prints_the_remedy(start_tree: Start, user: User) -> None:
    Leased.send(Ping("kept"))

    refused = start_tree("testapp.Leased", "--until-empty")

    assert refused.wait() == REFUSED == 4
    (line,) = refused.output.strip().splitlines()
    assert line.startswith("CommandError: The queues cannot be received: the database user may not SELECT, ")
    assert f"in table {Leased._meta.db_table} of 'default'" in line
    run("".join(grants_in(line)))
    run(
        f"GRANT SELECT, INSERT ON {Effect._meta.db_table} TO {connection.ops.quote_name(user.name)}"
    )  # the handler's own
    mended = start_tree("testapp.Leased", "--until-empty", "--no-dispatcher", "--no-maintenance")
    assert mended.wait() == 0, mended.output
    assert Effect.objects.exists()
    assert "Warning" not in mended.output


def test_a_revoked_privilege_is_logged_once_and_seen_by_operators(start_tree: Start, user: User) -> None:
    quoted = connection.ops.quote_name(user.name)
    run(f"GRANT SELECT, INSERT ON {connection.ops.quote_name(Effect._meta.db_table)} TO {quoted}")
    run("".join(re.sub(r" TO \S+;", f" TO {quoted};", grant) for grant in grants("worker")))
    tree = start_tree("testapp.Leased", "--no-dispatcher", "--no-maintenance")
    tree.wait_for_workers()
    right = f"UPDATE ON {connection.ops.quote_name(Leased._meta.db_table)}"

    run(f"REVOKE {right} FROM {quoted}")
    Leased.send(Ping("late"))
    trouble = Subscriber.objects.exclude(queue__in=NO_QUEUES).values_list("breakers", flat=True)
    reported = eventually(lambda: next((text for text in trouble.all() if "open" in text), None))

    assert "Receive from testapp.Leased" in reported
    assert f"GRANT {right} TO " in reported.replace('\\"', '"'), "queuestats and the overview show it"
    assert tree.output.count("Receive from testapp.Leased is refused, and no retry repairs that") == 1
    assert tree.terminate() == 0


@pytest.mark.django_db(transaction=True)
def test_work_until_empty_has_no_end_without_rights_so_it_is_given_up() -> None:
    Leased.send(Ping("kept"))
    with acting_as("inspector"):
        rest = remaining([Leased], runs_maintenance=True)
    assert (rest.hopeless, rest.refused) == (True, True)
    assert f"the database user may not UPDATE, DELETE in table {Leased._meta.db_table}" in rest.words.replace(
        "INSERT, ", ""
    )
    assert grants_in(rest.words)
    with acting_as("worker"):
        assert remaining([Leased], runs_maintenance=True) == ("testapp.Leased: 1 ready", False, False)


@pytest.mark.django_db(transaction=True)
def test_a_worker_lacks_nothing_with_the_documented_grants() -> None:
    with acting_as("worker"):
        assert missing_privileges("default", [Leased]) == []


@pytest.mark.django_db(transaction=True)
def test_error_for_a_read_only_user_names_the_setting_to_change() -> None:
    if connection.vendor != "postgresql":
        pytest.skip("PostgreSQL has it per user; a SQL Server's database would be read-only for all other tests")
    run("SET default_transaction_read_only = on")
    try:
        with pytest.raises(CommandError, match=r"ALTER ROLE .* SET default_transaction_read_only = off") as raised:
            call_command("runqueueworker", "testapp.Leased")
        assert raised.value.returncode == REFUSED
    finally:
        connection.close()


@pytest.mark.django_db
def test_only_a_missing_privilege_is_reported_as_one() -> None:
    backend = backend_of(connection)
    assert backend.schema.missing_privileges(connection, Leased._meta.db_table, ["SELECT", "DELETE"]) == []
    assert remedy_of(ValueError("permission denied")) is None
