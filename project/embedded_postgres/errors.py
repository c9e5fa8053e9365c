"""The one error of the embedded database."""


class EmbeddedPostgresError(Exception):
    """The embedded PostgreSQL cannot be used; the text is one line that says why and what to do."""
