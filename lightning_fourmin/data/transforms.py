"""Transforms of image samples: random crops and flips for training, the centre for evaluation.

They run in the worker processes of a loader, which get copies of them.
"""

import math
from abc import ABC, abstractmethod
from dataclasses import dataclass
from typing import NamedTuple

import numpy as np
from typing_extensions import override

from lightning_fourmin.data.decode import IMAGE_FIELDS, Encoded, Pixels, resized
from lightning_fourmin.data.sample import Sample

NUM_TRIES = 10
"""The number of random parts that are drawn before a part of the middle is taken, since each may not fit."""


@dataclass(frozen=True)
class ImageTransform(ABC):
    """Turns a sample with an image and a class into (pixels, label).

    The pixels are bytes, channels last; the data module normalises them on the device.
    """

    size: int = 224
    """Width and height of the result in pixels."""
    num_classes: int = 0
    """The number of classes, below which labels must be; 0: not checked. The data module sets it from the index."""

    def __call__(self, sample: Sample, rng: np.random.Generator) -> tuple[Pixels, int]:
        """The pixels and the label. Raises `ShardError` if either is missing or damaged."""
        field = next((field for field in IMAGE_FIELDS if field in sample), IMAGE_FIELDS[0])
        data = sample[field]
        label = sample.label(self.num_classes)
        try:
            return self.pixels(Encoded.of(data), rng), label
        except ValueError as error:
            raise sample.fault(field, f"is not a readable image: {error}") from error

    @abstractmethod
    def pixels(self, image: Encoded, rng: np.random.Generator) -> Pixels:
        """Makes size x size pixels of the image. Raises `ValueError` if it is damaged."""


class Box(NamedTuple):
    """A part of an image, in pixels."""

    left: int
    top: int
    width: int
    height: int


def random_box(
    width: int, height: int, scale: tuple[float, float], ratio: tuple[float, float], rng: np.random.Generator
) -> Box:
    """A part of the image with a random area and a random shape.

    `scale` has the bounds of its share of the image's area, `ratio` the bounds of its width divided by its height.
    """
    for _ in range(NUM_TRIES):
        area = width * height * (scale[0] + rng.random() * (scale[1] - scale[0]))
        shape = ratio[0] * (ratio[1] / ratio[0]) ** rng.random()
        box_width, box_height = round(math.sqrt(area * shape)), round(math.sqrt(area / shape))
        if 0 < box_width <= width and 0 < box_height <= height:
            left, top = int(rng.random() * (width - box_width + 1)), int(rng.random() * (height - box_height + 1))
            return Box(left, top, box_width, box_height)
    # No part fitted, since the image is too long. So take the largest part of its middle with an allowed shape.
    box_width = min(width, max(1, round(height * ratio[1])))
    box_height = min(height, max(1, round(width / ratio[0])))
    return Box((width - box_width) // 2, (height - box_height) // 2, box_width, box_height)


@dataclass(frozen=True)
class TrainImage(ImageTransform):
    """A random part of the image, resized and flipped by chance (RandomResizedCrop)."""

    scale: tuple[float, float] = (0.08, 1.0)
    """Least and largest share of the image's area."""
    ratio: tuple[float, float] = (3 / 4, 4 / 3)
    """Least and largest width of the part, divided by its height."""
    flip: bool = True
    """Whether images are mirrored with probability 1/2."""

    @override
    def pixels(self, image: Encoded, rng: np.random.Generator) -> Pixels:
        width, height = image.width, image.height
        box = random_box(width, height, self.scale, self.ratio, rng)
        flip = self.flip and rng.random() < 0.5
        pixels = image.pixels(
            min_width=math.ceil(width * self.size / box.width), min_height=math.ceil(height * self.size / box.height)
        )
        across, down = pixels.shape[1] / width, pixels.shape[0] / height
        left, top = round(box.left * across), round(box.top * down)
        right, bottom = round((box.left + box.width) * across), round((box.top + box.height) * down)
        part = pixels[top : max(bottom, top + 1), left : max(right, left + 1)]
        return resized(part, self.size, self.size, flip=flip)


@dataclass(frozen=True)
class EvalImage(ImageTransform):
    """The middle of the image, after its short side was resized."""

    resize: int = 256
    """Pixels of the short side after resizing, of which the middle `size` are kept."""

    def __post_init__(self) -> None:
        if self.resize < self.size:
            raise ValueError(f"resize={self.resize} is less than size={self.size}: there would be nothing to crop")

    @override
    def pixels(self, image: Encoded, rng: np.random.Generator) -> Pixels:
        pixels = image.pixels()
        height, width = pixels.shape[:2]
        factor = self.resize / min(width, height)
        pixels = resized(pixels, round(width * factor), round(height * factor))
        left, top = round((pixels.shape[1] - self.size) / 2), round((pixels.shape[0] - self.size) / 2)
        return np.ascontiguousarray(pixels[top : top + self.size, left : left + self.size])
