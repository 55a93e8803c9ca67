"""How LongBench's data sets are asked and scored, read from lm-evaluation-harness.

The harness keeps a YAML file for each data set, with LongBench's prompt, the length of an answer
and the name of the metric. Those are used as they are, without the harness's own loading of data,
which would go to the Hub.
"""

from __future__ import annotations

import warnings
from collections.abc import Callable
from dataclasses import dataclass
from importlib import import_module, resources
from pathlib import Path
from typing import Any

import jinja2
import yaml

from weir.errors import WeirError, suggest
from weir.evals.records import import_optional


@dataclass(frozen=True)
class Recipe:
    """How a data set is asked and scored.

    Attributes:
        prompt: a template over the fields of a record.
        max_new_tokens: of an answer; at most so many.
        stops: texts that end it.
        score: from a record's fields and the answers, a list of one, to figures; "score" counts.
    """

    prompt: jinja2.Template
    max_new_tokens: int
    stops: tuple[str, ...]
    score: Callable[[dict[str, Any], list[str]], dict[str, float]]


def recipe_of(name: str) -> Recipe:
    """How a data set is asked and scored.

    Raises:
        WeirError: there is no such data set, or a package is missing.
    """
    import_optional("lm_eval", "longbench")
    folder = Path(str(resources.files("lm_eval"))) / "tasks" / "longbench"
    known = sorted(path.stem for path in folder.glob("[!_]*.yaml") if path.stem[-2:] != "_e")
    if name not in known:
        raise WeirError(f"LongBench has no data set {name!r}{suggest(name, known)}")
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # that some of them could be faster with yet another one
        for package in ("jieba", "fuzzywuzzy.fuzz", "rouge"):
            import_optional(package, "longbench")
    facts = yaml.load((folder / f"{name}.yaml").read_text(encoding="utf-8"), _Loader)
    options = facts["generation_kwargs"]
    return Recipe(
        jinja2.Template(facts["doc_to_text"], keep_trailing_newline=True),
        int(options["max_gen_toks"]),
        tuple(options["until"]),
        facts["process_results"],
    )


class _Loader(yaml.SafeLoader):
    """Reads the harness's YAML, where `!function metrics.name` is a function beside the file."""


def _function(loader: yaml.SafeLoader, node: yaml.ScalarNode) -> Any:
    module, _, name = str(node.value).rpartition(".")
    return getattr(import_module(f"lm_eval.tasks.longbench.{module}"), name)


_Loader.add_constructor("!function", _function)
