"""Throughput of every installed decoder for every transfer syntax, in MB/s of decoded pixels on one core, in one run.

    python benchmarks/dicom_decoders.py [--image FILE.npy]

The image is one B-scan, uint8 [H, W], by default of a phantom. 16-bit pixels get eight random low bits, which resemble
speckle.
"""

import argparse
import time

import imagecodecs
import numpy as np
from pydicom import uid
from pydicom.pixels import get_encoder

from octfm.formats.dicom.codecs import FrameFormat, decode_frame, find_decoders
from octfm.phantom import phantom_volume


def encoders(bits: int):
    def rle(image):
        layout = {"rows": image.shape[0], "columns": image.shape[1], "number_of_frames": 1, "samples_per_pixel": 1}
        depth = {"bits_allocated": bits, "bits_stored": bits, "pixel_representation": 0}
        colours = {"photometric_interpretation": "MONOCHROME2"}
        return get_encoder(uid.RLELossless).encode(image, encoding_plugin="pydicom", **layout, **depth, **colours)

    if bits == 8:
        yield uid.JPEGBaseline8Bit, lambda image: imagecodecs.jpeg8_encode(image, level=95)
    yield uid.RLELossless, rle
    yield uid.JPEGLosslessSV1, lambda image: imagecodecs.ljpeg_encode(image, bitspersample=bits)
    yield uid.JPEGLSLossless, imagecodecs.jpegls_encode
    yield uid.JPEG2000Lossless, lambda image: imagecodecs.jpeg2k_encode(image, codecformat="J2K", reversible=True)
    yield uid.JPEG2000, lambda image: imagecodecs.jpeg2k_encode(image, level=45, codecformat="J2K")
    yield uid.HTJ2KLossless, lambda image: imagecodecs.htj2k_encode(image, reversible=True)
    yield uid.HTJ2K, lambda image: imagecodecs.htj2k_encode(image, reversible=False, level=0.002)


def seconds(decode, least: float = 0.4) -> float:
    decode()
    times = []
    while sum(times) < least:
        start = time.process_time()
        decode()
        times.append(time.process_time() - start)
    return float(np.median(times))


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--image")
    path = parser.parse_args().image
    image8 = np.ascontiguousarray(np.load(path) if path else phantom_volume(0, size=(2, 496, 512))[0].voxels[0])
    low = np.random.default_rng(0).integers(0, 256, image8.shape, np.uint16)
    print("| compression | bits | ratio | decoder | MB/s |\n|---|---|---|---|---|")
    for image in (image8, (image8.astype(np.uint16) << 8) | low):
        bits = 8 * image.dtype.itemsize
        form = FrameFormat(*image.shape, bits)
        for syntax, encode in encoders(bits):
            content = bytes(encode(image))
            name, decoders = find_decoders(syntax, "benchmark")
            for decoder in decoders:
                assert not isinstance(decode_frame(content, form, [decoder]), str)
                speed = image.nbytes / seconds(
                    lambda content=content, form=form, decoder=decoder: decode_frame(content, form, [decoder])
                )
                print(
                    f"| {name} | {bits} | {image.nbytes / len(content):.1f} | {decoder.name} | {speed / 1e6:.0f} |",
                    flush=True,
                )


if __name__ == "__main__":
    main()
