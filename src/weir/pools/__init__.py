"""Pools: rules that decide which tokens keep a slot, each in a separate file or folder."""

from weir.pools.balance import Balance, Halves, Sums
from weir.pools.base import (
    MOST_RANGES,
    MOST_WEIGHT,
    Fold,
    Marks,
    Pool,
    SizedPool,
    find_outside,
    split,
    wrong_ranges,
)
from weir.pools.beginning import Beginning
from weir.pools.counter_rng import CounterRNG
from weir.pools.defend import Defend
from weir.pools.failures import (
    check_declared,
    is_own,
    make_state,
    name_failed_policy,
    name_failure,
)
from weir.pools.gated import Gated
from weir.pools.header import Header
from weir.pools.heavy import Heavy
from weir.pools.hive import Hive, best_window
from weir.pools.kcenter import KCenter, farthest_first
from weir.pools.kept import Kept
from weir.pools.match import Match
from weir.pools.observed_attention import Gating, ObservedAttention, Output
from weir.pools.outliers import Outliers
from weir.pools.parameters import (
    Bounds,
    Count,
    Make,
    argument_hints,
    check_arguments,
    convert_argument,
    fits,
)
from weir.pools.ranked import Ranked, Tallied, pool_neighbors, select_highest
from weir.pools.recent import Recent
from weir.pools.registry import CONSTANTS, POOLS, WAITING, WORD, check_free, check_name, pool
from weir.pools.reservoir import Reservoir
from weir.pools.residue import Residue
from weir.pools.scores.caote import Caote
from weir.pools.scores.chunks import Chunks
from weir.pools.scores.critical import Critical
from weir.pools.scores.curdkv import CurDKV
from weir.pools.scores.expected import Expected
from weir.pools.scores.keydiff import KeyDiff
from weir.pools.scores.keyformer import Keyformer
from weir.pools.scores.knorm import KNorm
from weir.pools.scores.ladder import Ladder
from weir.pools.scores.lagkv import LagKV
from weir.pools.scores.qfilters import QFilters
from weir.pools.scores.rkv import RKV
from weir.pools.scores.scissorhands import Scissorhands
from weir.pools.scores.tova import Tova
from weir.pools.scores.tri import Tri
from weir.pools.scores.vase import Vase
from weir.pools.sink import Sink
from weir.pools.snap import Frame, Snap
from weir.pools.subgen import SubGen
from weir.pools.tail import Tail
from weir.pools.uniform import Uniform

__all__ = [
    "Bounds",
    "Count",
    "Fold",
    "Marks",
    "Pool",
    "Ranked",
    "Recent",
    "Sink",
    "SizedPool",
    "Tallied",
    "find_outside",
    "pool",
    "split",
]
