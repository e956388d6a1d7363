"""Notes of errors, also in Python 3.10."""

import logging
import sys

log = logging.getLogger(__name__)


def add_note(error: BaseException, note: str) -> None:
    """As `error.add_note`; Python 3.10 shows no notes, so there it is logged as well."""
    if sys.version_info >= (3, 11):
        error.add_note(note)
    else:
        error.__notes__ = [*getattr(error, "__notes__", []), note]  # type: ignore[attr-defined]
        log.error("%s: %s", type(error).__name__, note)
