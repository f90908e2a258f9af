"""Uses of an encoder: fine-tuning, segmentation, maps."""
