"""On which servers a test of this suite runs: as a rule on the private PostgreSQL, which can be stopped and filled up.

A test that does nothing to its server but connect, kill sessions and lose the network is marked ``on_both``, and runs
on the SQL Server of QUEUEAPP_TEST_SQLSERVER_URL too.
"""

from __future__ import annotations

import os

import pytest

SQLSERVER = pytest.param(
    "sqlserver",
    id="sqlserver",
    marks=pytest.mark.skipif(
        not os.environ.get("QUEUEAPP_TEST_SQLSERVER_URL"),
        reason="needs a SQL Server: QUEUEAPP_TEST_SQLSERVER_URL is not set",
    ),
)
on_both = pytest.mark.parametrize("scene", [pytest.param("server", id="postgresql"), SQLSERVER], indirect=True)
#: The same for the tests of a module that share a scene.
shared_on_both = pytest.mark.parametrize(
    "shared_scene", [pytest.param("server", id="postgresql"), SQLSERVER], indirect=True, scope="module"
)
only_on_sqlserver = pytest.mark.parametrize("scene", [SQLSERVER], indirect=True)
