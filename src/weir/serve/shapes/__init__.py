"""What an answer must look like: JSON schemas and grammars, and masks over the next token."""

from weir.serve.shapes.bounds import BadSchema, check_schema
from weir.serve.shapes.grammar import Grammars, Mask, Shape

__all__ = ["BadSchema", "Grammars", "Mask", "Shape", "check_schema"]
