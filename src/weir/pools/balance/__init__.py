"""BalanceKV: halves of blocks that answer as the whole does."""

from weir.pools.balance.balance import Balance, Sums
from weir.pools.balance.halving import Halves, check_block

__all__ = ["Balance", "Halves", "Sums", "check_block"]
