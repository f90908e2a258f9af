"""How many examples a property test draws."""

import os

EXPLORING = bool(os.environ.get("OCTFM_EXPLORE"))


def examples(most: int) -> int:
    """`most` with OCTFM_EXPLORE=1, which draws them anew; elsewhere a third, but at least ten, always the same."""
    return most if EXPLORING else max(10, most // 3)
