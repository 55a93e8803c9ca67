"""The errors weir raises on purpose; each is one sentence a user can act on."""

from __future__ import annotations


class WeirError(Exception):
    """Something given to weir cannot be used; the message says what, and what to do instead."""


class NotFiniteError(WeirError):
    """A layer made keys or values that are infinite or not numbers; the forward was taken back.

    Attributes:
        layer: the layer.
    """

    def __init__(self, layer: int, what: str = "the tokens of this call") -> None:
        super().__init__(
            f"{what} were refused: layer {layer} of the model made keys or values that are not "
            "finite numbers; the stream is as it was before them"
        )
        self.layer = layer
