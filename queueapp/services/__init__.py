"""The long-running parts that every receiving process has, a worker's or Celery's: heartbeat, listener, dispatcher,
maintenance.

Each is a ``Service``. Nothing in this package needs the process tree or a receiver.
"""
