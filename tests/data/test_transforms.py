"""Decoding and augmentation against Pillow, and the random boxes against their definition."""

import io
import struct
import zlib
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from PIL import Image

from lightning_fourmin.data.decode import Encoded, resized
from lightning_fourmin.data.transforms import EvalImage, TrainImage, random_box
from tests.support.shards import jpeg

SIDE = st.integers(1, 900)


def rng(seed: int = 0) -> np.random.Generator:
    return np.random.default_rng(seed)


def encoded(mode: str, kind: str) -> tuple[bytes, Image.Image]:
    image = Image.open(io.BytesIO(jpeg(64, 48))).convert(mode)
    file = io.BytesIO()
    image.save(file, kind)
    return file.getvalue(), Image.open(io.BytesIO(file.getvalue())).convert("RGB")


@pytest.mark.parametrize(
    ("mode", "kind"),
    [("RGB", "JPEG"), ("L", "JPEG"), ("CMYK", "JPEG"), ("RGB", "PNG"), ("L", "PNG"), ("P", "PNG"), ("RGBA", "WEBP")],
)
def test_decode_like_pillow(mode: str, kind: str) -> None:
    data, expected = encoded(mode, kind)
    image = Encoded.of(data)
    assert (image.width, image.height) == (64, 48)
    difference = np.abs(image.pixels().astype(int) - np.asarray(expected).astype(int))
    assert difference.max() <= 3


def grey(kind: str, bits: int = 16, mode: str = "I;16") -> bytes:
    """Black, two greys and white, side by side."""
    values = np.round(np.array([[0, 1 / 255, 0.6, 1]]) * (2**bits - 1))
    file = io.BytesIO()
    types = {"I;16": "<u2", "I;16B": ">u2", "I": "<i4", "F": "<f4"}
    Image.frombytes(mode, (4, 1), values.astype(types[mode]).tobytes()).save(file, kind)
    return file.getvalue()


def grey_tiff_of_12_bits() -> bytes:
    """As `grey`; Pillow reads such files but writes none."""
    tags = {256: 4, 257: 1, 258: 12, 259: 1, 262: 1, 273: 8, 277: 1, 278: 1, 279: 6}
    entries = b"".join(struct.pack("<HHII", tag, 4, 1, value) for tag, value in tags.items())
    return b"II*\0" + struct.pack("<I", 14) + bytes.fromhex("000010999fff") + struct.pack("<H", 9) + entries + bytes(4)


@pytest.mark.parametrize(
    "data",
    [
        grey("PNG"),
        grey("TIFF"),
        grey("TIFF", mode="I;16B"),
        grey("PPM"),
        b"P5 4 1 1023\n" + struct.pack(">4H", 0, 4, 614, 1023),
        grey_tiff_of_12_bits(),
    ],
    ids=["png", "tiff", "big-endian tiff", "pgm", "pgm of 10 bits", "tiff of 12 bits"],
)
def test_grey_of_more_than_8_bits_is_scaled(data: bytes) -> None:
    pixels = Encoded.of(data).pixels()
    assert pixels.tolist() == [[[value] * 3 for value in (0, 1, 153, 255)]]
    assert pixels.dtype == np.uint8
    assert pixels.flags.writeable


@pytest.mark.parametrize(("kind", "bits", "mode"), [("TIFF", 31, "I"), ("TIFF", 1, "F"), ("PPM", 1, "F")])
def test_grey_without_a_known_white_is_refused(kind: str, bits: int, mode: str) -> None:
    with pytest.raises(ValueError, match=r"^it is 32-bit or signed grey, .*: convert it to 8 bit first$"):
        Encoded.of(grey(kind, bits, mode)).pixels()


@pytest.mark.parametrize(
    ("least", "size"),
    [
        ((0, 0), (300, 400)),
        ((400, 300), (300, 400)),
        ((201, 10), (300, 400)),
        ((190, 140), (150, 200)),
        ((50, 37), (38, 50)),
    ],
)
def test_a_jpeg_is_decoded_no_larger_than_needed(least: tuple[int, int], size: tuple[int, int]) -> None:
    pixels = Encoded.of(jpeg(400, 300)).pixels(*least)
    assert pixels.shape == (*size, 3)
    expected = Image.open(io.BytesIO(jpeg(400, 300))).resize((size[1], size[0]), Image.Resampling.BOX)
    assert np.abs(pixels.astype(int) - np.asarray(expected).astype(int)).mean() < 2


@pytest.mark.parametrize("data", [b"", b"nothing", jpeg(99, 99)[:200], jpeg(99, 99)[:-300]])
def test_damaged_images(data: bytes) -> None:
    with pytest.raises(ValueError, match=r"are not those of an image|it is empty|[Tt]runcated"):
        Encoded.of(data).pixels()


def png_header(width: int, height: int) -> bytes:
    """A PNG of any size without pixels."""
    header = struct.pack(">IIBBBBB", width, height, 8, 2, 0, 0, 0)
    chunks = [(b"IHDR", header), (b"IDAT", b"")]
    return b"\x89PNG\r\n\x1a\n" + b"".join(
        struct.pack(">I", len(data)) + kind + data + struct.pack(">I", zlib.crc32(kind + data)) for kind, data in chunks
    )


def test_images_that_claim_to_be_huge_are_refused() -> None:
    data = jpeg(64, 48)
    at = data.index(b"\xff\xc0") + 5
    huge = data[:at] + struct.pack(">HH", 50_000, 60_000) + data[at + 4 :]
    with pytest.raises(ValueError, match="60000 x 50000 pixels are more than the limit of 89,478,485"):
        Encoded.of(huge)
    with pytest.raises(ValueError, match="could be decompression bomb"):
        Encoded.of(png_header(30_000, 30_000))
    with pytest.raises(ValueError, match="16384000 x 256 pixels are more than the limit"):
        EvalImage().pixels(Encoded.of(jpeg(64_000, 1)), rng())


def test_formats_that_run_programs_are_not_opened() -> None:
    with pytest.raises(ValueError, match="its bytes are not those of an image in a known format"):
        Encoded.of(b"%!PS-Adobe-3.0 EPSF-3.0\n%%BoundingBox: 0 0 10 10\n")


def test_resized_like_pillow() -> None:
    pixels = rng().integers(0, 256, (90, 70, 3), dtype=np.uint8)
    for width, height in ((30, 40), (140, 200), (70, 90)):
        expected = np.asarray(Image.fromarray(pixels).resize((width, height), Image.Resampling.BILINEAR))
        assert np.abs(resized(pixels, width, height).astype(int) - expected.astype(int)).max() <= 1


@given(SIDE, SIDE, st.integers(0, 2**32))
def test_random_boxes_are_parts_of_the_image(width: int, height: int, seed: int) -> None:
    box = random_box(width, height, (0.08, 1.0), (3 / 4, 4 / 3), rng(seed))
    assert box.width > 0
    assert box.height > 0
    assert 0 <= box.left <= width - box.width
    assert 0 <= box.top <= height - box.height


def test_random_boxes_have_the_areas_and_shapes_asked_for() -> None:
    generator = rng(1)
    boxes = [random_box(1000, 1000, (0.1, 0.5), (1 / 2, 2), generator) for _ in range(4000)]
    areas = np.array([box.width * box.height / 1e6 for box in boxes])
    shapes = np.log([box.width / box.height for box in boxes])
    assert areas.min() == pytest.approx(0.1, abs=0.01)
    assert areas.max() == pytest.approx(0.5, abs=0.01)
    assert np.median(areas) == pytest.approx(0.3, abs=0.02)
    assert shapes.min() == pytest.approx(-np.log(2), abs=0.02)
    assert np.median(shapes) == pytest.approx(0, abs=0.06)
    free = [box.left / (1000 - box.width) for box in boxes]
    assert np.mean(free) == pytest.approx(0.5, abs=0.02)


def test_an_image_too_long_for_the_shapes_gives_its_middle() -> None:
    assert random_box(1000, 10, (0.9, 1.0), (3 / 4, 4 / 3), rng()) == (493, 0, 13, 10)


@pytest.mark.parametrize("size", [(500, 375), (1400, 1000), (60, 200)])
def test_training_pixels_are_those_of_a_box(size: tuple[int, int]) -> None:
    """Scaled decoding changes little: the same box cut and resized by Pillow at full size gives nearly the same."""
    data = jpeg(*size, seed=3)
    transform = TrainImage(size=64, flip=False)
    full = Image.open(io.BytesIO(data))
    for seed in range(8):
        pixels = transform.pixels(Encoded.of(data), rng(seed))
        assert pixels.shape == (64, 64, 3)
        box = random_box(*size, transform.scale, transform.ratio, rng(seed))
        part = full.crop((box.left, box.top, box.left + box.width, box.top + box.height))
        expected = np.asarray(part.resize((64, 64), Image.Resampling.BILINEAR))
        assert np.abs(pixels.astype(int) - expected.astype(int)).mean() < 3


def test_every_second_image_is_flipped() -> None:
    data = jpeg(40, 40)
    flipped = 0
    for seed in range(200):
        box = {"size": 40, "scale": (1.0, 1.0), "ratio": (1.0, 1.0)}
        plain = TrainImage(**box, flip=False).pixels(Encoded.of(data), rng(seed))
        pixels = TrainImage(**box).pixels(Encoded.of(data), rng(seed))
        assert pixels.flags.c_contiguous
        mirrored = np.array_equal(pixels, plain[:, ::-1])
        assert mirrored or np.array_equal(pixels, plain)
        flipped += mirrored
    assert 70 < flipped < 130


@pytest.mark.parametrize("size", [(500, 375), (300, 400), (50, 40)])
def test_evaluation_takes_the_middle(size: tuple[int, int]) -> None:
    data = jpeg(*size)
    pixels = EvalImage(size=56, resize=64).pixels(Encoded.of(data), rng())
    full = Image.open(io.BytesIO(data))
    factor = 64 / min(size)
    small = full.resize((round(size[0] * factor), round(size[1] * factor)), Image.Resampling.BILINEAR)
    left, top = round((small.width - 56) / 2), round((small.height - 56) / 2)
    expected = np.asarray(small.crop((left, top, left + 56, top + 56)))
    assert np.abs(pixels.astype(int) - expected.astype(int)).max() <= 3


def test_nothing_to_crop() -> None:
    arguments: dict[str, Any] = {"size": 64, "resize": 60}
    with pytest.raises(ValueError, match="resize=60 is less than size=64"):
        EvalImage(**arguments)
