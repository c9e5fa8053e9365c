"""Connections that may be dead, and databases that may be down."""
