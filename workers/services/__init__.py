"""Long-running parts of a worker process that need its receivers: heartbeat, lease renewal, cancellation."""
