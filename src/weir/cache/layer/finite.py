"""Keys and values that are no numbers: whose they are, and from which token on."""

from __future__ import annotations

from torch import Tensor

from weir.cache.layer.plan import Plan


class RowsNotFinite(Exception):
    """Keys or values of some rows are not finite; the forward has to do without these rows.

    Attributes:
        layer: which layer found it.
        columns: by row, the first column whose key or value is not finite.
    """

    def __init__(self, layer: int, columns: dict[int, int]) -> None:
        super().__init__(f"layer {layer}, rows {sorted(columns)}")
        self.layer = layer
        self.columns = columns


def first_unfinite(finite: Tensor, plan: Plan) -> dict[int, int]:
    """By row, its first token among the columns where `finite` [batch, length] is false."""
    found: dict[int, int] = {}
    wrong = (~finite).tolist()
    for piece in plan.pieces:
        columns = piece.columns.tolist()
        for row, count in enumerate(piece.counts):
            bad = [column for column in columns[row][:count] if wrong[row][column]]
            if bad and row not in found:
                found[row] = bad[0]
    return found


def finite_columns(keys: Tensor, values: Tensor) -> Tensor:
    """Which columns have finite keys and values in all heads [batch, length], bool."""
    finite = keys.isfinite().all(dim=3) & values.isfinite().all(dim=3)
    return finite.all(dim=1)
