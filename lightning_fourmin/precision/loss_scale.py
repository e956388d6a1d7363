"""The loss scale: the factor on the loss that lifts small gradients into FP16's range."""

from typing import Any

INITIAL_SCALE = 2.0**16
FLOOR = 1.0
"""The smallest value of a dynamic scale: at 1 the loss is not scaled at all."""
GROWTH_INTERVAL = 2000
"""The number of steps without overflow after which the scale doubles."""
PATIENCE = 16
"""The number of skipped steps in a row that may be due to the scale: so many halvings lead from the initial value to
the floor."""


class LossScale:
    """A dynamic scale halves when gradients overflow and doubles when they have not for long; a static one stays.

    Ranks do not exchange the scale: they decide on each step alike, so their scales change alike.
    """

    def __init__(self, value: float, dynamic: bool) -> None:
        self.value, self.dynamic = value, dynamic
        self.skipped_steps = 0
        """The number of steps that were skipped, of all optimizers together."""
        self.skips_in_a_row: dict[int, int] = {}
        """The number of steps in a row that each optimizer has skipped up to now. They are counted apart, because a
        good step of one optimizer does not help another whose gradients always overflow."""
        self._good_steps = 0

    def exhausted(self, optimizer: int) -> bool:
        """Whether so many steps in a row overflowed that a lower scale would not help, or there is none."""
        return self.skips_in_a_row[optimizer] > PATIENCE and (not self.dynamic or self.value <= FLOOR)

    def update(self, finite: bool, optimizer: int = 0) -> None:
        """Counts a step, which is skipped unless its gradients are finite, and sets the scale for the next."""
        self.skips_in_a_row[optimizer] = 0 if finite else self.skips_in_a_row.get(optimizer, 0) + 1
        if finite:
            self._good_steps += 1
            if self.dynamic and self._good_steps >= GROWTH_INTERVAL:
                self.value *= 2
                self._good_steps = 0
            return
        self.skipped_steps += 1
        self._good_steps = 0
        if self.dynamic:
            self.value = max(self.value / 2, FLOOR)

    def state_dict(self) -> dict[str, Any]:
        """Returns the counts, and a dynamic scale, for a checkpoint; a static scale stands in the configuration."""
        counts = {
            "skipped_steps": self.skipped_steps,
            "skips_in_a_row": dict(self.skips_in_a_row),
            "good_steps": self._good_steps,
        }
        return {**counts, "value": self.value} if self.dynamic else counts

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Takes the counts of a checkpoint, and its scale if it is dynamic in the saved run and in this one."""
        self.skipped_steps, self.skips_in_a_row = state["skipped_steps"], dict(state["skips_in_a_row"])
        self._good_steps = state["good_steps"]
        if self.dynamic:
            self.value = state.get("value", self.value)
