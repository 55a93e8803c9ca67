"""BalanceKV: halves of blocks of tokens that answer queries as the whole block does."""

from weir.pools.balance.balance import Balance, Sums
from weir.pools.balance.halving import Halves, check_block
