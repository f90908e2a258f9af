"""Self-supervised objectives: one file each for settings, networks, loss and baseline."""
