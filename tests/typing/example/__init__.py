"""A project that uses queueapp, for type checkers only: no test imports it."""
