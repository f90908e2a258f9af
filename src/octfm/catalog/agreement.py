"""Combine header and tables into a catalog row. Each may supply what the other lacks; contradictions become flags."""

from collections.abc import Mapping
from dataclasses import replace

from octfm.catalog.acquisition import Acquisition, Reject
from octfm.catalog.participants.ids import person_key
from octfm.catalog.participants.path_words import names_nobody
from octfm.catalog.participants.people import Whose
from octfm.catalog.tables import ManifestRow, Tables
from octfm.errors import ReadError
from octfm.formats.bscans import MEAN_EYE, missing_spacing
from octfm.formats.dicom.geometry import check_bounds
from octfm.formats.names import lateralities, scanner_slug, slugify
from octfm.formats.reasons import Header
from octfm.volume.estimated import FLAG, spacing_of
from octfm.volume.volume import Spacing3


def accept(
    header: Header, tables: Tables, nominal_mm: Spacing3 | None = None, estimated_mm: Mapping[int, float] | None = None
) -> Acquisition | Reject:
    """The catalog row of a header. If neither header nor table names the participant, `with_person` adds it later.

    Spacing that the file does not state comes from the table, else from `nominal_mm`, else, of a single B-scan, from
    `estimated_mm` (rows of an image -> axial millimetres); without any it is a reject. If header and manifest name
    different eyes, laterality is unknown: a wrong guess would be mirrored in training and get the other eye's labels.
    """
    # An empty row where no table lists the file: nothing below has to distinguish the two.
    row = tables.find(header.uri, header.sop_instance_uid)
    flags = [*header.flags]
    if row is None:
        flags += ["not_in_manifest"] if tables.by_path or tables.by_uid else []
        row = ManifestRow()
    try:
        spacing_mm, spacing_source = _spacing(header, row, nominal_mm, estimated_mm or {})
    except ReadError as error:
        return Reject.of(header.uri, error)
    if spacing_source == "table" and MEAN_EYE in flags:
        flags.remove(MEAN_EYE)
    flags += ["nominal_spacing"] if spacing_source == "nominal" else []
    flags += [FLAG] if spacing_source == "estimated" else []
    flags += _contradictions(header, row)

    laterality = header.laterality
    stated, _ = lateralities([row.laterality])
    if stated and laterality and stated != laterality:
        laterality = None
        flags.append("laterality_conflict")
    elif stated and not laterality and "laterality_conflict" not in flags:
        laterality = stated
        flags[flags.index("laterality_unknown")] = "laterality_from_manifest"

    participant = next(iter(_people(header, row)), "")
    scanner = scanner_slug(row.manufacturer, row.model) if header.scanner == "unknown" else header.scanner
    return Acquisition(
        uri=header.uri,
        participant=participant,
        participant_source="" if not participant else "table" if participant == row.participant else "header",
        laterality=laterality,
        scanner=scanner,
        protocol=header.protocol if header.protocol != "unknown" else slugify(row.region),
        shape=header.shape,
        spacing_mm=spacing_mm,
        spacing_source=spacing_source,
        sop_instance_uid=header.sop_instance_uid,
        participant_labels=tables.labels_of(participant),
        flags=tuple(flags),
        layout=header.layout,
        modality=header.modality,
    )


_FLAG_OF_SOURCE = {"pattern": "participant_from_pattern", "folder": "participant_from_folder"}


def with_person(a: Acquisition, whose: Mapping[str, Whose], tables: Tables) -> Acquisition:
    """Fill in participant and eye from the path, if neither header nor table states them, and labels of the path.

    A path that names only the other eye makes laterality unknown. Labels that a table gives to the file come before
    those of its path.
    """
    if (found := whose.get(a.uri)) is None:
        return a
    flags = [*a.flags]
    participant, source = a.participant, a.participant_source
    if found.source in _FLAG_OF_SOURCE:
        participant, source = found.participant, found.source
        flags.append(_FLAG_OF_SOURCE[source])
    laterality = a.laterality
    if laterality is None and "laterality_unknown" in flags and found.eyes:
        laterality = next(iter(found.eyes)) if len(found.eyes) == 1 else None
        flags[flags.index("laterality_unknown")] = "laterality_from_path" if laterality else "laterality_conflict"
    elif laterality is not None and len(found.eyes) == 1 and laterality not in found.eyes:
        laterality = None
        flags.append("laterality_conflict")
    row = tables.find(a.uri, a.sop_instance_uid) or ManifestRow()
    return replace(
        a,
        participant=participant,
        participant_source=source,
        participant_labels={**tables.labels_of(participant), **found.labels, **row.labels},
        laterality=laterality,
        flags=tuple(flags),
    )


def _spacing(
    header: Header, row: ManifestRow, nominal_mm: Spacing3 | None, estimated_mm: Mapping[int, float]
) -> tuple[Spacing3, str]:
    better = MEAN_EYE in header.flags and row.spacing_mm is not None
    if header.spacing_mm is not None and not better:
        return header.spacing_mm, header.spacing_source
    spacing_mm = row.spacing_mm or nominal_mm
    if spacing_mm is None and header.layout == "line" and (dy := estimated_mm.get(header.shape[1])) is not None:
        return spacing_of(dy, header.shape), "estimated"
    if spacing_mm is None:
        raise missing_spacing(header.uri)
    # Readers have checked what a file states; tables and --nominal-spacing only pass here.
    check_bounds(spacing_mm, header.shape, header.uri, header.layout)
    return spacing_mm, "table" if row.spacing_mm else "nominal"


def _people(header: Header, row: ManifestRow) -> list[str]:
    """The participant of the table, then that of the header, where they name one."""
    return [name for name in (row.participant, header.participant or "") if not names_nobody(name)]


def _contradictions(header: Header, row: ManifestRow) -> list[str]:
    """Flags for facts on which header and table differ, except laterality, which `accept` compares."""
    flags = []
    if len(set(map(person_key, _people(header, row)))) > 1:
        flags.append("participant_conflict")
    listed = scanner_slug(row.manufacturer, row.model)
    if "unknown" not in (listed, header.scanner) and listed != header.scanner:
        flags.append("scanner_conflict")
    if row.sop_instance_uid and row.sop_instance_uid != header.sop_instance_uid:
        flags.append("sop_uid_conflict")
    if row.shape and row.shape != header.shape:
        flags.append("shape_conflict")
    # dz of anything but a raster is meaningless, so it cannot contradict the table.
    thickness_mm = row.slice_thickness_mm if header.layout == "raster" else None
    pairs = zip((thickness_mm, *(row.in_plane_mm or ())), header.spacing_mm or (), strict=False)
    differ = any(mm is not None and abs(mm / header_mm - 1) > 0.05 for mm, header_mm in pairs)
    # Millimetres of a mean eye give way to the table's, which is no contradiction.
    if differ and MEAN_EYE not in header.flags:
        flags.append("spacing_conflict")
    return flags
