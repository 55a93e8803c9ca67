"""Rules for who keeps a slot, one file or one folder each."""

from weir.pools.balance import Balance
from weir.pools.base import MOST_WEIGHT, Fold, Pool, split
from weir.pools.beginning import Beginning
from weir.pools.defend import Defend
from weir.pools.draws import Draws
from weir.pools.header import Header
from weir.pools.heavy import Heavy
from weir.pools.hive import Hive, best_window
from weir.pools.kcenter import KCenter, farthest_first
from weir.pools.marks import Marks
from weir.pools.match import Match
from weir.pools.outliers import Outliers
from weir.pools.parameters import Make, checked, fits, hints, taken
from weir.pools.ranked import Ranked, highest, pooled
from weir.pools.reading import Output, Reading
from weir.pools.recent import Recent
from weir.pools.registry import CONSTANTS, POOLS, WAITING, WORD, check_free, check_name, pool
from weir.pools.reservoir import Reservoir
from weir.pools.residue import Residue
from weir.pools.scores import (
    RKV,
    Caote,
    Chunks,
    Critical,
    CurDKV,
    Expected,
    KeyDiff,
    Keyformer,
    KNorm,
    Ladder,
    LagKV,
    QFilters,
    Scissorhands,
    Tova,
    Tri,
    Vase,
)
from weir.pools.sink import Sink
from weir.pools.snap import Snap
from weir.pools.subgen import SubGen
from weir.pools.tail import Tail
from weir.pools.tallied import Tallied
from weir.pools.uniform import Uniform

__all__ = [
    "CONSTANTS",
    "MOST_WEIGHT",
    "POOLS",
    "RKV",
    "WAITING",
    "WORD",
    "Balance",
    "Beginning",
    "Caote",
    "Chunks",
    "Critical",
    "CurDKV",
    "Defend",
    "Draws",
    "Expected",
    "Fold",
    "Header",
    "Heavy",
    "Hive",
    "KCenter",
    "KNorm",
    "KeyDiff",
    "Keyformer",
    "Ladder",
    "LagKV",
    "Make",
    "Marks",
    "Match",
    "Outliers",
    "Output",
    "Pool",
    "QFilters",
    "Ranked",
    "Reading",
    "Recent",
    "Reservoir",
    "Residue",
    "Scissorhands",
    "Sink",
    "Snap",
    "SubGen",
    "Tail",
    "Tallied",
    "Tova",
    "Tri",
    "Uniform",
    "Vase",
    "best_window",
    "check_free",
    "check_name",
    "checked",
    "farthest_first",
    "fits",
    "highest",
    "hints",
    "pool",
    "pooled",
    "split",
    "taken",
]
