"""One person is one person under every spelling of an id, and two people never become one."""

from itertools import combinations, pairwise

import pytest
from hypothesis import event, given
from hypothesis import strategies as st

from octfm.catalog.participants.ids import may_be_one_person, person_key, under_one_id
from octfm.io.hashing import keyed_hash
from octfm.run.checkpoint import participant_hashes, recogniser

PATIENT = ("p", "P", "pat", "PAT", "Patient", "sub", "SUBJECT", "participant")
SEPARATORS = ("-", "_", ".", " ", "/", "\\", "--", " - ", "\N{EN DASH}", "\N{NO-BREAK SPACE}")
_NUMBERS = st.one_of(st.integers(0, 30), st.integers(0, 10**9), st.sampled_from([1001, 10010, 100100]))
_WORDS = st.sampled_from(
    ["a", "b", "ab", "oct", "mrn", "s", "nh", "müller", "moller", "möller", "ヤマダ", "ヤマタ", "пб"]
)


@st.composite
def participants(draw) -> tuple[str | int, ...]:
    """The words and numbers of an id in their order; no two words are neighbours, which could be read as one."""
    parts: list[str | int] = []
    for _ in range(draw(st.integers(1, 4))):
        word = not (parts and isinstance(parts[-1], str)) and draw(st.booleans())
        parts.append(draw(_WORDS if word else _NUMBERS))
    return tuple(parts)


@st.composite
def spelt(draw, parts: tuple[str | int, ...]) -> str:
    """The id as a scanner, a table or a spreadsheet may write it."""
    text = ""
    if isinstance(parts[0], int) and draw(st.booleans()):
        text = draw(st.sampled_from(PATIENT)) + draw(st.sampled_from(["", *SEPARATORS]))
    elif len(parts) == 1 and isinstance(parts[0], int) and draw(st.booleans()):
        return f"{parts[0]}.0"  # a column with an empty cell
    for before, part in zip((None, *parts), parts, strict=False):
        between = isinstance(before, int) and isinstance(part, int)
        if before is not None:
            text += draw(st.sampled_from(SEPARATORS if between else ("", *SEPARATORS)))
        if isinstance(part, int):
            text += draw(st.sampled_from(["", "0", "00", "0000"])) + str(part)
        else:
            text += draw(st.sampled_from([part, part.upper(), part.title()]))
    # Not .0 at the end of 1.0, which is what a spreadsheet makes of 1.
    text = text.replace(".", "-") if len(parts) == 2 and parts[1] == 0 else text
    around = draw(st.sampled_from(["", " ", "\t"]))
    return around + text + around


@given(st.data())
def test_every_spelling_of_an_id_is_of_one_person(data):
    parts = data.draw(participants())
    one, other = data.draw(spelt(parts)), data.draw(spelt(parts))
    event("in two spellings" if one != other else "in one")
    assert person_key(one) == person_key(other), (one, other)


@given(st.data())
def test_two_people_stay_two_in_every_spelling(data):
    """The second differs from the first by one number, a digit that moves over a separator, or by all of it."""
    parts = data.draw(participants())
    places = [i for i, (a, b) in enumerate(pairwise(parts)) if isinstance(a, int) is isinstance(b, int)]
    change = data.draw(st.sampled_from(["anybody", "order", *["digit"] * bool(places)]))
    if change == "digit":
        place = data.draw(st.sampled_from(places))
        digits = f"{parts[place]}{parts[place + 1]}"
        cut = data.draw(st.integers(1, len(digits) - 1))
        other = (*parts[:place], int(digits[:cut]), int(digits[cut:]), *parts[place + 2 :])
    else:
        other = parts[::-1] if change == "order" else data.draw(participants())
    if any(isinstance(a, str) and isinstance(b, str) for a, b in pairwise(other)) or other == parts:
        return
    event(change)
    one, two = data.draw(spelt(parts)), data.draw(spelt(other))
    assert person_key(one) != person_key(two), (one, two)


@given(st.text(max_size=12))
def test_any_text_but_an_empty_one_has_a_key(text):
    assert bool(person_key(text)) == bool(text.strip())


_ANY = st.from_regex(r"(P|sub-|MRN|p_)?[01]{1,3}([-_. ][01]{1,2}){0,2}(\.0)?", fullmatch=True)


@given(st.lists(_ANY, min_size=2, max_size=8))
def test_who_else_is_in_a_cohort_never_decides_whether_two_ids_are_one_person(ids):
    """By the rule before, 1-11 and 111 were one person unless 11-1 was there as well."""
    together = dict(zip(ids, under_one_id(ids), strict=True))
    for one, other in combinations(ids, 2):
        alike = person_key(one) == person_key(other)
        assert (together[one] == together[other]) == alike == (len(set(under_one_id([one, other]))) == 1)
    assert all(name in ids for name in together.values()) and under_one_id(ids[::-1]) == [
        together[n] for n in ids[::-1]
    ]


@pytest.mark.parametrize(
    ("ids", "people"),
    [
        (["1-11", "11-1", "1-1-1", "111"], 4),  # numbers of several sites, and one without a site
        (["1_11", "11_1", "1.11", "1/11", "01-0011"], 2),
        (["1-011", "1-11", "111", "1011"], 3),  # 111 and 1011 must not be one by way of the others
        (["1-011", "01-11", "1_11", "11-01"], 2),
        (["OCT-001", "OCT001", "oct_001"], 1),
        (["P-01-0234", "sub-01.0234", "01 0234"], 1),
        (["001", "1", "00001", " 1 ", "P-001", "p1", "Patient 1", "1.0"], 1),
        (["1001", "00001001", "1001.0", "10010", "100.1"], 3),
        (["2019/1234", "2019-1234", "2019_01234", "20191234"], 2),
        (["MRN-7a", "mrn7A", "MRN-7b", "MRN-70"], 3),
        (["A1-1", "A11", "A-1-1", "a_01_1"], 2),
        (["Hà", "Hạ", "HÀ"], 2),
        (["ヤマダ1", "ヤマタ1", "ヤマダ001"], 2),
        (["１００１", "1001", "١٠٠١", "۰۱۰۰۱"], 1),
        (["MRN-7", "MRN\u200b-7", "\u200fMRN-7\ufeff", "\u2066MRN\u00ad-7\u2069"], 1),  # as pasted from pages
        (["\u200b", "\u200b\u200f"], 2),
        (["👩\u200d⚕1", "👩⚕1", "نامه\u200cای", "نامهای"], 4),  # joiners change what is seen
        (["-", "_", "."], 3),  # nothing but separators: themselves
        (["P", "p", "patient"], 2),
    ],
)
def test_ids_as_they_are_met(ids, people):
    for order in (ids, ids[::-1]):
        assert len(set(under_one_id(order))) == people
    assert len(set(under_one_id(["7", *ids, "8"]))) == people + 2


def test_ids_that_differ_in_an_accent_or_a_separator_between_numbers_are_two_people_that_may_be_one():
    ids = ["01-0234", "010234", "1-235", "P1-0235", "11-1", "1-11", "7"]
    assert may_be_one_person(ids) == [("010234", "01-0234"), ("1-235", "P1-0235")]
    assert may_be_one_person(["111", "1-11", "11-1", ""]) == [("111", "1-11"), ("111", "11-1")]
    names = ["MULLER11", "muller-1-1", "Müller 1-1"]
    assert {frozenset(pair) for pair in may_be_one_person(names)} == set(map(frozenset, combinations(names, 2)))
    for names in (["IĞDIR-3", "Iğdır-3"], ["dang-5", "Đặng 5"]):
        assert may_be_one_person(names) == [tuple(names)] and len(set(under_one_id(names))) == 2
    assert not may_be_one_person(["1001.0", "10010", "Hà", "Hạ", "1-11", "11-1"])


@given(st.data())
def test_a_person_is_found_again_by_the_hash_of_an_id_and_nobody_else_is(data):
    one = data.draw(participants())
    other = data.draw(st.one_of(st.just(one), participants()))
    kept, wanted = data.draw(spelt(one)), data.draw(spelt(other))
    is_known = recogniser({"key": "key", "hashes": participant_hashes([kept, "x"], "key")})
    assert is_known(wanted) == (person_key(kept) == person_key(wanted))


@given(_ANY, _ANY)
def test_hashes_of_older_checkpoints_find_whom_they_found(kept, wanted):
    """They hold ids as they were spelt."""
    is_known = recogniser({"key": "key", "hashes": [keyed_hash(kept, "key")]})
    assert is_known(kept) and (person_key(kept) == person_key(wanted) or not is_known(wanted))
