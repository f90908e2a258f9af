"""Turn the elements of a DICOM header into the facts of a volume, or into the reason why it is not one."""

from collections.abc import Collection
from dataclasses import replace

from octfm.errors import ReadError
from octfm.formats.declared import Declared
from octfm.formats.dicom.file import OpenFile, referenced_uids, text
from octfm.formats.dicom.geometry import Geometry, read_geometry
from octfm.formats.dicom.groups import Elements, items_in_groups
from octfm.formats.dicom.pixels import Pixels
from octfm.formats.names import lateralities, scanner_slug, slugify, stated_eye
from octfm.formats.reasons import REASONS, Header, angiography
from octfm.volume.volume import Layout, Modality, Shape3

OPHTHALMIC_TOMOGRAPHY = "1.2.840.10008.5.1.4.1.1.77.1.5.4"
HEIGHT_MAP = "1.2.840.10008.5.1.4.1.1.66.8"
SEGMENTATION, LABEL_MAP = "1.2.840.10008.5.1.4.1.1.66.4", "1.2.840.10008.5.1.4.1.1.66.7"
_MODALITIES: dict[str, Modality] = {OPHTHALMIC_TOMOGRAPHY: "structure", "1.2.840.10008.5.1.4.1.1.77.1.5.8": "octa"}
"""SOP classes of volumes: the second is Ophthalmic OCT B-scan Volume Analysis, flow (PS3.3 A.84)."""
_LEFT_OUT = {
    "1.2.840.10008.5.1.4.1.1.77.1.5.7": "en_face",
    "1.2.840.10008.5.1.4.1.1.77.1.5.1": "photograph",
    "1.2.840.10008.5.1.4.1.1.77.1.5.2": "photograph",
    "1.2.840.10008.5.1.4.1.1.77.1.5.5": "photograph",
    "1.2.840.10008.5.1.4.1.1.77.1.5.6": "photograph",
    HEIGHT_MAP: "layer_heights",
    SEGMENTATION: "voxel_labels",
    LABEL_MAP: "voxel_labels",
}
"""SOP classes exported along with OCT (PS3.4 B.5) -> reason code; all others get not_oct."""


def expect_oct(file: OpenFile, modalities: Collection[Modality]) -> None:
    """Raise ReadError unless the file is OCT of one of these modalities with a SOP Instance UID."""
    from pydicom.uid import UID

    dataset, uri = file.dataset, file.uri
    sop_class = _sop_class(dataset)
    if not sop_class:
        raise ReadError(
            "not_dicom", f"{uri}: no SOP Class UID, so this is not a DICOM object; remove it or export it again"
        )
    # A file may end inside the SOP Class UID itself: a prefix counts as well.
    if file.pixel_offset >= file.size and OPHTHALMIC_TOMOGRAPHY.startswith(sop_class):
        raise ReadError(
            "missing_pixel_data",
            f"{uri}: the file ends at byte {file.size:,} without pixel data; fetch or export it again",
        )
    modality = _MODALITIES.get(sop_class)
    if modality is None:
        code = _LEFT_OUT.get(sop_class, "not_oct")
        about = next(iter(referenced_uids(dataset)), "") if code in ("layer_heights", "voxel_labels") else ""
        raise ReadError(
            code, f"{uri}: {REASONS[code].meaning} ({UID(sop_class).name}){about and f' of {about}'}; left out", about
        )
    if modality not in modalities:
        raise angiography(uri)
    if not text(dataset, "SOPInstanceUID"):
        raise ReadError("missing_sop_uid", f"{uri}: SOP Instance UID is missing; export it again")


def _sop_class(dataset: Elements) -> str:
    # Some writers state the class in the meta group only; a header of several files has no meta group.
    meta = getattr(dataset, "file_meta", None)
    return text(dataset, "SOPClassUID") or ("" if meta is None else text(meta, "MediaStorageSOPClassUID"))


def describe(
    dataset: Elements, pixels: Pixels, shape: Shape3, uri: str, layouts: Collection[Layout]
) -> tuple[Header, Geometry]:
    """The facts of a volume of `shape`. `dataset` may be merged from several files, `pixels` those of one of them."""
    scanner = scanner_slug(text(dataset, "Manufacturer"), text(dataset, "ManufacturerModelName"))
    geometry = read_geometry(dataset, shape, scanner, uri, layouts)
    laterality, doubts = stated_eye(_stated_lateralities(dataset))
    flags = (
        *geometry.flags,
        *doubts,
        # Converters write BitsStored 16 whatever the number of bits in use. Signed pixels state their white.
        *(("bits_from_values",) if pixels.bits_stored == 16 and pixels.gray is None else ()),
    )
    header = Header(
        uri=uri,
        shape=shape,
        spacing_mm=geometry.spacing_mm,
        spacing_source=geometry.spacing_source,
        laterality=laterality,
        scanner=scanner,
        protocol=slugify(text(dataset, "ProtocolName")),
        participant=text(dataset, "PatientID") or None,
        sop_instance_uid=text(dataset, "SOPInstanceUID"),
        superior_first=geometry.superior_first,
        flags=flags,
        layout=geometry.layout,
        modality=_MODALITIES.get(_sop_class(dataset), "structure"),
    )
    return header, geometry


def with_sidecar(header: Header, declared: Declared) -> Header:
    """The header with facts of its sidecar that it lacks; it is believed where they differ, except about the eye, which
    is then unknown."""
    laterality, conflict = lateralities([header.laterality or "", declared.laterality])
    conflict = conflict or "laterality_conflict" in header.flags
    answered = {"laterality_unknown": laterality, "bits_from_values": declared.bits}
    flags = [flag for flag in header.flags if not answered.get(flag)]
    flags += ["laterality_conflict"] * (conflict and "laterality_conflict" not in flags)
    if declared.spacing_mm and header.spacing_mm:
        pairs = zip(declared.spacing_mm, header.spacing_mm, strict=True)
        differ = [abs(mm / own - 1) > 0.05 for mm, own in pairs]
        flags += ["spacing_conflict"] * any(differ if header.layout == "raster" else differ[1:])
    flags += ["sidecar_key_unused"] * bool(declared.axes or declared.modality or declared.bscan_lines_mm)
    return replace(
        header,
        laterality=None if conflict else laterality,
        scanner=header.scanner if header.scanner != "unknown" else slugify(declared.scanner),
        protocol=header.protocol if header.protocol != "unknown" else slugify(declared.protocol),
        participant=header.participant or declared.participant or None,
        superior_first=declared.superior_first if header.superior_first is None else header.superior_first,
        flags=(*flags, *declared.flags),
    )


def _stated_lateralities(dataset: Elements) -> list[str]:
    """From FrameAnatomySequence, shared and of all frames, then ImageLaterality and the series' Laterality."""
    # A file in which frames of both eyes were joined contradicts itself.
    values = {text(item, "FrameLaterality") for item in items_in_groups(dataset, "FrameAnatomySequence")}
    return [*values, text(dataset, "ImageLaterality"), text(dataset, "Laterality")]
