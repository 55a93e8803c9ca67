"""What a policy is, how it is written, and every one that has a name."""

from weir.policies import wrappers  # noqa: F401  (its policies get their names, and the library's)
from weir.policies.grammar import NUMBER, Parser, called, nearest, policy, policy_of
from weir.policies.naming import named
from weir.policies.pinned import Pinned, with_pin
from weir.policies.pipe import Pipe, Policy
from weir.policies.plugins import VARIABLE, import_plugin, load_plugins
from weir.policies.pyramid import Pyramid
from weir.policies.quantised import EXACT, Quantised, with_slots
from weir.policies.recompute import Recompute
from weir.policies.registry import NAMED, Called, Named

__all__ = [
    "EXACT",
    "NAMED",
    "NUMBER",
    "VARIABLE",
    "Called",
    "Named",
    "Parser",
    "Pinned",
    "Pipe",
    "Policy",
    "Pyramid",
    "Quantised",
    "Recompute",
    "called",
    "import_plugin",
    "load_plugins",
    "named",
    "nearest",
    "policy",
    "policy_of",
    "with_pin",
    "with_slots",
]
