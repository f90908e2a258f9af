"""Files of a few kilobytes or megabytes that claim, or inflate to, more than any OCT volume has."""

import gzip
import io
import struct
import zlib
from pathlib import Path

import numpy as np
import pydicom

from support.dicom_files import write_oct_dicom
from support.fuzz_files import deflated_bomb

_MB = 2**20


def npz_with_more_behind(path: Path, megabytes: int = 4000) -> Path:
    """A small array, and zeros behind it in the same member: what checks the checksum at the end inflates them all."""
    head = io.BytesIO()
    np.save(head, np.arange(8 * 64 * 48, dtype=np.uint16).reshape(8, 64, 48))
    return _zip_of_zeros(path, b"volume.npy", head.getvalue(), megabytes)


def npz_of_zeros(path: Path, megabytes: int = 1900) -> Path:
    """An array of nearly the largest size that a reader takes."""
    head = io.BytesIO()
    shape = (megabytes, 1024, 1024)
    np.lib.format.write_array_header_1_0(head, {"descr": "|u1", "fortran_order": False, "shape": shape})
    return _zip_of_zeros(path, b"volume.npy", head.getvalue(), megabytes)


def _zip_of_zeros(path: Path, name: bytes, start: bytes, megabytes: int) -> Path:
    """One deflated member, `start` and then zeros; made in no time, since every megabyte of them is compressed
    alike."""
    packer = zlib.compressobj(9, zlib.DEFLATED, -15)
    first = packer.compress(start) + packer.flush(zlib.Z_FULL_FLUSH)
    again = packer.compress(bytes(_MB)) + packer.flush(zlib.Z_FULL_FLUSH)
    body = first + again * megabytes + packer.flush()
    sizes = (0, len(body), len(start) + megabytes * _MB)  # nobody gets as far as to compare the checksum
    local = struct.pack("<4sHHHHHIIIHH", b"PK\3\4", 20, 0, 8, 0, 0, *sizes, len(name), 0) + name
    entry = (
        struct.pack("<4sHHHHHHIIIHHHHHII", b"PK\1\2", 20, 20, 0, 8, 0, 0, *sizes, len(name), 0, 0, 0, 0, 0, 0) + name
    )
    end = struct.pack("<4sHHHHIIH", b"PK\5\6", 0, 0, 1, 1, len(entry), len(local) + len(body), 0)
    path.write_bytes(local + body + entry + end)
    return path


def matlab_of_zeros(path: Path, megabytes: int = 1900) -> Path:
    """An array of nearly the largest size that a reader takes."""
    size = megabytes * _MB
    parts = struct.pack("<4I", 6, 8, 9, 0) + struct.pack("<6I", 5, 12, 1024, 1024, megabytes, 0)
    parts += struct.pack("<2I", 0x60001, 0) + struct.pack("<2I", 2, size)
    packer = zlib.compressobj(9)
    first = packer.compress(struct.pack("<2I", 14, len(parts) + size) + parts) + packer.flush(zlib.Z_FULL_FLUSH)
    again = packer.compress(bytes(_MB)) + packer.flush(zlib.Z_FULL_FLUSH)
    body = first + again * megabytes + packer.flush()
    header = b"MATLAB 5.0 MAT-file".ljust(124) + struct.pack("<2H", 0x0100, 0x4D49)
    path.write_bytes(header + struct.pack("<2I", 15, len(body)) + body)
    return path


def tiff_of_pages(path: Path, pages: int = 300_000) -> Path:
    """Pages of one pixel, all of which share it."""
    tags = [(256, 1), (257, 1), (258, 8), (259, 1), (262, 1), (273, 8), (277, 1), (278, 1), (279, 1)]
    size = 2 + 12 * len(tags) + 4
    entries = b"".join(struct.pack("<HHII", tag, 4, 1, value) for tag, value in tags)
    directories = (
        struct.pack("<H", len(tags)) + entries + struct.pack("<I", 16 + (i + 1) * size if i + 1 < pages else 0)
        for i in range(pages)
    )
    path.write_bytes(b"II*\0" + struct.pack("<I", 16) + b"\x7f" + bytes(7) + b"".join(directories))
    return path


def tiff_in_a_circle(path: Path) -> Path:
    """Whose second page says that the first one follows."""
    content = bytearray(tiff_of_pages(path, 2).read_bytes())
    content[-4:] = struct.pack("<I", 16)
    path.write_bytes(content)
    return path


def dicom_of_frames(path: Path, frames: int = 2**31 - 1) -> Path:
    """A NumberOfFrames that no instrument has, of frames so small that they would be allowed."""
    voxels = np.random.default_rng(0).integers(0, 255, (4, 2, 2), dtype=np.uint8)
    write_oct_dicom(path, voxels, (0.12, 0.0039, 0.0115))
    dataset = pydicom.dcmread(path)
    dataset.NumberOfFrames, dataset.Rows, dataset.Columns = frames, 1, 1
    dataset.save_as(path)
    return path


def dicom_of_items(path: Path, before: bytes = b"\x10\x00\x10\x00PN", items: int = 1_000_000) -> Path:
    """Some kilobytes of empty items in a sequence of undefined length, each of which becomes a dataset."""
    voxels = np.random.default_rng(0).integers(0, 255, (4, 40, 36), dtype=np.uint8)
    small = write_oct_dicom(
        path, voxels, (0.12, 0.0039, 0.0115), transfer_syntax=pydicom.uid.DeflatedExplicitVRLittleEndian
    ).read_bytes()
    start = 144 + int.from_bytes(small[140:144], "little")
    body = zlib.decompress(small[start:], -zlib.MAX_WBITS)
    at = body.index(before)
    tag = b"\x09\x00\x10\x10" if before[:1] == b"\x10" else before[:4]  # private, or the functional groups
    sequence = tag + b"SQ\0\0\xff\xff\xff\xff" + b"\xfe\xff\x00\xe0\0\0\0\0" * items + b"\xfe\xff\xdd\xe0\0\0\0\0"
    packer = zlib.compressobj(9, zlib.DEFLATED, -zlib.MAX_WBITS)
    path.write_bytes(small[:start] + packer.compress(body[:at] + sequence + body[at:]) + packer.flush())
    return path


def dicom_of_groups(path: Path) -> Path:
    """The same as frames of its functional groups."""
    return dicom_of_items(path, b"\x00\x52\x29\x92SQ", 2_000_000)


def e2e_of_directories(path: Path, directories: int = 30_000) -> Path:
    """Directories behind each other, of which each claims all bytes behind itself as its entries."""
    place, size = struct.Struct("<12sI20s4I"), 88 + 52 * directories
    content = b"CMDb".ljust(12, b"\0") + struct.pack("<I20s", 100, b"")
    content += place.pack(b"MDbMDir", 100, b"", 0, size - place.size, 0, 0)
    for at in range(88, size, place.size):
        before = at - place.size if at > 88 else 0
        content += place.pack(b"MDbDir", 100, b"", (size - at - place.size) // 44, 1, before, 0)
    path.write_bytes(content)
    return path


def nifti_of_an_offset(path: Path) -> Path:
    """Voxels two gigabytes behind the header."""
    _nifti(path, (48, 64, 8), bytes(2**20))
    content = bytearray(gzip.decompress(path.read_bytes()))
    struct.pack_into("<f", content, 108, 2.0**31)
    path.write_bytes(gzip.compress(bytes(content), 1))
    return path


def nifti_of_dimensions(path: Path, dimensions: tuple[int, int, int] = (32767, 32767, 32767)) -> Path:
    return _nifti(path, dimensions, b"")


def nifti_of_zeros(path: Path) -> Path:
    """A volume of 300 megabytes that could be one: its header and 200 B-scans, each compressed by itself."""
    depth, bscan = 200, bytes(2000 * 800)
    _nifti(path, (2000, 800, depth), b"")
    path.write_bytes(path.read_bytes() + depth * gzip.compress(bscan, 1))
    return path


def _nifti(path: Path, dimensions: tuple[int, int, int], body: bytes) -> Path:
    header = bytearray(352)
    struct.pack_into("<i", header, 0, 348)
    struct.pack_into("<8h", header, 40, 3, *dimensions, 1, 1, 1, 1)
    struct.pack_into("<hh", header, 70, 2, 8)
    struct.pack_into("<8f", header, 76, 1, 0.0115, 0.0039, 0.12, 0, 0, 0, 0)
    struct.pack_into("<3f", header, 108, 352, 1, 0)
    header[123], header[344:348] = 2, b"n+1\0"
    path.write_bytes(gzip.compress(bytes(header) + body, 1) if path.suffix == ".gz" else bytes(header) + body)
    return path


BOMBS = {
    "more_behind.npz": npz_with_more_behind,
    "zeros.npz": npz_of_zeros,
    "zeros.mat": matlab_of_zeros,
    "pages.tif": tiff_of_pages,
    "circle.tif": tiff_in_a_circle,
    "frames.dcm": dicom_of_frames,
    "items.dcm": dicom_of_items,
    "groups.dcm": dicom_of_groups,
    "directories.e2e": e2e_of_directories,
    "offset.nii.gz": nifti_of_an_offset,
    "deflated.dcm": lambda path: deflated_bomb(path, 300),
    "dimensions.nii": nifti_of_dimensions,
}
"""Name of the file -> what writes it."""
