#!/usr/bin/env python
"""Django's command line for this checkout.

Mistakes of the environment (a wrong DATABASE_URL, an unreachable server, a missing permission) are reported as one
line with what to do next and exit code 1; `--traceback` shows where they were raised.
"""

import os
import sys


def main() -> int:
    os.environ.setdefault("DJANGO_SETTINGS_MODULE", "project.settings")
    from django.core.management import execute_from_command_line

    from project.environment_errors import describe

    try:
        execute_from_command_line(sys.argv)
    except Exception as error:
        message = None if "--traceback" in sys.argv else describe(error)
        if message is None:
            raise
        print(f"{sys.argv[0]}: {message}", file=sys.stderr)
        return 1
    return 0


if __name__ == "__main__":
    sys.exit(main())
