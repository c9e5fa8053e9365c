"""Long-running helpers of a process, each a ``Service``: heartbeat, dispatcher (elected), housekeeping, listening."""
