"""Consumers: declaring and finding them, and the context that a handler gets beside its message."""
