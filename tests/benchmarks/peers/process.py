"""One act of one peer in a process of its own: ``python -m tests.benchmarks.peers.process '{"peer": ..., "act":
...}'``.

Prints the seconds that the act says it took.
"""

from __future__ import annotations

import asyncio
import inspect
import json
import sys
from importlib import import_module
from typing import Any


def main(peer: str, act: str, **arguments: Any) -> None:
    """Run ``install`` or ``drain`` of a peer."""
    module = import_module(f"tests.benchmarks.peers.{peer}")
    run = asyncio.run
    if peer == "pgqueuer":
        import uvloop

        run = uvloop.run
    result = getattr(module, act)(**arguments)
    print(run(result) if inspect.iscoroutine(result) else result)


if __name__ == "__main__":
    main(**json.loads(sys.argv[1]))
