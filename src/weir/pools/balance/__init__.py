"""BalanceKV: halves of blocks that answer as the whole does."""

from weir.pools.balance.balance import Balance
from weir.pools.balance.gram import Gram
from weir.pools.balance.halving import Halving, Sets, blocks_at_once, check_block

__all__ = ["Balance", "Gram", "Halving", "Sets", "blocks_at_once", "check_block"]
