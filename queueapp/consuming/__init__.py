"""Consumers: what handles messages, which of them handles what, and what a handler is told beside its message."""
