"""Classify words in folder and file names: eyes, dates, protocols, ... are never a person; others may be one."""

import re
import unicodedata
from collections.abc import Iterable
from dataclasses import dataclass, replace
from string import ascii_lowercase
from typing import Literal

from octfm.catalog.participants.safe_values import vocabulary
from octfm.volume.volume import Laterality

Kind = Literal["eye", "word", "visit", "date", "group", "literal", "explicit", "strong", "number", "name"]
"""Meaning of a segment of a name.

word: protocol, format, modality. group: site, vendor, diagnosis, split; below it, numbering may start again. literal: a
word such as `patient`. explicit: the number after it. strong: an id with four digits or more. name: any other word that
may be a person.
"""
CANDIDATES = ("explicit", "strong", "number", "name")


_EYE_WORDS: dict[Laterality, frozenset[str]] = {
    "R": vocabulary("""
    od right righteye rechts rechte rechtes rechtesauge droit droite derecho derecha destro destra dexter
    direito direita prawe prawy oikea hoger hoyre hojre right_eye 右 右眼
"""),
    "L": vocabulary("""
    os og oi oe left lefteye links linke linkes linkesauge gauche izquierdo izquierda sinistro sinistra sinister
    esquerdo esquerda lewe lewy vasen vanster venstre 左 左眼
"""),
}
_EYES: dict[str, Laterality] = {word: eye for eye, words in _EYE_WORDS.items() for word in words}
_PAIRED: dict[str, str] = {"r": "l", "re": "le", "ra": "la", "rt": "lt", "op": "ol", "dx": "sx"}
"""Right -> left abbreviations that often mean something else: eyes only in a tree that has both of a pair."""
_LEFT_OF_PAIR = {left: right for right, left in _PAIRED.items()}
_FOVEAL = vocabulary("macula macular mac makula fovea")

_PEOPLE = vocabulary("""
    patient patients patienten patienten pat pats pt participant participants teilnehmer subject subjects subj
    subjs sub person persons people personen proband probanden volunteer volunteers paciente pacientes paziente
    pazienti patientin persona mrn pid
""")
_IMAGES = vocabulary("""
    img image images im bild bilder imagen imagenes immagine immagini picture scan scans bscan bscans volume
    volumes vol vols cube cubes file files slice slices frame frames stack stacks oct octa eye eyes auge augen
    oeil yeux ojo ojos occhio occhi oog ogen export exports
""")
_WORDS = _IMAGES | vocabulary("""
    sdoct ssoct sd ss td angio angiography angiographie fundus slo ir faf af fa icg icga ffa cfp photo photos
    enface ef structural structure thickness segmentation seg mask masks label raw tif tiff tiffs tifs png pngs
    jpg jpgs jpeg jpegs bmp bmps dicom dicoms dcm nii nifti npy npz numpy mat matlab e2e fda fds heyex xml 8bit 16bit
    2d 3d 8bittiffs data dataset datasets daten donnees datos dati dados original originals processed preprocessed
    prepared converted cropped output input results final copy kopie temp tmp new neu old alt archive archiv
    backup folder ordner anonymized anonymised anonymisiert anon deidentified default untitled unnamed retina
    retinal macula macular mac makula macule foveal fovea onh disc disk opticdisc opticnerve optic papille
    papilla papil nerve rnfl nfl gcl gcc edi hd hr hs highres highspeed raster line lines linie linien star
    stern radial circle circular kreis ring cross crosshair grid block dense detail ppol posterior pole wide
    widefield peripapillary anterior segment cornea angle chorioid choroid ou both beide bilateral
    imagestr imagests labels labelstr labelsts msk gt truth groundtruth annotation annotations annotated
    labeled labelled unlabeled unlabelled layer layers fluid manual automatic grading multi modality publication
    projection full
""")
_BARE_WORDS = vocabulary("tr ts")
"""Words only without a number: of nnU-Net's imagesTr and imagesTs, but TR001 may be a person."""
_VISITS = vocabulary("""
    visit visits visite visites visita visitas besuch bezoek session sessions sess ses sitzung exam exams
    examination untersuchung untersuchungen examen esame onderzoek study studies studie etude series serie
    baseline followup fu follow up kontrolle controle verlauf screening month months monat mois mes mese week
    weeks woche semaine day days tag jour year years jahr timepoint tp time pre post preop postop before after
    vorher nachher initial first second third last erst erste zweite termin acquisition acq
""")
_DIAGNOSES = vocabulary("""
    normal normals healthy control controls gesund krank sain malade sano dme cnv drusen amd amrd armd namd wet dry dr
    npdr pdr csc csr cscr erm mh hole macularhole rvo brvo crvo rao pcv glaucoma glaukom poag ga atrophy edema oedema
    diabetic diabetes dm myopia rp vmt mactel pathology pathologic disease diseased abnormal positive negative
""")
_GROUPS = _DIAGNOSES | vocabulary("""
    train training val valid validation test testing dev holdout eval fold split class classes
    klasse grade group groups gruppe groupe grupo cohort arm site sites center centre zentrum clinic clinics
    klinik clinique clinica hospital krankenhaus hopital university standort praxis department abteilung station
    batch part set cd dvd usb heidelberg engineering spectralis hra zeiss cirrus plex elite topcon triton
    maestro maestro2 optovue avanti rtvue ivue solix nidek canon bioptigen leica envisu optopol revo copernicus
    tomey optos silverstone visionix huvitz
""")

_NOBODY = vocabulary("""
    anonymous anonymized anonymised anonym anon anonymisiert anonyme anonymise anonymisee anonimo anonimizado
    anonimizzato geanonimiseerd deidentified removed redacted masked hidden unknown unbekannt inconnu desconocido
    sconosciuto onbekend none null nil na nan undefined unspecified notavailable notgiven notprovided noid nopatientid
    noname xxx xxxx deleted empty blank blinded anonymouspatient anonpatient anonymizedpatient unknownpatient
""")

_PLACES = vocabulary(
    "site center centre zentrum clinic klinik hospital station batch part set group gruppe cohort fold cd dvd"
)

_NUMBERED_GROUPS = vocabulary("site center centre clinic klinik batch part set group cohort")

MONTH = r"(?:jan|feb|mar|m[aä]r|apr|may|mai|mag|jun|giu|jul|lug|aug|ago|sep|set|oct|okt|ott|nov|dec|dez|dic)[a-zäöüé]*"
_DATES = re.compile(
    rf"""(?<![0-9])(?:
    (?:19|20)\d\d([-_.]?)(?:0[1-9]|1[0-2])\1(?:0[1-9]|[12]\d|3[01])
        (?:[T_ -]?\d{{6}}|[T_ -]\d{{4}}|[T_ -]\d\d[-.h]\d\d(?:[-.]\d\d)?)?
    |(?:0?[1-9]|[12]\d|3[01])[-_.](?:0?[1-9]|[12]\d|3[01])[-_.](?:19|20)\d\d
    |(?:0[1-9]|[12]\d|3[01])\.(?:0[1-9]|1[0-2])\.\d\d
    |(?:0?[1-9]|[12]\d|3[01])[-_. ]?{MONTH}[-_. ]?(?:19|20)\d\d
    |(?:19|20)\d\d[-_. ]?{MONTH}[-_. ]?(?:0?[1-9]|[12]\d|3[01])
    )(?![0-9])""",
    re.IGNORECASE | re.VERBOSE,
)
_UID = re.compile(r"\d+(?:\.\d+){3,}")
_TOKEN = re.compile(r"[^\s_\-.,;+&=#~'()\[\]{}]+")
_CAMEL = re.compile(r"(?<=[a-zß-ÿ])(?=[A-ZÀ-Þ])")
_PROTOCOL = re.compile(r"(?:hd|hr|hs|edi)?\d+(?:x\d+)+(?:mm|deg)?|\d+(?:mm|um|deg|d|lines?|bit|cube|pt)")
_SPLIT_EYE = re.compile(r"(?P<number>\d{2,})(?P<eye>o[dsgie]|[rl])|(?P<eye2>od|os)(?P<number2>\d+)", re.IGNORECASE)


@dataclass(frozen=True)
class Segment:
    """A part of a folder's or file's name."""

    kind: Kind
    text: str
    before: str
    """The separator between it and the segment to its left."""
    eye: Laterality | None = None


_LETTERS = str.maketrans({"œ": "oe", "æ": "ae", "ø": "o", "ł": "l", "đ": "d", "ı": "i"})
"""Letters that Unicode does not take apart; the last one is the Turkish i without a dot, whose capital is I."""


def plain(text: str) -> str:
    """The text in lower case, without accents, in one Unicode form."""
    letters = unicodedata.normalize("NFKD", text.casefold().translate(_LETTERS))
    return "".join(c for c in letters if not unicodedata.combining(c))


def segments(name: str, abbreviations: Iterable[str] = ()) -> tuple[Segment, ...]:
    """The segments of a folder's name, or of a file's without its ending; neighbours of the same kind are joined.

    `abbreviations`: those that mean eyes in this tree, from `eye_abbreviations`.
    """
    # Classified one by one first, then joined with their neighbours: people, numbers, equal kinds.
    known = frozenset(abbreviations)
    found: list[Segment] = []
    end = 0
    for kind, text, start in _pieces(name):
        segment = _classified(kind, text, known)
        found.append(replace(segment, before=name[end:start]))
        end = start + len(text)
    if found:
        found[0] = replace(found[0], before="")
    return tuple(_joined(_numbered(_with_people(found))))


def eye_of(word: str) -> Laterality | None:
    """The eye that a word names, in any of a dozen languages, abbreviated or not."""
    text = re.sub(r"[\s_\-.]+", "", plain(word))
    if text in _EYES:
        return _EYES[text]
    bare = re.sub(r"(eye|auge|oog|oeil|ojo|occhio)$|^(eye|oeil|ojo|occhio|olho|oculus)", "", text)
    if bare in _EYES:
        return _EYES[bare]
    return "R" if bare in _PAIRED else "L" if bare in _LEFT_OF_PAIR else None


def telling_words(names: Iterable[str]) -> frozenset[str]:
    """The words of these names by which `eye_abbreviations` decides."""
    seen = {plain(text) for name in names for kind, text, _ in _pieces(name) if not kind}
    # 123R counts as R.
    seen |= {plain(match["eye"] or match["eye2"]) for match in map(_SPLIT_EYE.fullmatch, seen) if match}
    return frozenset(seen & {*_EYES, *_PAIRED, *_LEFT_OF_PAIR, *_FOVEAL})


def eye_abbreviations(names: Iterable[str]) -> frozenset[str]:
    """Abbreviations that mean eyes in a tree of these folder and file names.

    R and others count if their left counterpart occurs as well. OD, which may also be the optic disc, counts unless
    there are words such as `macula` and no left eye is named anywhere.
    """
    seen = telling_words(names)
    meant = {word for word in seen if _PAIRED.get(word, _LEFT_OF_PAIR.get(word, "")) in seen}
    named_left = any(_EYES.get(word) == "L" for word in seen)
    if named_left or not seen & _FOVEAL:
        meant.add("od")
    return frozenset(meant)


def _pieces(name: str) -> Iterable[tuple[Kind | Literal[""], str, int]]:
    """(kind, text, offset) of each date, UID and word; the kind of words is empty, `_classified` finds it."""
    if _UID.fullmatch(name):
        yield "word", name, 0
        return
    at = 0
    for date in [*_DATES.finditer(name), None]:
        for token in _TOKEN.finditer(name, at, date.start() if date else len(name)):
            start = token.start()
            # CamelCase is split, and eyes from numbers (123OD), but words for eyes stay whole.
            for piece in [token[0]] if plain(token[0]) in _EYES else _CAMEL.split(token[0]):
                match = _SPLIT_EYE.fullmatch(piece)
                for part in [p for p in match.groups() if p] if match else [piece]:
                    yield "", part, start
                    start += len(part)
        if date:
            yield "date", date[0], date.start()
            at = date.end()


def _classified(kind: Kind | Literal[""], text: str, abbreviations: frozenset[str]) -> Segment:
    word = plain(text)
    # OD may be the optic disc: an eye only if this tree uses it for one.
    eye = _EYES.get(word) if word != "od" or "od" in abbreviations else None
    if word in abbreviations and eye is None:
        eye = "R" if word in _PAIRED else "L"
    return Segment(kind or ("eye" if eye else _kind_of(word)), text, "", eye)


def _kind_of(word: str) -> Kind:
    """The first kind that fits."""
    letters = word.rstrip("0123456789")
    digits = len(word) - len(letters)
    if word in _PEOPLE:
        return "literal"
    if word in _GROUPS:
        return "group"
    if word in _VISITS or (letters in _VISITS and (digits < 4 or len(letters) > 2)):
        return "visit"
    if word in _WORDS or word in _BARE_WORDS or word == "od" or _is_protocol(word):
        return "word"
    if digits and (letters in _PEOPLE or letters == "p"):  # P012, sub07
        return "explicit"
    if word.isdecimal() or letters in _IMAGES:
        return "number"
    if digits < 4 and digits and letters in _WORDS:
        return "word"
    if digits and letters in _NUMBERED_GROUPS:
        return "group"
    # Four digits hardly ever number visits, images or clinics.
    return "strong" if re.search(r"\d{4}", word) else "name"


def _is_protocol(word: str) -> bool:
    """Whether a word is a protocol such as 6x6, 512x128, 5lines or Cube6x6."""
    rest = word.lstrip(ascii_lowercase)
    name = word[: len(word) - len(rest)]
    return bool(_PROTOCOL.fullmatch(word) or (name in _WORDS and _PROTOCOL.fullmatch(rest)))


def _with_people(found: list[Segment]) -> list[Segment]:
    """Make the segment after a word such as `patient` explicit; if none follows, it is a word like any other."""
    out: list[Segment] = []
    for segment in found:
        named = bool(out) and out[-1].kind == "literal"
        if named and segment.kind in CANDIDATES:
            segment = replace(segment, kind="explicit")
        elif named:
            out[-1] = replace(out[-1], kind="word")
        out.append(segment)
    if out and out[-1].kind == "literal":
        out[-1] = replace(out[-1], kind="word")
    return out


def _numbered(found: list[Segment]) -> list[Segment]:
    """Join numbers to the word before: `visit 2` is a visit, `site 2` a group, `scan 2` a number of scans."""
    out: list[Segment] = []
    for segment in found:
        last = out[-1] if out else None
        if last and segment.kind == "number":
            word = plain(last.text)
            kind = "number" if word in _IMAGES else last.kind if last.kind == "visit" or word in _PLACES else None
            if kind and (word in _IMAGES or segment.text.isdecimal()):
                out[-1] = replace(last, kind=kind, text=last.text + segment.before + segment.text)
                continue
        out.append(segment)
    return out


def names_nobody(participant: str) -> bool:
    """Whether an id is a word that anonymising programs put into every file: `ANONYMOUS`, but not `ANON-17`."""
    return re.sub(r"[\W_]+", "", plain(participant)) in {"", *_NOBODY}


def names_classes(names: Iterable[str]) -> bool:
    """Whether folders of these names are classes: without numbers, and one of them has a word for a diagnosis."""
    words = [{plain(text) for kind, text, _ in _pieces(name) if not kind} for name in names]
    return not any(re.search(r"\d", name) for name in names) and any(own & _DIAGNOSES for own in words)


def names_people(name: str) -> bool:
    """Whether a folder's name has a word such as `patients`: the folders in it are then people."""
    return any(plain(text) in _PEOPLE for kind, text, _ in _pieces(name) if not kind)


def _joined(found: list[Segment]) -> list[Segment]:
    out: list[Segment] = []
    for segment in found:
        last = out[-1] if out else None
        if last and last.kind == segment.kind and segment.kind in ("word", "visit", "date", "group", "name"):
            out[-1] = replace(last, text=last.text + segment.before + segment.text)
        else:
            out.append(segment)
    return out
