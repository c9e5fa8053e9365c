"""How messages look on every page: badges and sizes, the state of a lease, and what a stranger may have written."""
