"""Guess participants from paths: one pattern for each kind of path, with what may be wrong about it."""

import re
from collections import defaultdict
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Literal

from octfm.catalog.participants.path_words import (
    CANDIDATES,
    Segment,
    eye_of,
    names_classes,
    names_people,
    plain,
    segments,
)
from octfm.catalog.participants.patterns import LABELLED, Pattern, Place, matches
from octfm.catalog.participants.splits import parse_split
from octfm.display import EYES
from octfm.errors import ConfigError, one_line
from octfm.volume.volume import Laterality

_SMALL = 1000
"""Smaller numbers may count visits, scans or B-scans."""
EXAMPLES = 3
"""Most names that a message or a line of a guess shows."""


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
        """Examples of files in which `patterns` find no participant; the guess cannot be accepted with any of them."""
        return tuple(
            example.partition(" -> ")[0] for line in self.lines if not line.pattern for example in line.examples
        )

    def table(self) -> str:
        """A table for the terminal: what each path pattern gives, with examples."""
        rows = [("path pattern", "files", "participants", "right", "left")]
        rows += [
            (
                one_line(line.pattern) or "(no name that may be a person's)",
                *(f"{n:,}" for n in (line.files, line.participants, line.right, line.left)),
            )
            for line in self.lines
        ]
        widths = [max(len(row[i]) for row in rows) for i in range(5)]
        out = []
        for row, line in zip(rows, [None, *self.lines], strict=True):
            numbers = [cell.rjust(width) for cell, width in zip(row[1:], widths[1:], strict=True)]
            out.append("  ".join([row[0].ljust(widths[0]), *numbers]))
            out += [f"    {one_line(example)}" for example in line.examples] if line else []
        return "\n".join([*out, f"{self.participants:,} participants in all, if the guess is right"])


_Path = tuple[tuple[Segment, ...], ...]
_At = tuple[int, int]
"""Index of the folder or file name in a path, and of the segment in it."""


def guess_people(
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
    chosen = _choose(nameless, paths)
    patterns = {text: pattern for text in dict.fromkeys(chosen.texts.values()) if (pattern := _parsed(text))}
    order = sorted(patterns, key=lambda text: -text.count("/"))  # deeper patterns are more specific
    found = {uri: match.participant for uri, match in matches(places, [patterns[text] for text in order]).items()}
    people = {uri: paths[uri][at[0]][at[1]].text for uri, at in chosen.at.items()}
    reused = _reused(paths, chosen.at, people)
    apart = " ".join(f"--participant-from {text!r}" for text in chosen.apart)
    doubts = [
        _merged_surnames(people, found),
        f"{reused} (if two: {apart})" if apart else "",  # whoever accepts the guess decides this
        *chosen.doubts,
        "no pattern describes these names" if len(patterns) < len(set(chosen.texts.values())) else "",
        "people stand at different places in different paths" if len(chosen.spots) > 1 else "",
        reused,
        _unproven(people, chosen.named, eyes),
        _two_eyes(set(people.values())),
        # The patterns must give what the guess gave: the user may accept them on the command line.
        "names are read in more than one way" if any(found.get(uri) != name for uri, name in people.items()) else "",
    ]
    texts = {uri: text for uri, text in chosen.texts.items() if text in patterns}
    lines = _lines(nameless, texts, found, eyes)
    return found, Guess(lines, len({found[uri] for uri in nameless if uri in found}), next(filter(None, doubts), ""))


@dataclass(frozen=True)
class _Choice:
    """Where each path names its person."""

    at: dict[str, _At] = field(default_factory=dict)
    texts: dict[str, str] = field(default_factory=dict)
    """Pattern of each path."""
    doubts: list[str] = field(default_factory=list)
    named: set[str] = field(default_factory=set)
    """Paths in which a word such as `patient` marks the person."""
    spots: set[tuple[int, int]] = field(default_factory=set)
    """Depth of the person in the other paths, and number of candidates before it in the same name."""
    apart: dict[str, None] = field(default_factory=dict)
    """Patterns that take an id which occurs in several groups for several people."""


def _choose(nameless: Mapping[str, Place], paths: Mapping[str, _Path]) -> _Choice:
    groups: dict[tuple, list[str]] = defaultdict(list)
    for uri, path in paths.items():
        groups[_skeleton(path)].append(uri)
    roles = _roles([place.names for place in nameless.values()])
    everywhere = set.intersection(*({s.text for name in path for s in name} for path in paths.values()))
    chosen = _Choice()
    for uris in groups.values():
        own_paths = {uri: paths[uri] for uri in uris}
        own_roles = roles.get(len(paths[uris[0]]), {})
        at, doubt, explicit = _person_in(
            [*own_paths.values()],
            [nameless[uri].names for uri in uris],
            len(nameless),
            everywhere,
            min(own_roles, default=0),
        )
        chosen.doubts.append(doubt)
        if at is None:
            continue
        if explicit:
            chosen.named.update(uris)
        else:
            before = paths[uris[0]][at[0]][: at[1]]
            chosen.spots.add((at[0], sum(segment.kind in CANDIDATES for segment in before)))
        chosen.at.update(dict.fromkeys(uris, at))
        texts, apart = _templates(own_paths, nameless, at, own_roles)
        chosen.texts.update(texts)
        chosen.apart.update(dict.fromkeys(apart))
    return chosen


def _merged_surnames(people: Mapping[str, str], found: Mapping[str, str]) -> str:
    """A doubt, if a pattern leaves one word of a name (Meier of Meier_Eva)."""
    for uri, name in people.items():
        last = found.get(uri, "").rpartition("/")[2]
        if last and last != name and name.startswith(last):
            return f"the pattern reads {name!r} as {last!r}, and would merge people of one surname"
    return ""


def _two_eyes(people: Iterable[str]) -> str:
    """A doubt, if two ids are one number with a left and a right eye, as 1OD and 1OS are in `patient 1OD`."""
    first: dict[str, tuple[Laterality, str]] = {}
    for name in sorted(people):
        if (match := re.fullmatch(r"(.*\d)([^\W\d]+)", name)) and (eye := eye_of(match[2])):
            side, other = first.setdefault(plain(match[1]), (eye, name))
            if side != eye:
                return f"{other!r} and {name!r} may be eyes of one person; {{participant}}{{eye}} reads them so"
    return ""


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


def _are_classes_with_numbers(values: Sequence[str]) -> bool:
    """Whether these are names such as AMD1, DME1 and NORMAL12. Of MH1 and JS2, MH is no macular hole but initials."""
    letters = {value.rstrip("0123456789") for value in values}
    return len(letters) > 1 and letters.isdisjoint(values) and all(names_classes([each]) for each in letters)


def _person_in(
    paths: Sequence[_Path], names: Sequence[list[str]], total: int, everywhere: set[str], classes_at: int
) -> tuple[_At | None, str, bool]:
    """Position of the person in paths of one skeleton, a doubt, and whether a word such as `patient` marks it.

    `classes_at`: depth of the folders of splits or classes; a name above them that never changes is the set's.
    """
    columns = _candidates(paths)
    kinds = _kinds(columns, paths, names)
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
        # A path in which the two differ; there is one, as names that are the same everywhere count once.
        path, *shown = next(
            each for each in zip(names, *(columns[at] for at in several[:2]), strict=True) if each[1] != each[2]
        )
        return order[0], f"in {'/'.join(path)} the person may be {shown[0]!r} or {shown[1]!r}", False
    if not strong:
        return order[0], f"{columns[order[0]][0]!r} may be a person, a visit, a clinic or a number of scans", False
    return order[0], "", False


def _candidates(paths: Sequence[_Path]) -> dict[_At, list[str]]:
    """Position of each segment that may be a person → its text in every path."""
    return {
        (depth, i): [path[depth][i].text for path in paths]
        for depth, name in enumerate(paths[0])
        for i, segment in enumerate(name)
        if segment.kind in CANDIDATES
    }


def _kinds(columns: Mapping[_At, list[str]], paths: Sequence[_Path], names: Sequence[list[str]]) -> dict[_At, str]:
    """Kind of each position, which all its values decide: one small number among large ones, and it is no strong id."""
    kinds = {}
    for at, values in columns.items():
        depth, i = at
        kind = _kind_of(paths[0][depth][i].kind, values)
        alone = sum(other[0] == depth for other in columns) == 1
        if kind != "count" and depth and alone and all(_is_list_of_people(name[depth - 1]) for name in names):
            kind = "explicit"
        elif kind == "number" and all(_is_right_before_eye(path[depth], i) for path in paths):
            kind = "number" if _are_dates(values) else "strong"
        kinds[at] = kind
    return kinds


def _is_right_before_eye(name: Sequence[Segment], i: int) -> bool:
    """Whether an eye follows without a separator, as in 0012R. Numbers of images are not written like that."""
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
    return "number" if _are_dates(values) or min(map(int, values)) < _SMALL else "strong"


def _are_dates(values: Sequence[str]) -> bool:
    """Whether all are years (2019) or short dates (190523), which are not small, but no ids either."""
    years = all(re.fullmatch(r"(?:19|20)\d\d", value) for value in values)
    return years or all(len(value) == 6 and _is_date(value) for value in values)


def _is_date(digits: str) -> bool:
    a, b, c = int(digits[:2]), int(digits[2:4]), int(digits[4:])
    return 1 <= b <= 12 and (1 <= a <= 31 or 1 <= c <= 31)


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


def _templates(
    paths: Mapping[str, _Path],
    places: Mapping[str, Place],
    at: _At,
    roles: Mapping[int, Literal["split", "label"]],
) -> tuple[dict[str, str], list[str]]:
    """The pattern of each path of one skeleton with the person at `at`, and, if those take an id that occurs in several
    groups for one person, the patterns that take it for several."""
    people = {uri: path[at[0]][at[1]].text for uri, path in paths.items()}
    first = next(iter(paths.values()))
    outer = _numbered_by([*paths.values()], at) if _reused(paths, dict.fromkeys(paths, at), people) else set()
    without_groups = {(d, i) for d, i in outer if first[d][i].kind != "group"}
    if "label" in roles.values():  # the class again: AMD/AMD-1
        outer = {(d, i) for d, i in outer if d != at[0] or (d, i) in without_groups}
    # One id on both sides of a split means one person, and a long number one person in every class: two would leak.
    strong = _kind_of(first[at[0]][at[1]].kind, [*people.values()]) == "strong"
    one_person = without_groups if strong else {(d, i) for d, i in outer if roles.get(d) != "split"}
    labelled = not strong and "label" not in roles.values() and _are_classes_with_numbers([*people.values()])

    def texts(ids: set[_At]) -> dict[str, str]:
        return {uri: _template(places[uri], path, at, ids, roles, labelled) for uri, path in paths.items()}

    return texts(one_person), [*texts(outer).values()] if one_person != outer else []


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
        # What opens and closes the name, as in AMD (1) and [1001].
        opening, closing = (
            place.names[depth].partition(name[0].text)[0],
            place.names[depth].rpartition(name[-1].text)[2],
        )
        names.append((text if text.startswith("*") else opening + text) + ("" if text.endswith("*") else closing))
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
            if len(shown) < EXAMPLES and (person, eyes[uri]) not in seen:
                seen.add((person, eyes[uri]))
                eye = EYES.get("".join(eyes[uri]), EYES[None])
                shown.append(f"{nameless[uri].texts[0]} -> {f'participant {person}' if person else 'nobody'}, {eye}")
        sides = [eyes[uri] for uri in uris]
        people = len({found[uri] for uri in uris if uri in found}) if text else 0
        right, left = (sum(side == {eye} for side in sides) for eye in "RL")
        lines.append(Line(text, len(uris), people, right, left, tuple(shown)))
    return tuple(lines)
