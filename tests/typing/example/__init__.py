"""A project that uses queueapp, for type checkers only: nobody imports it."""
