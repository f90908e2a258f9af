"""Whose eye is it: from folders, behind a pseudonym, in which split."""
