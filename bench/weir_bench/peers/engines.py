"""The engines that are compared, in each of their precisions, and how they are started."""

from __future__ import annotations

import os
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from weir.errors import WeirError, suggest
from weir.native import BITS
from weir_bench.peers.process import HOME, PeerProcess

POLICY = "weir(budget={window})"
"""weir's default policy."""
COMPILED = ", compiled"
MODELS = {"smollm2": "Q4_1", "tinyllama": "Q4_0"}
"""The models: SmolLM2, and a random model of 1.1 billion parameters (`sides/random_model.py`).

The value is the precision of the file from which the tokenizer is read.
"""


@dataclass(frozen=True, eq=False)
class EngineSetup:
    """An engine with a model in some precision.

    Attributes:
        name: its name in tables.
        home: its environment's folder in `.peers`, or "" for weir's own environment.
        script: the file in `sides` that its process runs.
        bits: bits of most of its weights. Setups with the same number are measured in turns.
        kind: the precision of the model's file.
        given: settings that are passed to its script.
        main: whether to measure it also with long prompts, many rows and starts.
        compiles: whether to measure its steps twice, without and with compiled steps.
        model: its model, one of `MODELS`.
    """

    name: str
    home: str
    script: str
    bits: int
    kind: str
    given: dict[str, Any] = field(default_factory=dict)
    main: bool = False
    compiles: bool = False
    model: str = "smollm2"

    def start(self, threads: int, window: int, ids: Sequence[int] = (), **more: Any) -> PeerProcess:
        """Start its process.

        Args:
            threads: threads of the process.
            window: slots of weir's policy.
            ids: token ids of the text that it reads.
            more: further settings for its script; "environment" has environment variables.
        """
        environment = dict(more.pop("environment", {}))
        if self.given.get("weights") in BITS:  # these formats need torchao
            paths = (str(HOME / "torchao"), os.environ.get("PYTHONPATH", ""))
            environment["PYTHONPATH"] = os.pathsep.join(filter(None, paths))
        wanted = {
            "file": str(model_file(self.kind, self.model)),
            "threads": threads,
            "ids": list(ids),
            "context": len(ids) + 64,
            "kept": str(HOME / "kept"),
            **self.given,
            **more,
        }
        if "policy" in wanted:
            wanted["policy"] = wanted["policy"].format(window=window)
        (HOME / "kept").mkdir(parents=True, exist_ok=True)
        return PeerProcess(self.home, self.script, wanted, environment)


def model_file(kind: str, model: str = "smollm2") -> Path:
    """Return the path of a model's file in a precision."""
    path = HOME / "models" / f"{model}-{kind}.gguf"
    if not path.exists():
        raise WeirError(
            f"{path.name} does not exist in {path.parent}. Run `make peers` to create it."
        )
    return path


def _torch(name: str, bits: int, **given: Any) -> EngineSetup:
    ours = name.startswith("weir")
    if ours:
        given["policy"] = POLICY
    main = name in ("weir float32", "weir q8_0", "weir q4_1", "transformers float32")
    return EngineSetup(name, "", "torch_side.py", bits, "Q4_1", given, main, ours)


def _llamacpp(kind: str, bits: int, *, flash: bool = True, model: str = "smollm2") -> EngineSetup:
    name = f"llama.cpp {kind}" + ("" if model == "smollm2" else f" {model}")
    name += "" if flash else ", no flash attention"
    main, given = flash and kind != "F32", {"flash": flash}
    home, script = "llamacpp", "llamacpp_side.py"
    return EngineSetup(name, home, script, bits, kind, given, main, False, model)


def _openvino(kind: str, bits: int, *, evict: bool) -> EngineSetup:
    name = f"OpenVINO {kind}" + (", eviction" if evict else "")
    given = {"evict": evict}
    return EngineSetup(name, "openvino", "openvino_side.py", bits, kind, given, not evict)


def _native(kind: str, bits: int, model: str = "smollm2") -> EngineSetup:
    name = f"llama.cpp native {kind}" + ("" if model == "smollm2" else f" {model}")
    given = {"flash": True}
    home, script = "llamacpp_native", "llamacpp_native_side.py"
    return EngineSetup(name, home, script, bits, kind, given, True, False, model)


def _large(kind: str, bits: int) -> EngineSetup:
    """Return weir with a file of the model of 1.1 billion parameters, with default settings."""
    given = {"dtype": "auto", "policy": POLICY}
    name = f"weir {kind} tinyllama"
    return EngineSetup(name, "", "torch_side.py", bits, kind, given, True, True, "tinyllama")


ENGINES = (
    _torch("weir float32", 32, dtype="float32"),
    _torch("transformers float32", 32, dtype="float32"),
    *(_llamacpp("F32", 32, flash=flash) for flash in (True, False)),
    _torch("weir bfloat16", 16, dtype="bfloat16"),
    _torch("transformers bfloat16", 16, dtype="bfloat16"),
    _torch("weir q8_0", 8, dtype="float32", weights="q8_0"),
    _torch("weir int8", 8, dtype="float32", weights="int8"),
    *(_llamacpp("Q8_0", 8, flash=flash) for flash in (True, False)),
    *(_openvino("Q8_0", 8, evict=evict) for evict in (False, True)),
    _torch("weir q4_1", 4, dtype="float32", weights="gguf"),
    _torch("weir int4", 4, dtype="bfloat16", weights="int4"),
    *(_llamacpp("Q4_1", 4, flash=flash) for flash in (True, False)),
    *(_openvino("Q4_1", 4, evict=evict) for evict in (False, True)),
    _native("Q8_0", 8),
    _native("Q4_1", 4),
    _large("Q8_0", 8),
    _llamacpp("Q8_0", 8, model="tinyllama"),
    _native("Q8_0", 8, "tinyllama"),
    _large("Q4_0", 4),
    _llamacpp("Q4_0", 4, model="tinyllama"),
    _native("Q4_0", 4, "tinyllama"),
    _large("Q4_K_M", 5),
    _llamacpp("Q4_K_M", 5, model="tinyllama"),
    _native("Q4_K_M", 5, "tinyllama"),
)


def chosen(names: Sequence[str], model: str = "smollm2") -> list[EngineSetup]:
    """Return a model's engines whose names begin with one of `names`, or all if it is empty."""
    if model not in MODELS:
        raise WeirError(f"unknown model {model!r}. Use one of {', '.join(MODELS)}.")
    engines = [each for each in ENGINES if each.model == model]
    for name in names:
        if not any(each.name.lower().startswith(name.lower()) for each in engines):
            known = [each.name for each in engines]
            like = suggest(name, known) or f". Use one of {', '.join(known)}"
            raise WeirError(f"unknown peer {name!r}{like}")
    wanted = tuple(name.lower() for name in names) or ("",)
    return [each for each in engines if each.name.lower().startswith(wanted)]
