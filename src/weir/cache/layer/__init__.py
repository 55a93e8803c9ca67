"""One layer's stream: append, attend, fold."""

from weir.cache.layer.fold import Pending, fold_rows, states_of
from weir.cache.layer.layer import Layer
from weir.cache.layer.layer_state import LayerSpec, LayerState, Layout, lay_out
from weir.cache.layer.transaction import RowsNotFinite
