"""The policy of a cache where nobody names one: what was measured on the model, if it lies with it.

`weir calibrate --out MODEL/weir.toml` puts it there. Knows nothing about how policies are measured.
"""

from __future__ import annotations

from dataclasses import replace

from transformers import PreTrainedModel

from weir.cache.checks import check_origin
from weir.errors import WeirError
from weir.models import sidecar_path
from weir.policies import Layered, Policy, parse_policy, with_slots

DEFAULT = "weir(budget=256)"
"""The policy where nothing is said and nothing was measured."""
FILE = "weir.toml"
"""The policy file that is taken where it lies in a model's folder."""
BESIDE = (
    "; it lies with the model, so it is what is taken where no policy is given: mend or remove it, "
    "or give a policy"
)
"""What is said of one that cannot be taken."""


def find_model_policy(model: PreTrainedModel | str, revision: str | None = None) -> Policy | None:
    """The policy that lies with a model; None where there is none.

    Args:
        model: the model, or its name as `weir.load` takes it.
        revision: of a name on the Hub.

    Raises:
        WeirError: what lies there is no policy file, or of another model. It is not passed over:
            who put it there would not notice.
    """
    file = sidecar_path(model, FILE, revision)
    if file is None:
        return None
    try:
        found = parse_policy(file)
    except WeirError as error:
        raise WeirError(f"{error}{BESIDE}") from None
    if isinstance(found, Layered) and found.origin is not None:
        # Whoever finds later that it is of another model, with the weights or without, says so too.
        found = replace(found, origin=replace(found.origin, told=BESIDE))
    if not isinstance(model, str):
        check_origin(found, model)
    return found


def choose_policy(
    model: PreTrainedModel, policy: str | Policy | None, slots: str | None = None
) -> Policy:
    """The policy that is asked for, or the one to take where none is.

    Args:
        model: the model it is for.
        policy: what was asked for; None for what lies with the model, or else `DEFAULT`.
        slots: how its slots are held; said without a policy, they are those of `DEFAULT`, and
            what lies with the model is not looked at.

    Raises:
        WeirError: as for `parse_policy`, `with_slots` and `find_model_policy`.
    """
    if policy is None and slots is None and (found := find_model_policy(model)) is not None:
        return found
    return with_slots(parse_policy(DEFAULT if policy is None else policy), slots)
