"""Images as embeddings: what a decoder reads once the model has put image features among its words.

Made by the model itself, whatever its family, so nothing here knows of pixels or vision towers; nor
of caches.
"""

from __future__ import annotations

from collections.abc import Mapping
from inspect import signature
from typing import Any

import torch
from torch import Tensor
from transformers import PreTrainedModel
from transformers.modeling_outputs import BaseModelOutputWithPast

from weir.errors import WeirError
from weir.models.forward_lock import forward_lock_of
from weir.models.images import images_of, pictures_in, unfitting
from weir.models.method_patch import MethodPatch
from weir.models.model_spec import input_device
from weir.models.mrope import check_sizes

COMPLAINTS = (
    ("do not match", "feature"),
    ("<image> tokens not divisible",),  # SmolVLM's, and transformers' until it counted features
)
"""What errors say of images and image tokens that do not fit: all the words of one of these."""


def embed(model: PreTrainedModel, given: Mapping[str, Any]) -> Tensor:
    """What the decoder of a model reads in place of ids, images in the place of their tokens.

    The model makes it itself: it is called as ever, but that its decoder answers at once.

    Args:
        model: with images that weir streams.
        given: its arguments by name: `input_ids` [batch, length] and what brings the images.

    Returns:
        [batch, length, width], on the model's device.

    Raises:
        WeirError: the model has no images or they are refused, images and image tokens do not go
            together, or these are no tensors as the model's processor makes them.
    """
    images = images_of(model.config)
    if images is None:
        raise WeirError(f"a {type(model).__name__} sees no images")
    if not isinstance(given.get("input_ids"), Tensor):
        raise WeirError("embed needs input_ids as a tensor [batch, length]")
    images.check(given)
    unread = set(pictures_in(given)) - signature(model.base_model.forward).parameters.keys()
    if unread:
        raise WeirError(f"a {type(model).__name__} takes no {', '.join(sorted(unread))}")
    if images.axes:
        check_sizes(given)
    device = input_device(model)
    there = {n: t.to(device) if isinstance(t, Tensor) else t for n, t in given.items()}
    if images.axes:  # left to itself the model works places out, and remembers them
        there["position_ids"] = torch.zeros_like(there["input_ids"])
    read: list[Tensor] = []

    def answer(own: Any, *args: Any, **kwargs: Any) -> BaseModelOutputWithPast:
        read.append(kwargs["inputs_embeds"])
        return BaseModelOutputWithPast(last_hidden_state=kwargs["inputs_embeds"])

    with forward_lock_of(model.config.get_text_config(decoder=True)), torch.no_grad():
        around = MethodPatch(model.get_decoder(), "forward", answer)
        try:
            model.base_model(**there, use_cache=False)
        except torch.OutOfMemoryError:
            raise
        except (AttributeError, IndexError, RuntimeError, TypeError, ValueError) as error:
            told = mismatch(error)
            if told is not None:
                raise told from None
            reason = (str(error).strip() or type(error).__name__).splitlines()[0]
            raise WeirError(
                f"the model cannot read these ids and images ({reason}); pass what its own "
                'processor makes with return_tensors="pt"'
            ) from error
        finally:
            around.remove()
    return read[0]


def mismatch(error: BaseException) -> WeirError | None:
    """A model's own complaint that images and image tokens do not fit, as one sentence.

    Args:
        error: what a call of the model raised.

    Returns:
        None where it is about something else.
    """
    said = str(error).strip()
    if not isinstance(error, ValueError) or not any(all(w in said for w in c) for c in COMPLAINTS):
        return None
    return unfitting(said.splitlines()[0])
