"""What happens after a failed attempt: retry now, retry later, poison or discard."""
