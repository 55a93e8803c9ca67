"""The errors weir raises on purpose; each is one sentence a user can act on."""

from __future__ import annotations


class WeirError(Exception):
    """Something given to weir cannot be used; the message says what, and what to do instead."""
