"""Evaluate frozen encoders: probes, metrics and statistics."""
