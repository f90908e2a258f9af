"""Whose id it is: the one rule of every join, split, fold, list of exclusions, hash and count.

Scanners, tables and spreadsheets write one id as 1001, 00001001, P-1001 or 1001.0. Two ids are one person's if they
have the same words and numbers in the same order. Capitals, leading zeros, the script of digits, invisible characters,
a word for patient at the beginning and separators do not count, except a separator between two numbers: 1-11 and 11-1
are participants of two sites. Therefore 01-0234 and 010234 are two people: by a rule that drops both zeros and
separators, 111 and 1011 would be one, since 1-11 and 1-011 are. So are Müller and Muller, as Hà and Hạ are.
"""

import re
import unicodedata
from collections.abc import Iterable, Sequence
from functools import lru_cache

from octfm.catalog.columns import clean_id
from octfm.catalog.participants.path_words import plain

_SEPARATORS = re.compile(r"[\s_./\\\-\u2010-\u2015\u2212]+")
_BESIDE_A_WORD = re.compile(r"(?<!\d)-|-(?!\d)")
_PATIENT = re.compile(r"^(?:patient|participant|subject|pat|sub|p)(?=\d)")
_INVISIBLE = re.compile(r"[\u00ad\u061c\u180e\u200b\u200e\u200f\u202a-\u202e\u2060-\u2069\ufeff]")
"""Zero-width spaces, soft hyphens and marks of direction, copied with text from pages and forms. Not the joiners of
Persian and of emoji, which change what is seen."""
_LEADING_ZEROS = re.compile(r"(?<!\d)0+(?=\d)")


@lru_cache(maxsize=2**16)  # folds, splits and joins ask again and again for the same ids
def person_key(participant: str) -> str:
    """The same text for every spelling of an id, and another for every other id."""
    own = clean_id(participant)
    text = unicodedata.normalize("NFKC", own).casefold()
    if not text.isascii():
        text = "".join(str(unicodedata.decimal(letter, letter)) for letter in _INVISIBLE.sub("", text))
    text = _BESIDE_A_WORD.sub("", _SEPARATORS.sub("-", text))
    return _LEADING_ZEROS.sub("", _PATIENT.sub("", text)) or own


def under_one_id(participants: Sequence[str]) -> list[str]:
    """The ids, each as the first in the alphabet of those that are the same person's."""
    first = _first_of_person(participants)
    one = {name: first[person_key(name)] for name in set(participants)}
    return [one[name] for name in participants]


def may_be_one_person(participants: Iterable[str]) -> list[tuple[str, str]]:
    """Pairs of ids that are one person's, or would be if one did not lack a separator between two numbers (010234 and
    01-0234), an accent or the dot of an i (I is also the capital of the Turkish i without one): for splits and
    questions, where it is safe to take two people for one."""
    names = sorted({*participants} - {""})
    first = _first_of_person(names)
    pairs = []
    for name in names:
        spellings = (clean_id(name), plain(clean_id(name)), clean_id(name).replace("ı", "i"))
        keys = {person_key(text) for own in spellings for text in (own, _SEPARATORS.sub("", own))}
        pairs += [(first[key], name) for key in sorted(keys) if first.get(key, name) != name]
    return pairs


def _first_of_person(participants: Iterable[str]) -> dict[str, str]:
    """Key → the first id in the alphabet that has it."""
    return {person_key(name): name for name in sorted(set(participants), reverse=True)}
