"""A pool around another: what it is to a pipe, it is by the other, but for what it does itself."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Any

from torch import Tensor

from weir.pools.base import Pool
from weir.slab import Slots


@dataclass(frozen=True)
class Around(Pool):
    """A pool that folds by another one's judgment, and needs, remembers and reports as that does.

    Attributes:
        pool: the other, with as many slots as it says.
    """

    pool: Pool

    @property
    def needs_mass(self) -> bool:
        """As the pool inside."""
        return self.pool.needs_mass

    @property
    def needs_queries(self) -> int:
        """As the pool inside."""
        return self.pool.needs_queries

    @property
    def needs_shares(self) -> bool:
        """As the pool inside."""
        return self.pool.needs_shares

    @property
    def needs_marks(self) -> bool:
        """As the pool inside."""
        return self.pool.needs_marks

    @property
    def log_n(self) -> bool:
        """As the pool inside."""
        return self.pool.log_n

    @property
    def heads_agree(self) -> bool:
        """As the pool inside."""
        return self.pool.heads_agree

    @property
    def has_chance(self) -> bool:
        """As the pool inside."""
        return self.pool.has_chance

    def check(self, before: tuple[Pool, ...]) -> None:
        """Refuse what the pool inside refuses."""
        self.pool.check(before)

    def state(self, like: Slots) -> dict[str, Tensor]:
        """What the pool inside remembers."""
        return self.pool.state(like)

    def wrong_state(self, state: dict[str, Tensor], held: int, ahead: int) -> str | None:
        """Why tensors cannot be what it remembers; see `Pool.wrong_state`."""
        return self.pool.wrong_state(state, held, ahead)

    def report(self, state: dict[str, Tensor], row: int) -> dict[str, Any]:
        """As the pool inside."""
        return self.pool.report(state, row)

    def slots(self) -> int:
        """As many as the pool inside, which has a limit."""
        return self.pool.slots() or 0

    def fixed(self, before: tuple[Pool, ...]) -> int:
        """As many as of the pool inside."""
        return self.pool.fixed(before)

    def resized(self, slots: int) -> Pool:
        """The same around a pool of another size."""
        return replace(self, pool=self.pool.resized(slots))
