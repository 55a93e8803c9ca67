"""Models by name: `nano`, a folder, or an id on the Hugging Face Hub."""

from __future__ import annotations

from importlib import resources
from pathlib import Path

import torch
from transformers import (
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
    place = str(ASSETS / "nano") if name == "nano" else name
    if name == "nano" and dtype == "auto":
        dtype = torch.float32 if str(device) == "cpu" else torch.bfloat16
    looks_local = name.startswith((".", "/", "~")) or "\\" in name or name.count("/") > 1
    if name != "nano" and looks_local and not Path(name).expanduser().is_dir():
        raise WeirError(f"there is no model folder {name}")
    try:
        place = str(Path(place).expanduser()) if looks_local else place
        tokenizer = AutoTokenizer.from_pretrained(place)
        model = AutoModelForCausalLM.from_pretrained(place, dtype=dtype)
    except (OSError, ValueError, KeyError, RuntimeError) as error:
        first = str(error).strip().splitlines()[0]
        raise WeirError(
            f"cannot load the model {name!r}: it is neither nano, nor a folder with a model, nor "
            f"to be had from the Hub ({first})"
        ) from None
    return model.to(device).eval(), tokenizer
