"""Images as embeddings: computes the decoder's input after the model has inserted image
features.
"""

from __future__ import annotations

from collections.abc import Mapping
from inspect import signature
from typing import Any

import torch
from torch import Tensor
from transformers import PreTrainedModel
from transformers.modeling_outputs import BaseModelOutputWithPast

from weir.errors import WeirError, first_line
from weir.models.images import check_sizes, images_of, pictures_in, unfitting
from weir.models.interception import MethodPatch, forward_lock_of
from weir.models.model_spec import input_device

COMPLAINTS = (
    ("do not match", "feature"),
    ("<image> tokens not divisible",),  # SmolVLM, and older versions of transformers
)
"""Parts of messages of models' errors about images that do not match their tokens. Such an error
contains all texts of one of these tuples.
"""


def embed(model: PreTrainedModel, given: Mapping[str, Any]) -> Tensor:
    """Return the decoder's input embeddings, with images in place of their tokens.

    The model is called as usual, with a decoder that returns its input.

    Args:
        model: a model whose images weir streams.
        given: the model's arguments by name: `input_ids` [batch, length] and the images.

    Returns:
        [batch, length, width], on the model's device.

    Raises:
        WeirError: the model sees no images or weir refuses them, images and image tokens do not
            match, or the arguments are not tensors as the model's processor makes them.
    """
    images = images_of(model.config)
    if images is None:
        raise WeirError(f"a {type(model).__name__} sees no images")
    if not isinstance(given.get("input_ids"), Tensor):
        raise WeirError("embed needs input_ids as a tensor [batch, length]")
    images.check(given)
    unread = set(pictures_in(given)) - signature(model.base_model.forward).parameters.keys()
    if unread:
        raise WeirError(f"a {type(model).__name__} does not accept {', '.join(sorted(unread))}")
    if images.axes:
        check_sizes(given)
    device = input_device(model)
    there = {n: t.to(device) if isinstance(t, Tensor) else t for n, t in given.items()}
    if images.axes:  # without position_ids, the model would compute positions and keep them
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
            if (complaint := mismatch(error)) is not None:
                raise complaint from None
            raise WeirError(
                f"the model cannot read these ids and images ({first_line(error)}). Pass the "
                'output of its processor, made with return_tensors="pt".'
            ) from error
        finally:
            around.remove()
    return read[0]


def mismatch(error: BaseException) -> WeirError | None:
    """Convert a model's error about images that do not match their tokens to a WeirError; None for
    any other error.
    """
    text = str(error).strip()
    if not isinstance(error, ValueError) or not any(all(w in text for w in c) for c in COMPLAINTS):
        return None
    return unfitting(text.splitlines()[0])
