"""Receiving without a worker, and the low-water marks at which every claim begins."""
