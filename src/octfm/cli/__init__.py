"""The octfm command: one file per family of verbs."""

import sys


def run() -> None:
    """The command line (`octfm.cli.main.main`), whose imports take a moment in which Ctrl-C may come already."""
    try:
        from octfm.cli.main import main
    except KeyboardInterrupt:
        sys.stderr.write("octfm: interrupted before it began\n")
        sys.exit(130)
    main()
