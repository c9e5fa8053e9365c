"""What happens after a failed attempt: the recoverability policy and its verdicts, carrying a verdict out, the history
of failures in a message's headers, the poison table, and what is done with messages in it (archive, edit, requeue)."""
