"""Topics: what is published to a name is inserted into every queue that collects it."""
