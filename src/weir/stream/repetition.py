"""Tokens that came before are made less likely: the repetition penalty of CTRL.

Keskar et al. 2019, "CTRL: A Conditional Transformer Language Model for Controllable Generation",
section 4.1, as transformers has it for logits of either sign. Knows nothing about models.
"""

from __future__ import annotations

import math
from collections.abc import Iterable
from numbers import Real

import torch
from torch import Tensor

from weir.errors import WeirError, shown


def check_penalty(penalty: object) -> None:
    """Refuse what nothing can be divided by.

    Raises:
        WeirError: it is no number over 0.
    """
    is_number = isinstance(penalty, Real) and not isinstance(penalty, bool)
    if not is_number or not 0 < float(penalty) < math.inf:  # type: ignore[arg-type]
        raise WeirError(f"repetition_penalty must be a number over 0, not {shown(penalty)}")


def penalised(logits: Tensor, before: Iterable[int], penalty: float) -> Tensor:
    """Logits with those of some tokens divided where they are positive, and multiplied where not.

    Args:
        logits: of the tokens that may come next [..., vocabulary]; they stay as they are.
        before: the tokens that came before.
        penalty: over 1 makes them less likely, 1 leaves them.
    """
    index = torch.tensor(sorted(set(before)), dtype=torch.int64, device=logits.device)
    some = logits[..., index]
    changed = logits.clone()
    changed[..., index] = torch.where(some > 0, some / penalty, some * penalty)
    return changed
