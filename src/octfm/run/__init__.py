"""What any training needs, whatever it trains: devices, ranks, run folder, loop, checkpoints, metrics."""
