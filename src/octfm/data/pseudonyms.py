"""A catalog in which ids, UIDs, paths and dates are replaced by what only the holder of a key can compute again.

Keyed hashes (HMAC-SHA-256, RFC 2104) instead of a table: nothing that re-identifies is ever written. Whoever has the key and the files
finds each file again by hashing its path below the root, so that `prepare` can read what a pseudonymous catalog names. The same key gives
the same participant the same pseudonym in every data set, and shifts all of a participant's dates by the same days, so that intervals
stay true.
"""

import hashlib
import hmac
import re
import secrets
from collections.abc import Mapping
from dataclasses import replace
from datetime import date, timedelta
from pathlib import Path
from typing import Any

from octfm.data.acquisition import Acquisition, Reject
from octfm.data.catalog import Catalog, CatalogError
from octfm.data.location import Location, location
from octfm.data.readers import REASONS, volumes_in
from octfm.data.walk import walk
from octfm.errors import ReadError

PREFIX = "pseudonym:"
MIN_KEY_BYTES = 16
MAX_SHIFT_DAYS = 365

_DATE = re.compile(r"((?:19|20)\d\d)(-?)(\d\d)\2(\d\d)(?:[T ].*)?")
_LOOKS_LIKE_A_DATE = re.compile(r"(?<![\d.])\d{1,4}([./-])\d{1,2}\1\d{1,4}(?![\d.])|^\d{8}([T ]?\d{4,6})?$")


def read_key(path: str | Path, *, make: bool = True) -> bytes:
    """The key in a file; with `make`, a new random one, readable by its owner only, where there is no such file. Raises CatalogError."""
    path = Path(path)
    if not path.exists():
        if not make:
            raise CatalogError(f"{path}: no such key file; give the one that the catalog was scanned with")
        path.parent.mkdir(parents=True, exist_ok=True)
        path.touch(0o600, exist_ok=False)
        path.write_text(secrets.token_hex(32) + "\n")
    key = path.read_bytes().strip()
    if len(key) < MIN_KEY_BYTES:
        raise CatalogError(
            f"{path}: a key of {len(key)} bytes can be guessed, expected {MIN_KEY_BYTES} or more; delete it to get a new one"
        )
    return key


def pseudonymise(catalog: Catalog, key: bytes) -> Catalog:
    """The same catalog for people who may not know whose eyes these are. Rows are sorted by pseudonym: their order tells nothing."""
    root = location(catalog.root)
    accepted = [_hidden(a, root, key) for a in catalog.acquisitions]
    rejects, skipped = (
        [_hidden_reject(r, root, key) for r in left_out] for left_out in (catalog.rejects, catalog.skipped)
    )
    return Catalog(
        root=PREFIX + _hash(key, "root", str(root), 16),
        acquisitions=tuple(sorted(accepted, key=lambda a: a.uri)),
        rejects=tuple(sorted(rejects, key=lambda r: r.uri)),
        companions=catalog.companions,
        skipped=tuple(sorted(skipped, key=lambda r: r.uri)),
    )


def is_pseudonymous(catalog: Catalog) -> bool:
    return catalog.root.startswith(PREFIX)


def locate(catalog: Catalog, root: str | Location, key: bytes) -> dict[str, str]:
    """uri of each acquisition -> where the file lies below `root`, wherever that has moved to.

    Raises CatalogError where files are missing: another root, another key, or files that are gone.
    """
    folder = location(root)
    folder = folder.absolute() if isinstance(folder, Path) else folder
    files = [str(path) for path in walk(folder).files]
    wanted = [a.uri for a in catalog.acquisitions]
    places = {_place(path, folder, key): path for path in files}
    if not places.keys() >= set(wanted):  # those of several volumes have to be looked into
        places |= {_place(uri, folder, key): uri for path in files for uri in _volumes_in(path)}
    found = {uri: places[uri] for uri in wanted if uri in places}
    if len(found) < len(wanted):
        raise CatalogError(
            f"{folder}: {len(wanted) - len(found)} of {len(wanted)} acquisitions of the catalog are not below it under this key; "
            "give the root and the key of the scan"
        )
    return found


def _volumes_in(path: str) -> list[str]:
    try:
        return volumes_in(path)
    except ReadError:
        return []


def _hidden(a: Acquisition, root: Location, key: bytes) -> Acquisition:
    days = 1 + int(_hash(key, "shift", a.participant, 8), 16) % MAX_SHIFT_DAYS
    return replace(
        a,
        uri=_place(a.uri, root, key),
        participant="p" + _hash(key, "participant", a.participant, 16),
        sop_instance_uid=_hidden_uid(a.sop_instance_uid, key),
        participant_labels=_shifted(a.participant_labels, days),
    )


def _hidden_reject(reject: Reject, root: Location, key: bytes) -> Reject:
    """Sentences quote paths and values; the meaning of the code stands in for them."""
    uri, reason = _place(reject.uri, root, key), REASONS[reject.code]
    about = _hidden_uid(reject.refers_to, key) if reject.refers_to else ""
    return replace(reject, uri=uri, sentence=f"{uri}: {reason.meaning}; {reason.fix}", refers_to=about)


def _hidden_uid(uid: str, key: bytes) -> str:
    """PS3.5 B.2: a UID from 128 bits needs no registered root."""
    return f"2.25.{int(_hash(key, 'uid', uid, 32), 16)}"


def _shifted(labels: Mapping[str, str], days: int) -> dict[str, str]:
    """Dates earlier by `days`; what looks like a date and cannot be read as one is emptied, never passed on."""
    shifted = {}
    for column, value in labels.items():
        if match := _DATE.fullmatch(value):
            year, dash, month, day = match.groups()
            try:
                moved = date(int(year), int(month), int(day)) - timedelta(days=days)
            except ValueError:
                value = ""
            else:
                value = moved.isoformat() if dash else moved.strftime("%Y%m%d")
        elif _LOOKS_LIKE_A_DATE.search(value):
            value = ""
        shifted[column] = value
    return shifted


def _place(uri: str, root: Location, key: bytes) -> str:
    path: Any = location(uri)
    inside = path.relative_to(root) if path.is_relative_to(root) else path
    return PREFIX + _hash(key, "path", str(inside), 32)


def _hash(key: bytes, kind: str, text: str, digits: int) -> str:
    return hmac.new(key, f"{kind}\0{text}".encode("utf-8", "surrogateescape"), hashlib.sha256).hexdigest()[:digits]
