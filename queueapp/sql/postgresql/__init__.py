"""PostgreSQL 14 to 18."""
