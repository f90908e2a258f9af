"""The demonstration: a first picture, then pretraining, probe and report; or a question about a user's own scans."""

from octfm.demo.run import run_demo
from octfm.demo.sabotage import run_sabotage

__all__ = ["run_demo", "run_sabotage"]
