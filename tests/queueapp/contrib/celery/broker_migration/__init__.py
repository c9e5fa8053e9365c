"""Moving messages between brokers."""
