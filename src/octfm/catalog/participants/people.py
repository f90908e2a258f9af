"""Find the participant of files from their paths, by the user's pattern or by a guess, if header and table name none.

A guess is used only if it is unambiguous: one position in the paths holds ids that cannot be eyes, visits, dates,
protocols or numbers of scans; each id has only one meaning; and one id with both eyes proves that ids are not finer
than a person. Otherwise the guess is shown and the scan stops: merging two people, or splitting one person's eyes
between train and test, would corrupt every result unnoticed.
"""

import re
from collections import defaultdict
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from difflib import get_close_matches
from functools import lru_cache
from typing import Any, Literal, NamedTuple

from octfm.catalog.participants.path_words import (
    CANDIDATES,
    Segment,
    eye_abbreviations,
    eye_of,
    names_classes,
    names_people,
    plain,
    segments,
)
from octfm.catalog.participants.splits import parse_split
from octfm.errors import ConfigError, OctfmError
from octfm.io.archive import MEMBER, is_folder, list_folder
from octfm.io.location import Location, listed
from octfm.volume.volume import Laterality

Source = Literal["header", "table", "folder", "pattern", ""]
"""What named a participant: the header or its sidecar, a table of files, folders and file names by a guess that nothing
contradicts, or by --participant-from."""

PLACEHOLDERS = ("participant", "eye", "visit", "label", "split")
LABELLED = "label+participant"
"""Placeholder of a label that is part of the participant's id as well."""
_LISTED = ", ".join(f"{{{name}}}" for name in PLACEHOLDERS)
_ENDING = re.compile(r"\.(?:nii\.gz|[A-Za-z][A-Za-z0-9]{1,5})$")
_SMALL = 1000
"""Smaller numbers may count visits, scans or B-scans."""
_EXAMPLES = 3
_MOST_PARTS = 6
"""Placeholders and * in one name: more would let the regular expression backtrack through billions of matches."""


class PeopleError(OctfmError):
    """A pattern that does not fit the files, or a tree where a guess of participants may be wrong."""


class AmbiguousPeople(PeopleError):
    """A scan that stopped because the participants are ambiguous; `guess` is the best guess."""

    def __init__(self, message: str, guess: "Guess"):
        super().__init__(message)
        self.guess = guess


@dataclass(frozen=True)
class Scan:
    """A volume, with what is known of its participant."""

    uri: str
    participant: str
    """Empty where neither header nor table names one."""


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


class Match(NamedTuple):
    """What a pattern finds in a path."""

    participant: str
    eyes: frozenset[Laterality]
    labels: Mapping[str, str]
    """As in `Whose`."""


# ---- patterns -------------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Pattern:
    """A template of paths below the scanned folder, such as {participant}/{eye}/* or {participant}_{eye}_*.png.

    {participant}, {eye} and {visit} match part of a name, * any part of it, each as little as possible. A last * also
    matches everything further below. {participant} twice gives an id of both parts, for numbers that start again in
    every clinic. {label} gives the label of a file, such as the name of its folder, {split} its split (train, val or
    test). {label+participant}/{participant}/* is for numbers that start again in every class: AMD/1 is not DME/1. Right
    before {participant} it is the letters, and {participant} begins with a digit: AMD1. A pattern without a file ending
    matches files of any ending.
    """

    text: str

    @staticmethod
    def parse(text: str) -> "Pattern":
        """Raises ConfigError."""
        clean = text.strip().replace("\\", "/").removeprefix("./").strip("/")
        named = re.findall(r"\{([^{}]*)\}", clean)
        for name in named:
            if name not in (*PLACEHOLDERS, LABELLED):
                close = get_close_matches(name.lower(), PLACEHOLDERS, n=1, cutoff=0.4)
                hint = f"did you mean {{{close[0]}}}?" if close else f"there are {_LISTED}"
                raise ConfigError(f"--participant-from {text!r}: unknown {{{name}}}; {hint}")
        if "{" in (rest := re.sub(r"\{[a-z+]+\}", "", clean)) or "}" in rest:
            raise ConfigError(
                f"--participant-from {text!r}: a brace is not closed; expected a path such as {{participant}}/{{eye}}/*"
            )
        if "participant" not in named:
            raise ConfigError(
                f"--participant-from {text!r}: expected {{participant}} in it, as in {{participant}}/{{eye}}/* or "
                "{participant}_{eye}_*.png"
            )
        for name in ("label", "split"):
            if [part for several in named for part in several.split("+")].count(name) > 1:
                raise ConfigError(f"--participant-from {text!r}: {{{name}}} occurs twice; put * for one of them")
        apart = clean.replace("{participant}{eye}", "{participant}").replace(f"{{{LABELLED}}}{{participant}}", "")
        if "}{" in apart:
            raise ConfigError(
                f"--participant-from {text!r}: nothing separates two placeholders, so where one ends is a guess; "
                "put / _ or - between them"
            )
        if any(len(re.findall(r"\{|\*+", name)) > _MOST_PARTS for name in clean.split("/")):
            raise ConfigError(
                f"--participant-from {text!r}: more than {_MOST_PARTS} placeholders and * in one name; "
                "a * stands for everything between"
            )
        return Pattern(clean)

    def match(self, place: "Place") -> Match | None:
        """What the path of a scan states; None if the pattern does not fit, or {eye} or {split} match no such word."""
        # Only a pattern with a dot in its last name says something about the ending.
        for text in place.texts if "." in self.text.rpartition("/")[2] else place.stems:
            words = _eye_words(text) if "{eye}" in self.text else ()
            if match := _compiled(self.text, words).fullmatch(text):
                groups = match.groupdict()
                eyes = frozenset[Laterality](
                    eye for name, value in groups.items() if name[0] == "e" and (eye := eye_of(value))
                )
                labels = {}
                for name, value in groups.items():
                    if name[0] in "lb":
                        labels["label"] = value.strip()
                    if name[0] == "s":
                        if (split := parse_split(value)) is None:
                            return None
                        labels["recommended_split"] = split
                return Match("/".join(value.strip() for name, value in groups.items() if name[0] in "pb"), eyes, labels)
        return None


@lru_cache(maxsize=4096)
def _compiled(pattern: str, eye_words: tuple[str, ...]) -> re.Pattern[str]:
    """The regular expression of a pattern. {eye} matches only `eye_words`, which are the words for eyes in one path."""
    parts: list[str] = []
    for token in re.split(rf"(\{{{re.escape(LABELLED)}\}}\{{participant\}}|\{{[a-z+]+\}}|\*+)", pattern):
        if token.endswith("}{participant}"):
            parts.append(rf"(?P<b{len(parts)}>[^/\d]+?)[\s_\-]*(?P<p{len(parts)}>\d[^/]*?)")
        elif token == f"{{{LABELLED}}}":  # b for both
            parts.append(f"(?P<b{len(parts)}>[^/]+?)")
        elif token == "{eye}":
            parts.append(f"(?P<e{len(parts)}>{'|'.join(map(re.escape, eye_words)) or '(?!)'})")
        elif token.startswith("{"):
            parts.append(f"(?P<{token[1]}{len(parts)}>[^/]+?)")
        elif token.startswith("*"):
            parts.append("[^/]*?" if token == "*" else ".*?")
        else:
            parts.append(re.escape(token))
    if pattern.endswith("/*"):
        # The last * also matches what lies further below.
        parts[-2:] = [".+"]
    return re.compile("".join(parts), re.IGNORECASE)


def _eye_words(text: str) -> tuple[str, ...]:
    # Also words with separators (right_eye), and eyes next to digits (12OD).
    words = [*re.split(r"[\s_\-./]+", text), *re.split(r"[_/]", text)]
    ends = [end for word in words for end in re.findall(r"^[^\W\d]+(?=\d)|(?<=\d)[^\W\d]+$", word)]
    return tuple(sorted({word for word in (*words, *ends) if eye_of(word)}, key=lambda word: (-len(word), word)))


@dataclass(frozen=True)
class Place:
    """The path of a scan below the scanned folder. An archive counts as a folder with its name."""

    stems: tuple[str, ...]
    """The path without its ending; for a folder of images, also the path of one image in it."""
    texts: tuple[str, ...]
    """The same paths with their endings."""

    @property
    def shown(self) -> str:
        return self.texts[-1]

    @property
    def names(self) -> list[str]:
        return self.stems[0].split("/")


def eyes_in_paths(uris: Iterable[str], root: Location) -> dict[str, Laterality]:
    """The eyes that paths below `root` name, of those that name one."""
    places = {uri: place_of(uri, root) for uri in uris}
    meant = eye_abbreviations({name for place in places.values() for name in place.names})
    return {uri: next(iter(eyes)) for uri, eyes in _eyes(places, meant).items() if len(eyes) == 1}


def _eyes(places: Mapping[str, Place], meant: Iterable[str]) -> dict[str, frozenset[Laterality]]:
    """The eyes that each path names; `meant`: abbreviations of eyes, as for `segments`."""
    return {
        uri: frozenset[Laterality](s.eye for n in place.names for s in segments(n, meant) if s.eye)
        for uri, place in places.items()
    }


def place_of(uri: str, root: Location) -> Place:
    path: Any = listed(uri)
    inside = str(path.relative_to(root)) if path.is_relative_to(root) else str(path).lstrip("/")
    # The top folder of an archive is x.zip!
    head, mark, tail = (f"{inside}/" if inside.lower().endswith(".zip!") else inside).partition(MEMBER)
    if mark and head.lower().endswith(".zip"):
        inner, mark, _ = tail.partition(MEMBER)
        head = f"{head[:-4]}/{inner}".rstrip("/")
    if not mark and is_folder(uri):  # a second mark precedes the name of one of several volumes in a file
        first = next(iter(list_folder(uri)), "x.png").rpartition("/")[2]
        return Place((head, f"{head}/{_ENDING.sub('', first)}"), (head, f"{head}/{first}"))
    return Place((_ENDING.sub("", head),), (head,))


# ---- the result of a guess -----------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Line:
    """A path pattern of a guess, with counts."""

    pattern: str
    """Empty if no name in these paths may be a person's."""
    files: int
    participants: int
    right: int
    left: int
    examples: tuple[str, ...]


@dataclass(frozen=True)
class Guess:
    """A guess of participants from paths, to use or to show."""

    lines: tuple[Line, ...]
    participants: int
    doubt: str
    """Why it may be wrong; empty if nothing contradicts it."""

    @property
    def patterns(self) -> list[str]:
        return [line.pattern for line in self.lines if line.pattern]

    @property
    def without_person(self) -> tuple[str, ...]:
        """Examples of files without a participant under `patterns`: the guess cannot be accepted as it is."""
        return tuple(
            example.partition(" -> ")[0] for line in self.lines if not line.pattern for example in line.examples
        )

    def table(self) -> str:
        """A table for the terminal: what each path pattern gives, with examples."""
        rows = [("path pattern", "files", "participants", "right", "left")]
        rows += [
            (
                line.pattern or "(no name that may be a person's)",
                *(f"{n:,}" for n in (line.files, line.participants, line.right, line.left)),
            )
            for line in self.lines
        ]
        widths = [max(len(row[i]) for row in rows) for i in range(5)]
        out = []
        for row, line in zip(rows, [None, *self.lines], strict=True):
            numbers = [cell.rjust(width) for cell, width in zip(row[1:], widths[1:], strict=True)]
            out.append("  ".join([row[0].ljust(widths[0]), *numbers]))
            out += [f"    {example}" for example in line.examples] if line else []
        return "\n".join([*out, f"{self.participants:,} participants in all, if the guess is right"])


def find_people(
    scans: Sequence[Scan], root: Location, patterns: Sequence[Pattern] = (), listed_at: Mapping[str, str] | None = None
) -> dict[str, Whose]:
    """Participant and eyes of scans by uri. Header and table take precedence over the participant that a path names.

    `listed_at`: unpacked file -> archive member that it came from. Raises AmbiguousPeople if there is no pattern and a
    guess may be wrong, PeopleError for files that no pattern fits.
    """
    # Also of those with a participant: they show whose the folders of the others are, and may lie with the other eye.
    places = {scan.uri: place_of((listed_at or {}).get(scan.uri, scan.uri), root) for scan in scans}
    known = {scan.uri: scan.participant for scan in scans if scan.participant}
    nameless = {uri: place for uri, place in places.items() if uri not in known}
    meant = eye_abbreviations({name for place in places.values() for name in place.names})
    eyes = _eyes(places, meant)
    labels: dict[str, Mapping[str, str]] = {}
    if patterns:
        stated = {uri: next((m for p in patterns if (m := p.match(place))), None) for uri, place in places.items()}
        found = {uri: match[0] for uri, match in stated.items() if match}
        _expect_all(nameless, found, patterns)
        eyes |= {uri: match.eyes for uri, match in stated.items() if match and match.eyes}
        labels = {uri: match.labels for uri, match in stated.items() if match}
        source: Source = "pattern"
        doubt = ""
    elif nameless:
        found, guess = _guess(nameless, places, meant, eyes)
        source, doubt = "folder", guess.doubt
    else:
        found, source, doubt = {}, "", ""
    # From names in paths to ids; `_joined_with` replaces those whose participant other files state.
    ids = {found[uri]: found[uri] for uri in nameless if uri in found}
    contradiction = _joined_with(known, found, ids)
    if source == "folder":
        alike = [f"{a!r} and {b!r} may be one person" for a, b in spelt_alike([*ids.values(), *known.values()])]
        doubt = doubt or contradiction or next(iter(alike), "")
        if doubt:
            raise _ambiguous(root, len(nameless), len(scans), Guess(guess.lines, guess.participants, doubt))
    elif contradiction:
        raise PeopleError(
            f"--participant-from: {contradiction}; state another pattern, or name these files in a table (--table)"
        )
    return {
        uri: Whose(
            known[uri] if uri in known else ids[found[uri]],
            "" if uri in known else source,
            eyes[uri],
            labels.get(uri, {}),
        )
        for uri in places
    }


def _expect_all(nameless: Mapping[str, Place], found: Mapping[str, str], patterns: Sequence[Pattern]) -> None:
    named = " ".join(repr(pattern.text) for pattern in patterns)
    if missing := [place.shown for uri, place in nameless.items() if uri not in found]:
        raise PeopleError(
            f"--participant-from {named}: {len(missing)} of {len(nameless)} files that name no participant do not "
            f"match, for example {', '.join(sorted(missing)[:_EXAMPLES])}; give the option once more with a pattern "
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
            f"--participant-from {named}: gives {', '.join(sorted(words)[:_EXAMPLES])} as participants, which are "
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
        if len(participants) > 1:
            some = ", ".join(sorted(participants)[:_EXAMPLES])
            return f"other files of {name!r} name {len(participants)} participants ({some})"
        ids[name] = next(iter(participants))
    owners: dict[str, str] = {}
    for name in named:
        if owners.setdefault(ids[name], name) != name:
            return f"{owners[ids[name]]!r} and {name!r} hold files of one participant, {ids[name]}"
    return ""


def spelt_alike(participants: Iterable[str]) -> list[tuple[str, str]]:
    """Pairs of ids that may be spellings of one: P01 and p1 are one person more often than two."""
    first: dict[str, str] = {}
    pairs = []
    for participant in sorted(set(participants)):
        text = re.sub(r"[\s_\-.]+", "", plain(participant))
        text = re.sub(r"(?<!\d)0+(?=\d)", "", re.sub(r"^(?:patient|participant|subject|pat|sub|p)(?=\d)", "", text))
        if first.setdefault(text, participant) != participant:
            pairs.append((first[text], participant))
    return pairs


def _ambiguous(root: Location, nameless: int, scans: int, guess: Guess) -> AmbiguousPeople:
    of = f"{nameless:,} of {scans:,} scans" if nameless < scans else f"{scans:,} scans"
    options = " ".join(f"--participant-from '{pattern}'" for pattern in guess.patterns)
    advice = f"accept the guess, or state another: octfm scan {root} {options}"
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


# ---- the guess ------------------------------------------------------------------------------------------------------

_Path = tuple[tuple[Segment, ...], ...]
_At = tuple[int, int]
"""Index of the folder or file name in a path, and of the segment in it."""


def _guess(
    nameless: Mapping[str, Place],
    places: Mapping[str, Place],
    meant: frozenset[str],
    eyes: Mapping[str, frozenset[Laterality]],
) -> tuple[dict[str, str], Guess]:
    """The participant of each uri that the guessed patterns match, and the guess with its doubts.

    Paths with the same skeleton are judged together; the position of the person in each becomes a pattern, and the
    patterns must give the same participants again.
    """
    paths: dict[str, _Path] = {uri: tuple(segments(n, meant) for n in place.names) for uri, place in nameless.items()}
    groups: dict[tuple, list[str]] = defaultdict(list)
    for uri, path in paths.items():
        groups[_skeleton(path)].append(uri)
    roles = _roles([place.names for place in nameless.values()])
    chosen: dict[str, _At] = {}
    doubts, spots, texts, named = [], set(), {}, set()
    apart: dict[str, None] = {}
    everywhere = set.intersection(*({s.text for name in path for s in name} for path in paths.values()))
    for uris in groups.values():
        own_roles = roles.get(len(paths[uris[0]]), {})
        at, doubt, explicit = _person_in(
            [paths[uri] for uri in uris],
            [nameless[uri].names for uri in uris],
            len(nameless),
            everywhere,
            min(own_roles, default=0),
        )
        doubts += [doubt] if doubt else []
        if at is None:
            continue
        if explicit:
            named |= set(uris)
        else:
            spots.add(_nth_candidate(paths[uris[0]], at))
        chosen |= dict.fromkeys(uris, at)
        own = {uri: paths[uri] for uri in uris}
        people = {uri: path[at[0]][at[1]].text for uri, path in own.items()}
        outer = _numbered_by(list(own.values()), at) if _reused(own, dict.fromkeys(uris, at), people) else set()
        if "label" in own_roles.values():  # the class again: AMD/AMD-1
            outer = {(d, i) for d, i in outer if d != at[0] or own[uris[0]][d][i].kind != "group"}
        one_person = outer
        if _kind_of(paths[uris[0]][at[0]][at[1]].kind, list(people.values())) == "strong":
            # A long number means one person in every class and on both sides of a split: two would leak.
            one_person = {(d, i) for d, i in outer if own[uris[0]][d][i].kind != "group"}
        labelled = not {"label"} & {*own_roles.values()} and _is_class_with_number([*people.values()])
        for uri in uris:
            texts[uri] = _template(nameless[uri], paths[uri], at, one_person, own_roles, labelled)
            if one_person != outer:
                apart[_template(nameless[uri], paths[uri], at, outer, own_roles, labelled)] = None
    patterns = {text: pattern for text in dict.fromkeys(texts.values()) if (pattern := _parsed(text))}
    doubts += ["no pattern describes these names"] if len(patterns) < len(set(texts.values())) else []
    texts = {uri: text for uri, text in texts.items() if text in patterns}
    order = sorted(patterns, key=lambda text: -text.count("/"))  # deeper patterns are more specific
    found = {
        uri: match[0]
        for uri, place in places.items()
        if (match := next((m for t in order if (m := patterns[t].match(place))), None))
    }
    people = {uri: paths[uri][at[0]][at[1]].text for uri, at in chosen.items()}
    doubts += ["people stand at different places in different paths"] if len(spots) > 1 else []
    reused = _reused(paths, chosen, people)
    if apart:  # the first doubt is shown: whoever accepts the guess decides this
        doubts.insert(0, f"{reused} (if two: {' '.join(f'--participant-from {text!r}' for text in apart)})")
    doubts += [d for d in (reused, _unproven(people, named, eyes)) if d]
    if cut := next(((name, last) for uri, name in people.items() if (last := _cut(found.get(uri, ""), name))), None):
        doubts.insert(0, f"the pattern reads {cut[0]!r} as {cut[1]!r}, and would merge people of one surname")
    # The patterns must give what the guess gave: the user may accept them on the command line.
    if not doubts and any(found.get(uri) != name for uri, name in people.items()):
        doubts.append("names are read in more than one way")
    lines = _lines(nameless, texts, found, eyes)
    guess = Guess(lines, len({found[uri] for uri in nameless if uri in found}), doubts[0] if doubts else "")
    return found, guess


def _cut(participant: str, name: str) -> str:
    """What a pattern leaves of a name of several words (Meier of Meier_Eva); empty if it is whole."""
    last = participant.rpartition("/")[2]
    return last if last != name and name.startswith(last) else ""


def _parsed(text: str) -> Pattern | None:
    try:
        return Pattern.parse(text)
    except ConfigError:
        return None  # a name without separators, or with braces


def _skeleton(path: _Path) -> tuple:
    """What paths of one kind share: the sequence of kinds of words, and the separators between them."""

    def shape(s: Segment) -> tuple[str, str]:
        if s.kind == "literal":
            return plain(s.text), s.before
        return "word" if s.kind in ("word", "visit", "date", "group") else s.kind, s.before

    return tuple(tuple(shape(s) for s in name) for name in path)


def _roles(names: Iterable[list[str]]) -> dict[int, dict[int, Literal["split", "label"]]]:
    """Number of names in a path -> depths of the folders that are splits (train, test), or classes (AMD, normal)."""
    levels: dict[tuple[int, int], set[str]] = defaultdict(set)
    for own in names:
        for depth, name in enumerate(own[:-1]):
            levels[len(own), depth].add(name)
    found: dict[int, dict[int, Literal["split", "label"]]] = defaultdict(dict)
    for (count, depth), values in sorted(levels.items()):
        if len(values) < 2:
            continue
        if all(map(parse_split, values)) and "split" not in found[count].values():
            found[count][depth] = "split"
        elif names_classes(values) and "label" not in found[count].values():
            found[count][depth] = "label"
    return found


def _is_class_with_number(values: Sequence[str]) -> bool:
    """Whether these are names such as AMD1, DME1 and NORMAL12."""
    letters = {value.rstrip("0123456789") for value in values}
    return len(letters) > 1 and letters.isdisjoint(values) and names_classes(letters)


def _person_in(
    paths: Sequence[_Path], names: Sequence[list[str]], total: int, everywhere: set[str], classes_at: int
) -> tuple[_At | None, str, bool]:
    """Position of the person in paths of one skeleton, a doubt, and whether a word such as `patient` marks it.

    `classes_at`: depth of the folders of splits or classes; a name above them that never changes is the set's.
    """
    columns: dict[_At, list[str]] = {}
    for depth, name in enumerate(paths[0]):
        for i, segment in enumerate(name):
            if segment.kind in CANDIDATES:
                columns[depth, i] = [path[depth][i].text for path in paths]
    # All values of a position decide: with one small number among large ones it is no longer a strong id.
    kinds = {at: _kind_of(paths[0][at[0]][at[1]].kind, values) for at, values in columns.items()}
    for at in columns:
        alone = sum(other[0] == at[0] for other in columns) == 1
        if kinds[at] != "count" and at[0] and alone and all(_is_list_of_people(name[at[0] - 1]) for name in names):
            kinds[at] = "explicit"
        if kinds[at] == "number" and all(_is_right_before_eye(path[at[0]], at[1]) for path in paths):
            kinds[at] = "strong"
    for at in list(columns):  # Meyer/Meyer_OD.tif: the same name again
        first = next(other for other in columns if columns[other] == columns[at])
        if first != at:
            del columns[at]
    if explicit := [at for at in columns if kinds[at] == "explicit"]:
        return explicit[0], "two names in one path may each be a person" if len(explicit) > 1 else "", True
    # The most id-like position first; a value that is the same in all paths can hardly be a person.
    rank = {"strong": 0, "name": 1, "number": 2, "count": 3}
    constant = {at for at in columns if len(set(columns[at])) == 1 and len(paths) > 1}
    order = sorted(columns, key=lambda at: (at in constant and at[0] < classes_at, rank[kinds[at]], at in constant, at))
    if not order:
        return None, "no folder or name in these paths may be a person's", False
    if total == 1 and kinds[order[0]] in ("strong", "name") and eye_of(columns[order[0]][0]) is None:
        return order[0], "", False  # there is nobody to confuse them with
    strong = [at for at in order if kinds[at] == "strong"]
    # A name that occurs in every path below the people does not distinguish anybody.
    several = [at for at in order if at < order[0] or at == order[0] or not set(columns[at]) <= everywhere]
    if len(several) > 1:
        shown = " or ".join(repr(columns[at][0]) for at in several[:2])
        return order[0], f"in {'/'.join(names[0])} the person may be {shown}", False
    if not strong:
        return order[0], f"{columns[order[0]][0]!r} may be a person, a visit, a clinic or a number of scans", False
    return order[0], "", False


def _is_right_before_eye(name: Sequence[Segment], i: int) -> bool:
    """Whether an eye follows without a separator, as in 0012R: nobody writes so of an image."""
    return i + 1 < len(name) and name[i + 1].eye is not None and not name[i + 1].before


def _is_list_of_people(name: str) -> bool:
    """Whether a folder is called `patients`, possibly with plain words such as `export`."""
    return names_people(name) and all(s.kind == "word" for s in segments(name))


def _kind_of(kind: str, values: Sequence[str]) -> str:
    """explicit, strong, name, number (small, a year or a date) or count (img_003) for the values of one position."""
    if kind != "number":
        return kind
    if not all(value.isdecimal() for value in values):
        return "count"
    # Years (2019) and short dates (190523) are not small, but no ids either.
    years = all(re.fullmatch(r"(?:19|20)\d\d", value) for value in values)
    dates = all(len(value) == 6 and _is_date(value) for value in values)
    return "number" if years or dates or min(map(int, values)) < _SMALL else "strong"


def _is_date(digits: str) -> bool:
    a, b, c = int(digits[:2]), int(digits[2:4]), int(digits[4:])
    return 1 <= b <= 12 and (1 <= a <= 31 or 1 <= c <= 31)


def _nth_candidate(path: _Path, at: _At) -> tuple[int, int]:
    return at[0], sum(segment.kind in CANDIDATES for segment in path[at[0]][: at[1]])


def _reused(paths: Mapping[str, _Path], chosen: Mapping[str, _At], people: Mapping[str, str]) -> str:
    """A doubt if an id occurs with different groups, dates or names: number 1 of each clinic is another person."""
    above: dict[str, tuple[str, ...]] = {}
    for uri, (depth, i) in chosen.items():
        before = [s for name in paths[uri][:depth] for s in name] + list(paths[uri][depth][:i])
        outer = [s for s in before if s.kind in ("group", "date", *CANDIDATES)]
        outer += [s for s in paths[uri][depth][i + 1 :] if s.kind in ("group", "name", "strong")]
        words = tuple(plain(s.text) for s in outer)
        if above.setdefault(people[uri], words) != words:
            first, second = (" ".join(names) or "nothing" for names in (above[people[uri]], words))
            return f"{people[uri]!r} with {first!r} and with {second!r} may be one person or two"
    return ""


def _unproven(people: Mapping[str, str], named: set[str], eyes: Mapping[str, frozenset[Laterality]]) -> str:
    """A doubt unless one id has both eyes: ids without a word such as `patient` (`named`) may be of eyes or scans."""
    bare = [uri for uri in people if uri not in named]
    if len(people) == 1 or not bare:
        return ""
    both: dict[str, set[Laterality]] = defaultdict(set)
    for uri in bare:
        both[people[uri]] |= eyes[uri]
    if any(len(own) == 2 for own in both.values()):
        return ""
    return f"no one has both eyes: {people[bare[0]]!r} may be a person, an eye or a scan"


def _numbered_by(paths: Sequence[_Path], at: _At) -> set[_At]:
    """Positions before the person whose values differ: the id may need them as well."""
    before = [(d, i) for d, name in enumerate(paths[0]) for i in range(len(name)) if (d, i) < at]
    kinds = ("group", "date", *CANDIDATES)
    return {(d, i) for d, i in before if paths[0][d][i].kind in kinds and len({path[d][i].text for path in paths}) > 1}


def _template(
    place: Place,
    path: _Path,
    at: _At,
    outer: set[_At],
    roles: Mapping[int, Literal["split", "label"]],
    labelled: bool,
) -> str:
    """The pattern of a path with the person at `at`, whose id also has the segments at `outer`.

    `roles`: of folders, by depth. `labelled`: the person's name is a class with a number.
    """
    names = []
    people = {at, *outer}
    for depth, name in enumerate(path):
        numbered = any(depth == where[0] for where in people)
        if depth in roles and depth != at[0] and (roles[depth] == "label" or not numbered):
            names.append(f"{{{LABELLED if numbered else roles[depth]}}}")
            continue
        if not numbered and not any(s.eye for s in name):
            names.append("*")
            continue
        text = ""
        for i, s in enumerate(name):
            part = s.text if s.kind == "literal" else "*"
            if (depth, i) in people or s.eye:
                part = "{participant}" if (depth, i) in people else "{eye}"
            if labelled and (depth, i) == at:
                part = f"{{{LABELLED}}}{{participant}}"
            text = text if part == "*" and text.endswith("*") else f"{text}{s.before}{part}"
        # What closes the name, as in AMD (1).
        closing = place.names[depth].rpartition(name[-1].text)[2]
        names.append(text if text.endswith("*") else text + closing)
    # A last * stands for everything below.
    while len(names) > 1 and names[-2:] == ["*", "*"]:
        names.pop()
    return "/".join(names) + ("/*" if len(place.stems) > 1 and names[-1] != "*" else "")


def _lines(
    nameless: Mapping[str, Place],
    texts: Mapping[str, str],
    found: Mapping[str, str],
    eyes: Mapping[str, frozenset[Laterality]],
) -> tuple[Line, ...]:
    by_text: dict[str, list[str]] = defaultdict(list)
    for uri in nameless:
        by_text[texts.get(uri, "")].append(uri)
    lines = []
    for text, uris in sorted(by_text.items(), key=lambda item: (-len(item[1]), item[0])):
        shown, seen = [], set()
        for uri in uris:
            person = found.get(uri, "") if text else ""
            if len(shown) < _EXAMPLES and (person, eyes[uri]) not in seen:
                seen.add((person, eyes[uri]))
                eye = {"R": "right eye", "L": "left eye"}.get("".join(eyes[uri]), "eye unknown")
                shown.append(f"{nameless[uri].texts[0]} -> {f'participant {person}' if person else 'nobody'}, {eye}")
        sides = [eyes[uri] for uri in uris]
        people = len({found[uri] for uri in uris if uri in found}) if text else 0
        right, left = (sum(side == {eye} for side in sides) for eye in "RL")
        lines.append(Line(text, len(uris), people, right, left, tuple(shown)))
    return tuple(lines)
