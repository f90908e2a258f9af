"""A pretrained encoder: loaded, embedding, exported; and encoders of others."""
