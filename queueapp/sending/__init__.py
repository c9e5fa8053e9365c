"""Sending: one message or many, in the caller's transaction or on a connection of its own."""
