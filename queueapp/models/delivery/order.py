"""Options of ``class Delivery`` about the order of messages and their recipients."""

from __future__ import annotations

from ...options import Option

OPTIONS: tuple[Option, ...] = (
    Option(
        "priorities",
        int,
        1,
        "Number of priority levels: a message's priority is 0 to priorities - 1, the highest is received first.",
        low=1,
        high=10,
    ),
    Option(
        "priority",
        str,
        None,
        "Field path or expression whose number is a message's priority of 64 bits; the highest is received first.",
        optional=True,
        accept=lambda text: bool(text.strip()),
    ),
    Option(
        "recipients",
        bool,
        False,
        "Each consumer of a message type gets a copy of its own, addressed to it in the recipient column.",
    ),
    Option(
        "barriers",
        bool,
        False,
        "A message sent with is_barrier=True waits for all messages before it, blocks those behind it, and goes to "
        "every "
        "subscriber.",
    ),
    Option(
        "barrier_expression",
        str,
        None,
        "Expression; messages for which it is true are barriers. It implies `barriers`.",
        optional=True,
        accept=lambda text: bool(text.strip()),
    ),
)  # fmt: skip


class OrderOptions:
    """The types of these options."""

    priorities: int
    priority: str | None
    recipients: bool
    barriers: bool
    barrier_expression: str | None
