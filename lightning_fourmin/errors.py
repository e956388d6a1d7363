"""The errors that this package raises on purpose: each text says what happened, where, and what to do about it.

The command line prints a `FourMinError` as one sentence, without a traceback. Wrong arguments of a constructor are
plain `ValueError`s, as everywhere in Python.
"""


class FourMinError(Exception):
    """The base of all errors that this package raises on purpose."""


class LostRankError(FourMinError, RuntimeError):
    """The process of another rank ended, or stopped training."""


class CheckpointError(FourMinError):
    """A checkpoint could not be saved, or a file is not a complete checkpoint."""


class ShardError(FourMinError, RuntimeError):
    """A shard, an index or a sample is missing, damaged or not what it should be."""

    def __init__(self, text: str, *details: str) -> None:
        """Each of `details` gets a line of its own below the text."""
        super().__init__(*map(_escaped, (text, *details)))

    def __str__(self) -> str:
        return "\n  ".join(self.args)


class ConfigError(FourMinError, ValueError):
    """A configuration cannot be trained with; the text says what to change."""


class PlanError(FourMinError):
    """The settings of a prediction make no sense; the text names the field."""


class RunError(FourMinError, ValueError):
    """A folder holds no readable run."""


class RankError(FourMinError):
    """A rank failed: the error of the first one that did, and where it was raised."""

    def __init__(self, message: str, details: str) -> None:
        super().__init__(message)
        self.details = details
        """The traceback of the rank, or an empty text."""


def _escaped(text: str) -> str:
    """Returns the text with escapes for unprintable characters: names in a shard may hold terminal commands."""
    return "".join(c if c.isprintable() else ascii(c)[1:-1] for c in text)
