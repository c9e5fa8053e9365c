"""Receiving a queue in a worker process: looking, claiming, handling, ending."""
