"""Whether a model is the one that a policy was measured on."""

from __future__ import annotations

from torch.utils._python_dispatch import is_traceable_wrapper_subclass
from transformers import PreTrainedModel

from weir.errors import WeirError, quote
from weir.models import fingerprint
from weir.policies import Policy


def check_origin(policy: Policy, model: PreTrainedModel) -> None:
    """Refuse a policy that was measured on another model.

    In another dtype, of fewer bits and shared out the numbers of the weights are others, and on the
    device `meta` there are none: then shape and vocabulary have to do.

    Raises:
        WeirError: naming what differs.
    """
    origin = policy.origin
    if origin is None:
        return
    mine, theirs = fingerprint(model), origin.model
    compared = {"kind", "layers", "width", "vocabulary"}
    numbers = all(
        it.device.type != "meta" and not is_traceable_wrapper_subclass(it)
        for it in model.parameters()
    )
    if numbers and mine["dtype"] == theirs["dtype"]:
        compared.add("weights")
    differ = [name for name in mine if name in compared and mine[name] != theirs[name]]
    if differ:
        what = ", ".join(f"{name} {_bare(theirs[name])}, here {mine[name]}" for name in differ)
        raise WeirError(
            f"{origin.file} was calibrated for another model ({what}); run weir calibrate for this "
            f"one{origin.told}"
        )


def _bare(value: object) -> str:
    return quote(value).strip("'")
