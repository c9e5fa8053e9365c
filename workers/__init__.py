"""The Django app of the long-running processes: workers and the delayed dispatcher."""
