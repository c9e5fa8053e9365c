"""Formatting of messages on every page: badges and sizes, lease states, and untrusted text."""
