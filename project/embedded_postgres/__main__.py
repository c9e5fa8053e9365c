"""`python -m project.embedded_postgres`: look at the embedded server, keep it running, or open psql on it."""

import argparse
import subprocess
import sys

from project.embedded_postgres import EmbeddedPostgresError, ensure_running, find_binaries
from project.embedded_postgres.clients import stop
from project.embedded_postgres.os_account import prepare_home, remove_home
from project.paths import data_directory


def start() -> int:
    prepare_home(data_directory()).keep_running.touch()
    print(ensure_running().url)
    return 0


def stop_unused() -> int:
    if stop():
        print("stopped")
    else:
        print("in use by other processes; it stops with the last of them")
    return 0


def remove() -> int:
    if not stop():
        print("in use by other processes: nothing was removed", file=sys.stderr)
        return 1
    remove_home(data_directory())
    return 0


def status() -> int:
    home = prepare_home(data_directory())
    server = home.ready_server()
    if server is None:
        print(f"not running (data in {home.path})")
        return 3
    print(f"running at {server.url} (data in {home.path}), {'unused' if home.is_unused() else 'in use'}")
    return 0


def url() -> int:
    print(ensure_running().url)
    return 0


def psql(arguments: list[str]) -> int:
    address = ensure_running().url
    # A child, not exec: this process has to stay a user of the server while psql runs.
    return subprocess.run([find_binaries() / "psql", address, *arguments], check=False).returncode


def main() -> int:
    parser = argparse.ArgumentParser(prog="python -m project.embedded_postgres", description=__doc__)
    commands = parser.add_subparsers(dest="command", required=True)
    commands.add_parser("start", help="start it, and keep it running without users until `stop`")
    commands.add_parser("stop", help="stop the server if no process uses it, and wait for its end")
    commands.add_parser("remove", help="delete the database with all its data, if no process uses it")
    commands.add_parser("status", help="say whether it runs; exit code 3 when it does not")
    commands.add_parser("url", help="start it if needed and print the URL of its database")
    commands.add_parser("psql", help="open psql on it; arguments go to psql")
    options, rest = parser.parse_known_args()
    if rest and options.command != "psql":
        parser.error(f"unknown arguments: {' '.join(rest)}")
    try:
        if options.command == "psql":
            return psql(rest)
        return {"start": start, "stop": stop_unused, "remove": remove, "status": status, "url": url}[options.command]()
    except EmbeddedPostgresError as error:
        print(error, file=sys.stderr)
        return 1


if __name__ == "__main__":
    sys.exit(main())
