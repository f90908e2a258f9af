"""The model card of a packaged network or encoder, in Markdown."""

from octfm.display import times
from octfm.models.layer_net import MASKS, SURFACES
from octfm.weights.packaged import Packaged

INTENDED_USE = """## Intended use

Research use only. It is not a medical device, has no regulatory clearance and no CE mark, and is not for diagnosis,
treatment or monitoring of any person. It was trained on synthetic images only."""

SHOWN = "Show its results together with its verdict and the B-scans."

TESTED = """Not tested in children, in high myopia and staphyloma, in the periphery, in eyes filled
with oil or gas; hardly tested on real scans of other instruments.

Thickness is ILM to the outer edge of the RPE band (BM), as Heidelberg defines it; numbers of other makers are measured
between other boundaries and must not be pooled with it. The spread that the network reports is not calibrated."""


MEASURED = {
    "layers-2": """Mean absolute error on one real eye with AMD, 70 B-scans: RPE 4.88 µm, Bruch's membrane 3.94 µm; in
the first half of the same volume 6.2 µm and 3.8 µm. Fluid of five real eyes with diabetic oedema: Dice .57 and .53 with
two graders, who agree with each other at .71; in one eye none is found. These six eyes, all scanned by a Spectralis,
were also used to tune the appearance of the phantoms. All results:
docs/results.md of the repository.""",
    "encoder-2": """AUROC of frozen vectors, linear readout.

| | `encoder-2` | tissue map | untrained |
|---|---|---|---|
| 4,200 phantom participants, healthy or ill | .872 | .852 | .610 |
| the same, seven diagnoses | .898 | .857 | .651 |
| 946 real Cirrus B-scans of 47 patient groups, four classes | .825 | .674 | .633 |

On these B-scans thickness and fluid as measured by `layers-2` reach .892, and vectors add nothing to them.""",
}
"""Measured results by name of the network, from docs/results.md."""


def model_card(network: Packaged) -> str:
    """Markdown: what the network does, what it was trained on, what it is not for, where it was not tested."""
    facts = network.facts
    verb = "load_encoder()" if network.is_encoder else "octfm segment"
    specific = _of_encoder(network) if network.is_encoder else _of_finder(network)
    return "\n\n".join(
        [
            f"# {network.name}",
            f"{_sentence(network.about)}",
            "\n".join(
                [
                    f"- used by `{verb}`: {'yes' if network.current else 'no'}",
                    f"- licence: {network.licence}",
                    f"- size: {network.size_bytes / 1e6:.1f} MB",
                    f"- SHA-256: {network.digest}",
                ]
            ),
            INTENDED_USE,
            specific,
            *([f"## What was measured\n\n{MEASURED[network.name]}"] if network.name in MEASURED else []),
            f"## What it was trained on\n\n{_sentence(facts['trained_on'])}",
            f"## How it was made\n\n{_sentence(facts['made'])}",
            f"## Limits\n\n{_sentence(facts['limits'])}" + ("" if network.is_encoder else f"\n\n{TESTED}"),
        ]
    )


def _of_finder(network: Packaged) -> str:
    masks = ", ".join(name.replace("_", " ") for name in network.masks) or "none"
    unlearned = ", ".join(name.replace("_", " ") for name in MASKS if name not in network.masks)
    reported = [
        f"- surfaces: {', '.join(SURFACES)}",
        f"- masks: {masks}",
        *([f"- not learned, so never reported: {unlearned}"] if unlearned else []),
    ]
    return f"{SHOWN}\n\n## What it reports\n\n" + "\n".join(reported)


def _of_encoder(network: Packaged) -> str:
    facts, model = network.facts, network.facts["settings"]["model"]
    prepared = facts["preprocessing"]
    mm = " × ".join(f"{side:g}" for side in prepared["target_spacing"])
    return f"""## What it takes and gives

- input: {times(prepared["image_size"])} voxels of {mm} mm (B-scans, depth, A-scans); any scan that octfm reads is \
resampled to it
- tokens: patches of {times(model["patch_size"])} voxels, a grid of {times(facts["token_grid"])}
- network: vision transformer of {model["depth"]} blocks × {model["width"]} channels, \
{facts["parameters"] / 1e6:.2g} M parameters, stored in bfloat16, computed in float32
- vector: {facts["embedding_width"]} numbers
- all results: docs/results.md of the repository

```python
encoder = octfm.load_encoder("{network.name}")
vector = encoder.embed("scan.dcm")
```"""


def _sentence(text: str) -> str:
    return f"{text[:1].upper()}{text[1:].rstrip('.')}."
