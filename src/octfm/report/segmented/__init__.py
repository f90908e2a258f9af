"""Pictures and pages of what `octfm segment` found."""
