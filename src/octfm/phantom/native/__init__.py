"""Labelled images of phantom version 4, for training: native B-scans with realistic or randomised looks, streamed
without files."""
