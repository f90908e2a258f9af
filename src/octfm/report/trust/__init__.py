"""The trust report as a page."""
