"""Is this run healthy? Measurements, verdicts, and what is done about a bad step."""
