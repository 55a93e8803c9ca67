"""Scores of the field, by which a pool keeps tokens: one a file."""

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

__all__ = [
    "RKV",
    "Caote",
    "Chunks",
    "Critical",
    "CurDKV",
    "Expected",
    "KNorm",
    "KeyDiff",
    "Keyformer",
    "Ladder",
    "LagKV",
    "QFilters",
    "Scissorhands",
    "Tova",
    "Tri",
    "Vase",
]
