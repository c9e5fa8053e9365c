"""Long-running helpers of a process, each one thread: heartbeat, dispatcher, housekeeping, listening."""
