"""Pretrained encoders: loading, embedding, export, and encoders from other projects."""
