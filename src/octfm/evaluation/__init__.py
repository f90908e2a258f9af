"""What a frozen encoder is worth: embeddings, probes, statistics."""
