"""Open files on disk, in buckets and inside ZIP archives (/data/x.zip!/1001/scan.dcm) by one kind of uri.

Archives are untrusted. Names that leave the archive, links, duplicate names, overlapping members, members that inflate
beyond any OCT volume, encryption and unusual compression methods are refused with a reason code before any of their
bytes are decompressed. ZIP: PKWARE APPNOTE 6.3.10. Overlapping members: D. Fifield, "A better zip bomb", WOOT 2019.
"""

import io
import os
import re
import secrets
import struct
import zipfile
import zlib
from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager
from contextvars import ContextVar
from dataclasses import dataclass
from functools import cached_property, lru_cache
from pathlib import Path, PurePosixPath
from typing import BinaryIO, cast
from zipfile import ZIP_DEFLATED, ZIP_STORED, ZipInfo

from octfm.addresses import mask_path
from octfm.errors import ReadError, reason_of
from octfm.io.location import BucketPath, Location, is_remote, listed
from octfm.io.ranged import Positioned, directly_below, is_prefix, known, open_binary, remember

MEMBER = "!/"
"""Separates the archive from the member in a uri."""
MAX_MEMBER_BYTES = 2 * 2**30 + 64 * 2**20
"""The largest volume that a reader accepts, plus a generous header."""
MAX_RATIO, RATIO_FROM_BYTES = 200, 256 * 2**20
"""Members that inflate more than 200 times are refused: no OCT compresses so well. A blank volume does, so only members
larger than RATIO_FROM_BYTES are."""

_LOCAL_HEADER = struct.Struct("<4sHHHHHIIIHH")
_CHUNK = 2**20
_CONTROL = re.compile(r"[\x00-\x1f\x7f-\x9f\ud800-\udfff]")


@dataclass(frozen=True)
class Refused:
    """A member that must not be read, and why."""

    uri: str
    code: str
    """One of octfm.formats.reasons.REASONS."""
    sentence: str
    bytes: int


@dataclass(frozen=True)
class Archive:
    """The checked directory of a ZIP archive."""

    path: str
    members: dict[str, ZipInfo]
    """Path inside the archive, with / between folders, which never leaves it → what its central directory says."""
    refused: tuple[Refused, ...]

    @cached_property
    def folders(self) -> dict[str, list[str]]:
        """Names of the members directly in each folder, also of folders that hold only others; "" is the top."""
        found: dict[str, list[str]] = {}
        for name in self.members:
            folder = name.rpartition("/")[0]
            found.setdefault(folder, []).append(name)
            while folder and (folder := folder.rpartition("/")[0]) not in found:
                found[folder] = []
        return found


def open_archive(path: str | Location) -> Archive:
    """Read and check the directory of an archive. Raises ReadError damaged_archive."""
    path = str(path)
    if is_remote(path):
        remote = known(path)
        return _listed(path, remote.version, remote.size)
    found = os.stat(path)  # noqa: PTH116  (called for every member that is read)
    return _listed(path, found.st_mtime_ns, found.st_size)


def split_uri(uri: str | Location) -> tuple[str, str] | None:
    """(archive, member) for a uri inside an archive, else None; the member is empty for the archive's top folder."""
    text = str(uri)
    marked = f"{text}/"  # x.zip! is the top folder, as pathlib writes it
    at = marked.find(MEMBER)
    if is_remote(text):
        # A request per uri, to see whether the archive exists, would cost more than reading: trust the name.
        ending = re.search(rf"(?i)\.zip(?={MEMBER})", marked, re.ASCII)
        return None if ending is None else (text[: ending.end()], text[ending.end() + len(MEMBER) :])
    if at < 0 or os.path.exists(text):  # noqa: PTH110
        return None
    # A folder may have "!/" in its name, so take the first prefix that is a file.
    while at > 0:
        if os.path.isfile(text[:at]):  # noqa: PTH113
            return text[:at], text[at + len(MEMBER) :]
        at = marked.find(MEMBER, at + 1)
    return None


def recall(path: Location) -> None:
    """Remember the size and version that a path in a bucket brings from the process that listed it."""
    if isinstance(path, BucketPath) and path.facts is not None:
        inside = split_uri(path)
        remember(inside[0] if inside else str(path), path.facts)


_FOLLOW_LINKS: ContextVar[bool] = ContextVar("follow_links", default=True)


@contextmanager
def links(*, follow: bool) -> Iterator[None]:
    """Set whether links are followed. If not, `open_file` and `list_folder` raise ReadError
    link_not_followed when they meet one."""
    before = _FOLLOW_LINKS.set(follow)
    try:
        yield
    finally:
        _FOLLOW_LINKS.reset(before)


def refuse_link(path: str) -> None:
    """Raise ReadError if this is a symbolic link and links are not followed."""
    if not _FOLLOW_LINKS.get() and os.path.islink(path):  # noqa: PTH114
        raise ReadError(
            "link_not_followed",
            f"{path}: is a symbolic link; put the file itself there, or scan without --no-follow-links",
        )


def read_start(uri: str | Location, count: int) -> bytes:
    """The first `count` bytes of a file or member, inflating no more than needed, so no checksum is verified.

    Raises OSError, ReadError.
    """
    uri = str(uri)
    if (inside := split_uri(uri)) is None:
        with open_file(uri) as file:
            return file.read(count)
    with open_binary(inside[0], in_place=True) as file:
        member = _member(*inside, uri)
        file.seek(_data_offset(file, member, uri))
        if member.compress_type == ZIP_STORED:
            return file.read(min(count, member.file_size))
        return _inflated(file, member, uri, most=count)


@contextmanager
def open_file(uri: str | Location, *, whole: bool = False) -> Iterator[BinaryIO]:
    """Open a file or member as a seekable stream. `whole`: all will be read, so a member's checksum is verified first.

    Raises OSError for a file, ReadError with a reason code for a member.
    """
    uri = str(uri)
    if (inside := split_uri(uri)) is None:
        if is_remote(uri):
            with open_binary(uri, whole=whole) as file:
                yield file
            return
        refuse_link(uri)
        with _Frugal(io.FileIO(uri)) as file:
            yield cast(BinaryIO, file)
        return
    archive, name = inside
    try:
        with open_binary(archive, in_place=True) as file:
            member = _member(archive, name, uri)
            start = _data_offset(file, member, uri)
            if member.compress_type == ZIP_STORED and not whole:
                with _Frugal(_Window(file, start, member.file_size, name)) as window:
                    yield cast(BinaryIO, window)
                return
            content = io.BytesIO(_content(file, start, member, uri))
    except OSError as error:
        raise ReadError(
            "unreadable", f"{mask_path(uri)}: cannot be read: {error.strerror or error}; check path and permissions"
        ) from None  # the cause quotes the path, which may hold credentials
    yield content


def is_folder(uri: str | Location) -> bool:
    """Whether this is a folder on disk or in an archive, or a prefix in a bucket."""
    uri = str(uri)
    if (inside := split_uri(uri)) is None:
        return is_prefix(uri) if is_remote(uri) else os.path.isdir(uri)  # noqa: PTH112
    # In any other file the mark precedes the name of one of several volumes.
    return inside[0].lower().endswith(".zip") and inside[1] in open_archive(inside[0]).folders


def list_folder(uri: str | Location) -> list[str]:
    """Sorted uris of the files directly in a folder, bucket's prefix or archive. Raises OSError, ReadError."""
    uri = str(uri)
    if inside := split_uri(uri):
        archive, folder = inside
        return [f"{archive}{MEMBER}{name}" for name in open_archive(archive).folders.get(folder, ())]
    if is_remote(uri):
        return directly_below(uri)
    with os.scandir(uri) as entries:
        found = sorted(entry.path for entry in entries if entry.is_file())
    for path in found:
        refuse_link(path)
    return found


def file_size(uri: str | Location) -> int:
    """Bytes of a file, of an unpacked member, or of all files directly in a folder; 0 if there is none."""
    uri = str(uri)
    try:
        if is_folder(uri):
            return sum(file_size(file) for file in list_folder(uri))
        if inside := split_uri(uri):
            return open_archive(inside[0]).members[inside[1]].file_size
        return known(uri).size if is_remote(uri) else Path(uri).stat().st_size
    except (OSError, ReadError, KeyError):
        return 0


def unpacked_paths(uri: str) -> tuple[str, ...]:
    """Paths by which a table may refer to this file.

    Its own uri; for a member also its path after unpacking next to the archive, or into a folder named like the
    archive.
    """
    inside = split_uri(uri)
    if inside is None:
        return (uri,)
    archive, name = listed(inside[0]), inside[1]
    return uri, str(archive.parent / name), str(archive.with_suffix("") / name)


def unpack(archive: Archive, folder: Path) -> dict[str, Path]:
    """Unpack all members that are not refused below `folder`; return member uri -> file.

    Existing files are kept if they have the member's content. A file appears complete and verified, or not at all.
    Unreadable members are left out; reading them in place gives the reason code.
    """
    written = {}
    for name, member in archive.members.items():
        target = folder / name
        uri = f"{archive.path}{MEMBER}{name}"
        if not _holds(target, member):
            try:
                with open_file(uri, whole=True) as stream:
                    target.parent.mkdir(parents=True, exist_ok=True)
                    # Of fixed length: a long name with an ending could be longer than the file system allows. Another
                    # process may unpack the same archive.
                    partial = target.with_name(f".{secrets.token_hex(8)}.partial")
                    partial.write_bytes(stream.read())
                    partial.replace(target)
            except ReadError:
                continue
        written[uri] = target
    return written


def _holds(file: Path, member: ZipInfo) -> bool:
    """Whether the file is this member, unpacked earlier; a new archive may hold other voxels of the same size."""
    same_size = file.is_file() and file.stat().st_size == member.file_size
    return same_size and zlib.crc32(file.read_bytes()) == member.CRC


# ---- listing -----------------------------------------------------------------------------------------------------


@lru_cache(maxsize=16)
def _listed(path: str, version: int | str, size: int) -> Archive:  # noqa: ARG001
    """Read and check the directory of this version of an archive.

    Cached, since reading a large directory for each of its members would take longer than reading the members.
    """
    try:
        with open_binary(path, in_place=True) as file, zipfile.ZipFile(file) as archive:
            entries = [
                # A folder has an entry of its own, without bytes and with a slash at the end.
                entry
                for entry in archive.infolist()
                if entry.file_size or not entry.orig_filename.endswith(("/", "\\"))
            ]
    except (zipfile.BadZipFile, UnicodeDecodeError, NotImplementedError, ValueError, struct.error, EOFError) as error:
        what = reason_of(error, 80)
        raise ReadError(
            "damaged_archive", f"{path}: the directory of this ZIP archive cannot be read ({what}); fetch it again"
        ) from None
    names = [_inner_name(entry.orig_filename) for entry in entries]
    times = Counter(name for name in names if name)
    folders = {str(parent) for name in times for parent in PurePosixPath(name).parents}
    shared = _overlapping(entries)
    members, refused = {}, []
    for entry, name in zip(entries, names, strict=True):
        if name is None:
            problem = "unsafe_member", "its name is invalid or leaves the archive; unpack it by hand if you trust it"
        elif times[name] > 1 or name in folders:
            problem = "unsafe_member", "two members have this name, so it is ambiguous; create the archive again"
        elif entry.external_attr >> 28 == 0xA:  # S_IFLNK in the Unix mode
            problem = "unsafe_member", "is a symbolic link; create the archive again with the file itself"
        elif entry.header_offset in shared:
            problem = "decompression_bomb", "shares its bytes with another member; create the archive again"
        elif entry.flag_bits & 0x1:
            problem = "unsupported_member", "is encrypted; unpack it with its password"
        elif entry.compress_type not in (ZIP_STORED, ZIP_DEFLATED):
            found = f"compression method {entry.compress_type}, expected stored or deflated; unpack it"
            problem = "unsupported_member", found
        elif entry.file_size > MAX_MEMBER_BYTES or (
            entry.file_size > max(RATIO_FROM_BYTES, MAX_RATIO * max(entry.compress_size, 1))
        ):
            grows = f"claims to inflate from {entry.compress_size:,} to {entry.file_size:,} bytes"
            problem = "decompression_bomb", f"{grows}, more than any OCT volume does; unpack it by hand if you trust it"
        else:
            problem = None
        if problem is not None:
            uri = f"{path}{MEMBER}{_shown(entry.orig_filename)}"
            refused.append(Refused(uri, problem[0], f"{uri}: {problem[1]}", entry.file_size))
        elif name is not None:
            members[name] = entry
    return Archive(path, dict(sorted(members.items())), tuple(refused))


def _inner_name(stored: str) -> str | None:
    """The name with / between folders, none of them empty; None if it leaves the archive or is no valid file name."""
    text = stored.replace("\\", "/")
    if _CONTROL.search(text) or text.startswith("/") or re.match(r"[A-Za-z]:", text):
        return None
    parts = PurePosixPath(text).parts
    too_long = len(os.fsencode(text)) > 1024 or any(len(os.fsencode(part)) > 255 for part in parts)
    return None if not parts or ".." in parts or too_long else "/".join(parts)


def _shown(name: str) -> str:
    """A name that is safe to print: control characters escaped, at most 200 characters."""
    return name.encode("unicode_escape").decode("ascii")[:200]


def _overlapping(entries: list[ZipInfo]) -> set[int]:
    """Header offsets of members that share bytes of the archive."""
    order = sorted(entries, key=lambda entry: entry.header_offset)
    found, end, holder = set(), -1, -1
    for entry in order:
        if entry.header_offset < end:
            found |= {holder, entry.header_offset}
        own_end = entry.header_offset + _LOCAL_HEADER.size + entry.compress_size
        if own_end > end:
            end, holder = own_end, entry.header_offset
    return found


# ---- reading -----------------------------------------------------------------------------------------------------


def _member(archive: str, name: str, uri: str) -> ZipInfo:
    listed = open_archive(archive)
    if name in listed.members:
        return listed.members[name]
    for refused in listed.refused:
        if refused.uri == uri:
            raise ReadError(refused.code, refused.sentence)
    raise ReadError("unreadable", f"{uri}: no such member in the archive, which may have changed; scan again")


def _data_offset(file: BinaryIO, member: ZipInfo, uri: str) -> int:
    """Offset of the member's data. Raises ReadError unless its local header agrees with the central directory."""
    file.seek(member.header_offset)
    head = file.read(_LOCAL_HEADER.size)
    if len(head) < _LOCAL_HEADER.size or head[:4] != b"PK\x03\x04":
        raise _damaged(uri, "no member starts at the offset given in the directory")
    fields = _LOCAL_HEADER.unpack(head)
    flags, name_length, extra_length = fields[2], fields[9], fields[10]  # flag 0x800: the name is UTF-8
    name = file.read(name_length)
    if name.decode("utf-8" if flags & 0x800 else "cp437", "replace") != member.orig_filename:
        raise _damaged(uri, "local header and directory give different names")
    start = member.header_offset + _LOCAL_HEADER.size + name_length + extra_length
    if start + member.compress_size > file.seek(0, io.SEEK_END):
        raise _damaged(uri, "the archive ends in the middle of this member")
    if member.compress_type == ZIP_STORED and member.file_size != member.compress_size:
        raise _damaged(uri, f"stored as {member.compress_size:,} bytes, but the directory claims {member.file_size:,}")
    return start


def _content(file: BinaryIO, start: int, member: ZipInfo, uri: str) -> bytes:
    """All bytes of the member. Raises ReadError unless size and checksum agree with the directory."""
    file.seek(start)
    stored = member.compress_type == ZIP_STORED
    content = file.read(member.compress_size) if stored else _inflated(file, member, uri)
    if len(content) != member.file_size or zlib.crc32(content) != member.CRC:
        raise _damaged(uri, "size or checksum differs from the directory")
    return content


def _inflated(file: BinaryIO, member: ZipInfo, uri: str, most: int | None = None) -> bytes:
    """Inflate all bytes of the member, or the first `most`."""
    inflater = zlib.decompressobj(-zlib.MAX_WBITS)  # negative: raw deflate, without a zlib header
    pieces, inflated, left = [], 0, member.compress_size
    try:
        while left and (packed := file.read(min(left, _CHUNK))):
            left -= len(packed)
            # Allow one byte more than claimed, to detect a surplus without inflating all of it.
            limit = member.file_size if most is None else min(most, member.file_size)
            pieces.append(inflater.decompress(packed, limit - inflated + 1))
            inflated += len(pieces[-1])
            if most is not None and inflated >= most:
                return b"".join(pieces)[:most]
            if inflated > member.file_size:
                raise ReadError(
                    "decompression_bomb",
                    f"{uri}: inflates beyond the {member.file_size:,} bytes that the directory claims; "
                    "create the archive again",
                )
    except zlib.error:
        raise _damaged(uri, "the compressed data are corrupt") from None
    return b"".join(pieces)


def _damaged(uri: str, found: str) -> ReadError:
    return ReadError("damaged_archive", f"{uri}: {found}; fetch the archive again")


class _Frugal(io.BufferedReader):
    """A reader that never allocates more than the file has left: damaged headers claim lengths of gigabytes."""

    def read(self, size: int | None = -1) -> bytes:
        if size is not None and size > _CHUNK:
            at = self.tell()
            size = max(0, min(size, self.seek(0, io.SEEK_END) - at))
            self.seek(at)
        return super().read(size)


class _Window(Positioned):
    """Part of a file as a stream, so that the header of a stored member is read without its pixels."""

    def __init__(self, file: BinaryIO, start: int, size: int, name: str):
        super().__init__(name, size)
        self._file, self._start = file, start

    def readinto(self, buffer) -> int:
        self._file.seek(self._start + self._at)
        content = self._file.read(max(0, min(len(buffer), self._size - self._at)))
        buffer[: len(content)] = content
        self._at += len(content)
        return len(content)
