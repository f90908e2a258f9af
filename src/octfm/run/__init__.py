"""What any training needs, whatever it trains: devices, ranks, checkpoints, run folder, metrics."""
