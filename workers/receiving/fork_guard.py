"""A handler that forks, or a hook, a policy, a receiver of a signal: in the child its end is the end of the process, as it is for
a script.

The child has a copy of the task's thread and the parent's database session. ``sys.exit()`` there, an exception or the end of
such code would come back to the engine, which would end the message on the parent's session and then go on as a second
worker that nobody knows.
"""

from __future__ import annotations

import contextlib
import os
import sys
import traceback
from typing import NoReturn

#: How many forks this process is away from its first ancestor that imported this.
generation = 0


def _is_a_child() -> None:
    global generation
    generation += 1


os.register_at_fork(after_in_child=_is_a_child)


def end_child(failed: BaseException | None) -> NoReturn:
    """End this process as Python would have, but for what belongs to the parent: nothing of that is closed or told."""
    code: object = 0
    if isinstance(failed, SystemExit):
        code = 0 if failed.code is None else failed.code
    elif failed is not None:
        code = 1
        traceback.print_exception(failed)
    with contextlib.suppress(Exception):
        if not isinstance(code, int):
            sys.stderr.write(f"{code}\n")
        sys.stdout.flush()
        sys.stderr.flush()
    os._exit(code & 0xFF if isinstance(code, int) else 1)
