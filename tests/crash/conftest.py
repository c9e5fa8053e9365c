"""One private server for all crash tests, and a fresh database of it for each."""

from __future__ import annotations

import os
from collections.abc import Iterator
from pathlib import Path

import pytest
from pytest_django import DjangoDbBlocker

from .rig.scene import Scene, make_template
from .rig.server import PrivateServer
from .rig.sqlserver import SqlServer
from .rig.two_databases import TwoDatabases


@pytest.fixture(scope="session")
def server() -> Iterator[PrivateServer]:
    with PrivateServer() as private:
        make_template(private)
        yield private


@pytest.fixture(scope="session")
def sqlserver() -> SqlServer:
    """The one that the environment names."""
    return SqlServer(os.environ["QUEUEAPP_TEST_SQLSERVER_URL"])


@pytest.fixture
def scene(request: pytest.FixtureRequest, tmp_path: Path, django_db_blocker: DjangoDbBlocker) -> Iterator[Scene]:
    """A database of the test's own, which is Django's default in this process meanwhile; of a SQL Server as well for a
    test that is marked so (``rig.servers``)."""
    server = request.getfixturevalue(getattr(request, "param", "server"))
    with django_db_blocker.unblock(), Scene(server, tmp_path) as made, made.as_default():
        yield made
        made.print_logs()  # captured by pytest, and shown only when the test has failed


@pytest.fixture(scope="module")
def shared_scene(
    request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory, django_db_blocker: DjangoDbBlocker
) -> Iterator[Scene]:
    """The same for all tests of a module, where they need not have workers of their own."""
    server = request.getfixturevalue(getattr(request, "param", "server"))
    with django_db_blocker.unblock(), Scene(server, tmp_path_factory.mktemp("scene")) as made, made.as_default():
        yield made
        made.print_logs()


@pytest.fixture
def two(scene: Scene, tmp_path: Path) -> Iterator[TwoDatabases]:
    """The same, and a second database of its server, in which the queue of one model lies."""
    made = TwoDatabases(scene, scene.server, tmp_path / "warehouse")
    with made.known():
        yield made
