"""Find the participant of files from their paths, by the user's pattern or by a guess, if header and table name none.

A guess is used only if it is unambiguous: one position in the paths holds ids that cannot be eyes, visits, dates,
protocols or numbers of scans; each id has only one meaning; and one id with both eyes proves that ids are not finer
than a person. Otherwise the guess is shown and the scan stops: merging two people, or splitting one person's eyes
between train and test, would corrupt every result unnoticed.
"""

from collections import defaultdict
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Literal

from octfm.catalog.participants.guess import EXAMPLES, Guess, guess_people
from octfm.catalog.participants.ids import may_be_one_person, person_key
from octfm.catalog.participants.path_words import eye_abbreviations, segments
from octfm.catalog.participants.patterns import Pattern, PeopleError, Place, eyes_named, matches, place_of
from octfm.io.location import Location
from octfm.volume.volume import Laterality

Source = Literal["header", "table", "folder", "pattern", ""]
"""What named a participant: the header or its sidecar, a table of files, folders and file names by a guess that nothing
contradicts, or by --participant-from."""


class AmbiguousPeople(PeopleError):
    """A scan that stopped because the participants are ambiguous; `guess` is the best guess."""

    def __init__(self, message: str, guess: Guess):
        super().__init__(message)
        self.guess = guess


@dataclass(frozen=True)
class Whose:
    """Participant and eyes of a scan, from its path."""

    participant: str
    source: Source
    """Empty if header or table name the participant."""
    eyes: frozenset[Laterality]
    """The eyes that the path names."""
    labels: Mapping[str, str] = field(default_factory=dict)
    """Label columns that the path gives: `label` and `recommended_split`, where patterns have {label} and {split}."""


def find_people(
    scans: Mapping[str, str],
    root: Location,
    patterns: Sequence[Pattern] = (),
    listed_at: Mapping[str, str] | None = None,
) -> dict[str, Whose]:
    """Participant and eyes of scans by uri. Header and table take precedence over the participant that a path names.

    `scans`: uri -> participant, empty where neither header nor table names one. `listed_at`: unpacked file -> archive
    member that it came from. Raises AmbiguousPeople if there is no pattern and a guess may be wrong, PeopleError for
    files that no pattern fits.
    """
    # Scans with a participant as well: they show whose a folder is, and one may be the other eye of a nameless scan.
    places = {uri: place_of((listed_at or {}).get(uri, uri), root) for uri in scans}
    known = {uri: participant for uri, participant in scans.items() if participant}
    nameless = {uri: place for uri, place in places.items() if uri not in known}
    meant = eye_abbreviations({name for place in places.values() for name in place.names})
    eyes = eyes_named(places, meant)
    matched = matches(places, patterns)
    eyes |= {uri: match.eyes for uri, match in matched.items() if match.eyes}
    found = {uri: match.participant for uri, match in matched.items()}
    guess: Guess | None = None
    if patterns:
        _expect_all(nameless, found, patterns)
    elif nameless:
        found, guess = guess_people(nameless, places, meant, eyes)
    # From names in paths to ids; `_joined_with` replaces those whose participant other files state.
    ids = {found[uri]: found[uri] for uri in nameless if uri in found}
    contradiction = _joined_with(known, found, ids)
    if guess is not None:
        guessed = {*ids.values()} - {*known.values()}
        pairs = may_be_one_person([*ids.values(), *known.values()])
        alike = (f"{a!r} and {b!r} may be one person" for a, b in pairs if guessed.intersection((a, b)))
        if doubt := guess.doubt or contradiction or next(alike, ""):
            raise _ambiguous(root, len(nameless), len(scans), replace(guess, doubt=doubt))
    elif contradiction:
        raise PeopleError(
            f"--participant-from: {contradiction}; state another pattern, or name these files in a table (--table)"
        )
    source: Source = "pattern" if guess is None else "folder"
    return {
        uri: Whose(
            known.get(uri) or ids[found[uri]],
            "" if uri in known else source,
            eyes[uri],
            matched[uri].labels if uri in matched else {},
        )
        for uri in places
    }


def _expect_all(nameless: Mapping[str, Place], found: Mapping[str, str], patterns: Sequence[Pattern]) -> None:
    named = " ".join(repr(pattern.text) for pattern in patterns)
    if missing := [place.shown for uri, place in nameless.items() if uri not in found]:
        raise PeopleError(
            f"--participant-from {named}: {len(missing)} of {len(nameless)} files that name no participant do not "
            f"match, for example {', '.join(sorted(missing)[:EXAMPLES])}; give the option once more with a pattern "
            "for them, or name them in a table (--table)"
        )
    people = {found[uri] for uri in nameless}
    words = [
        p
        for p in people
        if all(s.kind in ("eye", "word", "visit", "date") for n in p.split("/") for s in segments(n, ("od",)))
    ]
    if people and len(words) == len(people):
        raise PeopleError(
            f"--participant-from {named}: gives {', '.join(sorted(words)[:EXAMPLES])} as participants, which are "
            "words for eyes, visits or protocols; put {participant} where the people are"
        )


def _joined_with(known: Mapping[str, str], found: Mapping[str, str], ids: dict[str, str]) -> str:
    """Set `ids` in place: a folder whose other files name their participant is that participant's.

    Returns what contradicts this, or an empty string.
    """
    named: dict[str, set[str]] = defaultdict(set)
    for uri, participant in known.items():
        if found.get(uri) in ids:
            named[found[uri]].add(participant)
    for name, participants in sorted(named.items()):
        if (count := len(set(map(person_key, participants)))) > 1:
            some = ", ".join(sorted(participants)[:EXAMPLES])
            return f"other files of {name!r} name {count} participants ({some})"
        ids[name] = min(participants)
    owners: dict[str, str] = {}
    for name in named:
        if (first := owners.setdefault(person_key(ids[name]), name)) != name:
            return f"{first!r} and {name!r} hold files of one participant, {ids[name]}"
    return ""


def _ambiguous(root: Location, nameless: int, scans: int, guess: Guess) -> AmbiguousPeople:
    of = f"{nameless:,} of {scans:,} scans" if nameless < scans else f"{scans:,} scans"
    options = " ".join(f"--participant-from '{pattern}'" for pattern in guess.patterns)
    advice = f"accept the guess by {options}, or state another pattern"
    if guess.without_person:
        advice = (
            f"{', '.join(guess.without_person)}: name the participant in a sidecar (NAME.json), in a table "
            "(--table FILE) or by --participant-from PATTERN if the path has it, scan the folder above if that is the "
            "person's, or move the file away"
        )
        if options:
            advice += f"; then {options} accepts the guess for the others"
    return AmbiguousPeople(
        f"{root}: whose eyes {of} show is stated by no header or table, and folders leave it open: {guess.doubt}; "
        f"{advice}",
        guess,
    )
