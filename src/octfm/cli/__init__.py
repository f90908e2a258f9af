"""The octfm command: one file per family of verbs."""
