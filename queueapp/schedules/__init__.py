"""Schedules: messages and tasks that are sent at certain times, by cron, at an interval, or once."""
