"""The journal: the retained messages of journaled topics, for replays and for filling queues."""
