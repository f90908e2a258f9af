"""The parts that every training needs: devices, ranks, run folder, loop, checkpoints, metrics."""
