"""Formats of medical imaging that are not of the eye: NIfTI and MetaImage."""
