"""Django database backend: PostgreSQL, on the embedded server (`project.embedded_postgres`)."""
