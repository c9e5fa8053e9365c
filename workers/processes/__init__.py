"""The process tree: a supervisor and its children, what they share, and what is done when one dies."""
