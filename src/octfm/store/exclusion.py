"""Lists of volumes to exclude: one acquisition, uri or participant per line; `#` begins a comment."""

from collections.abc import Iterable
from difflib import get_close_matches
from pathlib import Path

import numpy as np

from octfm.catalog.acquisition import Acquisition
from octfm.catalog.columns import composed
from octfm.catalog.participants.ids import person_key
from octfm.errors import ConfigError, Echo
from octfm.io.location import local_path
from octfm.io.progress import say
from octfm.store.store import Store

HINTS = 3
"""Most lines without a volume for which the nearest name is looked up: with 500,000 volumes, that takes six seconds
each."""


def named_lines(file: str | Path) -> dict[str, int]:
    """Composed name -> first line with it. Raises ConfigError if the file is unreadable or names nothing."""
    file = local_path(file)
    try:
        # utf-8-sig: Windows editors begin text files with a byte order mark.
        lines = file.read_text("utf-8-sig").splitlines()
    except (OSError, ValueError) as error:
        why = getattr(error, "strerror", None) or "it is not text in UTF-8"
        raise ConfigError(
            f"exclude {file}: {why}; expected a text file with an acquisition, uri or participant per line"
        ) from None
    found: dict[str, int] = {}
    for number, line in enumerate(lines, 1):
        # A uri may contain `#`; a comment after a name starts with white space.
        name = "" if line.lstrip().startswith("#") else line.replace("\t#", " #").split(" #")[0].strip()
        if name:
            found.setdefault(composed(name), number)
    if not found:
        raise ConfigError(f"exclude {file}: it names nothing; write an acquisition, uri or participant per line")
    return found


def excluded(
    file: str | Path, volumes: Iterable[tuple[str, ...]], of: str, known: Iterable[str] = (), echo: Echo = say
) -> np.ndarray:
    """bool [n]: True for each of `volumes` (given by all its names, the participant last) that the file lists, a
    participant in any spelling of the id.

    `of` describes the whole in messages. Lines that match no volume are reported, the first HINTS with the nearest
    name, unless they are in `known`: names of volumes that are left out already. Raises ConfigError if no volume would
    remain.
    """
    lines, known = named_lines(file), set(map(composed, known))
    volumes = [tuple(map(composed, names)) for names in volumes]
    people, scans = [person_key(names[-1]) for names in volumes], {name for names in volumes for name in names[:-1]}
    known |= scans
    # Not by the name of a scan, which may differ from somebody's id in zeros only.
    listed = {person_key(name) for name in lines if name not in known}
    out = np.array(
        [
            person in listed or any(name in lines for name in names)
            for names, person in zip(volumes, people, strict=True)
        ],
        bool,
    )
    all_names, known_people = scans.union(names[-1] for names in volumes), set(people)
    unknown = [name for name in lines if name not in known and person_key(name) not in known_people]
    for place, name in enumerate(unknown):
        near = get_close_matches(name, all_names, n=1) if place < HINTS else ()
        hint = f"; did you mean {near[0]}?" if near else ""
        echo(f"exclude {file}, line {lines[name]}: {of} has no acquisition, uri or participant {name}{hint}")
    if len(out) and out.all():
        raise ConfigError(f"exclude {file}: it names all {len(out)} volumes of {of}, so none is left; shorten the list")
    return out


def without_excluded(store: Store, file: str | Path | None, echo: Echo = say) -> Store:
    """The store without the volumes listed in `file`, renumbered as if they had never been prepared."""
    if file is None:
        return store
    quarantined = {name for u in store.unprepared() for name in (u.acquisition, u.uri)}
    out = excluded(
        file, ((row.acquisition, row.uri, row.participant) for row in store.rows), str(store.path), quarantined, echo
    )
    echo(f"exclude {file}: {out.sum():,} of {len(out):,} volumes of {store.path} are left out")
    return store.part(np.flatnonzero(~out)) if out.any() else store


def without_excluded_files(
    acquisitions: tuple[Acquisition, ...], file: str | Path | None, of: str, echo: Echo = say
) -> tuple[Acquisition, ...]:
    """The acquisitions of a catalog except those listed in `file`."""
    if file is None:
        return acquisitions
    out = excluded(file, ((a.sop_instance_uid, a.uri, a.participant) for a in acquisitions), of, echo=echo)
    echo(f"exclude {file}: {out.sum():,} of {len(out):,} acquisitions of {of} are left out")
    return tuple(a for a, left_out in zip(acquisitions, out, strict=True) if not left_out)
