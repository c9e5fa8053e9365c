"""``manage.py runsite``: the site, its admin and its workers, for development, until Ctrl-C."""

from __future__ import annotations

import signal
import socket
from argparse import ArgumentParser
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from time import monotonic, sleep
from typing import Any
from urllib.error import URLError
from urllib.request import urlopen

from django.conf import settings
from django.core.management import call_command
from django.core.management.base import BaseCommand, CommandError
from django.db import connections

from project.child_process import ChildProcess
from project.development_user import ensure_development_user

HOST = "127.0.0.1"
DEFAULT_PORT = 8000
_START_SECONDS = 60.0
_POLL_SECONDS = 0.5
#: The workers let running handlers end (QUEUEAPP["SHUTDOWN_GRACE"]) and wait a little for their children.
_STOP_WORKERS_SECONDS = 40.0
_STOP_WEB_SECONDS = 5.0
_LONGEST_WAIT = 30.0


class Command(BaseCommand):
    """Run the site."""

    help = "Serve the site and the admin, and run the workers, until Ctrl-C. For development."
    requires_system_checks = []

    def add_arguments(self, parser: ArgumentParser) -> None:
        parser.add_argument("--port", type=int, default=DEFAULT_PORT, metavar="N", help="Port (default %(default)s).")
        parser.add_argument("--processes", type=int, default=2, metavar="N",
                            help="Worker processes (default %(default)s).")  # fmt: skip

    def handle(self, *args: Any, **options: Any) -> None:
        if not settings.DEBUG:
            raise CommandError(
                "runsite is for development (DEBUG=1). In production a WSGI or ASGI server serves project.wsgi or "
                "project.asgi, and a service manager runs `manage.py runqueueworker`."
            )
        port = options["port"]
        if not 1 <= port <= 65535:
            raise CommandError(f"--port {port} is not accepted: it must be from 1 to 65535.")
        _refuse_busy_port(port)
        folder = Path(settings.DATA_DIR)
        call_command("migrate", verbosity=0, interactive=False, skip_checks=False)
        user = ensure_development_user(folder)
        connections.close_all()
        log = folder / "web.log"
        log.unlink(missing_ok=True)
        web = ChildProcess("runserver", "--noreload", f"{HOST}:{port}", log=log)
        workers = ChildProcess("runqueueworker", "--processes", str(options["processes"]))
        maintenance = [
            ChildProcess("runcelery", role, log=folder / f"celery-{role}.log") for role in ("worker", "beat")
        ]
        address = f"http://localhost:{port}/"
        with _stopping_on_signals():
            try:
                web.start()
                workers.start()
                for service in maintenance:
                    service.start()
                _wait_until_served(web, port)
                password = f"password {user.password}" if user.password else "with the password you gave it"
                self.stdout.write(
                    f"\n  Site    {address}\n  Admin   {address}admin/   user {user.name}, {password}\n"
                    f"  Requests are logged in {log}. Ctrl-C stops everything.\n\n"
                )
                self._watch(web, workers, *maintenance)
            except KeyboardInterrupt:
                self.stdout.write("\nStopping ...")
            finally:
                # The workers last: a page that is being served may still want to send them something.
                web.stop(_STOP_WEB_SECONDS)
                for service in maintenance:
                    service.ask_to_stop()
                for service in maintenance:
                    service.stop(_STOP_WORKERS_SECONDS)
                workers.stop(_STOP_WORKERS_SECONDS)
        self.stdout.write("Stopped.")

    def _watch(self, web: ChildProcess, workers: ChildProcess, *processes: ChildProcess) -> None:
        """Until Ctrl-C: end when the web server ends, and start workers that end again, ever more slowly; the others as
        well, at each look."""
        wait, started = 1.0, monotonic()
        while True:
            code = web.exit_code(_POLL_SECONDS)
            if code is not None:
                raise CommandError(f"The web server ended with exit code {code}: {web.last_words()}")
            for process in processes:
                if (code := process.exit_code()) is not None:
                    self.stderr.write(
                        f"{' '.join(process.command)} ended with exit code {code}: {process.last_words()}"
                    )
                    sleep(wait)
                    process.start()
            code = workers.exit_code()
            if code is None:
                continue
            wait = 1.0 if monotonic() - started > _LONGEST_WAIT else min(wait * 2, _LONGEST_WAIT)
            self.stderr.write(f"The workers ended with exit code {code}; starting them again in {wait:.0f} s.")
            sleep(wait)
            workers.start()
            started = monotonic()


def _refuse_busy_port(port: int) -> None:
    with socket.socket() as probe:
        # As the server will do it: connections of an earlier one that still linger are no obstacle.
        probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        try:
            probe.bind((HOST, port))
        except PermissionError:
            raise CommandError(
                f"Port {port} is not allowed to this user: choose one above 1023, --port 8001."
            ) from None
        except OSError:
            raise CommandError(
                f"Port {port} is in use. Stop what uses it, or take another one: manage.py runsite --port {port + 1}"
            ) from None


def _wait_until_served(web: ChildProcess, port: int) -> None:
    deadline = monotonic() + _START_SECONDS
    while True:
        code = web.exit_code(0.1)
        if code is not None:
            raise CommandError(f"The web server did not start (exit code {code}): {web.last_words()}")
        try:
            with urlopen(f"http://{HOST}:{port}/healthz", timeout=5):
                return
        except (URLError, TimeoutError, ConnectionError) as error:
            if monotonic() > deadline:
                raise CommandError(f"The web server does not answer: {error}. {web.last_words()}") from error


@contextmanager
def _stopping_on_signals() -> Iterator[None]:
    """Let `kill` and a closed terminal stop everything as Ctrl-C does."""

    def interrupt(*_: Any) -> None:
        raise KeyboardInterrupt

    before = {number: signal.signal(number, interrupt) for number in (signal.SIGTERM, signal.SIGHUP)}
    try:
        yield
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)
