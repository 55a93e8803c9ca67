"""Residue: means of what nobody kept, and how far they are believed."""

from weir.pools.residue.residue import Residue

__all__ = ["Residue"]
