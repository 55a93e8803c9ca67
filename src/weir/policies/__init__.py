"""What a policy is, how it is written, and every one that has a name."""

from weir.policies import wrappers  # noqa: F401  (its policies get their names, and the library's)
from weir.policies.file import at_home, check_regular, is_file, written_policy_file
from weir.policies.grammar import NUMBER, Parser, called, policy, policy_of, saved_policy
from weir.policies.layered import Layered
from weir.policies.naming import named
from weir.policies.pinned import Pinned, with_pin
from weir.policies.pipe import Origin, Pipe, Policy, chunk_of
from weir.policies.plugins import VARIABLE, import_plugin, load_plugins
from weir.policies.pyramid import Pyramid, shared
from weir.policies.quantized import EXACT, Quantized, with_slots
from weir.policies.recompute import Recompute
from weir.policies.registry import NAMED, Called, Named

__all__ = [
    "EXACT",
    "NAMED",
    "NUMBER",
    "VARIABLE",
    "Called",
    "Layered",
    "Named",
    "Origin",
    "Parser",
    "Pinned",
    "Pipe",
    "Policy",
    "Pyramid",
    "Quantized",
    "Recompute",
    "at_home",
    "called",
    "check_regular",
    "chunk_of",
    "import_plugin",
    "is_file",
    "load_plugins",
    "named",
    "policy",
    "policy_of",
    "saved_policy",
    "shared",
    "with_pin",
    "with_slots",
    "written_policy_file",
]
