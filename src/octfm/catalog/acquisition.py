"""The two outcomes of a scan for a file: an accepted acquisition, or a reject with a reason."""

from dataclasses import dataclass, field, replace

from octfm.catalog.participants.splits import Split
from octfm.display import EYES, brief, number, readable, times
from octfm.errors import ReadError
from octfm.formats.reasons import REASONS
from octfm.io.archive import file_size
from octfm.io.isolation import Lost
from octfm.io.location import Location
from octfm.volume.estimated import FLAG
from octfm.volume.volume import Laterality, Layout, Modality, Shape3, Spacing3, Volume, eye_id_of

PSEUDONYM = "pseudonym:"
"""Prefix of uris that only the holder of the key can resolve (octfm.catalog.participants.pseudonyms)."""
FLAGS: dict[str, str] = {
    "laterality_conflict": "header, table, folders or a copy name different eyes; counted as unknown, never mirrored",
    "laterality_unknown": "nothing says which eye it is; never mirrored",
    "laterality_not_read": "its header has a word for the eye that octfm does not know; it was not used",
    "laterality_from_manifest": "only the table says which eye it is",
    "laterality_from_path": "only a folder or the file's name says which eye it is",
    "reused_sop_uid": "another file has its SOP Instance UID and other voxels; "
    "tables that name the UID may mean either",
    "copy_contradicts": "a copy of it, left out, states other millimetres or another order of B-scans or, found by "
    "octfm prepare, another eye or label; its own were kept, and the copy's row says what differs",
    "label_conflict": "a copy of it, left out, has another label, diagnosis or study group, which counts as unknown",
    "not_in_manifest": "no table lists it",
    "participant_from_folder": "neither header nor table names a participant; folders do, and nothing contradicts them",
    "participant_from_pattern": "neither header nor table names a participant; "
    "--participant-from says where folders do",
    "participant_conflict": "header and table name different participants; the table is believed",
    "scanner_conflict": "header and table name different scanners; the header is believed",
    "sop_uid_conflict": "the table lists another SOP Instance UID at this path",
    "shape_conflict": "the table lists other rows, columns or frames; the header is believed",
    "spacing_conflict": "the table or the sidecar has other millimetres; header and positions are believed",
    "sidecar_states_nothing": "a JSON file of its name is next to it, but has none of the keys that octfm reads",
    "sidecar_key_unused": "its sidecar states axes, modality or bscan_lines_mm, which only the header of a DICOM does",
    "declared_upright": "its sidecar says that it is not upside down; that was believed and not checked",
    "declared_upside_down": "its sidecar says that it is upside down; its rows are flipped as it is read",
    "axial_direction_assumed": "the format does not say which end of the axial axis is the vitreous; row 0 was taken",
    "bits_from_values": "the file does not say how many of 16 bits it uses; "
    "the fewest of 8, 10, 12, 14 and 16 that hold its brightest voxel were assumed",
    "looks_upside_down": "the vitreous is at the bottom of its B-scans; kept as it is, because of --keep-upside-down",
    "way_up_unclear": "neither end of its B-scans looks like the vitreous; kept as stored",
    "intensity_stretched": "the format stores numbers without a scale; lowest to highest became 0 to 65,535",
    "laterality_from_name": "only the name that the instrument gave the file says which eye it is",
    "nominal_spacing": "nothing states millimetres; those of --nominal-spacing were used",
    "lateral_mm_of_a_mean_eye": "the file states degrees; the lateral millimetres are those of a mean eye, "
    "usually right within a tenth. Axial ones are stated",
    "estimated_spacing": "nothing states millimetres; they are estimated from the retina's thickness in B-scans of the "
    "same height, so no result is in micrometres",
    "several_splits": "folders or tables put its participant into several splits; all rows count as the first of "
    "train, val and test among them",
    "laterality_contradicts_anatomy": "its optic disc lies on the side of the other eye; "
    "look at it, nothing was changed",
    "disc_on_the_right": "nothing says which eye it is, and its optic disc lies on the right, "
    "as in a right eye's image",
    "disc_on_the_left": "nothing says which eye it is, and its optic disc lies on the left, as in a left eye's image",
    "disc_field_too_narrow": "it shows too little retina on a side of the fovea for its pixels to tell which eye it is",
    "disc_band_unsure": "its tissue band is of low confidence, so its pixels do not tell which eye it is",
    "disc_sides_alike": "nerve fibres and thickness do not both favour one side of the fovea, "
    "so its pixels do not tell which eye it is",
    "disc_bscans_turned": "its B-scans do not run from left to right over the fundus, "
    "so its pixels do not tell which eye it is",
    "pixels_of_two_participants": "another participant's acquisition has the same voxels and was left out; "
    "find out whose they are",
    "split_with_another_id": "its participant's voxels also occur under another id, or another id differs only "
    "in zeros, case, accents or punctuation; both ids are in one split",
    "slice_thickness_contradicts_positions": "SliceThickness differs from the distance of the frames; "
    "positions are believed",
    "slice_thickness_corrected": "SliceThickness repeated the lateral spacing (Cirrus); "
    "taken from the square field of view",
    "slice_thickness_equals_lateral_spacing": "SliceThickness repeats the lateral spacing, and nothing contradicts it",
    "positions_placeholder": "every B-scan has the position 0, or its number, or SliceThickness counted up from 0, as "
    "its position; the stated distance is believed, which B-scan is superior is unknown, and repeated lines would go "
    "unnoticed",
    "positions_of_other_frames": "its header describes more or fewer frames than it has, so no position is used; "
    "the stated distance is believed, and a star or repeated lines would go unnoticed",
    "bscan_order_unstated": "nothing states where its B-scans lie; "
    "the order of the file or of the numbers in their names was assumed",
    "bscans_to_and_fro": "its B-scans run over the fundus in both directions; they are read as stored, "
    "so that some may be mirrored",
    "uneven_positions": "B-scans are not equally far apart",
    "several_files": "its B-scans are in several files of one folder; the row names the first",
    "frames_reordered": "frames are not stored in the order of their positions",
}
"""Flag of an accepted row -> what is doubtful about it, and how it was decided."""


@dataclass(frozen=True)
class Acquisition:
    """One accepted volume. Holds no name, birth date or other direct identifier."""

    uri: str
    """Absolute path of a file, or of a folder whose images are the B-scans; archive.zip!/member inside an archive."""
    participant: str
    """From the manifest, else PatientID, else the folder (octfm.catalog.participants.people)."""
    laterality: Laterality | None
    """None if nothing states it, or if header and manifest contradict each other."""
    scanner: str
    """heidelberg_spectralis, topcon_maestro2, topcon_triton, zeiss_cirrus, else manufacturer_model."""
    protocol: str
    shape: Shape3
    """(D, H, W)."""
    spacing_mm: Spacing3
    """(dz, dy, dx)."""
    spacing_source: str
    sop_instance_uid: str
    split: Split | None = None
    participant_labels: dict[str, str] = field(default_factory=dict)
    """Columns of participants.tsv, without direct identifiers."""
    flags: tuple[str, ...] = ()
    """Doubts that are no reason to reject: keys of FLAGS."""
    layout: Layout = "raster"
    """Radial only if the scan's `layouts` include it. `shape` and `spacing_mm` are then those of the file, with a
    meaningless dz that repeats dx; `prepare` resamples it to a raster (octfm.volume.radial)."""

    participant_source: str = ""
    """A Source of octfm.catalog.participants.people; empty in catalogs of versions that did not record it."""

    modality: Modality = "structure"
    """octa only if the scan's `modalities` include it; training takes it only if data.modalities does."""

    def __repr__(self) -> str:
        size = "voxels" if self.layout == "raster" else f"voxels, {self.layout}"
        return brief("Acquisition", readable(self.scanner), f"{times(self.shape)} {size}", EYES[self.laterality])

    @property
    def eye_id(self) -> str:
        return eye_id_of(self.participant, self.laterality)

    def apply_to(self, volume: Volume, same_uid: bool = True) -> Volume:
        """The volume of this file with what the catalog says of it: the scan has compared header, tables and positions.

        same_uid: its SOP Instance UID must be this one's. Raises ReadError changed_since_scan for another volume.
        """
        if volume.shape != tuple(self.shape):
            raise ReadError(
                "changed_since_scan",
                f"{self.uri}: expected shape {tuple(self.shape)} as in the catalog, got {volume.shape}; scan again",
            )
        if same_uid and volume.acquisition != self.sop_instance_uid:
            raise ReadError(
                "changed_since_scan", f"{self.uri}: holds another acquisition than the catalog says; scan again"
            )
        return replace(
            volume,
            spacing_mm=tuple(self.spacing_mm),
            spacing_estimated=FLAG in self.flags,
            laterality=self.laterality,
            scanner=self.scanner,
            protocol=self.protocol,
            participant=self.participant,
            acquisition=self.sop_instance_uid,
            modality=self.modality,
            source=self.uri,
        )


@dataclass(frozen=True)
class Reject:
    """A file that is not in the catalog: rejected, or recognised and skipped."""

    uri: str
    code: str
    """One of octfm.formats.reasons.REASONS."""
    sentence: str
    bytes: int
    refers_to: str = ""
    """SOP Instance UID of the volume that these layer heights belong to, or that this file is a copy of."""

    def __repr__(self) -> str:
        return brief("Reject", self.code, number(self.bytes, "byte"))

    @staticmethod
    def of(uri: str | Location, error: ReadError, size: int | None = None) -> "Reject":
        """The reject of a file that raised `error`; `size` in bytes, by default the file's."""
        return Reject(str(uri), error.code, str(error), file_size(uri) if size is None else size, error.refers_to)

    @staticmethod
    def lost(uri: str | Location, lost: Lost, task: str, size: int | None = None) -> "Reject":
        """The reject of a file whose process ended while it did this `task`."""
        sentence = f"{uri}: the process that {task} {lost.what}; {REASONS[lost.code].fix}"
        return Reject.of(uri, ReadError(lost.code, sentence), size)

    @property
    def fix(self) -> str:
        """What to do so that a scan accepts the file."""
        return REASONS[self.code].fix

    @property
    def expected(self) -> bool:
        """True for files that are left out on purpose, such as angiography: not an error, nothing to fix."""
        return REASONS[self.code].expected
