"""The model card of a packaged network, in Markdown."""

from octfm.layers.packaged import CURRENT, Packaged
from octfm.models.layer_net import MASKS, SURFACES

INTENDED_USE = """## Intended use

Research use only. It is not a medical device, has no regulatory clearance and no CE mark, and is not for diagnosis,
treatment or monitoring of any person. It was trained on synthetic images only. Show its
results together with its verdict and the B-scans."""

TESTED = """Not tested in children, in high myopia and staphyloma, in the periphery, in eyes filled with oil or gas;
hardly tested on real scans of instruments other than the Spectralis.

Thickness is ILM to the outer edge of the RPE band (BM), as Heidelberg defines it; numbers of other makers are measured
between other boundaries and must not be pooled with it. The spread that the network reports is not calibrated."""


def model_card(network: Packaged) -> str:
    """Markdown: what the network does, what it was trained on, what it is not for, where it was not tested."""
    facts = network.facts
    masks = ", ".join(name.replace("_", " ") for name in network.masks) or "none"
    unlearned = ", ".join(name.replace("_", " ") for name in MASKS if name not in network.masks)
    reported = [
        f"- surfaces: {', '.join(SURFACES)}",
        f"- masks: {masks}",
        *([f"- not learned, so never reported: {unlearned}"] if unlearned else []),
    ]
    return "\n\n".join(
        [
            f"# {network.name}",
            f"{_sentence(network.about)}",
            "\n".join(
                [
                    f"- used by `octfm segment`: {'yes' if network.name == CURRENT else 'no'}",
                    f"- licence: {network.licence}",
                    f"- size: {network.size_bytes / 1e6:.1f} MB",
                    f"- SHA-256: {network.digest}",
                ]
            ),
            INTENDED_USE,
            "## What it reports\n\n" + "\n".join(reported),
            f"## What it was trained on\n\n{_sentence(facts['trained_on'])}",
            f"## How it was made\n\n{_sentence(facts['made'])}",
            f"## Limits\n\n{_sentence(facts['limits'])}\n\n{TESTED}",
        ]
    )


def _sentence(text: str) -> str:
    return f"{text[:1].upper()}{text[1:].rstrip('.')}."
