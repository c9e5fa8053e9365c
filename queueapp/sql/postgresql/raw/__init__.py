"""Code that bypasses psycopg's cursor on the hot path. ``docs/explanation/raw-statements.md`` explains why it exists,
what each part gains, and which behaviour of libpq and psycopg it relies on."""
