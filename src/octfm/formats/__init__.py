"""Read files into Volumes. The content decides on the format; every file that cannot be read has a reason code."""

import functools
import math
from collections.abc import Callable, Collection, Sequence
from os import PathLike
from pathlib import Path
from typing import TYPE_CHECKING, TypeVar

from octfm.addresses import in_home, path_text
from octfm.errors import ReadError
from octfm.formats.reasons import REASONS, Header, Reason
from octfm.io.location import BucketPath
from octfm.volume.volume import (
    LAYOUTS,
    MODALITIES,
    RASTER_ONLY,
    STRUCTURE_ONLY,
    Layout,
    Modality,
    Spacing3,
    Surfaces,
    Volume,
    as_spacing,
)

if TYPE_CHECKING:
    import numpy as np

    from octfm.formats.bscans import Reader
    from octfm.formats.heyex_xml import DeviceGrid
    from octfm.io.isolation import Limits
    from octfm.volume.volume import Fundus, Labels

LOST = ("decoder_crashed", "decoder_timeout", "decoder_memory")
"""Codes of files that end the process that reads them."""

T = TypeVar("T")


def read_volume(
    uri: str | PathLike[str],
    *,
    spacing_mm: Spacing3 | None = None,
    raster_only: bool = True,
    structure_only: bool = True,
    limits: "Limits | None" = None,
    readers: "Sequence[Reader]" = (),
) -> Volume:
    """Read the Volume in a file or in a folder of images, whatever its name. Raises ReadError with one of REASONS.

    spacing_mm: (dz, dy, dx), used if the file states none itself, such as a folder of images.
    raster_only: False also reads line, circular and radial scans; see Volume.layout, and octfm.volume.radial.to_raster
    for radial ones.
    structure_only: False also reads OCT angiography, whose voxels are flow; see Volume.modality.
    limits: read in a child process with limited time and memory, as a scan does; for files from unknown sources.
    readers: readers of formats of your own; the first that fits takes precedence over the built-in ones.
    """
    from octfm.formats import detect, plug_in  # keeps parsers out of training processes

    if not isinstance(uri, str | PathLike | BucketPath):
        raise TypeError(
            f"expected the path of a scan, got {type(uri).__name__}; octfm.Volume(voxels, spacing_mm) makes a volume "
            "of voxels [B-scan, axial, lateral]"
        )
    uri = str(uri) if isinstance(uri, BucketPath) else in_home(path_text(uri))
    plug_in.require_readers(readers)
    spacing_mm = None if spacing_mm is None else as_spacing(spacing_mm)
    wanted = {
        "layouts": RASTER_ONLY if raster_only else LAYOUTS,
        "modalities": STRUCTURE_ONLY if structure_only else MODALITIES,
        "readers": readers,
    }
    size = None
    if limits is not None:
        try:
            size = math.prod(within(limits, functools.partial(detect.read_header, **wanted), uri).shape)
        except ReadError as error:
            if error.code in LOST:
                raise
            # A radial scan of too few lines has no header that a scan would accept, but it can be read.
    return within(limits, functools.partial(detect.read_volume, spacing_mm=spacing_mm, **wanted), uri, size=size)


def within(limits: "Limits | None", read: Callable[[str], T], uri: str | Path, *, size: int | None = None) -> T:
    """Run `read(uri)` in a child process, or here without limits. `size`, in bytes or voxels, sets the time limit; by
    default it is the file's.

    Raises what `read` raises, and ReadError decoder_crashed, decoder_timeout or decoder_memory if it ends the child.
    """
    uri = str(uri)
    if limits is None:
        return read(uri)
    from octfm.io.archive import file_size
    from octfm.io.isolation import Lost, each

    seconds = limits.deadline(file_size(uri) if size is None else size, uri)
    (result,) = each(read, [uri], limits, lambda _: seconds)
    if isinstance(result, Lost):
        raise ReadError(result.code, f"{uri}: the process that read it {result.what}; {REASONS[result.code].fix}")
    return result


def read_header(
    uri: str | Path,
    layouts: Collection[Layout] = RASTER_ONLY,
    modalities: Collection[Modality] = STRUCTURE_ONLY,
) -> Header:
    """The facts about a volume without decoding it: cheap, and incomplete files are still found.

    Raises ReadError; not_raster for a layout not among `layouts`, and for a radial scan that cannot become a raster;
    angiography for flow, unless it is among `modalities`.
    """
    from octfm.formats import detect

    return detect.read_header(str(uri), layouts, (), modalities)


def volumes_in(uri: str | Path, limits: "Limits | None" = None, readers: "Sequence[Reader]" = ()) -> list[str]:
    """uris of the volumes in a file: its own if it is one, file!/name for each of several. `limits`: see `read_volume`.

    Raises ReadError.
    """
    from octfm.formats import detect

    return within(limits, functools.partial(detect.volumes_in, readers=readers), uri)


def read_surfaces(uri: str | Path, limits: "Limits | None" = None) -> Surfaces | None:
    """The layer boundaries stored with the B-scans or in a DICOM height map, None if there are none. Raises ReadError.

    DICOM keeps them in a separate file: `octfm.formats.dicom.surfaces.surfaces_of_volume` matches it to its volume.
    `limits`: see `read_volume`.
    """
    from octfm.formats import detect

    return within(limits, detect.read_surfaces, uri)


def read_overlay(uri: str | Path, of: Volume, limits: "Limits | None" = None) -> "Surfaces | Labels":
    """Layer boundaries or labels of a volume in a file of their own, in the volume's order of B-scans: a DICOM height
    map or SEG, or NIfTI, as `octfm segment --out FOLDER --dicom` writes them, or a MetaImage mask. Lines in micrometres
    become rows by the volume's millimetres.

    of: the volume as `read_volume` reads it from its file. `limits`: see `read_volume`.
    Raises ReadError; other_volume if the file refers to another volume, was written for
    other voxels by its sidecar, or differs in size; not_labels if it is neither.
    """
    from octfm.formats.overlay import expect_scan_of
    from octfm.formats.overlay import read_overlay as read

    expect_scan_of(uri, of)
    found = functools.partial(read, of=of.source, shape=of.shape, spacing_mm=of.spacing_mm)
    return within(limits, found, uri, size=math.prod(of.shape))


def read_fundus(uri: str | Path, limits: "Limits | None" = None) -> "Fundus | None":
    """The picture of the fundus that a .vol, a HEYEX XML export or an .e2e holds next to its B-scans, with their
    positions where the file states them; None if there is none. Raises ReadError. `limits`: see `read_volume`."""
    from octfm.formats import detect

    return within(limits, detect.read_fundus, uri)


def read_mask(uri: str | Path, limits: "Limits | None" = None) -> "np.ndarray":
    """The label of every voxel in a MetaImage file of masks, as it lies in the file: uint8 [B-scan, axial, lateral].
    `read_overlay` gives them in the order of a volume.

    Raises ReadError; not_labels if the file holds an image. `limits`: see `read_volume`.
    """
    from octfm.formats.arrays import metaimage

    return within(limits, metaimage.read_mask, uri)


def read_device_grid(uri: str | Path, limits: "Limits | None" = None) -> "DeviceGrid | None":
    """The ETDRS zones that the instrument measured, from a HEYEX XML export or its folder; None if the file has none.

    Raises ReadError. `limits`: see `read_volume`.
    """
    from octfm.formats import detect

    return within(limits, detect.read_device_grid, uri)


__all__ = [
    "REASONS",
    "Header",
    "ReadError",
    "Reason",
    "read_device_grid",
    "read_fundus",
    "read_header",
    "read_mask",
    "read_overlay",
    "read_surfaces",
    "read_volume",
    "volumes_in",
    "within",
]
