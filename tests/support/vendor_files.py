"""Writes volumes as files of other formats than DICOM, for tests: with an encoder of somebody else where there is
one (tifffile, Pillow, nibabel, numpy), byte by byte from the published structure where there is none. PHI is planted
wherever a format has a place for it.
"""

import io
import json
import struct
import xml.etree.ElementTree as ElementTree
import zlib
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

import numpy as np

NAME, SURNAME, BIRTH_DATE = "Planted", "Secret", "19500102"
SPACING_MM = (0.12, 0.003872, 0.0115)


def ends_of(count: int, width: int, spacing_mm=SPACING_MM, superior_first: bool = True) -> np.ndarray:
    """[D, 4] x0, y0, x1, y1 in mm on the fundus, y downwards: a raster of horizontal B-scans."""
    y = 2.0 + spacing_mm[0] * (np.arange(count) if superior_first else np.arange(count)[::-1])
    return np.stack([np.full(count, 1.5), y, np.full(count, 1.5 + spacing_mm[2] * width), y], axis=1)


def radial_ends(count: int) -> np.ndarray:
    angle = np.pi * np.arange(count) / count
    along = 3.0 * np.stack([np.cos(angle), np.sin(angle)], axis=1)
    return np.concatenate([5 - along, 5 + along], axis=1)


def write_vol(
    path: Path,
    gray: np.ndarray,
    spacing_mm=SPACING_MM,
    *,
    ends: np.ndarray | None = None,
    laterality: str = "OD",
    participant: str = "1001",
    pattern: int = 3,
    layers: np.ndarray | None = None,
) -> Path:
    """HSF-OCT-103. `gray` uint8 [D, H, W] is stored as the reflectivity that HEYEX shows so; `layers` [S, D, W] in
    rows."""
    count, height, width = gray.shape
    dz, dy, dx = spacing_mm
    ends = ends_of(count, width, spacing_mm) if ends is None else ends
    slo = np.full((20, 30), 7, np.uint8)
    head_bytes = 256 + 17 * 4 * width
    head = struct.pack(
        "<12s3I3d2I2dId",
        b"HSF-OCT-103",
        width,
        count,
        height,
        dx,
        dz,
        dy,
        slo.shape[1],
        slo.shape[0],
        0.0118,
        0.0118,
        30,
        -1.5,
    )
    head += struct.pack("<4sQiI16s16sI24sdI24sd", laterality.encode(), 10**17, pattern, head_bytes, b"716.0", b"", 86, participant.encode(), 18904.0, 145, b"", 42736.0)  # fmt: skip
    content = [head.ljust(2048, b"\0"), slo.tobytes()]
    raw = (gray / 255.0) ** 4
    for i in range(count):
        surfaces = [] if layers is None else [layer[i] for layer in layers]
        bscan = struct.pack("<12sI4d2IfI", b"HSF-BS-103", head_bytes, *ends[i], len(surfaces), 256, 30.0, 0).ljust(
            256, b"\0"
        )
        lines = np.full((17, width), np.finfo(np.float32).max, "<f4")
        for row, surface in zip(lines, surfaces, strict=False):
            row[:] = np.where(np.isnan(surface), np.finfo(np.float32).max, surface)
        content += [bscan, lines.tobytes(), raw[i].astype("<f4").tobytes()]
    return _write(path, b"".join(content))


def write_heyex_xml(
    folder: Path,
    gray: np.ndarray,
    spacing_mm=SPACING_MM,
    *,
    ends: np.ndarray | None = None,
    laterality: str = "R",
    participant: str = "1001",
    layers: dict[str, np.ndarray] | None = None,
    shuffle: int | None = None,
    suffix: str = "tif",
) -> Path:
    """The XML file of an export. `shuffle`: images are listed in another order, and their names sort in a third one."""
    from PIL import Image

    folder.mkdir(parents=True, exist_ok=True)
    count, height, width = gray.shape
    ends = ends_of(count, width, spacing_mm) if ends is None else ends
    root = ElementTree.Element("HEDX")
    patient = _element(
        _element(root, "BODY"), "Patient", ID="00077", PatientID=participant, LastName=SURNAME, FirstNames=NAME
    )
    _element(_element(patient, "Birthdate"), "Date", Year=BIRTH_DATE[:4], Month="01", Day="02")
    series = _element(
        _element(patient, "Study"),
        "Series",
        Modality="OCT",
        ModalityProcedure="IR_OCT",
        Type="Volume",
        Laterality=laterality,
    )
    _element(series, "GeneralEquipment", Manufacturer="Heidelberg Engineering", ManufacturerModelName="Spectralis")
    numbers = np.arange(count) if shuffle is None else np.random.default_rng(shuffle).permutation(count)
    localizer = _element(series, "Image", ImageNumber="0", Laterality=laterality)
    _element(localizer, "ImageType", Type="LOCALIZER")
    _element(localizer, "ImageData", ExamURL=f"file:///\\\\server\\share\\SLO.{suffix}")
    Image.fromarray(np.full((20, 20), 9, np.uint8)).save(folder / f"SLO.{suffix}")
    for i in numbers:
        image = _element(series, "Image", ImageNumber=str(i + 1), Laterality=laterality)
        _element(image, "ImageType", Type="OCT")
        context = _element(image, "OphthalmicAcquisitionContext", Width=str(width), Height=str(height))
        _element(context, None, ScaleX=repr(spacing_mm[2]), ScaleY=repr(spacing_mm[1]))
        for where, (x, y) in (("Start", ends[i, :2]), ("End", ends[i, 2:])):
            _element(_element(context, where), "Coord", X=f"{x:.3f}", Y=f"{y:.3f}")
        name = f"scan {i}.{suffix}"  # 10 sorts before 2
        _element(image, "ImageData", ExamURL=f"file:///\\\\server\\share\\{name}")
        Image.fromarray(gray[i]).save(folder / name)
        if layers:
            segmentation = _element(image, "Segmentation")
            for layer, heights in layers.items():
                values = " ".join("3e+038" if np.isnan(v) else f"{v:.2f}" for v in heights[i])
                _element(segmentation, "SegLine", Name=layer, Array=values)
    ElementTree.ElementTree(root).write(folder / "export.xml")
    return folder / "export.xml"


def write_tiff(path: Path, gray: np.ndarray, spacing_mm=SPACING_MM, **options) -> Path:
    """By tifffile; millimetres as ImageJ writes them, or as OME does, or none."""
    import tifffile

    path.parent.mkdir(parents=True, exist_ok=True)
    dz, dy, dx = spacing_mm
    if options.pop("ome", False):
        um = {f"PhysicalSize{axis}": 1000 * mm for axis, mm in zip("ZYX", spacing_mm, strict=True)}
        tifffile.imwrite(path, gray, ome=True, metadata={"axes": "ZYX", **um}, **options)
    elif options.pop("imagej", False):
        unit, of_mm = options.pop("unit", "mm"), options.pop("of_mm", 1)
        step = {"spacing": dz * of_mm, "unit": unit, "axes": "ZYX"}
        tifffile.imwrite(path, gray, imagej=True, resolution=(1 / dx / of_mm, 1 / dy / of_mm), metadata=step, **options)
    else:
        tifffile.imwrite(path, gray, metadata=None, photometric="minisblack", **options)
    return path


def write_images(folder: Path, gray: np.ndarray, spacing_mm=SPACING_MM, *, suffix: str = "png", **facts) -> Path:
    """A folder of images by Pillow, and millimetres in a sidecar beside it."""
    from PIL import Image

    folder.mkdir(parents=True, exist_ok=True)
    for i, bscan in enumerate(gray):
        Image.fromarray(bscan).save(folder / f"oct {i + 1}.{suffix}")
    write_sidecar(folder, spacing_mm, **facts)
    return folder


def write_npy(path: Path, gray: np.ndarray, **facts) -> Path:
    """.npy, or .npz with `facts` beside the volume."""
    path.parent.mkdir(parents=True, exist_ok=True)
    if path.suffix == ".npy":
        np.save(path, gray)
    else:
        np.savez_compressed(path, volume=gray, **facts)
    return path


def write_matlab(path: Path, gray: np.ndarray, compressed: bool = False, **more) -> Path:
    """Version 5, as `images` [axial, lateral, B-scan]; `more` are other arrays."""
    from scipy.io import savemat

    path.parent.mkdir(parents=True, exist_ok=True)
    savemat(path, {"images": gray.transpose(1, 2, 0), **more}, do_compression=compressed)
    return path


def write_nifti(
    path: Path, gray: np.ndarray, spacing_mm=SPACING_MM, axes: str = "WHD", version: int = 1, unit: str = "mm"
) -> Path:
    """By nibabel, whose first axis is the first letter of `axes`."""
    import nibabel

    path.parent.mkdir(parents=True, exist_ok=True)
    order = ["DHW".index(axis) for axis in axes]
    image = {1: nibabel.Nifti1Image, 2: nibabel.Nifti2Image}[version](gray.transpose(order), np.eye(4))
    factor = {"mm": 1.0, "micron": 1000.0}.get(unit, 1.0)
    image.header.set_zooms([spacing_mm[i] * factor for i in order])
    image.header.set_xyzt_units(unit)
    nibabel.save(image, path)
    return path


METAIMAGE_TYPES = {
    "u1": "MET_UCHAR", "u2": "MET_USHORT", "i2": "MET_SHORT", "i8": "MET_LONG_LONG", "f4": "MET_FLOAT",
}  # fmt: skip


def write_metaimage(
    path: Path,
    gray: np.ndarray,
    spacing_mm=SPACING_MM,
    *,
    axes: str = "WHD",
    zipped: bool = False,
    big_endian: bool = False,
    data: str = "",
    tags: dict[str, str] | None = None,
) -> Path:
    """.mhd with its .raw or .zraw, or .mha with the voxels behind the header: tags in the order of SimpleITK.

    `axes`: fastest first, as DimSize lists them. `data`: name of the file with voxels, as the header has it.
    """
    path.parent.mkdir(parents=True, exist_ok=True)
    order = ["DHW".index(axis) for axis in axes]
    stored = gray.transpose(order)
    content = stored.astype(stored.dtype.newbyteorder(">" if big_endian else "<")).tobytes(order="F")
    content = zlib.compress(content) if zipped else content
    local = path.suffix == ".mha"
    name = "LOCAL" if local else data or f"{path.stem}.{'zraw' if zipped else 'raw'}"
    size = {"CompressedDataSize": len(content)} if zipped else {}
    header = {
        "ObjectType": "Image",
        "NDims": 3,
        "BinaryData": True,
        "BinaryDataByteOrderMSB": big_endian,
        "CompressedData": zipped,
        **size,
        "TransformMatrix": "1 0 0 0 1 0 0 0 1",
        "Offset": "0 0 0",
        "CenterOfRotation": "0 0 0",
        "AnatomicalOrientation": "RAI",
        "ElementSpacing": " ".join(f"{spacing_mm[i]:.9g}" for i in order),
        "DimSize": " ".join(str(n) for n in stored.shape),
        "ElementType": METAIMAGE_TYPES[gray.dtype.str[1:]],
        **(tags or {}),
        "ElementDataFile": name,
    }
    text = "".join(f"{key} = {value}\n" for key, value in header.items()).encode()
    if local:
        return _write(path, text + content)
    _write(path.parent / name.replace("\\", "/").rsplit("/", 1)[-1], content)
    return _write(path, text)


# ---- formats that nobody else writes, byte by byte; tests/formats/test_vendor_files.py checks that OCT-Converter reads them
# the same ----------


def write_topcon(
    path: Path,
    gray: np.ndarray,
    spacing_mm=SPACING_MM,
    *,
    laterality: str = "R",
    participant: str = "1001",
    scan_mode: int = 2,
    compressed: bool = False,
    states_spacing: bool = True,
    layers: dict[str, np.ndarray] | None = None,
) -> Path:
    """`layers`: name in the file -> rows below the top, [D, W].

    .fda with JPEG 2000 or .fds with 16-bit numbers."""
    count, height, width = gray.shape
    dz, dy, dx = spacing_mm
    if compressed:
        from PIL import Image

        content = struct.pack("<B6I", scan_mode, 0, 0, width, height, count, 0)
        for bscan in gray:
            stream = io.BytesIO()
            Image.fromarray(bscan).save(stream, "JPEG2000", irreversible=False)
            content += struct.pack("<I", len(stream.getvalue())) + stream.getvalue()
        chunks = [("@IMG_JPEG", content)]
    else:
        content = (
            struct.pack("<B4IBI", scan_mode, width, height, 16, count, 0, gray.size * 2) + gray.astype("<u2").tobytes()
        )
        chunks = [("@IMG_SCAN_03", content)]
    patient = struct.pack(
        "<32s32s32s8sB3H", participant.encode(), NAME.encode(), SURNAME.encode(), b"", 1, 1950, 1, 2
    ).ljust(700, b"\0")
    chunks.insert(0, ("@PATIENT_INFO_02", patient))
    chunks.append(
        ("@CAPTURE_INFO_02", struct.pack("<BBI100s6H", "RL".index(laterality), 2, 7, b"", 2020, 1, 2, 3, 4, 5))
    )
    chunks.append(("@HW_INFO_03", struct.pack("<16s", b"3DOCT-2000").ljust(100, b"\0")))
    if states_spacing:
        chunks.append(
            ("@PARAM_SCAN_04", struct.pack("<3I5d2B", 0, 0, 0, dx * width, dz * count, dy * 1000, 0, 0, 0, 0))
        )
    for name, rows in (layers or {}).items():
        stored = np.where(np.isnan(rows), 0, height - rows)[::-1].astype("<u2")
        head = struct.pack("<20sH3I", name.encode(), 0, width, count, stored.nbytes)
        chunks.append(("@CONTOUR_INFO", head + stored.tobytes()))
    body = b"".join(bytes([len(name)]) + name.encode() + struct.pack("<I", len(data)) + data for name, data in chunks)
    kind = b"FDA" if compressed else b"FDS"
    return _write(path, b"FOCT" + kind + struct.pack("<2I", 2, 3) + body + b"\0")


def write_e2e(
    path: Path,
    series: dict[tuple[int, int, int], np.ndarray],
    *,
    ends: np.ndarray | None = None,
    eyes: str = "R",
    participant: str = "1001",
    pattern: int = 3,
    multiple: bool = False,
    layers: dict[int, np.ndarray] | None = None,
    pictures: tuple[tuple[int, int, int], ...] = (),
    backwards_from: int | None = None,
) -> Path:
    """`layers`: number of the layer -> rows [D, W], NaN where there is none, of every series. `backwards_from`: number
    of the first B-scan in a file that stores the last one first.

    `pictures`: (width, height, degrees) of each statement about the picture of the fundus, which is 5 wide, 6 high.

    `series`: (patient, study, series) -> codes [D, H, W] uint16 of the format's floats. `eyes`: a letter each.
    `ends` in degrees."""
    directory, entry, chunk = struct.Struct("<12sI20s4I"), struct.Struct("<7Ii2H2I"), struct.Struct("<12s3II4Ii2H2I")
    parts: list[tuple[tuple, int, int, int, bytes]] = []
    for ((patient, study, number), codes), eye in zip(series.items(), eyes, strict=True):
        count, height, width = codes.shape
        who = struct.pack(
            "<31s51s15sI1s25s", NAME.encode(), SURNAME.encode(), b"", int(BIRTH_DATE), b"M", participant.encode()
        )
        parts.append(((patient, -1 & 0xFFFFFFFF, -1 & 0xFFFFFFFF), -1, 0, 9, who))
        parts.append(((patient, study, number), -1, 0, 3, struct.pack("<I1s", 0, eye.encode()).ljust(96, b"\0")))
        parts.append(((patient, study, number), -1, 0, 11, (bytes(14) + eye.encode()).ljust(27, b"\0")))
        slo = np.full((6, 5), 9, np.uint8)
        parts.append(
            ((patient, study, number), -1, 0, 0x40000000, struct.pack("<5I", 30, 33620481, 30, 6, 5) + slo.tobytes())
        )
        for across, down, shown in pictures:
            about = struct.pack("<H2sQ2H2IH", 0, eye.encode("utf-16-le"), 132223104000000000, across, down, 0, 0, shown)
            parts.append(((patient, study, number), 0, 0, 5, about.ljust(59, b"\0")))
        # The degrees of a mean eye's millimetres.
        where = ends_of(count, width) * 15 / 4.4 if ends is None else ends
        for i in range(count):
            meta = struct.pack("<3I4fI3fI2fI", 0, height, width, *where[i], 0, 1.0, SPACING_MM[1], 1.0, 0, 0.0, 0.0, 0)
            meta += struct.pack("<4I2fIQIf", width, count, i, pattern, 0.0, 0.0, 0, 132223104000000000, 1, 0.8)
            image = (
                struct.pack("<5I", codes[i].nbytes, 35652097, height * width, height, width)
                + codes[i].astype("<u2").tobytes()
            )
            parts += [
                ((patient, study, number), 2 * i, 0, 10004, meta),
                ((patient, study, number), 2 * i, 1, 0x40000000, image),
            ]
            for layer, rows in (layers or {}).items():
                heights = np.where(np.isnan(rows[i]), np.finfo(np.float32).max, rows[i]).astype("<f4")
                head = struct.pack("<4I", 0, layer, 0, width)
                parts.insert(-1, ((patient, study, number), 2 * i, 0, 10019, head + heights.tobytes()))
    if backwards_from is not None:
        moved = [(ids, part + 2 * backwards_from * (part >= 0), *rest) for ids, part, *rest in parts]
        parts = moved[::-1]
    start = 36 + directory.size
    at = start + directory.size + entry.size * len(parts)
    entries, content = b"", b""
    for ids, part, ind, kind, data in parts:
        position = at + len(content)
        entries += entry.pack(1, position, len(data), 0, *ids, part, ind, 0, kind, 0)
        content += chunk.pack(b"MDbData", 0, 0, position, len(data), 0, *ids, part, ind, 0, kind, 0) + data
    body = b"CMDb".ljust(12, b"\0") + struct.pack("<I20s", 100, b"")
    body += directory.pack(b"MDbMDir", 100, b"", 0, start, 0, 0)
    body += directory.pack(b"MDbDir", 100, b"", len(parts), start, 0, 0) + entries + content
    return _write(path, (b"E2EMultipleVolumeFile".ljust(64, b"\0") if multiple else b"") + body)


def write_img(path: Path, gray: np.ndarray) -> Path:
    """Zeiss: bare voxels, upside down and mirrored."""
    return _write(path, np.ascontiguousarray(gray[:, ::-1, ::-1]).tobytes())


def write_optovue(path: Path, values: np.ndarray, eye: str = "OD") -> Path:
    """`values` float32 [D, H, W] as NAME.OCT with NAME.txt."""
    depth, height, width = values.shape
    lines = [
        "Eye Scanned = " + eye,
        f"OCT Window Height={height}",
        f"XY Scan Length={width}",
        f"Scan Usage={depth}",
        "Video Height=480",
    ]
    path.parent.mkdir(parents=True, exist_ok=True)
    path.with_suffix(".txt").write_text("\n".join(line.replace("=", " = ") for line in lines) + "\n")
    return _write(path, np.ascontiguousarray(values.transpose(0, 2, 1)[:, :, ::-1]).astype("<f4").tobytes())


def write_bioptigen(path: Path, gray: np.ndarray, spacing_mm=SPACING_MM, scan_type: int = 1, scans: int = 1) -> Path:
    depth, height, width = gray.shape
    dz, dy, dx = spacing_mm

    def entry(key: str, value: bytes | None = None, length: int = 0) -> bytes:
        return (
            struct.pack("<I", len(key))
            + key.encode()
            + struct.pack("<I", len(value) if value is not None else length)
            + (value or b"")
        )

    def whole(key: str, number: int) -> bytes:
        return entry(key, struct.pack("<I", number))

    def real(key: str, number: float) -> bytes:
        return entry(key, struct.pack("<d", number))

    content = struct.pack("<IH", 0x0101, 160) + entry("FRAMEHEADER")
    content += (
        whole("FRAMECOUNT", depth) + whole("LINECOUNT", width) + whole("LINELENGTH", height) + whole("SAMPLEFORMAT", 2)
    )
    content += entry("DESCRIPTION", b"phantom") + real("XMIN", 0) + real("XMAX", dx * width) + entry("XCAPTION", b"mm")
    content += real("YMIN", 0) + real("YMAX", dy * height) + entry("YCAPTION", b"mm") + whole("SCANTYPE", scan_type)
    content += real("SCANDEPTH", dy * height) + real("SCANLENGTH", dx * width) + real("AZSCANLENGTH", dx * width)
    content += real("ELSCANLENGTH", dz * depth) + real("OBJECTDISTANCE", 0) + real("SCANANGLE", 0)
    content += (
        whole("SCANS", scans)
        + whole("FRAMES", depth // scans)
        + whole("DOPPLERFLAG", 0)
        + entry("CONFIG", b"x" * 300)
        + bytes(4)
    )
    for bscan in gray:
        content += entry("FRAMEDATA", length=99) + entry("FRAMEDATETIME", struct.pack("<8H", 2020, 1, 3, 2, 3, 4, 5, 6))
        content += (
            real("FRAMETIMESTAMP", 1.0) + whole("FRAMELINES", width) + entry("FRAMESAMPLES", length=2 * height * width)
        )
        content += bscan.T.astype("<u2").tobytes() + bytes(4)
    return _write(path, content)


def e2e_codes(gray: np.ndarray) -> np.ndarray:
    """The floats of .e2e, 6 bits of exponent and 10 of mantissa, whose fourth root is shown as these gray levels."""
    bits = ((gray / 255) ** 4).astype(np.float32).view(np.uint32)
    rounded = (bits.astype(np.int64) + (1 << 12)) >> 13
    return np.where(gray > 0, rounded - ((127 - 63) << 10), 0).astype(np.uint16)


def write_sidecar(path: Path, spacing_mm=SPACING_MM, **facts) -> Path:
    place = path.with_name(f"{path.name.removesuffix('.gz').split('.')[0]}.json")
    place.write_text(json.dumps({"spacing_mm": spacing_mm, **facts}))
    return place


@dataclass(frozen=True)
class Format:
    """How a volume is written in a format, and what the format says by itself about it."""

    write: Callable[[Path, np.ndarray], Path]
    """(place without ending, voxels [D, H, W]) -> what to read."""
    dtypes: tuple = (np.uint8,)
    states: frozenset = frozenset()
    """Of spacing, laterality, participant and positions."""
    cut: Callable[[Path], Path] = lambda uri: uri
    """The file whose end is cut off in the test of incomplete files."""
    tolerance: int = 0
    """Gray levels that lossy compression may change."""
    of_a_mean_eye: bool = False
    """States degrees: declared millimetres win."""
    needs_name: bool = False
    """No magic bytes: its ending counts."""
    stretched: bool = False
    """Lowest to highest value come back as 0 to 65,535."""
    shape: tuple[int, int, int] = (12, 40, 36)
    """More than ten B-scans, so that 10 sorts before 2."""


_HEYEX = frozenset({"spacing", "laterality", "participant", "positions"})

FORMATS: dict[str, Format] = {
    "heyex_vol": Format(lambda at, v: write_vol(at.with_suffix(".vol"), v), states=_HEYEX),
    "heyex_xml": Format(lambda at, v: write_heyex_xml(at, v, shuffle=3), states=_HEYEX, cut=lambda uri: uri),
    "heyex_xml_png": Format(
        lambda at, v: write_heyex_xml(at, v, suffix="png"), states=_HEYEX, cut=lambda uri: uri.parent / "scan 2.png"
    ),
    "tiff_imagej": Format(
        lambda at, v: write_tiff(at.with_suffix(".tif"), v, imagej=True), (np.uint8, np.uint16), frozenset({"spacing"})
    ),
    "tiff_imagej_micron": Format(
        lambda at, v: write_tiff(at.with_suffix(".tif"), v, imagej=True, unit="micron", of_mm=1000),
        states=frozenset({"spacing"}),
    ),
    "tiff_ome": Format(
        lambda at, v: write_tiff(at.with_suffix(".tiff"), v, ome=True), (np.uint8, np.uint16), frozenset({"spacing"})
    ),
    "tiff_big_deflated": Format(
        lambda at, v: write_tiff(at.with_suffix(".tif"), v, bigtiff=True, compression="zlib"), (np.uint8, np.uint16)
    ),
    "tiff_big_endian": Format(
        lambda at, v: write_tiff(at.with_suffix(".tif"), v, byteorder=">"), (np.uint8, np.uint16)
    ),
    "npy": Format(lambda at, v: write_npy(at.with_suffix(".npy"), v), (np.uint8, np.uint16)),
    "npz": Format(
        lambda at, v: write_npy(at.with_suffix(".npz"), v, spacing_mm=SPACING_MM, laterality="OD"),
        (np.uint8, np.uint16),
        frozenset({"spacing", "laterality"}),
    ),
    "matlab": Format(lambda at, v: write_matlab(at.with_suffix(".mat"), v), (np.uint8, np.uint16)),
    "matlab_compressed": Format(
        lambda at, v: write_matlab(at.with_suffix(".mat"), v, compressed=True, Age=71.0), (np.uint8, np.uint16)
    ),
    "nifti": Format(
        lambda at, v: write_nifti(at.with_suffix(".nii"), v), (np.uint8, np.uint16), frozenset({"spacing"})
    ),
    "nifti_gz": Format(
        lambda at, v: write_nifti(at.with_suffix(".nii.gz"), v, axes="DHW"),
        (np.uint8, np.uint16),
        frozenset({"spacing"}),
    ),
    "nifti_2": Format(
        lambda at, v: write_nifti(at.with_suffix(".nii"), v, axes="HDW", version=2, unit="micron"),
        (np.uint8, np.uint16),
        frozenset({"spacing"}),
    ),
    "metaimage": Format(
        lambda at, v: write_metaimage(at.with_suffix(".mhd"), v),
        (np.uint8, np.uint16),
        frozenset({"spacing"}),
        cut=lambda uri: uri.with_suffix(".raw"),
    ),
    "metaimage_zipped": Format(
        lambda at, v: write_metaimage(at.with_suffix(".mhd"), v, zipped=True, big_endian=True, axes="HWD"),
        (np.uint8, np.uint16),
        frozenset({"spacing"}),
        cut=lambda uri: uri.with_suffix(".zraw"),
    ),
    "metaimage_local": Format(
        lambda at, v: write_metaimage(at.with_suffix(".mha"), v, axes="DWH"), (np.uint8,), frozenset({"spacing"})
    ),
    "topcon_fda": Format(
        lambda at, v: write_topcon(at.with_suffix(".fda"), v, compressed=True),
        (np.uint8, np.uint16),
        frozenset({"spacing", "laterality", "participant"}),
    ),
    "topcon_fds": Format(
        lambda at, v: write_topcon(at.with_suffix(".fds"), v),
        (np.uint16,),
        frozenset({"spacing", "laterality", "participant"}),
    ),
    "heidelberg_e2e": Format(
        lambda at, v: write_e2e(at.with_suffix(".e2e"), {(1, 2, 3): e2e_codes(v)}),
        states=frozenset({"spacing", "laterality", "participant", "positions"}),
        of_a_mean_eye=True,
    ),
    "zeiss_img": Format(
        lambda at, v: write_img(
            at.with_name(f"P7_Macular Cube {v.shape[2]}x{len(v)}_1-02-2001_10-20-30_OD_sn413_cube_z.img"),
            np.resize(v, (len(v), 1024, v.shape[2])),
        ),
        states=frozenset({"laterality"}),
        needs_name=True,
        shape=(12, 1024, 36),
    ),
    "optovue": Format(
        lambda at, v: write_optovue(at.with_suffix(".OCT"), v),
        (np.uint16,),
        frozenset({"laterality"}),
        needs_name=True,
        stretched=True,
        tolerance=1,
    ),
    "bioptigen": Format(lambda at, v: write_bioptigen(at.with_suffix(".OCT"), v), (np.uint16,), frozenset({"spacing"})),
    "png_folder": Format(write_images, (np.uint8, np.uint16), cut=lambda uri: uri / "oct 10.png"),
    "bmp_folder": Format(lambda at, v: write_images(at, v, suffix="bmp"), cut=lambda uri: uri / "oct 10.bmp"),
    "tiff_folder": Format(
        lambda at, v: write_images(at, v, suffix="tif"), (np.uint8, np.uint16), cut=lambda uri: uri / "oct 10.tif"
    ),
    "jpeg_folder": Format(
        lambda at, v: write_images(at, v, suffix="jpg"), cut=lambda uri: uri / "oct 10.jpg", tolerance=40
    ),
}
"""Formats without spacing of their own get a sidecar from the test."""


def _element(parent: ElementTree.Element, tag: str | None, **texts: str) -> ElementTree.Element:
    """A child with children of text; without a tag, the children go to the parent."""
    element = ElementTree.SubElement(parent, tag) if tag else parent
    for name, text in texts.items():
        ElementTree.SubElement(element, name).text = text
    return element


def _write(path: Path, content: bytes) -> Path:
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_bytes(content)
    return path


def with_grid(uri: Path, diameters=(1, 3, 6)) -> Path:
    """Add the thickness grid of the instrument to an XML of write_heyex_xml."""
    zones = {"C0": 0.280, "N1": 0.345, "N2": 0.310, "S1": 0.340, "S2": 0.300, "T1": 0.325, "T2": 0.270, "I1": 0.335}
    text = "".join(f"<Diameter{i}>{mm:.2f}</Diameter{i}>" for i, mm in enumerate(diameters, 1))
    text += "<IsDefaultPos>false</IsDefaultPos><CenterPos><Coord><X>370</X><Y>386</Y></Coord></CenterPos>"
    text += "<TotalVolume>8.729</TotalVolume>"
    for zone, mm in (*zones.items(), ("I2", 0.0)):
        text += f"<Zone><Name>{zone}</Name><AvgThickness>{mm:.3f}</AvgThickness>"
        text += f"<ValidPixelPercentage>{98.5 if mm else 0:.3f}</ValidPixelPercentage></Zone>"
    scale = "<OphthalmicAcquisitionContext><ScaleX>0.01</ScaleX><ScaleY>0.02</ScaleY></OphthalmicAcquisitionContext>"
    content = uri.read_text().replace("<GeneralEquipment>", f"<ThicknessGrid>{text}</ThicknessGrid><GeneralEquipment>")
    localizer = "<ImageType><Type>LOCALIZER</Type></ImageType>"
    uri.write_text(content.replace(localizer, localizer + scale))
    return uri
