"""Other queues on PostgreSQL, each as it is fastest, run in a process of its own."""
