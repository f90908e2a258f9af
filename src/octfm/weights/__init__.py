"""Weights of the packaged networks, and what each was trained on."""
