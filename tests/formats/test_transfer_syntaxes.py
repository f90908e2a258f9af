"""Every transfer syntax, from encoders that are not the decoder in use: lossless is bit exact, lossy within a bound,
anything else a code.

tests/fixtures/codestreams: one B-scan, `picture(bits)`, from encoders that no Python package brings. ffmpeg 9.0 (its
own JPEG-LS and JPEG 2000 encoders): `ffmpeg -f rawvideo -pix_fmt gray|gray16le -s 64x48 -i - -c:v jpegls`, `-c:v
jpeg2000 -format j2k -pred dwt53`. DCMTK 3.6.7 (libjpeg 6b for 8, 12 and 16 bit): `dcmcjpeg +eb +q 97`, `+ee +q 97`,
`+e1`, `+el +sv 4|6`. CharLS 2.4 through pydicom and pyjpegls 1.5, with 12 bits and with `jls_error=3`.
"""

import io
import itertools
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from pydicom import uid
from pydicom.encaps import encapsulate_extended

from octfm.formats import ReadError, read_header, read_volume
from octfm.formats.dicom.codecs import FrameFormat, decode_frame, find_decoders
from support import FIXTURES
from support.codestreams import imagecodecs_encoder, picture, rle_encoder
from support.dicom_files import NATIVE, write_oct_dicom
from support.examples import examples

SPACING_MM = (0.12, 0.0039, 0.0115)

lenient = settings(max_examples=examples(40))


@dataclass(frozen=True)
class Case:
    syntax: str
    bits: int
    encoder: str
    encode: Callable[[np.ndarray], bytes]
    bound: int = 0
    """Largest error allowed, in grey values."""

    def __str__(self) -> str:
        return f"{uid.UID(self.syntax).keyword}-{self.bits}-{self.encoder}"


def _from_file(name: str) -> Callable[[np.ndarray], bytes]:
    return lambda _: (FIXTURES / "codestreams" / name).read_bytes()


def _pillow(image: np.ndarray) -> bytes:
    from PIL import Image

    buffer = io.BytesIO()
    Image.fromarray(image).save(buffer, "JPEG", quality=97)
    return buffer.getvalue()


def _cases() -> list[Case]:
    cases = [
        Case(uid.JPEGBaseline8Bit, 8, "dcmtk", _from_file("dcmtk_baseline_8bit.jpg"), 6),
        Case(uid.JPEGBaseline8Bit, 8, "pillow", _pillow, 6),
        Case(uid.JPEGExtended12Bit, 8, "dcmtk", _from_file("dcmtk_extended_8bit.jpg"), 6),
        Case(uid.JPEGExtended12Bit, 12, "dcmtk", _from_file("dcmtk_extended_12bit.jpg"), 8),
        Case(uid.JPEGLossless, 8, "dcmtk-sv4", _from_file("dcmtk_lossless_sv4_8bit.jpg")),
        Case(uid.JPEGLossless, 12, "dcmtk-sv6", _from_file("dcmtk_lossless_sv6_12bit.jpg")),
        Case(uid.JPEGLosslessSV1, 16, "dcmtk", _from_file("dcmtk_lossless_sv1_16bit.jpg")),
        Case(uid.JPEGLSLossless, 8, "ffmpeg", _from_file("ffmpeg_8bit.jls")),
        Case(uid.JPEGLSLossless, 8, "imagecodecs", imagecodecs_encoder("jpegls")),
        Case(uid.JPEGLSNearLossless, 8, "imagecodecs", imagecodecs_encoder("jpegls", level=3), 3),
        Case(uid.JPEGLSLossless, 12, "charls", _from_file("charls_12bit.jls")),
        Case(uid.JPEGLSLossless, 16, "ffmpeg", _from_file("ffmpeg_16bit.jls")),
        Case(uid.JPEG2000Lossless, 8, "ffmpeg", _from_file("ffmpeg_8bit.j2k")),
        Case(uid.JPEG2000Lossless, 16, "ffmpeg", _from_file("ffmpeg_16bit.j2k")),
        Case(uid.JPEG2000, 8, "ffmpeg", _from_file("ffmpeg_8bit.j2k")),  # this syntax allows lossless streams, too
    ]
    for bits in (8, 12, 16):
        scale = 1 if bits == 8 else 1 << (bits - 8)
        cases += [
            Case(uid.RLELossless, bits, "pydicom", rle_encoder(bits)),
            # liblj92; libjpeg-turbo decodes.
            Case(uid.JPEGLosslessSV1, bits, "lj92", imagecodecs_encoder("ljpeg", bitspersample=bits)),
            Case(uid.JPEGLSNearLossless, bits, "charls", _from_file(f"charls_near3_{bits}bit.jls"), 3),
            Case(
                uid.JPEG2000Lossless,
                bits,
                "imagecodecs",
                imagecodecs_encoder("jpeg2k", codecformat="J2K", reversible=True, bitspersample=bits),
            ),
            Case(
                uid.JPEG2000,
                bits,
                "imagecodecs",
                imagecodecs_encoder("jpeg2k", level=50, codecformat="J2K", bitspersample=bits),
                8 * scale,
            ),
            # OpenJPH writes RPCL streams; OpenJPEG is the other decoder.
            Case(uid.HTJ2KLossless, bits, "openjph", imagecodecs_encoder("htj2k", reversible=True)),
            Case(uid.HTJ2KLosslessRPCL, bits, "openjph", imagecodecs_encoder("htj2k", reversible=True)),
            Case(
                uid.HTJ2K,
                bits,
                "openjph",
                imagecodecs_encoder("htj2k", reversible=False, level=0.002 if bits != 12 else 0.0002),
                4 * scale,
            ),
        ]
    return cases


CASES = _cases()


def write(path: Path, case: Case, **options) -> Path:
    image = picture(case.bits)
    return write_oct_dicom(
        path,
        np.stack([image] * 3),
        SPACING_MM,
        transfer_syntax=case.syntax,
        bits_stored=case.bits,
        encode=case.encode,
        **options,
    )


@pytest.mark.parametrize("case", CASES, ids=str)
def test_every_transfer_syntax_is_read(tmp_path, case):
    path = write(tmp_path / "a", case)
    volume = read_volume(path)
    expected = np.stack([picture(case.bits)] * 3)
    shift = 8 * expected.itemsize - case.bits
    assert (
        (volume.voxels.dtype, volume.shape)
        == (expected.dtype, expected.shape)
        == (expected.dtype, read_header(path).shape)
    )
    error = np.abs((volume.voxels >> shift).astype(int) - expected.astype(int))
    assert error.max() <= case.bound
    assert not case.bound or error.max() > 0 or case.encoder == "ffmpeg", (
        "a lossy case that loses nothing tests nothing"
    )


@pytest.mark.parametrize("case", [c for c in CASES if c.encoder == "imagecodecs" and c.bits == 8], ids=str)
def test_any_byte_may_pad_a_codestream_to_an_even_length(tmp_path, case):
    """Orthanc 1.10.1 pads JPEG-LS with whatever its buffer holds, seldom the zero of PS3.5 A.4."""
    voxels = np.stack([np.roll(picture(8), shift, axis=1) for shift in range(8)])
    odd = []

    def encode(image):
        odd.append(len(code := case.encode(image)) % 2)
        return code + b"\xef" * odd[-1]

    path = write_oct_dicom(tmp_path / "a", voxels, SPACING_MM, transfer_syntax=case.syntax, encode=encode)
    assert any(odd)
    assert np.abs(read_volume(path).voxels.astype(int) - voxels).max() <= case.bound


@pytest.mark.parametrize("case", CASES, ids=str)
def test_every_decoder_gives_the_same_values_so_that_the_next_may_stand_in(case):
    image = picture(case.bits)
    form = FrameFormat(*image.shape, 8 * image.dtype.itemsize)
    _, decoders = find_decoders(case.syntax, "test")
    for decoder in decoders:
        found = decode_frame(case.encode(image), form, [decoder])
        if decoder.name == "pillow" and case.bits == 12:  # its libjpeg has 8 bits
            assert isinstance(found, str)
            continue
        assert not isinstance(found, str), found
        assert np.abs(found.astype(int) - image.astype(int)).max() <= case.bound, decoder[0]


def test_lossy_htj2k_does_not_wrap_black_into_white(tmp_path):
    """OpenJPH does at 8 bit, which is why OpenJPEG decodes this one."""
    checks = np.kron(np.indices((12, 16)).sum(0) % 2, np.ones((4, 4))).astype(np.uint8) * 255
    path = write_oct_dicom(
        tmp_path / "a",
        np.stack([checks] * 2),
        SPACING_MM,
        transfer_syntax=uid.HTJ2K,
        encode=imagecodecs_encoder("htj2k", reversible=False, level=0.02),
    )
    assert np.abs(read_volume(path).voxels[0].astype(int) - checks).max() <= 16


@pytest.mark.parametrize(
    "syntax", [*NATIVE, uid.RLELossless, uid.JPEGLSLossless, uid.JPEG2000Lossless, uid.JPEGLosslessSV1], ids=str
)
@pytest.mark.parametrize("bits", [8, 10, 12, 16])
@pytest.mark.parametrize("photometric", ["MONOCHROME1", "MONOCHROME2"])
def test_white_is_full_scale_in_every_syntax(tmp_path, syntax, bits, photometric):
    image = picture(8) if bits == 8 else (picture(16) >> (16 - bits))
    path = write_oct_dicom(
        tmp_path / "a", np.stack([image] * 2), SPACING_MM, transfer_syntax=syntax, bits_stored=bits, photometric=photometric,
        encode=imagecodecs_encoder("ljpeg", bitspersample=bits) if syntax == uid.JPEGLosslessSV1 else None,
    )  # fmt: skip
    white = (1 << bits) - 1
    expected = (white - image if photometric == "MONOCHROME1" else image) << (8 * image.dtype.itemsize - bits)
    np.testing.assert_array_equal(read_volume(path).voxels[1], expected)


# Fragments and offset tables

_FRAGMENTED = [
    case for case in CASES if case.syntax not in NATIVE and case.syntax != uid.RLELossless and case.bits != 12
]


@lenient
@given(
    case=st.sampled_from(_FRAGMENTED),
    cuts=st.lists(st.floats(0.02, 0.98), max_size=4, unique=True),
    table=st.sampled_from(["right", "empty", "wrong", "too short", "extended"]),
)
def test_frames_are_found_whatever_the_fragments_and_the_offset_table(tmp_path, case, cuts, table):
    frames = [case.encode(picture(case.bits))] * 3

    def edit(dataset):
        dataset.PixelData, offsets = _fragmented(frames, cuts)
        if table == "extended" and not cuts:
            dataset.PixelData, dataset.ExtendedOffsetTable, dataset.ExtendedOffsetTableLengths = encapsulate_extended(
                frames
            )
        elif table in ("right", "wrong", "too short"):
            values = {"right": offsets, "wrong": [4 * n + 1 for n in offsets], "too short": offsets[:1]}[table]
            content = b"".join(n.to_bytes(4, "little") for n in values)
            dataset.PixelData = (
                b"\xfe\xff\x00\xe0" + len(content).to_bytes(4, "little") + content + dataset.PixelData[8:]
            )

    whole = read_volume(write(tmp_path / "whole", case)).voxels
    path = write(tmp_path / "cut", case, edit=edit)
    np.testing.assert_array_equal(read_volume(path).voxels, whole)
    assert read_header(path).shape == whole.shape


def _fragmented(frames: list[bytes], cuts: list[float]) -> tuple[bytes, list[int]]:
    """Items after an empty offset table, and the offset of each frame's first item."""
    items, offsets = b"", []
    for frame in frames:
        offsets.append(len(items))
        frame += b"\0" * (len(frame) % 2)
        at = [0, *sorted({2 * int(cut * len(frame) / 2) for cut in cuts} - {0}), len(frame)]
        for start, stop in itertools.pairwise(at):
            items += b"\xfe\xff\x00\xe0" + (stop - start).to_bytes(4, "little") + frame[start:stop]
    return b"\xfe\xff\x00\xe0\0\0\0\0" + items, offsets


def test_jpeg_2000_with_a_file_header_is_read(tmp_path):
    """PS3.5 A.4.4 forbids the boxes; some writers put them there."""
    import imagecodecs

    image = picture(8)
    path = write_oct_dicom(
        tmp_path / "a", np.stack([image] * 2), SPACING_MM, transfer_syntax=uid.JPEG2000Lossless,
        encode=lambda frame: bytes(imagecodecs.jpeg2k_encode(frame, codecformat="JP2", reversible=True)),
    )  # fmt: skip
    np.testing.assert_array_equal(read_volume(path).voxels[0], image)


def test_scrambled_zeiss_pixels_are_named_and_never_decoded(tmp_path):
    import imagecodecs

    def scrambled(frame):
        content = bytearray(imagecodecs.jpeg2k_encode(frame, codecformat="JP2", reversible=True))
        return bytes(byte ^ 0x33 if i % 2 == 0 else byte for i, byte in enumerate(content))

    options = {"transfer_syntax": uid.JPEG2000Lossless, "encode": scrambled}
    voxels = np.stack([picture(8)] * 2)
    zeiss = write_oct_dicom(
        tmp_path / "a", voxels, SPACING_MM, manufacturer="Carl Zeiss Meditec", model="CIRRUS HD-OCT 5000", **options
    )
    other = write_oct_dicom(tmp_path / "b", voxels, SPACING_MM, **options)
    for path, code in ((zeiss, "scrambled_pixels"), (other, "decode_failed")):
        for read in (read_header, read_volume):
            with pytest.raises(ReadError) as refused:
                read(path)
            assert refused.value.code == code


# Header and codestream that disagree


@pytest.mark.parametrize(
    "syntax", [uid.JPEGBaseline8Bit, uid.JPEGLSLossless, uid.JPEG2000Lossless, uid.HTJ2KLossless], ids=str
)
def test_a_codestream_of_another_size_is_refused_before_it_is_decoded(tmp_path, syntax):
    case = next(case for case in CASES if case.syntax == syntax and case.bits == 8)
    for keyword, value in (("Rows", 47), ("Columns", 65)):
        path = write(
            tmp_path / keyword, case, edit=lambda ds, keyword=keyword, value=value: setattr(ds, keyword, value)
        )
        with pytest.raises(ReadError, match="48 x 64") as refused:
            read_header(path)
        assert refused.value.code == "decode_failed"


def test_colour_in_a_grayscale_file_is_refused(tmp_path):
    from PIL import Image

    def colour(frame):
        buffer = io.BytesIO()
        Image.fromarray(np.stack([frame] * 3, -1)).save(buffer, "JPEG")
        return buffer.getvalue()

    path = write_oct_dicom(
        tmp_path / "a", np.stack([picture(8)] * 2), SPACING_MM, transfer_syntax=uid.JPEGBaseline8Bit, encode=colour
    )
    with pytest.raises(ReadError, match="3 component") as refused:
        read_header(path)
    assert refused.value.code == "decode_failed"


@pytest.mark.parametrize("syntax", [uid.HTJ2KLossless, uid.ExplicitVRLittleEndian])
def test_values_beyond_bits_stored_are_refused_not_wrapped(tmp_path, syntax):
    path = write_oct_dicom(
        tmp_path / "a", np.stack([picture(16)] * 2), SPACING_MM, transfer_syntax=syntax, bits_stored=12,
        encode=imagecodecs_encoder("htj2k", reversible=True),
    )  # fmt: skip
    with pytest.raises(ReadError, match="where BitsStored is 12") as refused:
        read_volume(path)
    assert refused.value.code == "unsupported_pixels"


def test_the_real_volume_survives_every_syntax(tmp_path, real_data):
    voxels = np.load(real_data / "medvisbonn_amd_spectralis_145.npz")["volume"][::48, :200, 100:356]
    for case in CASES:
        if case.bits != 8 or case.encoder in ("dcmtk", "ffmpeg", "charls", "dcmtk-sv4"):
            continue
        path = write_oct_dicom(
            tmp_path / "a",
            voxels,
            (0.87, 0.003872, 0.011182),
            transfer_syntax=case.syntax,
            encode=case.encode,
            superior_first=True,
        )
        volume = read_volume(path)
        error = np.abs(volume.voxels.astype(int) - voxels.astype(int))
        # Speckle is harder on a lossy codec than a ramp.
        assert error.max() <= 3 * case.bound, (str(case), error.max())
        assert volume.spacing_mm == pytest.approx((0.87, 0.003872, 0.011182))
