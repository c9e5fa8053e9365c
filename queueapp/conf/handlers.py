"""Settings of where handlers run, and in which context."""

from __future__ import annotations

from datetime import timedelta

from ..options import Option

OPTIONS: tuple[Option, ...] = (
    Option(
        "EAGER",
        str,
        "",
        "Handle messages in the thread that sends them, without a worker: after its transaction has committed "
        "(at_commit), or "
        "at once within it (at_once). For development and tests "
        "([testing](howto/testing.md#eager-mode)); empty: workers handle them.",
        accept=("", "at_commit", "at_once").__contains__,
        words="empty, 'at_commit' or 'at_once'",
    ),
    Option(
        "CORRELATE",
        bool,
        True,
        "Messages that a handler sends get the headers `correlation-id` and `related-to` of the message it handles "
        "([context](reference/context.md#what-a-handler-sends)).",
    ),
    Option(
        "HANDLER_CONTEXT_MANAGER",
        str,
        "",
        "Dotted path of a function of the context that returns a context manager, in which each handler is called, for "
        "example to "
        "select the tenant that a header names ([context](reference/context.md#around-every-handler)). Empty: none.",
    ),
    Option(
        "CANCEL_GRACE",
        timedelta,
        timedelta(seconds=5),
        "A sync handler that was asked to stop (`cancel_running`) is interrupted after this time; until then it can "
        "read "
        "`context.cancelled`.",
        low=timedelta(0),
        high=timedelta(hours=1),
        seconds=True,
    ),
)
