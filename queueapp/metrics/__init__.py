"""The figures of queues as Prometheus reads them, by ``prometheus-client``; nothing here is imported unless somebody asks."""
