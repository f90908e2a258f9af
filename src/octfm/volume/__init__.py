"""OCT volumes with their geometry, and all preprocessing before a model sees them; without torch."""
