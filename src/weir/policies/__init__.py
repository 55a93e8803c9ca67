"""What a policy is, how it is written, and every one that has a name."""

from weir.policies import library  # noqa: F401  (its policies get their names)
from weir.policies.grammar import Reader, called, policy, policy_of
from weir.policies.naming import named
from weir.policies.pipe import Pipe, Policy
from weir.policies.pyramid import Pyramid
from weir.policies.recompute import Recompute
from weir.policies.registry import NAMED, Called, Named

__all__ = [
    "NAMED",
    "Called",
    "Named",
    "Pipe",
    "Policy",
    "Pyramid",
    "Reader",
    "Recompute",
    "called",
    "named",
    "policy",
    "policy_of",
]
