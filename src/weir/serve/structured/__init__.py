"""Structured output: JSON schemas and grammars, and the tokens that they allow next."""

from weir.serve.structured.grammar import ANY_SPACE, ONE_SPACE, GrammarCompiler, add_guidance
from weir.serve.structured.schema_limits import BadSchema, check_schema

__all__ = ["ANY_SPACE", "ONE_SPACE", "BadSchema", "GrammarCompiler", "add_guidance", "check_schema"]
