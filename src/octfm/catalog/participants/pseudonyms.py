"""A catalog in which ids, UIDs, paths and dates are replaced by what only the holder of a key can compute again.

Keyed hashes (HMAC-SHA-256, RFC 2104) instead of a table: nothing that re-identifies is ever written. Whoever has the key and the files
finds each file again by hashing its path below the root, so that `prepare` can read what a pseudonymous catalog names. The same key gives
the same participant the same pseudonym in every data set, and shifts all of a participant's dates by the same days, so that intervals
stay true. Of what tables and headers say, only what is known to be safe passes (octfm.catalog.participants.safe_values), or what the user names.
"""

import re
import secrets
from collections import Counter
from collections.abc import Collection, Mapping
from dataclasses import replace
from datetime import date, timedelta
from pathlib import Path
from typing import Any

from octfm.catalog.acquisition import PSEUDONYM, Acquisition, Reject
from octfm.catalog.catalog import Catalog, CatalogError
from octfm.catalog.labels import MISSING
from octfm.catalog.participants.safe_values import (
    DATES,
    SITES,
    is_known_protocol,
    is_known_scanner,
    meaning,
    safe_value,
)
from octfm.catalog.walk import walk
from octfm.errors import ConfigError, ReadError
from octfm.formats import volumes_in
from octfm.formats.reasons import REASONS
from octfm.io.hashing import keyed_hash
from octfm.io.isolation import Limits
from octfm.io.location import Location, listed, location

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


def pseudonymise(catalog: Catalog, key: bytes, keep_columns: Collection[str] = ()) -> Catalog:
    """The same catalog for people who may not know whose eyes these are. Rows are sorted by pseudonym: their order tells nothing.

    Of participants' columns, `keep_columns` pass as they are, except that dates are shifted, and others as far as they are known to be
    safe; `withheld` counts what does not pass. Sites, scanners and protocols that are not known become keyed codes, which keep groups apart.
    """
    root = location(catalog.root)
    accepted = [_hidden(a, root, key, keep_columns) for a in catalog.acquisitions]
    rejects, skipped = (
        [_hidden_reject(r, root, key) for r in left_out] for left_out in (catalog.rejects, catalog.skipped)
    )
    return Catalog(
        root=PSEUDONYM + _hash(key, "root", str(root), 16),
        acquisitions=tuple(sorted(accepted, key=lambda a: a.uri)),
        rejects=tuple(sorted(rejects, key=lambda r: r.uri)),
        companions=catalog.companions,
        skipped=tuple(sorted(skipped, key=lambda r: r.uri)),
        pixels=catalog.pixels,
    )


def withheld(catalog: Catalog, keep_columns: Collection[str] = ()) -> dict[str, tuple[int, int]]:
    """Columns of which `pseudonymise` withholds values -> (participants whose value is withheld, participants that have one).

    For the terminal of whoever holds the key: the name of a column may itself be private. Raises ConfigError where `keep_columns` names
    a column that no table has.
    """
    people = {a.participant: a.participant_labels for a in catalog.acquisitions}
    columns = sorted({column for labels in people.values() for column in labels})
    if people and (absent := sorted(set(keep_columns) - set(columns))):
        raise ConfigError(
            f"--keep-columns {absent[0]}: no participant has such a column, or its name says that it identifies a person; "
            f"columns: {', '.join(columns) or 'none'}"
        )
    stated, lost = Counter[str](), Counter[str]()
    for labels in people.values():
        passed = _passed(labels, 1, b"", keep_columns)
        for column, value in labels.items():
            if value.strip().lower() not in MISSING:
                stated[column] += 1
                lost[column] += not passed.get(column)
    return {column: (lost[column], stated[column]) for column in columns if lost[column]}


def is_pseudonymous(catalog: Catalog) -> bool:
    return catalog.root.startswith(PSEUDONYM)


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
        return volumes_in(path, Limits())
    except ReadError:
        return []


def _hidden(a: Acquisition, root: Location, key: bytes, keep_columns: Collection[str]) -> Acquisition:
    days = 1 + int(_hash(key, "shift", a.participant, 8), 16) % MAX_SHIFT_DAYS
    return replace(
        a,
        uri=_place(a.uri, root, key),
        participant="p" + _hash(key, "participant", a.participant, 16),
        scanner=a.scanner if is_known_scanner(a.scanner) else _code(key, "scanner", a.scanner),
        protocol=a.protocol if is_known_protocol(a.protocol) else _code(key, "protocol", a.protocol),
        sop_instance_uid=_hidden_uid(a.sop_instance_uid, key),
        participant_labels=_passed(a.participant_labels, days, key, keep_columns),
    )


def _hidden_reject(reject: Reject, root: Location, key: bytes) -> Reject:
    """Sentences quote paths and values; the meaning of the code stands in for them."""
    uri, reason = _place(reject.uri, root, key), REASONS[reject.code]
    about = _hidden_uid(reject.refers_to, key) if reject.refers_to else ""
    return replace(reject, uri=uri, sentence=f"{uri}: {reason.meaning}; {reason.fix}", refers_to=about)


def _hidden_uid(uid: str, key: bytes) -> str:
    """PS3.5 B.2: a UID from 128 bits needs no registered root."""
    return f"2.25.{int(_hash(key, 'uid', uid, 32), 16)}"


def _passed(labels: Mapping[str, str], days: int, key: bytes, keep_columns: Collection[str]) -> dict[str, str]:
    """The columns of a participant that may be known, dates earlier by `days`; a column without a value that passes is left out."""
    passed: dict[str, str | None] = {}
    for column, value in labels.items():
        if column in keep_columns:
            passed[column] = value if (moved := _shifted(value, days)) is None else moved
        elif meaning(column) in DATES:
            passed[column] = _shifted(value, days)
        elif (safe := safe_value(column, value)) is None and meaning(column) in SITES and value:
            passed[column] = _code(key, "site", value)
        else:
            passed[column] = safe
    return {column: value for column, value in passed.items() if value}


def _shifted(value: str, days: int) -> str | None:
    """A date earlier by `days`; empty for what looks like a date and cannot be read as one; None where there is no date."""
    if match := _DATE.fullmatch(value):
        year, dash, month, day = match.groups()
        try:
            moved = date(int(year), int(month), int(day)) - timedelta(days=days)
        except ValueError:
            return ""
        return moved.isoformat() if dash else moved.strftime("%Y%m%d")
    return "" if _LOOKS_LIKE_A_DATE.search(value) else None


def _code(key: bytes, kind: str, text: str) -> str:
    """Groups stay apart, and nobody without the key can guess what they are called."""
    return f"{kind}_{_hash(key, kind, text, 8)}"


def _place(uri: str, root: Location, key: bytes) -> str:
    path: Any = listed(uri)
    inside = path.relative_to(root) if path.is_relative_to(root) else path
    return PSEUDONYM + _hash(key, "path", str(inside), 32)


def _hash(key: bytes, kind: str, text: str, digits: int) -> str:
    return keyed_hash(f"{kind}\0{text}", key)[:digits]
