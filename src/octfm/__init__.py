"""octfm: the 3D OCT foundation model, built to be trusted."""

__version__ = "0.1.0"
