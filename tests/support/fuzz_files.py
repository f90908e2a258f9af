"""Files of every format, and what happens to files: bytes flipped, blocks lost, ends cut, DICOM elements removed or
absurd. Seeded."""

import copy
import io
import struct
import warnings
import zlib
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import pydicom
from pydicom import uid
from pydicom.dataset import Dataset

from support import FIXTURES
from support.dicom_files import LOSSLESS, LOSSY, NATIVE, write_oct_dicom
from support.multifile_dicom import concatenation, series
from support.vendor_files import FORMATS, write_sidecar

SHAPE = (4, 32, 48)
SPACING_MM = (0.4, 0.02, 0.1)
CODESTREAMS = FIXTURES / "codestreams"


@dataclass(frozen=True)
class Seed:
    """A whole acquisition that is readable before anything happens to it."""

    name: str
    files: dict[str, bytes]
    """By path below the folder in which they lie."""
    read: str
    """Which of them is read; the folder where it is empty."""


def voxels() -> np.ndarray:
    d, h, w = SHAPE
    ramp = np.add.outer(np.add.outer(3 * np.arange(d), 5 * np.arange(h)), np.arange(w))
    return ((ramp + np.random.default_rng(0).integers(0, 40, SHAPE)) % 256).astype(np.uint8)


def seeds(folder: Path) -> list[Seed]:
    """DICOM of every transfer syntax that can be written here, positions and preambles of all kinds, and every other
    format."""
    whole = voxels()
    found = []
    for syntax in (*LOSSLESS, *LOSSY):
        found.append(_dicom(folder, f"dicom {uid.UID(syntax).name}", whole, transfer_syntax=syntax))
    for codestream, syntax in (
        ("ffmpeg_8bit.j2k", uid.JPEG2000Lossless),
        ("dcmtk_extended_8bit.jpg", uid.JPEGExtended12Bit),
    ):
        frame = (CODESTREAMS / codestream).read_bytes()
        rows, columns = _size(frame)
        blank = np.zeros((4, rows, columns), np.uint8)
        found.append(
            _dicom(folder, f"dicom {codestream}", blank, transfer_syntax=syntax, encode=lambda _, frame=frame: frame)
        )
    found.append(_dicom(folder, "dicom positions", whole, spacing_in="positions"))
    found.append(_dicom(folder, "dicom no preamble", whole, preamble=False))
    found.append(
        _dicom(folder, "dicom 16 bit", whole.astype(np.uint16) * 16, bits_stored=12, photometric="MONOCHROME1")
    )
    found += [
        _several(folder / name, write, name) for name, write in (("concatenation", concatenation), ("series", series))
    ]
    return found + _other_formats(folder, whole)


def _dicom(folder: Path, name: str, content: np.ndarray, **options) -> Seed:
    path = write_oct_dicom(
        folder / "seed.dcm", content, SPACING_MM, sop_instance_uid=f"1.2.3.{zlib.crc32(name.encode())}", **options
    )
    return Seed(name, {"seed.dcm": path.read_bytes()}, "seed.dcm")


def _several(folder: Path, write: Callable[[Path, np.ndarray], list[Path]], name: str) -> Seed:
    paths = write(folder, np.repeat(voxels(), 2, axis=0)[:7])
    return Seed(f"dicom {name}", {path.name: path.read_bytes() for path in paths}, paths[0].name)


def _size(frame: bytes) -> tuple[int, int]:
    from octfm.formats.dicom.codecs import inspect

    found = inspect(frame)
    assert found is not None
    return found.rows, found.columns


def _other_formats(folder: Path, whole: np.ndarray) -> list[Seed]:
    found = []
    for name, form in FORMATS.items():
        home = folder / name
        home.mkdir()
        uri = form.write(home / "scan", whole)
        if "spacing" not in form.states:
            write_sidecar(uri)
        files = {str(path.relative_to(home)): path.read_bytes() for path in home.rglob("*") if path.is_file()}
        found.append(Seed(name, files, str(uri.relative_to(home))))
    return found


# ---- what happens to bytes
# -------------------------------------------------------------------------------------------------------

ABSURD = (0, 1, 2, 0x7F, 0x80, 0xFF, 0xFFFF, 0x7FFFFFFF, 0x80000000, 0xFFFFFFFE, 0xFFFFFFFF)


def flip_bits(content: bytearray, rng: np.random.Generator) -> None:
    for at in rng.integers(0, len(content), rng.integers(1, 9)):
        content[at] ^= 1 << int(rng.integers(8))


def flip_bits_of_the_head(content: bytearray, rng: np.random.Generator) -> None:
    for at in rng.integers(0, min(len(content), 1500), rng.integers(1, 5)):
        content[at] ^= 1 << int(rng.integers(8))


def cut(content: bytearray, rng: np.random.Generator) -> None:
    del content[int(rng.integers(0, len(content))) :]


def lose_a_block(content: bytearray, rng: np.random.Generator) -> None:
    at = int(rng.integers(0, len(content)))
    del content[at : at + int(rng.integers(1, 600))]


def blank_a_block(content: bytearray, rng: np.random.Generator) -> None:
    at, length = int(rng.integers(0, len(content))), int(rng.integers(1, 2000))
    content[at : at + length] = bytes([int(rng.choice([0, 0xFF, 0x20]))]) * len(content[at : at + length])


def repeat_a_block(content: bytearray, rng: np.random.Generator) -> None:
    at = int(rng.integers(0, len(content)))
    content[at:at] = content[at : at + int(rng.integers(1, 600))]


def absurd_number(content: bytearray, rng: np.random.Generator) -> None:
    """Four bytes of a length, a count, an offset or a float, wherever they fall, more often in the head."""
    within = len(content) if rng.random() < 0.3 else min(len(content), 2000)
    at = int(rng.integers(0, max(within - 8, 1)))
    kind = rng.integers(4)
    if kind == 0:
        content[at : at + 8] = struct.pack("<d", float(rng.choice([np.nan, np.inf, -1.0, 0.0, 1e30, 1e-30])))
    elif kind == 1:
        content[at : at + 4] = struct.pack("<f", float(rng.choice([np.nan, np.inf, -1.0, 0.0, 1e30, 1e-30])))
    else:
        content[at : at + 4] = struct.pack("<I" if kind == 2 else ">I", int(rng.choice(np.array(ABSURD, np.uint64))))


def append_garbage(content: bytearray, rng: np.random.Generator) -> None:
    content += rng.bytes(int(rng.integers(1, 5000)))


DAMAGES: tuple[Callable[[bytearray, np.random.Generator], None], ...] = (
    flip_bits,
    flip_bits_of_the_head,
    cut,
    lose_a_block,
    blank_a_block,
    repeat_a_block,
    absurd_number,
    append_garbage,
)

# ---- what happens to DICOM elements
# ----------------------------------------------------------------------------------------------

_ABSURD_VALUES = {
    "US": (0, 1, 3, 65535),
    "IS": ("0", "-1", "1", "3", "5", "2147483647", "99999999999", "", "four"),
    "DS": ("0", "-1", "1", "nan", "NaN", "inf", "1e30", "1e-30", "1e400", "", "x"),
    "FD": (0.0, -1.0, 1e30, 1e-30, float("nan"), float("inf")),
    "FL": (0.0, -1.0, 1e30, float("nan"), float("inf")),
    "UI": ("", "1.2.3", "1.2.840.10008.5.1.4.1.1.77.1.5.8", "x" * 64),
    "CS": ("", "MONOCHROME1", "RGB", "PALETTE COLOR", "LINEAR", "NONLINEAR", "L", "Ä"),
    "LO": ("", "x" * 10_000, "\0", "../../etc"),
    "SQ": ((), None),
    "UL": (0, 1, 2**31, 2**32 - 1),
}


def absurd_element(dataset: Dataset, rng: np.random.Generator) -> str:
    """One element, anywhere in the tree, gets a value that no instrument writes, or goes."""
    home, tag = _anywhere(dataset, rng)
    element = home[tag]
    choices = _ABSURD_VALUES.get(element.VR, ("",))
    if rng.random() < 0.35 or element.VR in ("OB", "OW") or not choices:
        del home[tag]
        return f"without {element.keyword}"
    if element.VR == "SQ":
        home[tag].value = (
            [] if rng.random() < 0.5 else [copy.deepcopy(item) for item in element.value for _ in range(3)]
        )
        return f"{element.keyword} of other length"
    value = choices[int(rng.integers(len(choices)))]
    several = getattr(element.value, "__len__", lambda: 1)() if element.VM > 1 else 1
    home[tag]._value = [value] * int(rng.choice([several, several, 1, 3])) if several > 1 else value
    return f"{element.keyword} = {value!r}"


def nest_sequences(content: bytes, rng: np.random.Generator) -> tuple[bytes, str]:
    """A functional group inside a functional group inside ..., before the pixels (by hand: pydicom needs minutes to
    write it)."""
    depth = int(rng.choice([3, 60, 1000, 20_000]))
    at = content.rfind(b"\xe0\x7f\x10\x00")
    tag = b"\x00\x52" + (b"\x29\x92" if rng.random() < 0.5 else b"\x30\x92")
    begin = tag + b"SQ\0\0\xff\xff\xff\xff" + b"\xfe\xff\x00\xe0\xff\xff\xff\xff"
    end = b"\xfe\xff\x0d\xe0\0\0\0\0" + b"\xfe\xff\xdd\xe0\0\0\0\0"
    closed = depth if rng.random() < 0.7 else depth // 2
    return content[:at] + begin * depth + end * closed + content[at:], f"sequences nested {depth} deep"


def other_transfer_syntax(dataset: Dataset, rng: np.random.Generator) -> str:
    syntax = str(rng.choice([*LOSSLESS, *LOSSY, "1.2.840.10008.1.2.4.100", "1.2.840.10008.1.2.4.203", "1.2.3", ""]))
    dataset.file_meta.TransferSyntaxUID = uid.UID(syntax)
    return f"transfer syntax {syntax}"


def mutate_dicom(content: bytes, rng: np.random.Generator) -> tuple[bytes, str] | None:
    """None where the change cannot be written, by pydicom at least."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # pydicom says of every absurd value that it is absurd
        return _mutated(pydicom.dcmread(io.BytesIO(content), force=True), rng)


def _mutated(dataset: Dataset, rng: np.random.Generator) -> tuple[bytes, str] | None:
    what = [absurd_element(dataset, rng) for _ in range(int(rng.integers(1, 4)))]
    syntax = (
        str(dataset.file_meta.get("TransferSyntaxUID", uid.ImplicitVRLittleEndian))
        if hasattr(dataset, "file_meta")
        else ""
    )
    out = io.BytesIO()
    try:
        if "TransferSyntaxUID" in getattr(dataset, "file_meta", {}):
            if rng.random() < 0.1 and syntax not in NATIVE:
                what.append(other_transfer_syntax(dataset, rng))
            pydicom.dcmwrite(out, dataset, enforce_file_format=False)
        else:
            pydicom.dcmwrite(out, dataset, implicit_vr=False, little_endian=True)
    except Exception:  # pydicom refuses some of what a broken exporter writes
        return None
    return out.getvalue(), ", ".join(what)


def _anywhere(dataset: Dataset, rng: np.random.Generator):
    places = [(dataset, element.tag) for element in dataset if element.tag.group != 0x0010]
    for element in dataset:
        if element.VR == "SQ":
            for item in element.value:
                places += [(item, inner.tag) for inner in item]
                places += [(deep, e.tag) for inner in item if inner.VR == "SQ" for deep in inner.value for e in deep]
    return places[int(rng.integers(len(places)))]


# ---- a stream of damaged files
# ---------------------------------------------------------------------------------------------------


def damaged(seed: Seed, rng: np.random.Generator) -> tuple[dict[str, bytes], str]:
    """The files of a seed, one of them damaged, and what was done."""
    names = sorted(seed.files)
    name = names[int(rng.integers(len(names)))]
    content = seed.files[name]
    if name.endswith(".dcm") and rng.random() < 0.5:
        changed = mutate_dicom(content, rng) if rng.random() < 0.9 else nest_sequences(content, rng)
        if changed is not None:
            return {**seed.files, name: changed[0]}, f"{seed.name}: {changed[1]}"
    spoilt, done = bytearray(content), []
    for _ in range(int(rng.choice([1, 1, 2, 3]))):
        damage = DAMAGES[int(rng.integers(len(DAMAGES)))]
        if spoilt:
            damage(spoilt, rng)
            done.append(damage.__name__)
    return {**seed.files, name: bytes(spoilt)}, f"{seed.name}: {name} {', '.join(done)}"


def deflated_bomb(path: Path, megabytes: int) -> Path:
    """A deflated DICOM file of a few kilobytes whose pixels inflate to `megabytes` of zeros."""
    small = write_oct_dicom(path, voxels(), SPACING_MM, transfer_syntax=uid.DeflatedExplicitVRLittleEndian).read_bytes()
    start = 144 + int.from_bytes(small[140:144], "little")
    packer = zlib.compressobj(9, zlib.DEFLATED, -zlib.MAX_WBITS)
    body = zlib.decompress(small[start:], -zlib.MAX_WBITS)
    first = packer.compress(body) + packer.compress(bytes(2**20)) + packer.flush(zlib.Z_FULL_FLUSH)
    # After a full flush a block depends on nothing before it, so the same bytes can be repeated.
    block = packer.compress(bytes(2**20)) + packer.flush(zlib.Z_FULL_FLUSH)
    path.write_bytes(small[:start] + first + block * megabytes + packer.flush())
    return path
