"""The errors that this package raises on purpose: each text says what happened, where, and what to do about it.

The command line prints a `FourMinError` as one sentence, without a traceback. Wrong arguments of a constructor are
plain `ValueError`s, as everywhere in Python.
"""


class FourMinError(Exception):
    """What all errors below have in common."""


class LostRankError(FourMinError, RuntimeError):
    """The process of another rank ended, or stopped training."""


class CheckpointError(FourMinError):
    """A checkpoint that could not be saved, or a file that is no whole checkpoint."""


class ShardError(FourMinError, RuntimeError):
    """A shard, an index or a sample that is missing, damaged or not what it should be."""

    def __init__(self, text: str, *details: str) -> None:
        """Each of `details` gets a line of its own below the text."""
        super().__init__(*map(_escaped, (text, *details)))

    def __str__(self) -> str:
        return "\n  ".join(self.args)


class ConfigError(FourMinError, ValueError):
    """A configuration that makes no training, and what to change."""


class PlanError(FourMinError):
    """Settings of a prediction that make no sense, with the field that they stand in."""


class RunError(FourMinError, ValueError):
    """A folder that holds no readable run."""


class RankError(FourMinError):
    """What the first rank that failed says, and where it was."""

    def __init__(self, message: str, details: str) -> None:
        super().__init__(message)
        self.details = details
        """The traceback, or nothing."""


def _escaped(text: str) -> str:
    """The text with escapes for unprintable characters: names in a shard may hold what a terminal obeys."""
    return "".join(c if c.isprintable() else ascii(c)[1:-1] for c in text)
