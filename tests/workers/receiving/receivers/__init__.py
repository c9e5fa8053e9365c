"""One file per strategy and aspect."""
