"""One scan of a cohort's eye as version 4 draws it; volume and truth have the form of version 3."""

from dataclasses import replace

import numpy as np

from octfm.phantom.eye import Eye
from octfm.phantom.native.bscans import SURFACES, Shot, render_native, sample_placement
from octfm.phantom.native.look import sample_look
from octfm.phantom.native.outer_retina import sample_outer_lesions
from octfm.phantom.render import GroundTruth, truth_of, volume_of
from octfm.phantom.scanner import Scanner, acquire
from octfm.volume.volume import Shape3, Volume


def render_eye(eye: Eye, scanner: Scanner, rng: np.random.Generator, size: Shape3) -> tuple[Volume, GroundTruth]:
    """Scan this eye once, on a grid of `size` [D, H, W]; row 0 is on the vitreous side.

    The look is one of this instrument's, without accidents of placement. Lesions are only those of the eye's diagnosis.
    In the truth, a surface that leaves the image is NaN. `cst_um` is the eye's, without what a look adds to the RPE's
    bright band.
    """
    lesions = sample_outer_lesions(rng, detached=False, neovascular=False, reticular=False)
    acquisition, look = acquire(rng, scanner, size[0]), sample_look(rng, scanner)
    placement = replace(sample_placement(rng), accident="none")
    image = render_native(Shot(eye, lesions, scanner, look, acquisition, placement), rng, size)
    volume = volume_of(eye, scanner, image.voxels, image.spacing_mm)
    return volume, truth_of(eye, scanner, SURFACES, image.surfaces, image.lesions, image.spacing_mm)
