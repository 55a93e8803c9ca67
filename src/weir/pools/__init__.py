"""The pools a policy can be made of, one file each."""

from weir.pools.base import POOLS, Fold, Pool, pool
from weir.pools.recent import Recent
from weir.pools.sink import Sink

__all__ = ["POOLS", "Fold", "Pool", "Recent", "Sink", "pool"]
