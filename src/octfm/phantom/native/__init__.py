"""Labelled images of phantom version 4 for training: native B-scans of realistic or random looks, without files."""
