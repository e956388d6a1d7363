"""Images out of bytes: JPEG decoded no larger than needed, everything else by Pillow; resized by torch."""

import io
from collections.abc import Iterator
from contextlib import contextmanager

import numpy as np
import simplejpeg
import torch
from numpy.typing import NDArray
from PIL import Image
from torch.nn.functional import interpolate

Pixels = NDArray[np.uint8]
"""Height x width x RGB."""

IMAGE_FIELDS = ("jpg", "jpeg", "png", "webp", "bmp", "gif", "tif", "tiff", "ppm")
"""Extensions of files that hold images."""


def image_size(data: bytes) -> tuple[int, int]:
    """Width and height, from the header alone; ValueError if it is damaged."""
    try:
        height, width, _, _ = simplejpeg.decode_jpeg_header(data)
        return width, height
    except ValueError:
        with _damage_as_value_error():
            return Image.open(io.BytesIO(data)).size


def decode(data: bytes, min_width: int = 0, min_height: int = 0) -> Pixels:
    """An image; ValueError if it is damaged.

    With a minimum, a JPEG comes fast, and at half its size or less if that is still as large. Fractions above a half
    would save work later but cost more here.
    """
    fast = min_width > 0
    try:
        if simplejpeg.decode_jpeg_header(data)[2] not in ("CMYK", "YCCK"):
            return simplejpeg.decode_jpeg(  # type: ignore[no-any-return]
                data, "RGB", fast, fast, min_width=min_width, min_height=min_height, min_factor=2
            )
    except ValueError:
        # Not a JPEG, or one with a slight fault: Pillow has the last word.
        pass
    with _damage_as_value_error():
        # A copy, because torch minds arrays that cannot be written to.
        return np.array(Image.open(io.BytesIO(data)).convert("RGB"))


def resized(pixels: Pixels, width: int, height: int) -> Pixels:
    """The image at another size, smoothed as Pillow does it."""
    if pixels.shape[:2] == (height, width):
        return pixels
    # Channels last without gaps: only so does the result come channels last, too, and needs no transposing.
    batch = torch.from_numpy(np.ascontiguousarray(pixels)).unsqueeze(0).permute(0, 3, 1, 2)
    result: Pixels = interpolate(batch, (height, width), mode="bilinear", antialias=True)[0].permute(1, 2, 0).numpy()
    return result


@contextmanager
def _damage_as_value_error() -> Iterator[None]:
    try:
        yield
    except (OSError, SyntaxError, Image.DecompressionBombError) as error:
        raise ValueError(str(error)) from error
