"""Pseudonymous catalogs: ids, UIDs and paths become keyed hashes, dates are shifted.

Keyed hashes (HMAC-SHA-256, RFC 2104) need no table, so nothing that re-identifies is ever written. With the key and the
files, each file is found again by hashing its path below the root: `prepare` can read a pseudonymous catalog. The
same key and id always give the same pseudonym. Where a catalog spells a person's id in several ways, all of them get
the pseudonym of the shortest. All dates of a participant are shifted by the same number of days, which preserves
intervals. Values from tables and headers pass only if they are known to be safe
(octfm.catalog.participants.safe_values), or if the user names their column.
"""

import re
import secrets
from collections import defaultdict
from collections.abc import Collection, Mapping, Sequence
from dataclasses import replace
from datetime import date, timedelta
from pathlib import Path
from typing import Any

from octfm.catalog.acquisition import PSEUDONYM, Acquisition, Reject
from octfm.catalog.catalog import Catalog, CatalogError
from octfm.catalog.labels import MISSING
from octfm.catalog.participants.ids import under_one_id
from octfm.catalog.participants.path_words import MONTH
from octfm.catalog.participants.safe_values import (
    DATES,
    SITES,
    is_known_protocol,
    is_known_scanner,
    meaning,
    safe_value,
)
from octfm.catalog.walk import walk
from octfm.display import number
from octfm.errors import ConfigError, ReadError
from octfm.formats import volumes_in
from octfm.formats.reasons import REASONS
from octfm.io.hashing import keyed_hash
from octfm.io.isolation import Limits
from octfm.io.location import Location, flush, listed, local_path, location, warn_if_shared

MIN_KEY_BYTES = 16
MAX_SHIFT_DAYS = 365

_DATE = re.compile(r"((?:19|20)\d\d)(-?)(\d\d)\2(\d\d)(?:[T ].*)?")
_PAST = r"(?:19\d\d|20[0-2]\d)"
_YEAR, _MONTH_NUMBER, _DASH = r"(?:19|20)\d\d", r"(?:0?[1-9]|1[0-2])", r"[-_\u2010-\u2015\u2212]"
_NAMED = rf"(?:{MONTH}|(?:d[eé]c|f[eé]v|avr|ao[uû]|gen|ene|abr|ago)[a-zéûç]*)"
_OF = r"\W{0,3}(?:d[ei]\s)?"
_LOOKS_LIKE_A_DATE = re.compile(
    rf"""(?<![\d.])\d{{1,4}}([./]|{_DASH})\d{{1,2}}\1\d{{1,4}}(?![\d.])  # 3.12.1957, 03_12_1957
    |^\d{{8}}[T ]?(\d{{4,6}}(\.\d+)?)?(Z|[-+]\d{{4}})?$                 # 19571203101500.000000
    |(?<!\d){_YEAR}(?:0[1-9]|1[0-2])(?:0[1-9]|[12]\d|3[01])(?!\d)       # born 19571203
    |(?<!\d){_YEAR}\s?([/年]|{_DASH}|\s)\s?{_MONTH_NUMBER}(?!\d)        # 1957-12, 1957 12 03
    |(?<![\d.]){_MONTH_NUMBER}(/|{_DASH}|\s)\s?{_YEAR}(?!\d)            # 12/1957, 03 12 1957; no 20/2000
    |\d(?:st|nd|rd|th|er)?{_OF}{_NAMED}{_OF}\d                          # 3-Dec-57, 3 de diciembre de 1957
    |(?<![^\W\d_])(?<!3D[ ]){_NAMED}\W{{0,3}}(?:\d{{1,2}}(?:st|nd|rd|th)?\W{{1,3}})?{_YEAR}(?!\d)  # Dec 3rd, 1957
    |(?<!\d){_YEAR}\W{{0,3}}{MONTH}(?![^\W\d_])                         # 1957 Dec
    |^{MONTH}\W{{1,2}}\d\d$                                             # Dec-57, as spreadsheets write it
    |^(?:{_MONTH_NUMBER}\.\s?{_PAST}|{_PAST}\.(?:0[1-9]|1[0-2]))$       # 12.1957, 1957.12; no 12.5 or 12.2034
    |(?<!\d)\d{{1,2}}\W{{0,3}}[^\W\d_]{{3,}}\W{{1,3}}{_YEAR}(?!\d)        # 3 grudnia 1957, 3 декабря 1957
    |(?<![^\W_])[IVX]{{1,4}}\s?[./\s-]\s?{_YEAR}(?!\d)                  # 3.XII.1957
    |(?<![^\W_])Q[1-4]\W{{0,2}}{_YEAR}(?!\d)|(?<!\d){_YEAR}\W{{0,2}}(?:Q[1-4]|W\d\d)(?!\d)  # Q4 1957, 1957-W49
    |(?<!\d){_YEAR}-[0-3]\d\d(?!\d)                                   # 1957-337, the day of the year
    |\d\s?[년年]""",
    re.IGNORECASE | re.VERBOSE,
)
"""As people write dates. (?<!3D[ ]) lets Topcon's 3D OCT-2000 pass."""
_MEASURED = re.compile(r"[-+]?\d{1,3}\.\d{4,}")
_LEAST_MEASURED = 20
"""A column with as many different numbers of four or more decimals, three quarters of it, is one of measurements: 1.3 %
of those from 1 to 12 look like months (7.1957). In a column of months all do."""


def read_key(path: str | Path, *, make: bool = True) -> bytes:
    """Read a key; with `make`, a missing file is created with a random one, for its owner only. Raises CatalogError."""
    path = local_path(path)
    if not path.exists():
        if not make:
            raise CatalogError(f"{path}: no such key file; give the one that the catalog was scanned with")
        path.parent.mkdir(parents=True, exist_ok=True)
        # Created empty with its mode first: the key is at no time readable by others.
        path.touch(0o600, exist_ok=False)
        try:
            path.write_text(secrets.token_hex(32) + "\n", "ascii")
            flush(path)  # a power cut must not leave a catalog whose key is lost
        except BaseException:  # as on a full disk: the next call would find a key that is too short
            path.unlink()
            raise
        warn_if_shared(path)
    key = path.read_bytes().strip()
    if len(key) < MIN_KEY_BYTES:
        raise CatalogError(
            f"{path}: a key of {len(key)} bytes can be guessed, expected {MIN_KEY_BYTES} or more; "
            "delete it to get a new one"
        )
    return key


def pseudonymise(catalog: Catalog, key: bytes, keep_columns: Collection[str] = ()) -> Catalog:
    """The catalog without anything that identifies. Rows are sorted by pseudonym: their order would give paths away.

    `keep_columns` of participants pass as they are, except that dates are shifted. Of other columns only values known
    to be safe pass; `withheld` counts the rest. Unknown sites, scanners and protocols become keyed codes, which
    preserves groups. Ids that differ in spelling only get one pseudonym, since pseudonyms do not show that they do.
    """
    root = location(catalog.root)
    measured = _measured(catalog, keep_columns)
    named = _under_shortest_id(catalog.acquisitions)
    accepted = [_hidden(a, root, key, keep_columns, measured) for a in named]
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


def pseudonym(participant: str, key: bytes) -> str:
    """The pseudonym of an id as it is spelt."""
    return "p" + _hash(key, "participant", participant, 16)


def key_digest(key: bytes) -> str:
    """Identifies a key without giving it away: under another one the same people have other pseudonyms."""
    return _hash(key, "key", "", 16)


def withheld(catalog: Catalog, keep_columns: Collection[str] = ()) -> dict[str, tuple[int, int]]:
    """Column -> (participants whose value `pseudonymise` withholds, participants with a value).

    Show it only to the holder of the key: even the name of a column may be private. Raises ConfigError for a column in
    `keep_columns` that no table has.
    """
    rows = _under_shortest_id(catalog.acquisitions)
    columns = sorted({column for a in rows for column in a.participant_labels})
    if rows and (absent := sorted(set(keep_columns) - set(columns))):
        raise ConfigError(
            f"--keep-columns {absent[0]}: no participant has such a column, or it is a direct identifier; "
            f"columns: {', '.join(columns) or 'none'}"
        )
    # Every row: labels that a table gives to files differ among those of one person.
    measured = _measured(catalog, keep_columns)
    stated, dropped = defaultdict[str, set[str]](set), defaultdict[str, set[str]](set)
    for a in rows:
        # Any shift and key: only what passes is counted.
        passed = _passed(a.participant_labels, 1, b"", keep_columns, measured)
        for column, value in a.participant_labels.items():
            if value.strip().lower() not in MISSING:
                stated[column].add(a.participant)
                if not passed.get(column):
                    dropped[column].add(a.participant)
    return {column: (len(dropped[column]), len(stated[column])) for column in columns if dropped[column]}


def is_pseudonymous(catalog: Catalog) -> bool:
    return catalog.root.startswith(PSEUDONYM)


def locate(catalog: Catalog, root: str | Location, key: bytes) -> dict[str, str]:
    """uri of each acquisition -> path of its file below `root`, which may have moved, without files that are gone.

    Raises CatalogError if no file is found: the root or the key is wrong.
    """
    folder = location(root)
    folder = folder.absolute() if isinstance(folder, Path) else folder
    # In a catalog of single B-scans each image is a file of its own, as it was scanned.
    volumes = any(a.layout != "line" for a in catalog.acquisitions)
    files = [str(path) for path in walk(folder, folders_are_volumes=volumes).files]
    wanted = [a.uri for a in catalog.acquisitions]
    places = {_place(path, folder, key): path for path in files}
    if not places.keys() >= set(wanted):  # the rest may be volumes inside files of several
        others = [places[place] for place in places.keys() - set(wanted)]
        places |= {_place(uri, folder, key): uri for path in others for uri in _volumes_in(path)}
    found = {uri: places[uri] for uri in wanted if uri in places}
    if wanted and not found:
        raise CatalogError(
            f"{folder}: none of the {number(len(wanted), 'acquisition')} of the catalog is below it under this key; "
            "give the root and the key of the scan"
        )
    return found


def _volumes_in(path: str) -> list[str]:
    try:
        return volumes_in(path, Limits())
    except ReadError:
        return []


def _measured(catalog: Catalog, keep_columns: Collection[str]) -> set[str]:
    """Those of `keep_columns` that hold measurements, as all of their values together show."""
    found = set()
    for column in keep_columns:
        values = {a.participant_labels.get(column, "").strip() for a in catalog.acquisitions}
        values = {value for value in values if value.lower() not in MISSING}
        sure = [v for v in values if _MEASURED.fullmatch(v) and not _LOOKS_LIKE_A_DATE.search(v)]
        if len(sure) >= max(_LEAST_MEASURED, 0.75 * len(values)):
            found.add(column)
    return found


def _under_shortest_id(acquisitions: Sequence[Acquisition]) -> list[Acquisition]:
    """Each under the shortest spelling of its participant's id; one with zeros may join in a later scan."""
    ids = sorted({a.participant for a in acquisitions}, key=lambda name: (len(name), name))
    one: dict[str, str] = {}
    shortest = {name: one.setdefault(person, name) for name, person in zip(ids, under_one_id(ids), strict=True)}
    return [replace(a, participant=shortest[a.participant]) for a in acquisitions]


def _hidden(
    a: Acquisition, root: Location, key: bytes, keep_columns: Collection[str], measured: Collection[str]
) -> Acquisition:
    # At least one day: a shift of 0 would leave a participant's dates as they are.
    days = 1 + int(_hash(key, "shift", a.participant, 8), 16) % MAX_SHIFT_DAYS
    return replace(
        a,
        uri=_place(a.uri, root, key),
        participant=pseudonym(a.participant, key),
        scanner=a.scanner if is_known_scanner(a.scanner) else _code(key, "scanner", a.scanner),
        protocol=a.protocol if is_known_protocol(a.protocol) else _code(key, "protocol", a.protocol),
        sop_instance_uid=hidden_uid(a.sop_instance_uid, key),
        participant_labels=_passed(a.participant_labels, days, key, keep_columns, measured),
    )


def _hidden_reject(reject: Reject, root: Location, key: bytes) -> Reject:
    """The sentence is replaced by the meaning of its code: sentences quote paths and values."""
    uri, reason = _place(reject.uri, root, key), REASONS[reject.code]
    about = hidden_uid(reject.refers_to, key) if reject.refers_to else ""
    return replace(reject, uri=uri, sentence=f"{uri}: {reason.meaning}; {reason.fix}", refers_to=about)


def hidden_uid(uid: str, key: bytes) -> str:
    """The pseudonym of a UID: a UID from 128 bits of hash, which needs no registered root (PS3.5 B.2)."""
    return f"2.25.{int(_hash(key, 'uid', uid, 32), 16)}"


def _passed(
    labels: Mapping[str, str], days: int, key: bytes, keep_columns: Collection[str], measured: Collection[str]
) -> dict[str, str]:
    """The columns of a participant whose values may pass, with dates earlier by `days`."""
    passed: dict[str, str | None] = {}
    for column, value in labels.items():
        if column in measured and _MEASURED.fullmatch(value.strip()):
            passed[column] = value
        elif column in keep_columns:  # the user vouches for these, but dates are shifted all the same
            passed[column] = value if (shifted := _shifted(value, days)) is None else shifted
        elif meaning(column) in DATES:
            passed[column] = _shifted(value, days)
        elif (safe := safe_value(column, value)) is None and meaning(column) in SITES and value:
            passed[column] = _code(key, "site", value)
        else:
            passed[column] = safe
    return {column: value for column, value in passed.items() if value}


def _shifted(value: str, days: int) -> str | None:
    """The date `days` earlier; empty if it looks like a date but is not valid, None if it does not look like one."""
    if match := _DATE.fullmatch(value):
        year, dash, month, day = match.groups()
        try:
            shifted = date(int(year), int(month), int(day)) - timedelta(days=days)
        except ValueError:
            return ""
        return shifted.isoformat() if dash else shifted.strftime("%Y%m%d")
    return "" if _LOOKS_LIKE_A_DATE.search(value) else None


def _code(key: bytes, kind: str, text: str) -> str:
    """A code for a name: different names stay different, and only the key's holder can guess them."""
    return f"{kind}_{_hash(key, kind, text, 8)}"


def _place(uri: str, root: Location, key: bytes) -> str:
    path: Any = listed(uri)
    inside = path.relative_to(root) if path.is_relative_to(root) else path
    # The path below the root, so that the files are found again after the root has moved.
    return PSEUDONYM + _hash(key, "path", str(inside), 32)


def _hash(key: bytes, kind: str, text: str, digits: int) -> str:
    return keyed_hash(f"{kind}\0{text}", key)[:digits]
