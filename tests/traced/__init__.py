"""An app whose worker processes are traced by the real SDK, into a file that the test reads."""
