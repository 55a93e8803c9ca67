"""BalanceKV: halves of blocks that answer as the whole does."""

from weir.pools.balance.balance import Balance
from weir.pools.balance.halving import Halving, Sets, check_block

__all__ = [
    "Balance",
    "Halving",
    "Sets",
    "check_block",
]
