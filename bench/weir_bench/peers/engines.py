"""The engines that are compared, each in each precision that it has, and how one is started."""

from __future__ import annotations

import os
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from weir.errors import WeirError, suggest
from weir.models import BITS
from weir_bench.peers.process import HOME, PeerProcess

POLICY = "weir(budget={window})"
"""weir's default policy."""
COMPILED = ", compiled"


@dataclass(frozen=True, eq=False)
class EngineSetup:
    """An engine with a model in some precision.

    Attributes:
        name: what tables call it.
        home: its environment below .peers; "" for weir's own.
        script: the file in `sides` that it runs.
        bits: of most of its weights; those of as many take turns.
        kind: the file of the model that it reads.
        given: what its side is told.
        main: the one of its engine that long prompts, many rows and starts are measured with.
        compiles: its steps are measured twice, as they are and compiled.
    """

    name: str
    home: str
    script: str
    bits: int
    kind: str
    given: dict[str, Any] = field(default_factory=dict)
    main: bool = False
    compiles: bool = False

    def start(self, threads: int, window: int, ids: Sequence[int] = (), **more: Any) -> PeerProcess:
        """Start its process."""
        environment = dict(more.pop("environment", {}))
        if self.given.get("weights") in BITS:  # torchao's
            paths = (str(HOME / "torchao"), os.environ.get("PYTHONPATH", ""))
            environment["PYTHONPATH"] = os.pathsep.join(filter(None, paths))
        wanted = {
            "file": str(model_file(self.kind)),
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


def model_file(kind: str) -> Path:
    """SmolLM2's file in a precision."""
    path = HOME / "models" / f"smollm2-{kind}.gguf"
    if not path.exists():
        raise WeirError(f"there is no {path.name} in {path.parent}; `make peers` makes it")
    return path


def _torch(name: str, bits: int, **given: Any) -> EngineSetup:
    ours = name.startswith("weir")
    if ours:
        given["policy"] = POLICY
    main = name in ("weir float32", "weir q8_0", "weir q4_1", "transformers float32")
    return EngineSetup(name, "", "torch_side.py", bits, "Q4_1", given, main, ours)


def _llamacpp(kind: str, bits: int, *, flash: bool) -> EngineSetup:
    name = f"llama.cpp {kind}" + ("" if flash else ", no flash attention")
    main = flash and kind != "F32"
    return EngineSetup(name, "llamacpp", "llamacpp_side.py", bits, kind, {"flash": flash}, main)


def _openvino(kind: str, bits: int, *, evict: bool) -> EngineSetup:
    name = f"OpenVINO {kind}" + (", eviction" if evict else "")
    given = {"evict": evict}
    return EngineSetup(name, "openvino", "openvino_side.py", bits, kind, given, not evict)


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
)


def chosen(names: Sequence[str]) -> list[EngineSetup]:
    """The engines whose names begin so; all without names."""
    for name in names:
        if not any(each.name.lower().startswith(name.lower()) for each in ENGINES):
            known = [each.name for each in ENGINES]
            like = suggest(name, known) or f"; there are {', '.join(known)}"
            raise WeirError(f"there is no peer {name!r}{like}")
    wanted = tuple(name.lower() for name in names) or ("",)
    return [each for each in ENGINES if each.name.lower().startswith(wanted)]
