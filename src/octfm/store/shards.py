"""The bytes of one shard: zarr v3's sharding codec with the index in front, zstd and CRC-32C, for any zarr reader.

A shard of voxels is an index and chunks of up to 16 B-scans, so that a few B-scans can be read alone; one of band or
valid is a single chunk. Chunks end with their CRC-32C, except in stores older than those checksums.
"""

import json
import os
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from importlib.util import find_spec
from io import RawIOBase
from pathlib import Path

import numpy as np

from octfm.io.cores import available_cores
from octfm.store.layout import ARRAYS, Compression, array_metadata, bscans_per_chunk, shapes, shard_key

CRC_BYTES = 4


def encode(
    name: str, array: np.ndarray, image_size: Sequence[int], compression: Compression, crc: bool = True
) -> bytes:
    """The bytes of one shard. They do not depend on the row, which may be assigned later."""
    if array.dtype != ARRAYS[name] or array.shape != shapes(image_size)[name]:
        raise ValueError(
            f"{name} of a prepared volume must be {ARRAYS[name]} {shapes(image_size)[name]}, "
            f"got {array.dtype} {array.shape}"
        )
    if find_spec("google_crc32c") is None:
        return _encode_by_tensorstore(name, array, image_size, compression, crc)
    plain = np.ascontiguousarray(array, array.dtype.newbyteorder("<"))
    chunks = [_chunk(part.tobytes(), compression, crc) for part in _parts(name, plain)]
    return b"".join([_index([len(chunk) for chunk in chunks]) if name == "voxels" else b"", *chunks])


def _parts(name: str, array: np.ndarray) -> list[np.ndarray]:
    """Views of what the chunks of this array hold."""
    step = bscans_per_chunk(array.shape) if name == "voxels" else len(array)
    return [array[i : i + step] for i in range(0, len(array), step)]


def _chunk(content: bytes, compression: Compression, crc: bool) -> bytes:
    if compression == "zstd":
        from imagecodecs import zstd_encode

        content = bytes(zstd_encode(content, level=1))
    return content + _crc(content) if crc else content


def _index(sizes: Sequence[int]) -> bytes:
    """Offset and size of every chunk, and a checksum of these."""
    first = 16 * len(sizes) + CRC_BYTES
    offsets = first + np.cumsum([0, *sizes[:-1]])
    index = np.stack([offsets, sizes], axis=1).astype("<u8").tobytes()
    return index + _crc(index)


def _crc(content: bytes | np.ndarray) -> bytes:
    import google_crc32c

    return google_crc32c.value(content).to_bytes(CRC_BYTES, "little")  # pyright: ignore[reportArgumentType]


def _encode_by_tensorstore(
    name: str, array: np.ndarray, image_size: Sequence[int], compression: Compression, crc: bool
) -> bytes:
    """The same shard without google-crc32c, as on machines that only train."""
    import tensorstore

    context = tensorstore.Context()
    memory = tensorstore.KvStore.open({"driver": "memory"}, context=context).result()
    memory["zarr.json"] = json.dumps(array_metadata(name, 1, image_size, compression, crc)).encode()
    # By default a shard of zeros is not written.
    spec = {"driver": "zarr3", "kvstore": {"driver": "memory"}, "store_data_equal_to_fill_value": True}
    tensorstore.open(spec, context=context).result()[0] = array
    return bytes(memory[shard_key(0)])


class ShardArrays:
    """The arrays of a local folder, read straight into the caller's memory."""

    def __init__(self, path: Path, compression: Compression, crc: bool, threads: int | None):
        self._path, self._compression, self._crc = path, compression, crc
        self._pool = ThreadPoolExecutor(threads or available_cores(), "octfm-read")

    def read_into(self, name: str, index: np.ndarray, out: np.ndarray) -> None:
        """Fill `out`, one array per row. Raises OSError if a shard is absent or damaged."""

        def one(position: int) -> None:
            self._read(name, self._path / name / shard_key(int(index[position])), out[position])

        if len(index) == 1:
            one(0)
        else:  # as a list, or errors of the threads would go unnoticed
            list(self._pool.map(one, range(len(index))))

    def _read(self, name: str, file: Path, out: np.ndarray) -> None:
        parts, checked = _parts(name, out), CRC_BYTES * self._crc
        with file.open("rb", buffering=0) as stream:
            if name == "voxels":
                index = _take(stream, np.empty(16 * len(parts), np.uint8), True, file)
                places = index.view("<u8").reshape(-1, 2).tolist()
            else:
                places = [(0, os.fstat(stream.fileno()).st_size)]
            for part, (offset, size) in zip(parts, places, strict=True):
                stream.seek(offset)
                if self._compression == "none":
                    if size != part.nbytes + checked:
                        raise OSError(f"{file}: a chunk has {size} bytes, expected {part.nbytes + checked}")
                    _take(stream, part, self._crc, file)
                else:
                    _decompress(_take(stream, np.empty(max(size - checked, 0), np.uint8), self._crc, file), part, file)


def _take(stream: RawIOBase, out: np.ndarray, crc: bool, file: Path) -> np.ndarray:
    """Fill `out` from the stream and, with `crc`, compare it with the checksum that follows."""
    stored = np.empty(CRC_BYTES if crc else 0, np.uint8)
    for content in (out, stored):
        rest = content.reshape(-1).view(np.uint8).data
        while len(rest):
            if not (count := stream.readinto(rest)):
                raise OSError(f"{file}: the file ends {len(rest)} bytes too early")
            rest = rest[count:]
    if crc and _crc(out.reshape(-1).view(np.uint8)) != stored.tobytes():
        raise OSError(f"{file}: a checksum does not match")
    return out


def _decompress(content: np.ndarray, out: np.ndarray, file: Path) -> None:
    from imagecodecs import zstd_decode

    try:
        plain = zstd_decode(content.tobytes(), out=out.nbytes)
    except (RuntimeError, ValueError) as error:
        raise OSError(f"{file}: not a zstd stream of {out.nbytes} bytes ({error})") from error
    if len(plain) != out.nbytes:
        raise OSError(f"{file}: a chunk has {len(plain)} bytes, expected {out.nbytes}")
    out[:] = np.frombuffer(plain, out.dtype).reshape(out.shape)
