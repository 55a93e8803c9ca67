"""Models by name: `nano`, a folder, or an id on the Hugging Face Hub."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from importlib import resources
from pathlib import Path
from typing import Any

import torch
from transformers import (
    AutoConfig,
    AutoModelForCausalLM,
    AutoTokenizer,
    PreTrainedModel,
    PreTrainedTokenizerBase,
)

from weir.errors import WeirError

ASSETS = Path(str(resources.files("weir"))) / "assets"


def load(
    name: str, *, dtype: str | torch.dtype = "auto", device: str | torch.device | None = None
) -> tuple[PreTrainedModel, PreTrainedTokenizerBase]:
    """A causal language model, ready to read, and its tokenizer.

    Args:
        name: `"nano"` for the packaged model, a folder, or a Hub id.
        dtype: of the weights; "auto" is what they were saved in, but float32 for `nano` on CPU,
            which is faster there.
        device: where it should live; by default a GPU if there is one.

    Raises:
        WeirError: there is no such model, or it cannot be read.
    """
    device = device or ("cuda" if torch.cuda.is_available() else "cpu")
    if name == "nano" and dtype == "auto":
        dtype = torch.float32 if str(device) == "cpu" else torch.bfloat16
    wanted = _dtype(dtype)
    place, where = _place(name)
    with _told_as(where):
        config = AutoConfig.from_pretrained(place, trust_remote_code=False)
    with _told_as(f"{name} has no tokenizer that transformers can read"):
        tokenizer = AutoTokenizer.from_pretrained(place, trust_remote_code=False)
    with _told_as(f"{name} cannot be read as a causal language model"):
        loaded: Any = AutoModelForCausalLM.from_pretrained(
            place,
            config=config,
            dtype=wanted,
            trust_remote_code=False,
            ignore_mismatched_sizes=True,
            output_loading_info=True,
        )
    model: PreTrainedModel
    model, found = loaded
    _check_weights(name, found)
    with _told_as(f"the model cannot be put on the device {str(device)!r}"):
        model.to(device)  # type: ignore[arg-type]
    return model.eval(), tokenizer


def skeleton(name: str, *, dtype: str | torch.dtype = "auto") -> PreTrainedModel:
    """A causal language model without weights, on the device `meta`: its shapes and no more.

    Args:
        name: `"nano"`, a folder, a `config.json`, or a Hub id; weights are not looked for.
        dtype: of the weights; "auto" is what the configuration says, float32 if it says nothing.

    Raises:
        WeirError: there is no configuration, or it is of no causal language model.
    """
    wanted = _dtype(dtype)
    path = Path(name).expanduser()
    if path.is_file():
        place, where = str(path), f"{name} is no configuration of a model"
    else:
        place, where = _place(name)
    if path.is_dir() and not (path / "config.json").is_file():
        raise WeirError(f"the folder {name} has no config.json, which says how large a model is")
    with _told_as(where):
        config = AutoConfig.from_pretrained(place, trust_remote_code=False)
    if wanted == "auto":
        wanted = getattr(config, "dtype", None) or torch.float32
    with _told_as(f"{name} is no causal language model"), torch.device("meta"):
        model: PreTrainedModel = AutoModelForCausalLM.from_config(
            config, dtype=wanted, trust_remote_code=False
        )
    return model.eval()


def is_local(name: str) -> bool:
    """Whether `load` finds the model on this machine, without the Hub."""
    return name == "nano" or Path(name).expanduser().is_dir()


def _place(name: str) -> tuple[str, str]:
    """Where transformers is to look, and what to say if there is nothing."""
    if name == "nano":
        return str(ASSETS / "nano"), "the packaged model cannot be read"
    if not name or (name.startswith((".", "/", "~")) and not is_local(name)):
        raise WeirError(f"there is no model folder {name!r}")
    if is_local(name):
        return str(Path(name).expanduser()), f"the folder {name} holds no model"
    return name, f"there is no model {name!r}: not a folder here, and not to be had from the Hub"


def _check_weights(name: str, found: dict[str, Any]) -> None:
    """Refuse what transformers would fill up with random numbers."""
    if found["missing_keys"]:
        missing = sorted(found["missing_keys"])
        raise WeirError(f"{name} lacks {len(missing)} of its weights, {missing[0]} for one")
    if found["mismatched_keys"]:
        wrong = sorted(str(key[0]) for key in found["mismatched_keys"])
        raise WeirError(
            f"{name} has weights of other shapes than its config.json says: {len(wrong)} of them, "
            f"{wrong[0]} for one"
        )


def _dtype(dtype: str | torch.dtype) -> Any:
    found = dtype if dtype == "auto" else getattr(torch, str(dtype).removeprefix("torch."), None)
    if found != "auto" and not (isinstance(found, torch.dtype) and found.is_floating_point):
        raise WeirError(f"dtype must be 'auto', 'float32', 'bfloat16' or 'float16', not {dtype!r}")
    return found


@contextmanager
def _told_as(beginning: str) -> Iterator[None]:
    """Whatever the libraries raise inside, as one sentence."""
    try:
        yield
    except Exception as error:
        reason = (str(error).strip().splitlines() or [type(error).__name__])[0].rstrip()
        # After a colon follows a list that is no use on its own.
        more = "" if reason.endswith(":") else f" ({reason.rstrip('.')})"
        raise WeirError(beginning + more) from None
