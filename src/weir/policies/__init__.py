"""Policies: their classes, their text grammar, and the named policies."""

from weir.policies.file import (
    check_folder,
    check_regular,
    expand_home,
    format_policy_file,
    is_file,
)
from weir.policies.file_facts import FARTHEST, FileFacts, ListOf, Whole, read_facts
from weir.policies.grammar import NUMBER, Parser, parse_call, parse_policy, policy, saved_policy
from weir.policies.layered import Layered, OtherHeads
from weir.policies.library import KVzip, Recompute
from weir.policies.pipe import Pipe, Policy, resolve_chunk
from weir.policies.registry import (
    NAMED,
    VARIABLE,
    import_plugin,
    load_plugins,
    named,
)
from weir.policies.weir import fit_budgets, is_weir
from weir.policies.wrappers import (
    EXACT,
    SAME,
    Pinned,
    PolicyWrapper,
    Pyramid,
    Quantized,
    pinned_slots,
    share_slots,
    with_pin,
    with_slots,
)

__all__ = ["Layered", "Pipe", "Policy", "Pyramid", "Recompute", "named", "policy"]
