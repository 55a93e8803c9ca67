"""The page about GGUF files lists what the code reads."""

from __future__ import annotations

import re
from pathlib import Path

from weir.models.gguf.families import COMMON, DESCRIBING, FAMILIES, NEUTRAL, OTHER_FILES, ROPE, SAME
from weir.models.gguf.pretokenizers import PRE_TOKENIZERS
from weir.models.gguf.tokenizer import _DESCRIBING, _FOLLOWED, _KINDS, _NEUTRAL
from weir.models.model_spec import INTERFACE_FAMILIES, OWN_FAMILIES

PAGE = (Path(__file__).parents[2] / "docs" / "gguf.md").read_text("utf-8")


def section(title: str) -> str:
    """Text of a section."""
    return PAGE.split(f"\n## {title}\n")[1].split("\n## ")[0]


def test_families() -> None:
    rows = re.findall(r"^\| `([\w-]+)`[^|]* \| `(\w+)` \|", section("Families"), re.MULTILINE)
    assert {name for name, _ in rows} == FAMILIES.keys()
    kinds = {family.kind for family in FAMILIES.values()} | {"mixtral", "olmo3"}
    assert {kind for _, kind in rows} == kinds
    # weir can stream all these families, and the page names those that it cannot read from GGUF.
    served = INTERFACE_FAMILIES | OWN_FAMILIES
    assert kinds <= served
    others = section("Families").split("All other architectures")[1]
    assert set(re.findall(r"`(\w+)`", others)) == served - kinds


def test_keys_of_an_architecture() -> None:
    text = section("Keys")
    suffixes = COMMON | ROPE | DESCRIBING | set(SAME)
    for family in FAMILIES.values():
        suffixes |= family.followed()
    for suffix in suffixes - {"classifier.pooling_type"}:
        shown = suffix.removeprefix("rope.scaling.")
        assert f"`*.{suffix}`" in text or f"`{shown}`" in text, suffix
    for start in OTHER_FILES:
        assert f"`{start}*`" in text
    assert set(re.findall(r"`\*\.([\w.]+)`", text)) <= suffixes | set(NEUTRAL) | {
        "expert_weights_norm",
        "expert_gating_func",
    }


def test_keys_of_tokenizers() -> None:
    text = section("Tokenizers")
    for name in _FOLLOWED - {"model"} | _NEUTRAL.keys():
        assert f"`{name}`" in text, name
    for name in _DESCRIBING:
        assert f"`{name}`" in text or name.endswith("_token_id")
    for kind in _KINDS:
        assert re.search(rf"^\| `{kind}` \|.*\| yes \|$", text, re.MULTILINE)


def test_rules_that_cut_words() -> None:
    table = section("Tokenizers").split("| rule | names |")[1]
    names = re.findall(r"`([\w.-]+)`", table.split("\n\n")[0])
    assert sorted(names) == sorted(PRE_TOKENIZERS)
