"""A password that the server refuses, over TCP as in production: one line from every command, and the password is not
in it."""

from __future__ import annotations

import pytest

from tests.queueapp.management.processes import manage, only_line

from .rig.scene import Scene

WRONG = "not-the-one"


@pytest.mark.parametrize(
    "command",
    [
        ["runqueueworker", "testapp.Leased"],
        ["rundelayeddispatcher"],
        ["listpoison"],
        ["requeuepoison", "--all"],
        ["pausequeue", "testapp.Leased"],
        ["setconcurrency", "testapp.Leased", "3"],
        ["purgequeue", "testapp.Leased", "--yes"],
    ],
    ids=lambda command: command[0],
)
def test_a_command_states_it_in_one_line(scene: Scene, command: list[str]) -> None:
    url = scene.server.url(scene.name, port=scene.server.port)
    user, _, rest = url.removeprefix("postgresql://").partition(":")
    wrong = f"postgresql://{user}:{WRONG}@{rest.partition('@')[2]}"
    if command == ["listpoison"]:
        assert manage(*command, DATABASE_URL=url).returncode == 0, "the right one is accepted"

    line = only_line(manage(*command, DATABASE_URL=wrong))

    assert f"The database 'default' ({scene.name} on 127.0.0.1" in line
    assert 'password authentication failed for user "postgres"' in line
    assert "check that its server runs, and its address, user and password in DATABASES" in line
    assert WRONG not in line
