"""`model.generate(custom_generate=weir.generate, ...)`, and the same loaded from a folder."""

from __future__ import annotations

import importlib.metadata
import re
import shutil
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers
from packaging.requirements import Requirement
from transformers import DynamicCache, GenerationConfig, PreTrainedModel, TextStreamer

import weir

pytestmark = pytest.mark.thinned(3, least=2)

ROOT = Path(__file__).parents[2]
HUB = ROOT / "hub"
POLICY = "sink(2) | recent(8) | reservoir(6)"


class Heard(TextStreamer):
    """A streamer that records the tokens it receives."""

    def __init__(self) -> None:
        self.tokens: list[int] = []
        self.ended = False

    def put(self, value: torch.Tensor) -> None:
        self.tokens += value.flatten().tolist()

    def end(self) -> None:
        self.ended = True


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> str:
    """A copy of the folder for the Hub; transformers puts its own copy of the code next to it."""
    monkeypatch.setattr(
        transformers.dynamic_module_utils, "HF_MODULES_CACHE", str(tmp_path / "modules")
    )
    return str(shutil.copytree(HUB, tmp_path / "hub"))


@pytest.fixture(params=["callable", "folder"])
def custom(request: pytest.FixtureRequest, folder: str) -> dict[str, Any]:
    """The arguments with which `generate` uses weir, in each of the two ways."""
    if request.param == "callable":
        return {"custom_generate": weir.generate}
    return {"custom_generate": folder, "trust_remote_code": True}


WAYS: dict[str, dict[str, Any]] = {
    "greedy": {"do_sample": False},
    "sampling": {"do_sample": True, "temperature": 1.3, "top_k": 20},
    "several answers": {"do_sample": True, "num_return_sequences": 2},
    "beams": {"num_beams": 3, "do_sample": False},
    "sampled beams": {"num_beams": 2, "do_sample": True},
}


@pytest.mark.parametrize("way", WAYS)
@pytest.mark.thinned(3)
def test_it_is_generate_with_a_cache_of_that_policy(
    llama: PreTrainedModel, ids: Any, way: str, custom: dict[str, Any]
) -> None:
    tokens = ids(2, 30)
    tokens[1, :7], mask = 0, torch.ones(2, 30, dtype=torch.long)
    mask[1, :7] = 0  # padded on the left
    asked = {"inputs": tokens, "attention_mask": mask, "max_new_tokens": 20, "pad_token_id": 0}
    made = {"chunk": 4, "seed": 5, "positions": "original"}
    torch.manual_seed(0)
    cache = weir.StreamingCache(llama, POLICY, **made)
    wanted = llama.generate(**asked, **WAYS[way], past_key_values=cache)
    torch.manual_seed(0)
    got = llama.generate(
        **asked, **WAYS[way], **custom, policy=POLICY, **made, return_dict_in_generate=True
    )
    assert torch.equal(got.sequences, wanted)
    used = got.past_key_values
    assert isinstance(used, weir.StreamingCache)
    assert str(used.policy) == str(cache.policy)
    assert used.made_with == cache.made_with
    assert torch.equal(used.slots(1).position, cache.slots(1).position)


def test_a_policy_that_is_left_out_is_the_default(
    llama: PreTrainedModel, ids: Any, custom: dict[str, Any]
) -> None:
    got = llama.generate(
        ids(1, 9), **custom, max_new_tokens=2, return_dict_in_generate=True, do_sample=False
    )
    assert got.past_key_values.policy == weir.StreamingCache(llama).policy
    assert got.past_key_values.made_with["chunk"] == 64


def test_it_goes_on_in_a_cache_of_weir(
    llama: PreTrainedModel, ids: Any, custom: dict[str, Any]
) -> None:
    cache = weir.StreamingCache(llama, POLICY, chunk=4)
    first = llama.generate(ids(1, 20), past_key_values=cache, max_new_tokens=5, do_sample=False)
    more = torch.cat([first, ids(1, 6, seed=1)], dim=1)
    llama.generate(more, **custom, past_key_values=cache, max_new_tokens=5, do_sample=False)
    assert cache.get_seq_length() == 20 + 5 + 6 + 5 - 1


def test_it_takes_a_streamer(llama: PreTrainedModel, ids: Any, custom: dict[str, Any]) -> None:
    # transformers does not pass a streamer to `custom_generate`, so weir has to find it. Without
    # tokens, the streamer's reader would wait forever.
    heard = Heard()
    got = llama.generate(ids(1, 9), **custom, streamer=heard, max_new_tokens=12, do_sample=False)
    assert heard.tokens == got[0].tolist() and heard.ended


def test_what_transformers_does_not_hand_on_is_refused(llama: PreTrainedModel, ids: Any) -> None:
    asked: dict[str, Any] = {"custom_generate": weir.generate, "max_new_tokens": 3}
    with pytest.raises(weir.WeirError, match="assisted and prompt-lookup"):
        llama.generate(ids(1, 9), **asked, assistant_model=llama)
    with pytest.raises(weir.WeirError, match="Leave out the streamer, or num_beams"):
        llama.generate(ids(1, 9), **asked, num_beams=2, streamer=Heard())


def test_the_folder_is_run_by_those_who_trust_it_only(
    llama: PreTrainedModel, ids: Any, folder: str
) -> None:
    with pytest.raises(ValueError, match="trust_remote_code"):
        llama.generate(ids(1, 9), custom_generate=folder, trust_remote_code=False)


@pytest.mark.parametrize(
    ("asked", "said"),
    [
        ({"policy": "recent(8) | sink(4)"}, r"sink .*first"),
        ({"policy": "recompute(8)"}, "Stream"),
        ({"chunk": 0}, "chunk"),
        ({"penalty_alpha": 0.6, "top_k": 4, "do_sample": False}, "ask for contrastive search"),
    ],
)
def test_what_cannot_be_is_refused(
    llama: PreTrainedModel, ids: Any, asked: dict[str, Any], said: str
) -> None:
    with pytest.raises(weir.WeirError, match=said):
        llama.generate(ids(1, 9), custom_generate=weir.generate, max_new_tokens=2, **asked)


@pytest.mark.parametrize(
    ("asked", "said"), [({"policy": POLICY}, "a policy was given"), ({"chunk": 4}, "chunk was")]
)
def test_a_cache_has_its_own_policy(
    llama: PreTrainedModel, ids: Any, asked: dict[str, Any], said: str
) -> None:
    cache = weir.StreamingCache(llama, POLICY, chunk=4)
    with pytest.raises(weir.WeirError, match=said):
        llama.generate(
            ids(1, 9),
            custom_generate=weir.generate,
            past_key_values=cache,
            max_new_tokens=2,
            **asked,
        )
    assert not cache.get_seq_length()


def test_tokens_in_a_foreign_cache_are_not_dropped(llama: PreTrainedModel, ids: Any) -> None:
    tokens, cache = ids(1, 9), DynamicCache()
    with torch.no_grad():
        llama(tokens[:, :5], past_key_values=cache)
    with pytest.raises(weir.WeirError, match="a DynamicCache that holds tokens"):
        llama.generate(
            tokens, custom_generate=weir.generate, past_key_values=cache, max_new_tokens=2
        )


def test_by_hand_it_makes_the_call_that_it_is_meant_for(llama: PreTrainedModel, ids: Any) -> None:
    tokens, asked = ids(1, 30), {"max_new_tokens": 4, "do_sample": False}
    wanted = llama.generate(tokens, custom_generate=weir.generate, policy=POLICY, chunk=4, **asked)
    config = GenerationConfig(**asked)
    for given in (asked, {"generation_config": config}):
        got = weir.generate(
            llama, tokens, attention_mask=torch.ones_like(tokens), policy=POLICY, chunk=4, **given
        )
        assert torch.equal(got, wanted)
    with pytest.raises(weir.WeirError, match="must be a model, got 'nano'"):
        weir.generate("nano", tokens)
    for wrong in ([1, 2, 3], tokens[0], tokens.float(), "hello"):
        with pytest.raises(weir.WeirError, match=r"needs tokens as a tensor \[batch, length\]"):
            weir.generate(llama, wrong)
    heard = Heard()
    got = weir.generate(llama, tokens, policy=POLICY, chunk=4, streamer=heard, **asked)
    assert torch.equal(got, wanted)
    assert heard.tokens == wanted[0].tolist() and heard.ended
    with pytest.raises(weir.WeirError, match="assisted and prompt-lookup"):
        weir.generate(llama, tokens, assistant_model=llama)


def test_by_hand_it_ends_at_stop_strings_with_a_tokenizer() -> None:
    model, tokenizer = weir.load("nano")
    tokens = tokenizer("Once there was a river", return_tensors="pt").input_ids
    asked: dict[str, Any] = {"max_new_tokens": 12, "do_sample": False, "policy": POLICY}
    whole = tokenizer.decode(weir.generate(model, tokens, **asked)[0, tokens.shape[1] :])
    word = whole.split()[3]
    for given in ({}, {"stopping_criteria": [lambda ids, scores, **more: False]}):
        ended = weir.generate(
            model, tokens, stop_strings=[word], tokenizer=tokenizer, **given, **asked
        )
        said = tokenizer.decode(ended[0, tokens.shape[1] :])
        assert said == whole[: len(said)] != whole and word in said
    with pytest.raises(ValueError, match=r"pass the model.s tokenizer"):
        weir.generate(model, tokens, stop_strings=[word], **asked)


def test_the_folder_asks_for_this_weir_and_tells_every_argument() -> None:
    (line,) = (HUB / "custom_generate" / "requirements.txt").read_text("utf-8").splitlines()
    asked = Requirement(line)
    assert asked.name == "weir-kv"
    assert importlib.metadata.version("weir-kv") in asked.specifier
    text = (HUB / "README.md").read_text("utf-8")
    code = (HUB / "custom_generate" / "generate.py").read_text("utf-8")
    signature = code.partition("def generate(")[2].partition("**asked")[0]
    arguments = set(re.findall(r"^    (\w+)", signature, re.MULTILINE)) - {"model"}
    assert set(re.findall(r"^\| `(\w+)` \|", text, re.MULTILINE)) == arguments
    assert re.search(r"^tags:\n  - custom_generate$", text, re.MULTILINE)
