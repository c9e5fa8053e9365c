"""What operators do and see: control of queues and messages, statistics, health, schema and privilege checks."""
