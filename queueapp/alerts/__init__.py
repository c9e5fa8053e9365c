"""Alerts: conditions that need an operator, notified once when they begin and once when they are resolved
(``QUEUEAPP["ALERTS"]``)."""
