"""The deployable site: settings, URLs, the embedded database, and the demo app.

Nothing is imported here: the process that looks after the embedded database starts from this package and has to be
small and quick.
"""
