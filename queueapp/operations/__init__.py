"""What operators see and do: figures, what tables lack, pausing, purging, single messages."""
