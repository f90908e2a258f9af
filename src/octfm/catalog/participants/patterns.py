"""Patterns of paths, such as {participant}/{eye}/*, and what the path of a scan below the scanned folder is."""

import os
import re
from collections.abc import Iterable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from difflib import get_close_matches
from functools import lru_cache
from pathlib import Path
from typing import Any, NamedTuple

from octfm.catalog.participants.path_words import eye_abbreviations, eye_of, segments, telling_words
from octfm.catalog.participants.splits import parse_split
from octfm.errors import ConfigError, OctfmError
from octfm.io.archive import MEMBER, is_folder, list_folder
from octfm.io.location import Location, is_remote, listed
from octfm.volume.volume import Laterality

PLACEHOLDERS = ("participant", "eye", "visit", "label", "split")
LABELLED = "label+participant"
"""Placeholder of a label that is part of the participant's id as well."""
_LISTED = ", ".join(f"{{{name}}}" for name in PLACEHOLDERS)
_ENDING = re.compile(r"\.(?:nii\.gz|[A-Za-z][A-Za-z0-9]{1,5})$")
_MOST_PARTS = 6
"""Placeholders and * in one name: the more of them, the more places {eye} is looked for at."""
WILD = ("[^/]+?)", "[^/]*?")
"""How the regular expressions of placeholders and * end that match any part of a name."""


class PeopleError(OctfmError):
    """A pattern that does not fit the files, or a tree where a guess of participants may be wrong."""


class Match(NamedTuple):
    """What a pattern finds in a path."""

    participant: str
    eyes: frozenset[Laterality]
    labels: Mapping[str, str]
    """Label columns: `label` and `recommended_split`, where the pattern has {label} and {split}."""


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
        elif token == f"{{{LABELLED}}}":  # group b: part of label and participant
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
    # What a wildcard leaves, the next one takes: so the first place of the text between them is as good as any other,
    # and no other is tried. Else six wildcards would try billions of places in a long name.
    for i in range(len(parts) - 2):
        if parts[i].endswith(WILD) and parts[i + 2].endswith((*WILD, ".+")):
            parts[i : i + 2] = [f"(?>{parts[i]}", f"{parts[i + 1]})"]
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
    """The eyes that paths below `root` name; paths that name none are left out."""
    places = {uri: place_of(uri, root) for uri in uris}
    meant = eye_abbreviations({name for place in places.values() for name in place.names})
    return {uri: next(iter(eyes)) for uri, eyes in eyes_named(places, meant).items() if len(eyes) == 1}


def eye_in_path(path: Path) -> Laterality | None:
    """The eye that a file's name or one of the two folders above it names; names further up are of disks and users.

    Names of its neighbours show whether abbreviations mean eyes, as in a folder that is given whole.
    """
    path = Path(os.path.abspath(path))  # noqa: PTH100
    place = place_of(str(path), [*path.parents[:3]][-1])
    names = frozenset(place.names).union(*map(_telling_words_in, path.parents[:2]))
    eyes = eyes_named({"": place}, eye_abbreviations(names))[""]
    return next(iter(eyes)) if len(eyes) == 1 else None


@lru_cache
def _telling_words_in(folder: Path) -> frozenset[str]:
    """Kept, since thousands of files may be named in one folder."""
    with suppress(OSError):
        return telling_words(entry.name for entry in folder.iterdir())
    return frozenset()


def matches(places: Mapping[str, Place], patterns: Sequence[Pattern]) -> dict[str, Match]:
    """What the first pattern that fits finds in each path; without the paths that none fits."""
    first = {uri: next((m for p in patterns if (m := p.match(place))), None) for uri, place in places.items()}
    return {uri: match for uri, match in first.items() if match}


def eyes_named(places: Mapping[str, Place], meant: Iterable[str]) -> dict[str, frozenset[Laterality]]:
    """The eyes that each path names; `meant`: abbreviations of eyes, as for `segments`."""
    return {
        uri: frozenset[Laterality](s.eye for n in place.names for s in segments(n, meant) if s.eye)
        for uri, place in places.items()
    }


def place_of(uri: str, root: Location) -> Place:
    path: Any = listed(uri)
    inside = str(path.relative_to(root)) if path.is_relative_to(root) else str(path).lstrip("/")
    # The top folder of an archive is x.zip!
    above = str(path).removesuffix(inside)
    head, mark, tail = _parted(f"{inside}/" if inside.lower().endswith(".zip!") else inside, above)
    if mark and head.lower().endswith(".zip"):
        inner, mark, _ = _parted(tail, f"{above}{head}{mark}")
        head = f"{head[:-4]}/{inner}".rstrip("/")
    if not mark and is_folder(uri):  # a second mark precedes the name of one of several volumes in a file
        first = next(iter(list_folder(uri)), "x.png").rpartition("/")[2]
        return Place((head, f"{head}/{_ENDING.sub('', first)}"), (head, f"{head}/{first}"))
    return Place((_ENDING.sub("", head),), (head,))


def _parted(text: str, above: str) -> tuple[str, str, str]:
    """`text` before and after the mark that follows a file; in new!/scan.png the mark is the end of a folder's name."""
    for found in re.finditer(MEMBER, text):
        head = text[: found.start()]
        # In a bucket names are trusted: a request for every file below would cost more than reading it.
        of_file = _ENDING.search(head) if is_remote(above) else not is_folder(f"{above}{head}!")
        if of_file or head.lower().endswith(".zip"):
            return head, MEMBER, text[found.end() :]
    return text, "", ""
