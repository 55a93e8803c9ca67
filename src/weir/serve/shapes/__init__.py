"""What an answer must look like: JSON schemas and grammars, and masks over the next token."""

from weir.serve.shapes.bounds import BadSchema, check_schema
from weir.serve.shapes.grammar import ONE_SPACE, SPACES, Grammars, Mask, Shape, guided

__all__ = [
    "ONE_SPACE",
    "SPACES",
    "BadSchema",
    "Grammars",
    "Mask",
    "Shape",
    "check_schema",
    "guided",
]
