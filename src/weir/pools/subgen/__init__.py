"""SubGen: clusters of keys, and samples that stand for the rest."""

from weir.pools.subgen.subgen import SubGen

__all__ = ["SubGen"]
