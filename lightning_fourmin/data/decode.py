"""Makes pixels of encoded images: simplejpeg decodes JPEG, Pillow everything else, and torch resizes."""

import io
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass

import numpy as np
import simplejpeg
import torch
from numpy.typing import NDArray
from PIL import Image, UnidentifiedImageError
from PIL.TiffImagePlugin import BITSPERSAMPLE, TiffImageFile
from torch.nn.functional import interpolate

Pixels = NDArray[np.uint8]
"""Height x width x RGB."""

IMAGE_FIELDS = ("jpg", "jpeg", "png", "webp", "bmp", "gif", "tif", "tiff", "ppm")
"""Extensions of files that hold images."""
# Pillow knows more formats, and runs programs for some of them, such as EPS.
PILLOW_FORMATS = ("JPEG", "PNG", "WEBP", "BMP", "GIF", "TIFF", "PPM")
MAX_PIXELS = 89_478_485
"""Larger images are refused, since a small file can claim to have any size. Pillow has the same limit."""


@dataclass(frozen=True)
class Encoded:
    """An encoded image, of which only the header has been read."""

    data: bytes
    width: int
    height: int
    is_fast: bool
    """Whether it is a JPEG that simplejpeg can decode, also at a fraction of its size."""

    @classmethod
    def of(cls, data: bytes) -> "Encoded":
        """Reads the header. Raises `ValueError` if the image is damaged or too large."""
        if not data:
            raise ValueError("it is empty")
        try:
            height, width, colours, _ = simplejpeg.decode_jpeg_header(data)
            is_fast = colours not in ("CMYK", "YCCK")
        except ValueError:
            width, height = _opened(data).size
            is_fast = False
        _check_size(width, height)
        return cls(data, width, height, is_fast)

    def pixels(self, min_width: int = 0, min_height: int = 0) -> Pixels:
        """Decodes the image. Raises `ValueError` if it is damaged.

        With a minimum a JPEG is decoded with faster, less exact methods, and at half its size or less if the result is
        still as large as the minimum. Sizes between a half and the whole would save work later but cost more here.
        """
        if self.is_fast:
            fast = min_width > 0
            try:
                return simplejpeg.decode_jpeg(  # type: ignore[no-any-return]
                    self.data, "RGB", fast, fast, min_width=min_width, min_height=min_height, min_factor=2
                )
            except ValueError:
                # Pillow can read images with slight faults.
                pass
        image = _opened(self.data)
        with _damage_as_value_error():
            return _rgb(image)


def _opened(data: bytes) -> Image.Image:
    with _damage_as_value_error():
        return Image.open(io.BytesIO(data), formats=PILLOW_FORMATS)


def _rgb(image: Image.Image) -> Pixels:
    """Converts an image with Pillow; grey of more than 8 bits by hand, because Pillow would clip it to white."""
    # In PPM files Pillow has scaled all grey of more than 8 bits to 16.
    if image.mode.startswith("I;16") or (image.mode == "I" and image.format == "PPM"):
        is_12_bit = isinstance(image, TiffImageFile) and image.tag_v2.get(BITSPERSAMPLE) == (12,)
        white = 4095 if is_12_bit else 65535
        grey = (np.asarray(image).astype(np.uint32) * 255 + white // 2) // white
        return np.repeat(grey.astype(np.uint8)[:, :, None], 3, axis=2)
    if image.mode in ("I", "F"):
        raise ValueError("it is 32-bit or signed grey, whose white is not known: convert it to 8 bit first")
    # A copy, because torch warns of arrays that cannot be written to.
    return np.array(image.convert("RGB"))


def _check_size(width: int, height: int) -> None:
    if width * height > MAX_PIXELS:
        raise ValueError(f"{width} x {height} pixels are more than the limit of {MAX_PIXELS:,}")


def resized(pixels: Pixels, width: int, height: int, *, flip: bool = False) -> Pixels:
    """The image at another size, smoothed as Pillow does it, and mirrored with `flip`."""
    # A single row of pixels becomes a large image when its short side is made longer.
    _check_size(width, height)
    # Channels last without gaps: only then does the result come channels last as well and need no transposing.
    batch = torch.from_numpy(np.ascontiguousarray(pixels)).unsqueeze(0).permute(0, 3, 1, 2)
    if pixels.shape[:2] != (height, width):
        batch = interpolate(batch, (height, width), mode="bilinear", antialias=True)
    if flip:
        # torch does this many times faster than numpy copies a mirrored view.
        batch = batch.flip(3)
    result: Pixels = batch[0].permute(1, 2, 0).numpy()
    return result


@contextmanager
def _damage_as_value_error() -> Iterator[None]:
    try:
        yield
    except UnidentifiedImageError:
        raise ValueError("its bytes are not those of an image in a known format") from None
    except Exception as error:
        # Damaged bytes make Pillow raise errors of many kinds; callers expect one.
        raise ValueError(str(error) or type(error).__name__) from error
