"""Average of the master weights over a run's last updates: their mean, or an exponential one."""

from __future__ import annotations

import torch
from torch import Tensor

from megabert.engine.zero_layout import AVERAGE, Read, ZeroLayout


class Average:
    """The average of this rank's masters, fp32: 4 bytes more for each element of them. Nothing is read from the device."""

    def __init__(self, layout: ZeroLayout, decay: float) -> None:
        """`decay`: what an update leaves of the average before it (0: the mean of all updates)."""
        self.updates = 0  # that are in it
        self._layout, self._decay = layout, decay
        self.values: list[Tensor] = []  # one a master

    @torch.no_grad()
    def add(self) -> None:
        """The weights as they are now."""
        masters = [master.tensor.detach() for master in self._layout.masters]
        self.updates += 1
        if self.updates == 1:
            self.values = [master.clone() for master in masters]
        else:
            torch._foreach_lerp_(self.values, masters, 1 - self._decay if self._decay else 1 / self.updates)

    @torch.no_grad()
    def load(self, read: Read, updates: int) -> None:
        """Go on from a saved average of so many updates; 0: from none."""
        self.updates = updates
        if updates:
            self.values = [torch.zeros_like(master.tensor) for master in self._layout.masters]
            self._layout.load(read, AVERAGE, self.values)
