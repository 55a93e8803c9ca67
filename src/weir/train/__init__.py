"""Training the packaged model: corpus, exercises and the loop."""

from weir.train.exercises import DIGITS, Words, passage
from weir.train.loop import Recipe, run

__all__ = ["DIGITS", "Recipe", "Words", "passage", "run"]
