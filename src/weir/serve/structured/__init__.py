"""What an answer must look like: JSON schemas and grammars, and masks over the next token."""

from weir.serve.structured.grammar import (
    ONE_SPACE,
    SPACES,
    CompiledGrammar,
    GrammarConstraint,
    Grammars,
    guided,
)
from weir.serve.structured.schema_limits import BadSchema, check_schema

__all__ = [
    "ONE_SPACE",
    "SPACES",
    "BadSchema",
    "CompiledGrammar",
    "GrammarConstraint",
    "Grammars",
    "check_schema",
    "guided",
]
