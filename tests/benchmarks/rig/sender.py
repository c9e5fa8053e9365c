"""A process that sends: for each number read from stdin so many messages, one by one; then it says so.

``python -m tests.benchmarks.rig.sender [silent]``; ``silent``: without wake-ups.
"""

from __future__ import annotations

import json
import os
import sys

SILENT = "silent"
DONE = "done"


def main() -> None:
    """Send until stdin ends."""
    os.environ["DJANGO_SETTINGS_MODULE"] = "tests.benchmarks.settings"
    os.environ["BENCH_QUEUEAPP"] = json.dumps({"NOTIFY": sys.argv[1:] != [SILENT]})
    import django

    django.setup()
    from tests.benchmarks.messages import Nop, make
    from tests.benchmarks.models import Leased

    body = make(Nop, 1)
    for line in sys.stdin:
        for _ in range(int(line)):
            Leased.send(body)
        print(DONE, flush=True)


if __name__ == "__main__":
    main()
