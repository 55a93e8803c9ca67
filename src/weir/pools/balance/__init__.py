"""BalanceKV: halve blocks of tokens so that each half answers queries like the whole block."""

from weir.pools.balance.balance import Balance, Sums
from weir.pools.balance.halving import Halves, check_block
