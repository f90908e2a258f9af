"""Ophthalmic Tomography in DICOM: files, functional groups, geometry, pixels."""
