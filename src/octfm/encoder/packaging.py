"""Turn a run into the encoder that comes with octfm: an export in octfm/weights, with bfloat16 weights.

    python -m octfm.encoder.packaging RUN [--name encoder-2] [--pool summary]

The bytes are a function of the checkpoint alone, so the same command gives the same files.
"""

import argparse
import shutil
from collections.abc import Sequence
from pathlib import Path

import numpy as np
import torch

from octfm.encoder.encoder import Encoder, encoder_in, load_encoder, opened, participants_in
from octfm.encoder.export import settings_of, tensors_of, write_files
from octfm.errors import Echo, EvaluationError
from octfm.io.location import Location, local_path
from octfm.models.pooling import POOLS, VectorPool
from octfm.phantom import phantom_volume
from octfm.pretraining.initial_weights import NAMED
from octfm.run.checkpoint import parts_of
from octfm.run.checkpoint_files import size_of
from octfm.run.runtime import alone
from octfm.weights.exported import digest
from octfm.weights.packaged import CURRENT_ENCODER, encoders_folder

MOST_BYTES = 25_000_000
"""Largest packaged encoder; larger ones belong on a hub (`octfm export`)."""
COMPARED = 6
"""Number of synthetic scans whose vectors by bfloat16 weights are compared with those by float32."""
LICENCE = "Apache-2.0"
ABOUT = "Vectors of volumes and single B-scans of the macula"
TRAINED_ON = (
    "the truth of streamed phantoms (octfm.phantom.native), synthetic-supervised; no scan of any patient. The "
    "appearance of phantoms was set with published values and with statistics of real development scans: one "
    "Spectralis volume with AMD (MedVisBonn, eyepy), five Spectralis eyes with diabetic macular oedema (Chiu et al. "
    "2015)"
)
LIMITS = (
    "Its vectors are features and no findings: only a probe with labels of your own measures what they are worth for a "
    "question, beside the baselines that octfm embeds with. It has never seen what phantoms do not have: other "
    "diseases, other parts of the eye, artefacts, angiography"
)


def package(
    run: str | Location,
    name: str = CURRENT_ENCODER,
    weights: Path | None = None,
    pool: VectorPool | None = None,
    echo: Echo = print,
) -> Path:
    """Write octfm/weights/NAME, replacing it, from the newest checkpoint of a pretraining run, or from a checkpoint.

    weights: folder to write into, instead of octfm/weights. pool: pooling of its vectors, instead of the run's
    objective.pool. Raises EvaluationError for a fine-tuned model, for a run with recorded participants, and for more
    than MOST_BYTES.
    """
    path, content = opened(run)
    if "encoder_config" in content or content.get("head"):
        raise EvaluationError(f"{run}: fine-tuned; a packaged encoder has no head, name a run of octfm pretrain")
    if any(part["hashes"] for part in parts_of(participants_in(path, content))):
        raise EvaluationError(f"{run}: trained on scans of people; packaged encoders are trained on phantoms only")
    encoder = encoder_in(path, content, alone("fp32", "cpu")).pooling(pool)
    # A path on the machine that trained may name somebody.
    init = encoder.config.model.init
    begun = init if init is None or NAMED.fullmatch(init) else "another run"
    stored = {name: tensor.to(torch.bfloat16) for name, tensor in tensors_of(encoder).items()}
    objective, commit = encoder.config.objective.name, (content.get("git") or {}).get("commit")
    facts = {
        "about": ABOUT,
        "licence": LICENCE,
        "trained_on": TRAINED_ON,
        "made": f"pretrained with objective {objective}: {content['step']:,} steps of "
        f"{encoder.config.data.global_batch_size} phantoms with seed {encoder.config.seed}"
        + (f", begun with {begun}" if begun else "")
        + (f", at commit {commit[:12]}" if commit else "")
        + f"; make encoder POOL={encoder.config.objective.pool}",
        "limits": LIMITS,
        "sha256": digest({name.removeprefix("network."): tensor for name, tensor in stored.items()}),
    }
    folder = (weights or encoders_folder()) / name
    partial = folder.with_name(f".{name}.partial")
    shutil.rmtree(partial, ignore_errors=True)
    try:
        write_files(partial, settings_of(encoder, step=content["step"]) | facts, stored, {"hashes": []})
        if (size := size_of(partial)) > MOST_BYTES:
            raise EvaluationError(
                f"{run}: {size / 1e6:.1f} MB in bfloat16, at most {MOST_BYTES / 1e6:g} MB come with octfm; publish it "
                "with octfm export"
            )
        packed = load_encoder(partial, device="cpu")
        shutil.rmtree(folder, ignore_errors=True)
        partial.rename(folder)
    except BaseException:
        shutil.rmtree(partial, ignore_errors=True)
        raise
    echo(f"{folder}: {size / 1e6:.2f} MB, SHA-256 {packed.digest[:12]}, {facts['made']}")
    echo(_compared(encoder, packed))
    return folder


def _compared(whole: Encoder, packed: Encoder) -> str:
    """How far vectors move by the rounding of weights to bfloat16."""
    a, b = (
        encoder.embed([phantom_volume(seed, size=(16, 128, 96))[0] for seed in range(COMPARED)]).astype(np.float64)
        for encoder in (whole, packed)
    )
    cosine = (a * b).sum(1) / np.linalg.norm(a, axis=1) / np.linalg.norm(b, axis=1)
    moved = np.linalg.norm(a - b, axis=1)
    apart = np.linalg.norm(a[:, None] - a[None], axis=2)[np.triu_indices(COMPARED, 1)]
    return (
        f"bfloat16 weights against float32, {COMPARED} synthetic scans: cosine of their vectors at least "
        f"{cosine.min():.6f}; they move by at most {moved.max() / np.median(apart):.2%} of the "
        "distance between two scans"
    )


def main(words: Sequence[str] | None = None) -> None:
    parser = argparse.ArgumentParser(prog="python -m octfm.encoder.packaging", description=package.__doc__)
    parser.add_argument("run", help="Run of octfm pretrain on phantoms, or one of its checkpoints.")
    parser.add_argument("--name", default=CURRENT_ENCODER, help="Name of the packaged encoder.")
    parser.add_argument("--weights", type=local_path, help="Folder to write into; default: octfm/weights.")
    parser.add_argument("--pool", choices=POOLS, help="Pooling of its vectors; default: the run's objective.pool.")
    given = parser.parse_args(words)
    package(given.run, given.name, given.weights, given.pool)


if __name__ == "__main__":
    main()
