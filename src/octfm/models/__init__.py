"""Networks and objectives: torch only, no files."""
