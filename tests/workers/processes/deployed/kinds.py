"""The kinds of messages, without the consumer, which a test's own process does not have."""

MENDED, HALF, BROKEN = "mended", "half", "broken"
#: So many messages of ``HALF`` are handled by version 2.
HANDLED = 8
