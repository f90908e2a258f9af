"""Voxels with their geometry, and everything done to them before a model sees them; numpy only."""
