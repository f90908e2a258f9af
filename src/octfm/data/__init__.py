"""Data side: from files to batches; numpy only, never torch."""
