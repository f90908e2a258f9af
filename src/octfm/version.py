"""The version of octfm, in a module without imports."""

__version__ = "0.1.0"
