"""The commands that start worker processes."""
