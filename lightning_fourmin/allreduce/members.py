"""A process group as one of its members sees it."""

from dataclasses import dataclass

import torch.distributed as dist


@dataclass(frozen=True)
class Members:
    """The ranks of a group and the place of this rank among them; place 0 is the leader."""

    group: dist.ProcessGroup
    ranks: tuple[int, ...]
    index: int

    @property
    def others(self) -> list[int]:
        """Places of the other members, the next one first, so that not all send to the same member at once."""
        return [(self.index + i) % len(self.ranks) for i in range(1, len(self.ranks))]
