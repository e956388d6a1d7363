"""`ShardDataModule`: tar shards for any LightningModule."""

from dataclasses import replace
from functools import cached_property
from typing import Any, Literal, TypeVar

import torch
from lightning.pytorch import Callback, LightningDataModule, LightningModule, Trainer
from lightning.pytorch.trainer.states import TrainerFn
from torch import Tensor
from torch.utils.data import default_collate
from typing_extensions import override

from lightning_fourmin.data.dataset import Collate, OnError, ShardDataset, Transform
from lightning_fourmin.data.digits import DIGITS, digits_folder
from lightning_fourmin.data.index import Index, read_index
from lightning_fourmin.data.loader import EvalLoader, ShardLoader, TrainLoader
from lightning_fourmin.data.partition import Partition, Remainder
from lightning_fourmin.data.transforms import EvalImage, ImageTransform, TrainImage
from lightning_fourmin.errors import ShardError

IMAGENET_MEAN = (0.485, 0.456, 0.406)
IMAGENET_STD = (0.229, 0.224, 0.225)
LoaderType = TypeVar("LoaderType", bound=ShardLoader)


Augment = Literal["none", "flip", "crop"]
LARGEST_DEFAULT = 224
"""The largest size of images that is taken from an index: the usual one for photos."""
SMALL_IMAGE = 96
"""The size below which images are not cropped at random unless the user asks for it."""


class ShardDataModule(LightningDataModule):
    """Tar shards with an index, for training and evaluation of any LightningModule with any strategy.

    In training an epoch has every sample once, except those that fill no step (`remainder`), and every rank has the
    same number of batches. In evaluation every sample counts once, on any number of ranks. A run that is resumed in
    mid-epoch continues with the samples that are left, also on another number of ranks or with another `batch_size`; it
    needs nothing but the data module for that.

    Batches are (images, labels) unless transforms of your own make something else. Images travel to the device as bytes
    and are normalised there. Each worker reads one piece of the epoch's order, so `num_workers` decides which samples
    share a batch and has a fixed default. Which samples an epoch has does not depend on it.

    Each rank has a data module in its main process; spawned ranks get a pickled copy. It makes a new loader for each
    run and each kind of evaluation. The loaders start worker processes, and those open the shards.

    Args:
        path: folder or URL with an `index.json`; "digits" for small demo data that is written on first use.
        batch_size: number of samples in a batch of one rank.
        train_transform: called with a `Sample` and a random generator that depends on (seed, epoch, sample); what it
            returns is collated. None: images, as `augment` says.
        eval_transform: the same for evaluation. None: the middle of images.
        image_size: width and height in pixels, for the default transforms. None: that of the images in the index, by
            the mean of their short sides, at most 224.
        augment: what training does to images at random: "none", "flip" (mirrored or not), or "crop" (a part of any size
            and shape, flipped or not). None: "crop", but "none" for images of less than 96 pixels, which lose too much.
        train_split: name in the index of the split for training.
        val_split: name in the index of the split for validation.
        test_split: name in the index of the split for testing and prediction.
        num_workers: number of processes of each rank that read and decode. 0: the main process does it.
        prefetch_factor: number of batches that each worker prepares ahead.
        seed: seed of the order and the augmentation.
        window: number of samples that are shuffled with each other; a worker holds as many in memory, undecoded.
        remainder: what happens to the samples of an epoch that fill no step of all ranks, accumulation included:
            "drop" them, or "wrap": fill the step with the first samples of the epoch.
        on_error: "raise" on damaged samples, or "skip" them; warnings and the callback `DataMonitor` count them. In
            training other samples take their places, of the same batch or those that follow it; in evaluation the batch
            is smaller or left out.
        pipes: whether shards may be `pipe:` URLs, which run commands: only for an index that you trust.
        collate: makes a batch of a list of values that the transform returned; images must stay first to be normalised.
        mean: mean of the images' red, green and blue, each between 0 and 1.
        std: standard deviation of the images' red, green and blue, each above 0 and at most 1.

    Example:
        ```python
        trainer.fit(ImageClassifier("resnet50"), ShardDataModule("shards/imagenet", batch_size=256, num_workers=8))
        ```
    """

    def __init__(
        self,
        path: str,
        batch_size: int,
        *,
        train_transform: Transform | None = None,
        eval_transform: Transform | None = None,
        image_size: int | None = None,
        augment: Augment | None = None,
        train_split: str = "train",
        val_split: str = "val",
        test_split: str = "val",
        num_workers: int = 2,
        prefetch_factor: int = 2,
        seed: int = 0,
        window: int = 1024,
        remainder: Remainder = "drop",
        on_error: Literal["raise", "skip"] = "raise",
        pipes: bool = False,
        collate: Collate = default_collate,
        mean: tuple[float, float, float] = IMAGENET_MEAN,
        std: tuple[float, float, float] = IMAGENET_STD,
    ) -> None:
        super().__init__()
        for name, value, least in (
            ("batch_size", batch_size, 1),
            ("num_workers", num_workers, 0),
            ("prefetch_factor", prefetch_factor, 1),
            ("seed", seed, 0),
            ("window", window, 1),
        ):
            if not isinstance(value, int):
                raise ValueError(f"{name}={value!r} must be a whole number")
            if value < least:
                raise ValueError(f"{name}={value} must be at least {least}")
        for name, choice, known in (
            ("remainder", remainder, ("drop", "wrap")),
            ("on_error", on_error, ("raise", "skip")),
            ("augment", augment, (None, "none", "flip", "crop")),
        ):
            if choice not in known:
                raise ValueError(f"{name}={choice!r} must be one of {', '.join(map(repr, known))}")
        if augment is not None and train_transform is not None:
            raise ValueError(f"augment={augment!r} is part of the default train_transform, and another one is given")
        for name, values in (("mean", mean), ("std", std)):
            if len(values) != 3 or not all(0 <= value <= 1 for value in values) or (name == "std" and 0 in values):
                raise ValueError(f"{name}={values} must be three shares of 255, for red, green and blue")
        self.path = path
        self.batch_size = batch_size
        self._given_size, self._given_augment = image_size, augment
        self._given_train_transform, self._given_eval_transform = train_transform, eval_transform
        self.splits = {"train": train_split, "val": val_split, "test": test_split}
        """The name in the index of the split for each stage: train, val and test."""
        self._num_workers = num_workers
        self._prefetch_factor = prefetch_factor
        self._seed = seed
        self._window = window
        self._remainder: Remainder = remainder
        self._on_error = on_error
        self._pipes = pipes
        self._collate = collate
        self._mean, self._std = tuple(mean), tuple(std)
        self._train_loader: TrainLoader | None = None
        self._state: dict[str, Any] | None = None
        """The state in the checkpoint that this run resumes, until its train loader is made."""
        self._scale = self._shift = torch.empty(0)
        """The factor of each colour and the number that is then added: tensors on the device of the last batch."""

    def __getstate__(self) -> dict[str, Any]:
        # Spawned ranks get the data module pickled. A loader with worker processes cannot be, and ranks make their own.
        return self.__dict__ | {"_train_loader": None}

    @property
    def folder(self) -> str:
        """The folder or URL of the index."""
        return str(digits_folder()) if self.path == DIGITS else self.path

    @cached_property
    def index(self) -> Index:
        """The index with splits, shards and classes, which is read on first use."""
        return read_index(self.folder, pipes=self._pipes)

    @property
    def num_classes(self) -> int:
        """The number of classes in the index; 0 if it has none."""
        return len(self.index.classes)

    @cached_property
    def image_size(self) -> int:
        """Width and height of the images that the default transforms make."""
        if self._given_size is not None:
            return self._given_size
        splits = self.index.splits
        split = splits.get(self.splits["train"]) or next(iter(splits.values()), None)
        sizes = None if split is None else split.image_sizes
        return LARGEST_DEFAULT if sizes is None else min(LARGEST_DEFAULT, round(min(sizes.mean)))

    @property
    def augment(self) -> Augment:
        """What the default transform of training does to images at random."""
        return self._given_augment or ("none" if self.image_size < SMALL_IMAGE else "crop")

    @cached_property
    def _train_transform(self) -> Transform:
        if self._given_train_transform is not None:
            return self._given_train_transform
        if self.augment == "crop":
            return TrainImage(self.image_size)
        # All of the image, or of a long one its middle.
        return TrainImage(self.image_size, scale=(1.0, 1.0), ratio=(1.0, 1.0), flip=self.augment == "flip")

    @cached_property
    def _eval_transform(self) -> Transform:
        if self._given_eval_transform is not None:
            return self._given_eval_transform
        size = self.image_size
        return EvalImage(size, resize=round(size * 256 / 224) if self.augment == "crop" else size)

    @property
    def batches_per_epoch(self) -> int:
        """The number of batches that each rank has in an epoch. It is known before any loader is made."""
        partition, split = self._partition(), self.index.split(self.splits["train"], self.path)
        return partition.num_batches(partition.epoch(split.num_samples, self._remainder, self._num_accumulated))

    @property
    def _num_accumulated(self) -> int:
        return self.trainer.accumulate_grad_batches if self.trainer else 1

    @override
    def prepare_data(self) -> None:
        if self.path == DIGITS:
            digits_folder()

    @override
    def setup(self, stage: str) -> None:
        # Lightning loads the checkpoint of this run after `setup`. A state that is there already is of an earlier run,
        # such as a validation, which makes no train loader to use it up.
        self._state = None

    # Lightning calls this once a run, and again for `reload_dataloaders_every_n_epochs`.
    @override
    def train_dataloader(self) -> ShardLoader:
        if self.trainer and self.trainer.overfit_batches:  # type: ignore[attr-defined]
            return self._loader(EvalLoader, "train", window=0)
        loader = self._make_train_loader()
        if self._state is not None:
            loader.load_state_dict(self._state)
            self._state = None
        self._train_loader = loader
        return loader

    def _make_train_loader(self) -> TrainLoader:
        kwargs: dict[str, Any] = {"window": self._window, "remainder": self._remainder}
        kwargs["num_accumulated"] = self._num_accumulated
        if self.trainer:
            limit = self.trainer.limit_train_batches
            num_batches = self.batches_per_epoch
            max_batches = min(limit, num_batches) if isinstance(limit, int) else int(limit * num_batches)
            kwargs |= {"epoch": self.trainer.current_epoch, "max_batches": max_batches}
            loop = self.trainer.fit_loop.epoch_loop
            kwargs["is_at_end"] = lambda: loop.restarted_on_last
        return self._loader(TrainLoader, "train", **kwargs)

    @override
    def val_dataloader(self) -> EvalLoader:
        return self._loader(EvalLoader, "val", window=0)

    @override
    def test_dataloader(self) -> EvalLoader:
        return self._loader(EvalLoader, "test", window=0)

    @override
    def predict_dataloader(self) -> EvalLoader:
        return self.test_dataloader()

    # Lightning keeps the loader's own state as well, but does not restore it at the end of an epoch, nor in a run whose
    # `configure_optimizers` reads `trainer.estimated_stepping_batches` (lightning#20550).
    @override
    def state_dict(self) -> dict[str, Any]:
        return self._train_loader.state_dict() if self._train_loader is not None else {}

    @override
    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        self._state = state_dict
        if self.trainer is not None:
            # Lightning restores the callbacks after the data module, so a callback that is added here is called, too.
            callbacks: list[Callback] = self.trainer.callbacks  # type: ignore[attr-defined]
            if not any(isinstance(callback, _BatchCountFix) for callback in callbacks):
                callbacks.append(_BatchCountFix())

    def _batch_count_shift(self) -> int:
        """The number of batches by which Lightning's count for the resumed epoch differs from that in the checkpoint.

        It is 0 if the global batch is the same. Raises `ShardError` if the epoch cannot be resumed.
        """
        if not self._state or not self._state["left"]:
            return 0
        loader = self._make_train_loader()
        loader.load_state_dict(self._state)
        return int(loader.state_dict()["num_batches"] - self._state["num_batches"])

    @override
    def on_after_batch_transfer(self, batch: Any, dataloader_idx: int) -> Any:
        training = self.trainer is not None and self.trainer.training
        if not isinstance(self._train_transform if training else self._eval_transform, ImageTransform):
            return batch
        images, *rest = batch
        return [self._normalised(images), *rest]

    def _normalised(self, images: Tensor) -> Tensor:
        """Turns bytes, channels last, into what the net computes with: normalised floats, channels first."""
        if not self._scale.numel() or self._scale.device != images.device:
            mean, std = torch.tensor([self._mean, self._std], device=images.device).view(2, 3, 1, 1)
            self._scale, self._shift = 1 / (255 * std), -mean / std
        floats = images.permute(0, 3, 1, 2).float().mul_(self._scale).add_(self._shift).contiguous()
        # Lightning lets the precision plugin convert batches before the transfer, when the images were still bytes.
        return self.trainer.precision_plugin.convert_input(floats) if self.trainer else floats

    def _partition(self) -> Partition:
        world = self.trainer.world_size if self.trainer else 1
        return Partition(world, self.batch_size, max(1, self._num_workers))

    def _loader(self, kind: type[LoaderType], stage: str, *, window: int, **kwargs: Any) -> LoaderType:
        name, transform = self.splits[stage], self._train_transform if stage == "train" else self._eval_transform
        if isinstance(transform, ImageTransform):
            transform = replace(transform, num_classes=self.num_classes)
        # In training all batches must have the same size. In evaluation a sample that counts twice changes the result.
        skip: OnError = "repeat" if stage == "train" else "omit"
        dataset = ShardDataset(
            self.index.split(name, self.path),
            self.folder,
            seed=self._seed,
            window=window,
            transform=transform,
            collate=self._collate,
            on_error="raise" if self._on_error == "raise" else skip,
        )
        on_cuda = self.trainer is not None and self.trainer.strategy.root_device.type == "cuda"
        rank = self.trainer.global_rank if self.trainer else 0
        try:
            return kind(
                dataset,
                self._partition(),
                rank,
                num_workers=self._num_workers,
                prefetch_factor=self._prefetch_factor,
                pin_memory=on_cuda,
                **kwargs,
            )
        except ShardError as error:
            raise ShardError(f"split {name!r} of {self.path}: {error}") from None


class _BatchCountFix(Callback):
    """Corrects Lightning's count of batches when a run resumes in mid-epoch with another global batch.

    Lightning's epoch ends when its count of batches reaches the length of the loader. A checkpoint has that count in
    batches of the run that was saved; this run may have larger or smaller ones. A callback's `on_load_checkpoint` is
    the public place to change it: it gets the whole checkpoint, after `ShardDataModule.load_state_dict` was called and
    before the loops read their counts. `load_state_dict` adds the callback to the Trainer, so a user passes only the
    data module. The callback has no state and stays there for later runs of the Trainer.
    """

    @override
    def on_load_checkpoint(self, trainer: Trainer, pl_module: LightningModule, checkpoint: dict[str, Any]) -> None:
        data = trainer.datamodule  # type: ignore[attr-defined]
        if trainer.state.fn != TrainerFn.FITTING or not isinstance(data, ShardDataModule):
            return
        if shift := data._batch_count_shift():
            # The numbers of batches that are ready, started, processed and completed.
            counts = checkpoint["loops"]["fit_loop"]["epoch_loop.batch_progress"]["current"]
            for stage in counts:
                counts[stage] += shift
