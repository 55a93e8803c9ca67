"""Groups of slots, each in the slot of its newest member: sums and means over them.

Knows slots; nothing of who was put into which group, or why.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from weir.slab import Slots


@dataclass(frozen=True)
class Groups:
    """Who is in which group.

    Attributes:
        home: for each slot, that of its group's newest member [batch, kv_heads, n], int64.
        stays: which slots are such homes [batch, kv_heads, n], bool.
        member: whether a slot is in the group of another [batch, kv_heads, n, homes n], bool.
    """

    home: Tensor
    stays: Tensor
    member: Tensor

    @classmethod
    def of(cls, group: Tensor, slots: Slots) -> Groups:
        """Groups by numbers from 0 to n [batch, kv_heads, n], of those slots that hold a token."""
        step = torch.arange(group.shape[2], device=group.device)
        together = (group[..., None] == step) & slots.held[..., None]
        newest = slots.position[..., None].where(together, -1).argmax(dim=2)
        home = newest.gather(2, group)
        return cls(
            home, (home == step) & slots.held, (home[..., None] == step) & slots.held[..., None]
        )

    @property
    def several(self) -> Tensor:
        """Which homes have more than one member [batch, kv_heads, n], bool."""
        return self.member.sum(dim=2) > 1

    def total(self, log: Tensor) -> Tensor:
        """Logarithms of sums, from logarithms, both [batch, kv_heads, n]; -inf where not home."""
        return log[..., None].where(self.member, -torch.inf).logsumexp(dim=2)

    def mean(self, x: Tensor, log: Tensor) -> Tensor:
        """Means of `x` [batch, kv_heads, n, dim] by weights whose logarithms these are; in float32.

        Zero where not home, and for a group without weight.
        """
        total = self.total(log)
        share = log[..., None] - total.masked_fill(total.isneginf(), 0.0)[:, :, None]
        return share.exp().where(self.member, 0.0).transpose(2, 3) @ x.float()

    def home_of(self, x: Tensor) -> Tensor:
        """To each slot the row of `x` [batch, kv_heads, n, dim] that its group's home has."""
        return x.gather(2, self.home[..., None].expand_as(x))
