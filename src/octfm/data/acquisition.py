"""The two ways in which a file ends: as an accepted acquisition, or as a reject with a reason."""

from dataclasses import dataclass, field

from octfm.data.readers import REASONS
from octfm.data.splits import Split
from octfm.data.volume import Laterality, Shape3, Spacing3


@dataclass(frozen=True)
class Acquisition:
    """One accepted file. Holds no name, birth date or other direct identifier."""

    uri: str
    """Absolute path; archive.zip!/member for a file inside an archive."""
    participant: str
    """From the manifest, else PatientID, else the folder."""
    laterality: Laterality | None
    """None where nothing states it and where header and manifest contradict each other."""
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
    """What is doubtful but no reason to reject: laterality_conflict, slice_thickness_corrected, not_in_manifest, ..."""

    @property
    def eye_id(self) -> str:
        return f"{self.participant}_{self.laterality or 'unknown'}"


@dataclass(frozen=True)
class Reject:
    """A file that is not in the catalog: rejected, or expected and skipped."""

    uri: str
    code: str
    """One of octfm.data.readers.REASONS."""
    sentence: str
    bytes: int

    @property
    def fix(self) -> str:
        """What would make it acceptable."""
        return REASONS[self.code].fix

    @property
    def expected(self) -> bool:
        """Recognised and left out on purpose, such as angiography: no error, and nothing to fix."""
        return REASONS[self.code].expected
