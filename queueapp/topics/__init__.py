"""Topics: a message published to a topic is inserted into every queue that collects it."""
