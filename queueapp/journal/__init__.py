"""The journal: what was published to topics that are kept, to be read again, and to fill queues from."""
