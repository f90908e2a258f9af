"""`python -m octfm` and `torchrun -m octfm`."""

from octfm.cli import main

main()
