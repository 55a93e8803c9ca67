"""The pools a policy can be made of, one file each."""

from weir.pools.balance import Balance
from weir.pools.base import POOLS, Fold, Pool, pool
from weir.pools.heavy import Heavy
from weir.pools.hive import Hive
from weir.pools.kcenter import KCenter
from weir.pools.outliers import Outliers
from weir.pools.recent import Recent
from weir.pools.reservoir import Reservoir
from weir.pools.sink import Sink
from weir.pools.snap import Snap
from weir.pools.subgen import SubGen
from weir.pools.uniform import Uniform

__all__ = [
    "POOLS",
    "Balance",
    "Fold",
    "Heavy",
    "Hive",
    "KCenter",
    "Outliers",
    "Pool",
    "Recent",
    "Reservoir",
    "Sink",
    "Snap",
    "SubGen",
    "Uniform",
    "pool",
]
