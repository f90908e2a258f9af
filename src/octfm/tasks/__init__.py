"""What an encoder is used for: fine-tuning, segmentation, maps."""
