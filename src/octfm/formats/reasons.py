"""Reason codes for files that cannot be read, and `Header`: the facts about a volume before its pixels are decoded."""

import math
from dataclasses import dataclass

import numpy as np

from octfm.addresses import mask_path
from octfm.errors import ReadError
from octfm.volume.volume import Laterality, Layout, Lines, Modality, Shape3, Spacing3, Volume


@dataclass(frozen=True)
class Reason:
    """Why a file is not in the catalog, and how to get it in."""

    meaning: str
    fix: str
    expected: bool = False
    """Recognised and left out on purpose: counted as skipped, not as an error."""


_LEFT_OUT = "nothing to fix, it is left out on purpose"

REASONS: dict[str, Reason] = {
    "empty_file": Reason("the file has no bytes", "fetch it again"),
    "unreadable": Reason(
        "the file system or the DICOM parser failed on it", "check permissions and the disk, fetch it again"
    ),
    "missing_file": Reason("a DICOMDIR lists it, but it is missing", "copy the whole medium again"),
    "damaged_archive": Reason("a ZIP archive, or a member of one, is cut or corrupt", "fetch the archive again"),
    "link_not_followed": Reason(
        "a link, or a folder of B-scans with a link among them, in a scan with --no-follow-links",
        f"{_LEFT_OUT}; put the file itself there, or scan without --no-follow-links",
        expected=True,
    ),
    "unsafe_member": Reason(
        "a member of a ZIP archive that is a link, or whose name leaves the archive or occurs twice",
        "make the archive again",
    ),
    "decompression_bomb": Reason(
        "a file, or a member of a ZIP archive, that inflates to more than any OCT volume",
        "unpack it by hand if you trust it",
    ),
    "unsupported_member": Reason(
        "a member of a ZIP archive that is encrypted or compressed in an exotic way", "unpack it, or zip it again"
    ),
    "not_dicom": Reason(
        "the content is not in a format that octfm reads", "remove it, or convert it to DICOM Ophthalmic Tomography"
    ),
    "damaged_file": Reason(
        "a vendor's or research file whose structure is cut or contradicts itself", "fetch or export it again"
    ),
    "single_image": Reason(
        "one image, not a volume",
        "put the B-scans of a volume, and nothing else, into a folder of their own, numbered in their names",
    ),
    "side_by_side": Reason(
        "a screenshot with a fundus image, or a second B-scan, next to the B-scan; found when pixels are read",
        "crop it to one B-scan; if it is one, declare its spacing_mm in NAME.json",
    ),
    "mixed_images": Reason(
        "images of one folder that are not the B-scans of one volume: sizes or names differ, or numbers are missing",
        "keep one volume per folder, its B-scans numbered in their names without a gap",
    ),
    "several_volumes": Reason(
        "a file that holds several volumes, and none was chosen",
        "name one of them, such as file.e2e!/series_1_2_3; a scan takes each",
    ),
    "unknown_axes": Reason(
        "an array whose axes are not stated, or whose voxels show another order than [B-scan, axial, lateral]",
        'save it as [B-scan, axial, lateral], or declare its axes; if its voxels only look so, declare "upside_down": '
        "false in NAME.json beside it (--keep-upside-down keeps none)",
    ),
    "incomplete_export": Reason(
        "a file that needs another file next to it, which is missing", "copy the whole folder of the export"
    ),
    "contradicting_declaration": Reason(
        "a sidecar or a table declares something about the file that cannot be read or is impossible",
        "correct the line of the sidecar or the table that the sentence names",
    ),
    "angiography": Reason(
        "OCT angiography (flow), not structure; octfm scan takes it with --modalities structure,octa",
        _LEFT_OUT,
        expected=True,
    ),
    "en_face": Reason("an en face image, made from a volume", _LEFT_OUT, expected=True),
    "photograph": Reason("a fundus photograph or scanning laser image", _LEFT_OUT, expected=True),
    "not_a_bscan": Reason(
        "an image of another size or name among the numbered B-scans of a volume: en face, average, thumbnail",
        _LEFT_OUT,
        expected=True,
    ),
    "layer_heights": Reason("surfaces of a segmentation, not an image", _LEFT_OUT, expected=True),
    "voxel_labels": Reason("labels of voxels, such as masks of fluid, not an image", _LEFT_OUT, expected=True),
    "not_labels": Reason(
        "labels of voxels were expected and an image was given", "give the file of the masks, or of the labels"
    ),
    "not_layer_heights": Reason(
        "layer heights were expected and something else was given", "give the file of the height map"
    ),
    "other_volume": Reason(
        "layer heights or labels of another volume, or of another size", "give the height map or labels of this volume"
    ),
    "not_oct": Reason("DICOM, but not a kind of eye image that octfm knows", _LEFT_OUT, expected=True),
    "not_raster": Reason(
        "radial, circular or repeated B-scans do not form a volume",
        f"{_LEFT_OUT}; radial scans are taken with --layouts raster,radial",
        expected=True,
    ),
    "several_bscans": Reason(
        "a volume, where only single B-scans are taken",
        f"{_LEFT_OUT}; scan without --layouts line to take volumes",
        expected=True,
    ),
    "missing_sop_uid": Reason(
        "without a SOP Instance UID an acquisition cannot be distinguished from its copies", "export it again"
    ),
    "missing_pixel_data": Reason("the header is complete but there are no pixels", "export it again with images"),
    "truncated_pixel_data": Reason("the file ends before its pixels do: the transfer was cut off", "fetch it again"),
    "surplus_data": Reason(
        "the file holds more voxels than its header says, so size or type in the header are wrong",
        "correct the header, or save the volume again",
    ),
    "frame_count_mismatch": Reason(
        "NumberOfFrames differs from the number of stored B-scans", "export it again, which frames are meant is a guess"
    ),
    "missing_part": Reason(
        "some of the files of a volume are missing", "put all files of the acquisition into one folder"
    ),
    "inconsistent_parts": Reason(
        "files that claim to be one volume but differ in size or grey scale, occur twice or have no order",
        "remove copies, or export it again",
    ),
    "absurd_size": Reason(
        "rows, columns or frames are zero or beyond any OCT instrument", "the header is damaged, export it again"
    ),
    "unsupported_pixels": Reason(
        "colour, floating-point, neither 8 nor 16 bit, or signed without stating which value is black",
        "export 8- or 16-bit unsigned greyscale",
    ),
    "unsupported_transfer_syntax": Reason(
        "no installed decoder knows this compression", "transcode it where it was made, for example with gdcmconv --raw"
    ),
    "scrambled_pixels": Reason(
        "Zeiss pixel data, scrambled so that only Zeiss software can read them",
        "export from FORUM or CIRRUS as unscrambled DICOM or as .img, or ask Zeiss for an export that others can read",
    ),
    "decode_failed": Reason("every installed decoder refused the compressed pixels", "fetch it again, or transcode it"),
    "decoder_crashed": Reason(
        "the process that read it crashed; only this file was affected",
        "fetch it again, else transcode it and report it",
    ),
    "decoder_timeout": Reason(
        "reading it took longer than a file of its size should",
        "fetch it again, else transcode it; on a slow disk allow more seconds",
    ),
    "decoder_memory": Reason(
        "reading it needed more memory than a worker may use",
        "a huge volume needs a higher limit, or fewer workers; else it is damaged",
    ),
    "missing_spacing": Reason(
        "neither file, sidecar nor table states millimetres on all three axes",
        "DICOM: add PixelSpacing; others: declare spacing_mm in NAME.json or a table, or ask for a nominal spacing",
    ),
    "absurd_spacing": Reason(
        "the millimetres are impossible for an OCT instrument (1, 1, 1 is a placeholder)",
        "correct PixelSpacing and SliceThickness",
    ),
    "mixed_spacing": Reason(
        "frames of one file that differ in spacing by more than 1 %, so no volume of one spacing holds them",
        "export each spacing as a file of its own",
    ),
    "swapped_spacing": Reason(
        "axial and lateral millimetres look exchanged: the retina would be coarser along its depth than across it",
        "state the axial millimetres first: PixelSpacing is [axial, lateral], spacing_mm [dz, dy, dx]",
    ),
    "blank_volume": Reason(
        "every voxel has the same value", "nothing was imaged, or the export failed: export it again"
    ),
    "upside_down": Reason(
        "the vitreous is at the bottom of its B-scans and the choroid at the top; found when pixels are read",
        'declare "upside_down" in NAME.json beside it: true to have it flipped, false if it is not; or keep all with '
        "--keep-upside-down",
    ),
    "duplicate_sop_uid": Reason(
        "the same acquisition, with the same voxels, is already in the catalog",
        "remove the copy; if it contradicts the other file, find out first which is right",
    ),
    "duplicate_pixels": Reason(
        "another file has the same voxels under another SOP Instance UID",
        "remove the copy; if it contradicts the other file, find out first which is right",
    ),
    "pixels_of_two_participants": Reason(
        "another participant's file has the same voxels: one id is wrong, and keeping both could leak between splits",
        "find out whose they are, and remove the other file",
    ),
    "reused_sop_uid": Reason(
        "another acquisition in the catalog has this SOP Instance UID but different voxels",
        "export both again, each needs a UID of its own",
    ),
}
"""All reason codes; rejects.parquet and the report use no others."""


def cannot_open(uri: str, error: OSError) -> ReadError:
    why = error.strerror or type(error).__name__
    return ReadError("unreadable", f"{mask_path(uri)}: cannot be read: {why}; check path and permissions")


PADDING = 4096
"""Bytes that may follow the voxels: some programs fill the last block of a file."""


def expect_bytes(uri: str, size: int, needed: int, most: float = math.inf) -> None:
    """Raise ReadError truncated_pixel_data where a file of `size` bytes is shorter than its header demands, and
    surplus_data where it has more bytes than that by over `most`."""
    if size < needed:
        raise ReadError(
            "truncated_pixel_data", f"{uri}: {size:,} of {needed:,} bytes; the file is incomplete, fetch it again"
        )
    if size > needed + most:
        raise ReadError(
            "surplus_data",
            f"{uri}: {size:,} bytes where the header demands {needed:,}; correct the size or type in the header, or "
            "save the volume again",
        )


def angiography(uri: str) -> ReadError:
    return ReadError("angiography", f"{uri}: {REASONS['angiography'].meaning}; left out")


def voxel_labels(uri: str) -> ReadError:
    return ReadError("voxel_labels", f"{uri}: labels of voxels (masks of a segmentation), not an image; left out")


ZARR_FILES = (".zarray", ".zgroup", "zarr.json")
"""Names that mark a folder as an array, or a group of arrays, in Zarr."""


def zarr_array(uri: str) -> ReadError:
    return ReadError(
        "not_dicom", f"{uri}: a Zarr array, such as a store that octfm prepared; to read it as a scan, save it as .npz"
    )


def blank(uri: str) -> ReadError:
    return ReadError("blank_volume", f"{uri}: every voxel has the same value; nothing was imaged, export it again")


@dataclass(frozen=True)
class Header:
    """What is known about an acquisition before its pixels are decoded."""

    uri: str
    shape: Shape3
    spacing_mm: Spacing3 | None
    """None if the file does not state it; it must then be declared."""
    spacing_source: str
    """Source of (dz, dy, dx): shared, per_frame or top_level in DICOM, header in other files, sidecar, or missing; with
    `+positions` or `+field_of_view` where dz was derived from those."""
    laterality: Laterality | None
    scanner: str
    """Canonical slug, or unknown."""
    protocol: str
    participant: str | None
    """PatientID; None if the file does not state one."""
    sop_instance_uid: str
    superior_first: bool | None
    flags: tuple[str, ...] = ()
    layout: Layout = "raster"
    """For anything but a raster, dz repeats dx and is meaningless."""
    modality: Modality = "structure"
    set_aside: tuple[tuple[str, str], ...] = ()
    """(uri, reason) of each image in the folder that is not one of the B-scans."""

    def volume(self, voxels: np.ndarray, full_scale: int, spacing_mm: Spacing3, lines: Lines | None) -> Volume:
        """The Volume of these voxels with the facts of this header."""
        return Volume(
            voxels=voxels,
            full_scale=full_scale,
            spacing_mm=spacing_mm,
            lines=lines,
            laterality=self.laterality,
            scanner=self.scanner,
            protocol=self.protocol,
            participant=self.participant or "unknown",
            acquisition=self.sop_instance_uid,
            superior_first=self.superior_first,
            modality=self.modality,
            layout=self.layout,
            source=self.uri,
        )
