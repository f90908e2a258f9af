"""HEYEX XML: a folder of B-scan images with an XML file that holds their order, positions, spacing and layers.

Only the XML decides which image is which B-scan; names and order of the image files do not matter.
"""

import re
import xml.etree.ElementTree as ElementTree
from collections.abc import Iterable
from dataclasses import dataclass
from functools import partial
from html import unescape
from pathlib import PurePath
from xml.etree.ElementTree import Element

import numpy as np

from octfm.errors import ReadError
from octfm.formats.bscans import Bscans, check_size, uid_from
from octfm.formats.heyex_vol import FUNDUS, NO_VALUE, on_picture
from octfm.formats.images import digest_of, image_size, read_gray, significant_bits, stack_gray
from octfm.formats.names import last_part, lateralities, may_be_an_eye, scanner_slug
from octfm.io.archive import list_folder, open_file, read_start
from octfm.io.location import listed
from octfm.volume.etdrs import RINGS_MM, ZONES
from octfm.volume.volume import Fundus, Laterality, Layout, Lines, Surfaces

HEAD_BYTES = 4096
"""The root element must begin within these bytes."""
MAX_BYTES = 64 * 2**20
"""Four times what the layers of 145 wide B-scans take."""
ROW_MM, ROUNDED_MM = 0.003872, 0.0039
"""Height of a Spectralis row, as newer exports and .vol state it, and as older exports round it: a retina of 300 µm
would be 2 µm too thick."""
_LAYOUTS: dict[str, Layout] = {
    "line": "line",
    "single": "line",
    "circle": "circle",
    "star": "radial",
    "radial": "radial",
}
_PIXEL_MM = ("OphthalmicAcquisitionContext/ScaleX", "OphthalmicAcquisitionContext/ScaleY")
_GRID_ZONES: dict[str, str] = dict(zip(("C0", "S1", "N1", "I1", "T1", "S2", "N2", "I2", "T2"), ZONES, strict=True))


@dataclass(frozen=True, eq=False)
class DeviceGrid:
    """The ETDRS grid that the instrument measured and exported, ILM to BM."""

    mean_um: dict[str, float | None]
    """Zone, as in `octfm.volume.etdrs.ZONES`, → mean thickness; None if nothing was measured."""
    coverage: dict[str, float]
    """Zone → measured share, in [0, 1]; NaN if not stated."""
    volume_mm3: float | None
    """Sum over the zones of mean thickness times area, the whole area also where a part of it was not measured."""
    centre_mm: tuple[float, float] | None
    """(x, y) on the fundus, as `Lines`; None if not stated."""
    centre_moved: bool
    """False if the grid lies in the middle of the fundus image, where HEYEX puts it at first, not on the fovea."""
    laterality: Laterality | None


def fits(head: bytes) -> bool:
    """Whether a file starts as HEYEX XML: with the root HEDX, or as a single Heidelberg series without the examination
    around it; in any of the encodings that HEYEX writes."""
    text = head.replace(b"\0", b"").lstrip(b"\xef\xbb\xbf\xff\xfe \r\n\t")  # turns UTF-16 of ASCII into ASCII
    series = re.match(rb"(<\?xml[^>]*>\s*)?<Series>", text) is not None and b"Heidelberg" in text
    return series or (text.startswith(b"<") and b"<HEDX" in text)


def only_export(places: Iterable[str], folder: str) -> str | None:
    """The HEYEX XML among the files of a folder; None without one. Raises OSError, ReadError; several_volumes if there
    are several."""
    files = [place for place in places if PurePath(place).suffix.lower() == ".xml"]
    found = [place for place in files if fits(read_start(place, HEAD_BYTES))]
    if len(found) > 1:
        names = ", ".join(PurePath(place).name for place in found)
        raise ReadError(
            "several_volumes", f"{folder}: which of its {len(found)} HEYEX exports? give one of {names[:200]}"
        )
    return found[0] if found else None


def open_bscans(uri: str) -> Bscans:
    root = _root(uri)
    series = _series(root, uri)
    images = sorted(_images(series, "OCT"), key=_number)
    if not images:
        raise ReadError("missing_pixel_data", f"{uri}: names no OCT image; export it again with B-scans")
    contexts = [_context(image, uri) for image in images]
    files = _files(uri, [last_part(_text(image, "ImageData/ExamURL")) for image in images])
    width, height = (int(_floats(contexts[0], name)[0]) for name in ("Width", "Height"))
    shape = (len(images), height, width)
    check_size(shape, uri)
    for i, place in enumerate(files):
        if (size := image_size(place)) != (height, width):
            raise ReadError(
                "mixed_images",
                f"{uri}: B-scan {i + 1} is {width} x {height}, and its image {size[1]} x {size[0]}; export it again",
            )
    scales = np.array([_floats(context, "ScaleY", "ScaleX") for context in contexts])
    coordinates = ("Start/Coord/X", "Start/Coord/Y", "End/Coord/X", "End/Coord/Y")
    ends = np.array([_floats(context, *coordinates) for context in contexts])
    # Median: scales may differ a little from B-scan to B-scan, a volume has one.
    dy, dx = np.median(scales, axis=0) if np.isfinite(scales).all() else (None, None)
    dy = ROW_MM if dy == ROUNDED_MM else dy
    kind = _text(series, "Type").lower()
    eyes = [_text(place, "Laterality") for place in (series, *images)]
    return Bscans(
        uri=uri,
        shape=shape,
        decode=partial(stack_gray, files, uri),
        uid=uid_from(digest_of([uri, *files])),
        in_plane_mm=(float(dy), float(dx)) if dy and dx else None,
        lines=Lines(ends[:, :2], ends[:, 2:]) if np.isfinite(ends).all() else None,
        layout=next((layout for word, layout in _LAYOUTS.items() if word in kind), None),
        laterality=lateralities(eyes)[0] or next((eye for eye in eyes if not may_be_an_eye(eye)), ""),
        scanner=scanner_slug(
            _text(series, "GeneralEquipment/Manufacturer") or "Heidelberg Engineering",
            _text(series, "GeneralEquipment/ManufacturerModelName") or "Spectralis",
        ),
        protocol=" ".join(filter(None, (_text(series, "ModalityProcedure"), kind))),
        participant=_participant(root, series),
        surfaces=partial(_surfaces, images, shape, dy, uri),
        fundus=partial(_fundus, series, ends, uri),
        bits=significant_bits(files[0]),
    )


def read_device_grid(uri: str) -> DeviceGrid | None:
    """The thickness grid of an export, or None without one of 1, 3 and 6 mm. Raises ReadError.

    Its centre is in pixels of the fundus image, whose scale older exports round to a tenth of a micrometre: millimetres
    are then right within .02.
    """
    root = _root(uri)
    if root.find(".//ThicknessGrid") is None:
        return None
    series = _series(root, uri)
    grid = series.find("ThicknessGrid")
    if grid is None or _floats(grid, "Diameter1", "Diameter2", "Diameter3") != [2 * mm for mm in RINGS_MM]:
        return None
    mean_um: dict[str, float | None] = dict.fromkeys(ZONES)
    coverage: dict[str, float] = dict.fromkeys(ZONES, 0.0)
    for zone in grid.findall("Zone"):
        name = _GRID_ZONES.get(_text(zone, "Name"))
        thickness_mm, percentage = _floats(zone, "AvgThickness", "ValidPixelPercentage")
        if name is not None and thickness_mm > 0:
            mean_um[name] = 1000 * thickness_mm
            coverage[name] = percentage / 100
    volume_mm3 = _floats(grid, "TotalVolume")[0]
    x, y = _floats(grid, "CenterPos/Coord/X", "CenterPos/Coord/Y")
    dx, dy = _floats(next(iter(_images(series, "LOCALIZER")), series), *_PIXEL_MM)
    centre = (x * dx, y * dy)
    return DeviceGrid(
        mean_um,
        coverage,
        volume_mm3 if volume_mm3 > 0 else None,
        centre if np.isfinite(centre).all() else None,
        _text(grid, "IsDefaultPos").lower() == "false",
        lateralities([_text(series, "Laterality")])[0],
    )


_OF_SEVERAL_BYTES = {
    **dict.fromkeys(("gb2312", "gbk", "gb18030"), "gb18030"),
    **{"big5": "big5hkscs", "shift_jis": "cp932", "euc-jp": "euc_jp", "euc-kr": "cp949"},
}
"""Encoding of an XML whose letters take several bytes -> codec; the parser knows no others than Unicode's."""


def _decoded(content: bytes) -> bytes | str:
    """Text where the parser does not know the encoding that the XML states. Raises UnicodeDecodeError."""
    stated = re.match(rb"<\?xml[^>]*encoding=[\"']([\w-]+)", content)
    codec = _OF_SEVERAL_BYTES.get(stated[1].decode().lower()) if stated else None
    return content if codec is None else content.decode(codec)


def named_images(content: bytes) -> set[str]:
    """Lower-case names of all images in a HEYEX XML, B-scans and others.

    A regular expression, not a parser: the XML may be damaged or hostile.
    """
    text = content.decode("utf-16" if content[:2] in (b"\xff\xfe", b"\xfe\xff") else "utf-8", "replace")
    return {last_part(unescape(url)).lower() for url in re.findall(r"<ExamURL>([^<]*)</ExamURL>", text)}


def names_of(file: str) -> set[str]:
    """Lower-case names under which an XML may know an image file: its own, and the one in brackets if HEYEX has renamed
    it on export ("OCT R 1 [5DD37430.jpg].jpg")."""
    renamed = re.search(r"\[([^\[\]]+)\]\.\w+$", file)
    return {file.lower()} | ({renamed[1].lower()} if renamed else set())


def _root(uri: str) -> Element:
    with open_file(uri, whole=True) as file:
        content = file.read(MAX_BYTES + 1)
    if len(content) > MAX_BYTES:
        raise ReadError("absurd_size", f"{uri}: an XML of more than {MAX_BYTES:,} bytes; no export is so large")
    try:
        # Entities can make a small file expand without bounds (billion laughs). NULs removed: it may be UTF-16.
        plain = content.replace(b"\0", b"")
        if b"<!DOCTYPE" in plain or b"<!ENTITY" in plain:
            raise ValueError("a document type or an entity, which HEYEX never writes")
        return ElementTree.fromstring(_decoded(content))
    except (ElementTree.ParseError, ValueError) as error:
        raise ReadError(
            "damaged_file", f"{uri}: the XML cannot be parsed ({type(error).__name__}); fetch it again"
        ) from None


def _series(root: Element, uri: str) -> Element:
    """The only series with an OCT image. Raises ReadError."""
    found = [series for series in root.iter("Series") if _images(series, "OCT")]
    if len(found) > 1:
        raise ReadError("mixed_images", f"{uri}: holds {len(found)} OCT series; export each into a folder of its own")
    if not found:
        raise ReadError("missing_pixel_data", f"{uri}: no series with an OCT image; export it again with B-scans")
    return found[0]


def _images(series: Element, kind: str) -> list[Element]:
    """Those of one kind: OCT, or LOCALIZER for the picture of the fundus."""
    return [image for image in series.findall("Image") if _text(image, "ImageType/Type") == kind]


def _participant(root: Element, series: Element) -> str:
    """The clinic's id of the patient whose series it is, else HEYEX's own; never a name."""
    patients = list(root.iter("Patient"))
    own = [patient for patient in patients if series in patient.iter("Series")] or patients
    return _text(own[0], "PatientID") or _text(own[0], "ID") if len(own) == 1 else ""


def _context(image: Element, uri: str) -> Element:
    found = image.find("OphthalmicAcquisitionContext")
    if found is None:
        raise ReadError("damaged_file", f"{uri}: image {_number(image):g} has no acquisition context; export it again")
    return found


def _number(image: Element) -> float:
    return _floats(image, "ImageNumber")[0]


def _files(uri: str, names: list[str]) -> list[str]:
    """The image files, which must lie in the folder of the XML: folders in its paths are ignored."""
    files = list_folder(str(listed(uri).parent))
    # Own names come last: they win over those in brackets, and exact ones over those in another case.
    present = {name: place for place in files for name in names_of(PurePath(place).name)}
    present |= {PurePath(place).name.lower(): place for place in files}
    exact = {PurePath(place).name: place for place in files}
    missing = [name or "(no name)" for name in names if name.lower() not in present]
    if missing:
        raise ReadError(
            "incomplete_export",
            f"{uri}: {len(missing)} of {len(names)} B-scans are not next to it, for example {missing[0]}",
        )
    found = [exact.get(name) or present[name.lower()] for name in names]
    if len(set(found)) < len(found):
        raise ReadError("damaged_file", f"{uri}: names one image for two B-scans; export it again")
    return found


def _surfaces(images: list[Element], shape: tuple[int, int, int], dy: float | None, uri: str) -> Surfaces | None:
    names = list(dict.fromkeys(_text(line, "Name") for image in images for line in image.iter("SegLine")))
    heights = np.full((len(names), shape[0], shape[2]), np.nan, np.float32)
    for i, image in enumerate(images):
        for line in image.iter("SegLine"):
            values = np.array(_text(line, "Array").split(), float)
            if len(values) != shape[2]:
                raise ReadError(
                    "damaged_file",
                    f"{uri}: a layer of B-scan {i + 1} has {len(values)} of {shape[2]} values; export it again",
                )
            values[(values > NO_VALUE) | (values < 0)] = np.nan
            heights[names.index(_text(line, "Name")), i] = values
    return Surfaces(tuple(names), heights, float(dy) if dy else None, uri) if names else None


def _fundus(series: Element, ends: np.ndarray, uri: str) -> Fundus | None:
    """The localizer, if its image lies in the folder: an export is complete without it."""
    found = next(iter(_images(series, "LOCALIZER")), None)
    if found is None:
        return None
    try:
        image = read_gray(_files(uri, [last_part(_text(found, "ImageData/ExamURL"))])[0])
    except ReadError:
        return None
    eight_bit = (image if image.dtype == np.uint8 else image >> 8).astype(np.uint8)
    return Fundus(eight_bit, FUNDUS, on_picture(ends, _floats(found, *_PIXEL_MM)))


def _text(element: Element, path: str) -> str:
    return (element.findtext(path) or "").strip()


def _floats(element: Element, *paths: str) -> list[float]:
    # NaN where an element is missing: callers test all values at once.
    return [float(text) if (text := _text(element, path)) else np.nan for path in paths]
