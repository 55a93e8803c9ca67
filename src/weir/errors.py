"""The errors weir raises on purpose; each is one sentence a user can act on."""

from __future__ import annotations


class WeirError(Exception):
    """Something given to weir cannot be used; the message says what, and what to do instead."""


class NotFiniteError(WeirError):
    """What a model made of tokens is infinite or no number; the forward was taken back.

    Attributes:
        layer: the layer that made such keys or values; None where nothing is cached, and it is the
            logits that are no numbers.
    """

    def __init__(self, layer: int | None, what: str = "the tokens of this call") -> None:
        made = "the model made logits that are no numbers"
        if layer is not None:
            made = f"layer {layer} of the model made keys or values that are not finite numbers"
        super().__init__(f"{what} were refused: {made}; the stream is as it was before them")
        self.layer = layer
