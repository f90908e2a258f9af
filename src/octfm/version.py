"""The version of octfm, in a module without imports."""

__version__ = "0.2.0.dev0"
