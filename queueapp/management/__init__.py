"""Management commands: operating queues from a shell, with ``--json`` where a script reads."""
