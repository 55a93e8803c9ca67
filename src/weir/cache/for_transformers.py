"""What transformers asks of a cache, as a cache without masks, cropping or rollback answers it.

`generate` reads how much was fed, reorders rows for beam search, and would take tokens back for
assisted decoding. Knows nothing about policies or how a call goes through the layers.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor
from transformers.cache_utils import Cache

from weir.cache.layer import Layer
from weir.cache.rows import Rows
from weir.errors import WeirError, quote
from weir.models import DROPPING
from weir.pools import fits

ASSISTED = (
    "assisted and prompt-lookup decoding take back tokens, which a StreamingCache cannot; "
    "generate without assistant_model and prompt_lookup_num_tokens"
)
"""Why decoding with an assistant is refused, wherever it is asked for."""


class ForTransformers(Cache):
    """The side of a `StreamingCache` that transformers sees.

    Attributes:
        stack: the layers.
        rows: how far each row of the batch has come.
    """

    stack: list[Layer]
    rows: Rows
    _kind: str

    def get_seq_length(self, layer_idx: int = 0) -> int:
        """Columns fed so far, padding too; `generate` feeds what comes after them."""
        return self.rows.columns

    def get_mask_sizes(self, query_length: int, layer_idx: int = 0) -> tuple[int, int]:
        """Sizes for a mask nobody reads: (query_length, 0)."""
        return query_length, 0

    def get_query_offset(self, layer_idx: int = 0) -> int:
        """Columns fed so far."""
        return self.rows.columns

    def get_max_length(self, layer_idx: int | None = None) -> int:
        """No limit on what can be fed: -1."""
        return -1

    def __len__(self) -> int:
        """Layers of the model, as for every cache of transformers."""
        return len(self.stack)

    def __bool__(self) -> bool:
        """True, from the first token on and before; but see `models.DROPPING`."""
        return self._kind not in DROPPING

    @property
    def is_compileable(self) -> bool:
        """False: `generate` is not to compile the forward."""
        return False

    @property
    def is_initialized(self) -> bool:
        """Whether anything was fed."""
        return self.rows.columns > 0

    @property
    def batch_size(self) -> int:
        """Rows of the batch; -1 before the first token."""
        return -1 if self.rows.batch is None else self.rows.batch

    @property
    def is_croppable(self) -> bool:
        """False: tokens that were folded cannot be taken back."""
        return False

    def crop(self, *args: Any, **kwargs: Any) -> None:
        """Refused: tokens that were folded cannot be taken back.

        An older transformers finds out here that an assistant needs it, after a first forward.

        Raises:
            WeirError: always.
        """
        raise WeirError(
            f"a StreamingCache cannot be cropped: what left its slots is gone; {ASSISTED}"
        )

    def activate_past_recording(self, *args: Any, **kwargs: Any) -> None:
        """Refused: assisted and prompt-lookup decoding take tokens back.

        Raises:
            WeirError: always.
        """
        raise WeirError(ASSISTED)

    def reorder_cache(self, beam_idx: Tensor) -> None:
        """Rows change places, as beam search asks after each step; `beam_idx` [batch]."""
        self.batch_select_indices(beam_idx)

    def batch_select_indices(self, indices: Tensor) -> None:
        """Keep the rows `indices` [n], in that order; a row may come more than once.

        Raises:
            WeirError: there is no such row, none is named, or the cache is narrowed (`only`).
        """
        self._check_wide()
        batch = self.rows.batch
        if batch is None:
            return
        wanted = indices.tolist()
        if not wanted or not all(0 <= row < batch for row in wanted):
            raise WeirError(
                f"rows {quote(str(wanted))} cannot be kept: the rows are 0 to {batch - 1}, and one "
                "at least has to stay"
            )
        for layer in self.stack:
            if layer.state.slab is not None:
                layer.state.select_rows(indices.to(layer.state.slab.keys.device, torch.int64))
        self.rows = self.rows.select(wanted)

    def batch_repeat_interleave(self, repeats: int) -> None:
        """Every row `repeats` times.

        Raises:
            WeirError: that is less than once.
        """
        if not fits(repeats, int) or repeats < 1:
            raise WeirError(f"rows are repeated once or more, not {quote(repeats)} times")
        if self.rows.batch is not None:
            self.batch_select_indices(torch.arange(self.rows.batch).repeat_interleave(repeats))

    def __reduce_ex__(self, protocol: Any) -> Any:
        """Refused: the model would have to go along.

        Raises:
            WeirError: always.
        """
        raise WeirError(
            "a StreamingCache cannot be pickled or copied shallowly; copy.deepcopy makes a second "
            "one, and weir.Stream saves to a file"
        )

    def _check_wide(self) -> None:
        """Refuse what changes which rows there are, while some are all there is."""
        if any(layer.state.narrowed for layer in self.stack):
            raise WeirError("this cache is narrowed to some of its rows; leave only() first")
