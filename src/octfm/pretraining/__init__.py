"""Self-supervised pretraining: the algorithm, its settings, checks before step 0 and monitors while it runs."""
