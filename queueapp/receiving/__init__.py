"""Receiving without a worker, and the floors from which every receiver looks."""
