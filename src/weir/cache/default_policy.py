"""Default policy of a cache: the policy file in the model's folder, if there is one.

`weir calibrate --out MODEL/weir.toml` writes it.
"""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

from torch.utils._python_dispatch import is_traceable_wrapper_subclass
from transformers import PreTrainedModel

from weir.errors import WeirError
from weir.models import (
    ASSETS,
    compare_fingerprints,
    find_head_facts,
    fingerprint,
    has_few_bits,
    sidecar_path,
    sight_of,
)
from weir.policies import (
    Layered,
    Policy,
    PolicyWrapper,
    fit_budgets,
    is_weir,
    parse_policy,
    resolve_chunk,
    with_slots,
)

DEFAULT = "weir"
"""The policy if none is given and the model's folder has no policy file."""
FILE = "weir.toml"
"""Name of the policy file in a model's folder."""
BESIDE = (
    ". It is used by default, because it is next to the model. Repair or remove it, or give a "
    "policy."
)
"""End of the error about a policy file that cannot be used."""


def check_origin(policy: Policy, model: PreTrainedModel) -> None:
    """Refuse a policy that was measured on another model (WeirError).

    If weights are quantized, sharded, of another dtype or on `meta`, only type, shape and
    vocabulary are compared, because the numbers of the weights differ or are missing.
    """
    origin = policy.origin
    if origin is None:
        return
    mine, theirs = fingerprint(model), origin.model
    compared = {"kind", "layers", "width", "vocabulary"}
    numbers = not has_few_bits(model) and all(
        weight.device.type != "meta" and not is_traceable_wrapper_subclass(weight)
        for weight in model.parameters()
    )
    if numbers and mine["dtype"] == theirs["dtype"]:
        compared.add("weights")
    if what := compare_fingerprints(mine, theirs, compared):
        raise WeirError(
            f"{origin.file} was calibrated for another model ({what}). Run weir calibrate for this "
            f"one{origin.told}"
        )


def find_model_policy(model: PreTrainedModel | str, revision: str | None = None) -> Policy | None:
    """Read the policy file in the folder of a model; None if there is none. `model` can also be a
    name that `weir.load` accepts.

    A file that is not a policy file, or that was measured on another model, is refused (WeirError):
    if it were ignored, the user who put it there would not notice. If `model` is a name, there are
    no weights yet to compare, so a file of another model is refused later, by the cache. The file
    that comes with weir was not put there by a user. For nano with other weights, for example
    trained further, that file is ignored, and None is returned.
    """
    file = sidecar_path(model, FILE, revision)
    if file is None:
        return None
    try:
        found = parse_policy(file)
    except WeirError as error:
        raise WeirError(f"{str(error).removesuffix('.')}{BESIDE}") from None
    if isinstance(found, Layered) and found.origin is not None:
        # Later checks of the policy's model end their error with this too.
        found = replace(found, origin=replace(found.origin, told=BESIDE))
    if not isinstance(model, str):
        try:
            check_origin(found, model)
        except WeirError:
            if Path(file).is_relative_to(ASSETS):
                return None
            raise
    return found


def choose_policy(
    model: PreTrainedModel,
    policy: str | Policy | None,
    slots: str | None = None,
    chunk: int | None = None,
) -> Policy:
    """Return the given policy, or that in the model's folder, or else `DEFAULT`.

    If `slots`, the format of slots, is given without a policy, the policy is `DEFAULT`. `chunk`
    matters because the tokens of a chunk also take places in the model's window. Raises the errors
    of `parse_policy`, `with_slots` and `find_model_policy`.
    """
    if policy is None and slots is None and (found := find_model_policy(model)) is not None:
        return found
    named = with_slots(parse_policy(DEFAULT if policy is None else policy), slots)
    return fit_to_model(named, model, chunk)


def depends_on_weights(policy: Policy) -> bool:
    """Return whether a policy's slots or their format depend on the model's weights.

    They do for `weir`, also inside other policies, unless its `slots` and `heads=alike` are given.
    """
    if isinstance(policy, PolicyWrapper):
        return depends_on_weights(policy.policy)
    if not is_weir(policy):
        return False
    assert policy.called is not None
    given = policy.called.given
    return "slots" not in given or given.get("heads") != "alike"


def fit_to_model(
    policy: Policy, model: PreTrainedModel, chunk: int | None = None, beside: int = 0
) -> Policy:
    """Share out the budget of `weir` over a model's KV heads; other policies stay as they are.

    If the model has no weights, or its heads cannot be measured, all heads get the same budget. If
    4-bit slots would shift the attention of its heads too much, `weir` gets 8-bit slots, unless its
    `slots` are given. The model's window must also have room for the tokens of a chunk (`chunk`;
    None for the policy's usual one) and for the slots that a policy around `weir` holds in addition
    (`beside`).
    """
    if isinstance(policy, PolicyWrapper):
        inner = policy.policy
        more = (policy.pipes[0].slots or 0) - (inner.pipes[0].slots or 0)
        inner = fit_to_model(inner, model, chunk, beside + more)
        return policy if inner is policy.policy else policy.around(inner)
    if not is_weir(policy):
        return policy
    sight = sight_of(model)
    most = None if sight is None else sight - resolve_chunk(policy, chunk) - beside
    facts = find_head_facts(model)
    if facts is None:
        return fit_budgets(policy, (), 0.0, most)
    return fit_budgets(policy, facts.lookup, facts.shift, most)
