"""Queue statistics for Prometheus, through ``prometheus-client``. Nothing imports this package unless it is used."""
