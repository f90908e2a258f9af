"""Prepared volumes: written once, read by every training step."""
