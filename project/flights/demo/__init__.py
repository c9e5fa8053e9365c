"""The main job from end to end, as ``manage.py demo`` runs it: a clean start, publishing, handling, the check."""
