"""Layers of any scan, found by a network that was trained on phantoms alone."""
