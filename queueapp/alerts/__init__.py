"""Alerts: what is worth waking somebody, told once when it begins and once when it is over (``QUEUEAPP["ALERTS"]``)."""
