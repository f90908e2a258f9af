"""Model card and paper draft, from what a run recorded."""
