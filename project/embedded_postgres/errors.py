"""How the embedded database fails."""

KILLED = 75  # the exit code that says: nothing is wrong, but the keeper was killed; try again (EX_TEMPFAIL)


class EmbeddedPostgresError(Exception):
    """The embedded PostgreSQL cannot be used; the text is one line that says why and what to do."""
