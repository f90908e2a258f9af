"""Participants: found from folders and names, replaced by pseudonyms, assigned to splits."""
