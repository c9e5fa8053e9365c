"""The guard around the database connections that handlers use."""
