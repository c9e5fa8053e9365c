#!/usr/bin/env python
"""Django's command line for this checkout.

Mistakes of the environment (a wrong DATABASE_URL, an unreachable server, a missing permission) are reported as one
line with what to do next and exit code 1; `--traceback` shows where they were raised.
"""

import io
import os
import sys
import threading


def main() -> int:
    os.environ.setdefault("DJANGO_SETTINGS_MODULE", "project.settings")
    from django.core.management import execute_from_command_line

    from project.startup_errors import describe

    def report(error: BaseException | None) -> bool:
        message = None if error is None or "--traceback" in sys.argv else describe(error)
        if message is not None:
            print(f"{sys.argv[0]}: {message}", file=sys.stderr)
        return message is not None

    # `runserver` works in a thread, beside the one that watches the files for changes.
    if sys.argv[1:2] == ["runserver"]:
        threading.excepthook = lambda event: None if report(event.exc_value) else threading.__excepthook__(event)
    # Piped into a file or a service manager, what a long-running command says must arrive when it says it.
    if isinstance(sys.stdout, io.TextIOWrapper):
        sys.stdout.reconfigure(line_buffering=True)
    try:
        execute_from_command_line(sys.argv)
    except Exception as error:
        if not report(error):
            raise
        return 1
    return 0


if __name__ == "__main__":
    sys.exit(main())
