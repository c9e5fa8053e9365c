"""Settings: where handlers run, and what they are given."""

from __future__ import annotations

from datetime import timedelta

from ..options import Option

OPTIONS: tuple[Option, ...] = (
    Option(
        "EAGER",
        str,
        "",
        "Messages are handled by the process that sends them, in the sending thread, without a worker: when their transaction has "
        "committed (at_commit) or at once, within it (at_once). For development and tests "
        "([testing](howto/testing.md#eager-mode)); empty: by workers.",
        accept=("", "at_commit", "at_once").__contains__,
        words="empty, 'at_commit' or 'at_once'",
    ),
    Option(
        "CORRELATE",
        bool,
        True,
        "What a handler sends says in its headers what it came of: `correlation-id` and `related-to` "
        "([context](reference/context.md#what-a-handler-sends)).",
    ),
    Option(
        "HANDLER_CONTEXT_MANAGER",
        str,
        "",
        "Dotted path of a function of the context that returns a context manager; each handler is called within it: the tenant that "
        "a header names, for one ([context](reference/context.md#around-every-handler)). Empty: nothing is.",
    ),
    Option(
        "CANCEL_GRACE",
        timedelta,
        timedelta(seconds=5),
        "A sync handler that was asked to stop (`cancel_running`) and has not ended after so long is interrupted; until then it "
        "sees `context.cancelled`.",
        low=timedelta(0),
        high=timedelta(hours=1),
        seconds=True,
    ),
)
