"""Measurements of KV heads are right, are made once for each model, and decide which slots the
policy `weir` uses.
"""

from __future__ import annotations

import json
import lzma
from pathlib import Path

import pytest
import torch
from reference.models import make
from reference.seeing import CONFIGS, make_seeing

import weir
from weir.cache import fit_to_model, size_of
from weir.errors import WeirError
from weir.evals.grid import make_grid
from weir.models import AttentionInputs, find_head_facts, head_facts, measure_heads
from weir.policies.weir import LOOKS_UP, SPOILED
from weir.slab import FORMATS, AttentionParams, as_read

pytestmark = pytest.mark.thinned(3, least=2)


@pytest.fixture
def kept(monkeypatch, tmp_path):
    """The file in which measurements are cached, in an empty folder. The measurements that weir
    ships are hidden.
    """
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    monkeypatch.setattr(head_facts, "_SHIPPED", tmp_path / "none.json")
    return tmp_path / "weir" / head_facts.FILE


def test_what_is_shipped_is_what_is_measured():
    model, _ = weir.load("nano")
    found, shipped = measure_heads(model), find_head_facts(model)
    assert [len(layer) for layer in found.lookup] == [2] * 4
    assert found.lookup[2][0] > 0.9 and sum(map(sum, found.lookup)) < 1.5
    assert torch.tensor(found.lookup).allclose(torch.tensor(shipped.lookup), atol=1e-3)
    assert found.shift == pytest.approx(shipped.shift, abs=1e-2) and found.shift < SPOILED


def test_scores_are_those_of_the_models_own_attention():
    """Compare with the attention weights that transformers' eager attention returns."""
    model, _ = weir.load("nano")
    draw, size = torch.Generator().manual_seed(0), model.config.vocab_size
    ids = torch.randint(size // 16, size, (1, 128), generator=draw).repeat(1, 2)
    before = model.config._attn_implementation
    model.set_attn_implementation("eager")
    with torch.no_grad():
        shares = model(ids, output_attentions=True).attentions
    model.set_attn_implementation(before)
    wanted = [
        layer[0, :, 128:, 8:128].unflatten(0, (2, -1)).amax(dim=(1, 2)).mean(-1) for layer in shares
    ]
    assert torch.tensor(measure_heads(model).lookup).allclose(torch.stack(wanted), atol=1e-4)
    assert model.config._attn_implementation == before


@pytest.mark.parametrize("name", ["llama", "gemma2", "gpt-oss", "qwen3", "phi3", "bloom", "mpt"])
def test_models_without_training_look_nothing_up(name, kept):
    try:
        model = make(name, vocab_size=200)
    except Exception as error:  # a family that this transformers does not have
        pytest.skip(str(error))
    found = find_head_facts(model)
    if name in ("bloom", "mpt"):  # these have their own attention, which is not measured
        assert found is None and not kept.exists()
    else:
        held = 1 if name in ("gemma2", "gpt-oss") else 2
        assert len(found.lookup) == held and max(map(max, found.lookup)) < LOOKS_UP
    assert weir.Stream(model, "weir(60)").capacity == 60


def test_a_model_in_training_stays_as_it_is(fresh_llama):
    model = fresh_llama().train()
    model.lm_head.eval()
    measure_heads(model)
    assert model.training and model.model.training and not model.lm_head.training


def test_what_was_found_is_kept_by_the_weights(kept, monkeypatch):
    model, _ = weir.load("nano")
    head_facts._KNOWN.clear()
    found = find_head_facts(model)
    assert len(json.loads(kept.read_text())) == 1
    head_facts._KNOWN.clear()
    monkeypatch.setattr(head_facts, "measure_heads", None)
    assert find_head_facts(model) == found
    for broken in ('{"broken": ', kept.read_text().replace("lookup", "looked")):
        kept.write_text(broken)
        head_facts._KNOWN.clear()
        with pytest.raises(TypeError):  # measured again, by a function that is None here
            find_head_facts(model)
    head_facts._KNOWN.clear()


PAIRS = (1, 4, 9, 20)
"""Pairs of channels that are rotated together."""


def spoil(model, factor, layers=slice(None)):
    """Multiply some channels of the keys of some layers by a factor, and divide the same channels
    of the queries by it.
    """
    dim = model.config.head_dim
    for layer in model.model.layers[layers]:
        for projection, times in (
            (layer.self_attn.k_proj, factor),
            (layer.self_attn.q_proj, 1 / factor),
        ):
            rows = projection.weight.data.view(-1, dim, projection.in_features)
            rows[:, [*PAIRS, *(pair + dim // 2 for pair in PAIRS)]] *= times
    return model


def test_keys_that_4_bits_would_spoil_get_8(kept):
    """Queries undo the factor by which channels of the keys are multiplied. So the model computes
    the same, but rounding its keys to 4 bits loses more.
    """
    (model, tokenizer), (plain, _) = weir.load("nano"), weir.load("nano")
    spoil(model, 50)
    packaged = Path(weir.__file__).parent / "assets" / "war-and-peace.txt.xz"
    ids = tokenizer(lzma.decompress(packaged.read_bytes()).decode()[20_000:24_000])["input_ids"]
    losses = {
        policy: float(weir.Stream(model, policy).score(ids)[0, 1:].mean())
        for policy in ("weir(120)", "weir(120, slots=exact)", "weir(120, slots=int4)")
    }
    exact = float(weir.Stream(plain, "weir(120, slots=exact)").score(ids)[0, 1:].mean())
    assert losses["weir(120, slots=exact)"] == pytest.approx(exact, abs=1e-3)
    assert losses["weir(120)"] == pytest.approx(exact, abs=0.02)
    assert losses["weir(120, slots=int4)"] > exact + 0.1
    assert find_head_facts(plain).shift < SPOILED < find_head_facts(model).shift
    assert "slots=int8" in str(weir.Stream(model, "weir(120)").policy)
    assert ":int4" in fit_to_model(weir.policy("weir(120, slots=int4)"), model).stands_for


def test_a_memory_is_filled_with_the_slots_that_a_model_gets(kept, tmp_path):
    """This also holds if only the weights of the model show which slots it gets."""
    model, tokenizer = weir.load("nano")
    for folder in (spoil(model, 50), tokenizer):
        folder.save_pretrained(tmp_path / "m")
    (cell,) = make_grid([str(tmp_path / "m")], "ppl", "weir", memory=[500_000]).cells
    one_more = f"weir(budget={cell.budget + 1})"
    assert [size_of(model, one).stream <= 500_000 for one in (cell.policy, one_more)] == [1, 0]


@pytest.mark.parametrize("layer", [0, 2, 3])
def test_one_layer_that_4_bits_would_spoil_is_enough(layer, kept):
    """Such a layer is found even if 4 bits hardly change predictions for random tokens. On a book,
    they raise the perplexity by 1 to 7%.
    """
    model, _ = weir.load("nano", dtype="bfloat16")
    spoil(model, 30, slice(layer, layer + 1))
    assert "slots=int8" in str(weir.Stream(model, "weir(120)").policy)


@pytest.mark.thinned(1)
@pytest.mark.parametrize("given", [{}, {"softcap": 2.0}, {"s_aux": torch.tensor([4.0, 3.0])}])
def test_the_shift_is_the_divergence_of_the_head_that_is_moved_most(given):
    draw = torch.Generator().manual_seed(0)
    query, key, value = torch.randn(3, 1, 2, 40, 64, generator=draw).unbind()
    sinks = given["s_aux"][:, None] if "s_aux" in given else None
    params = AttentionParams(1 / 8, given.get("softcap"), sinks)
    earlier = torch.ones(1, 1, 40, 40, dtype=torch.bool).tril()
    seen = AttentionInputs(torch.nn.Module(), query, key, value, params, earlier)
    shift = head_facts._measure(seen)[1]
    rounded = as_read(key, FORMATS["int4"].keys)
    rounded[:, :, :4] = key[:, :, :4]

    def shares(head, place, keys):
        logits = (keys[0, head, : place + 1] @ query[0, head, place]).double() / 8
        if "softcap" in given:
            logits = (logits / given["softcap"]).tanh() * given["softcap"]
        if "s_aux" in given:
            logits = torch.cat([logits, given["s_aux"][head, None].double()])
        return logits.softmax(0)

    def divergence(head, place):
        exact = shares(head, place, key)
        return float((exact * (exact / shares(head, place, rounded)).log()).sum())

    wanted = max(sum(divergence(head, place) for place in range(40)) / 40 for head in range(2))
    assert shift == pytest.approx(wanted, abs=1e-4)


def test_heads_whose_size_is_no_power_of_two_get_4_bits(fresh_llama):
    one_head = {"num_attention_heads": 2, "num_key_value_heads": 1, "vocab_size": 200}
    odd, wide = (fresh_llama(head_dim=dim, **one_head) for dim in (6, 256))
    assert measure_heads(wide).shift < SPOILED
    assert measure_heads(odd).shift < SPOILED


def test_weir_gives_them_what_the_others_leave():
    model, _ = weir.load("nano")
    fitted = fit_to_model(weir.policy("weir(320)"), model)
    slots = [[pipe.slots for pipe in fitted.for_heads(n, 4, 2)] for n in range(4)]
    far = min(448, 8 * 320 - 7 * 256)
    assert slots == [[near := (8 * 320 - far) // 7] * 2, [near] * 2, [far, near], [near] * 2]
    assert str(weir.Stream(model, "weir(320)").policy) == str(fitted)
    assert fitted.brief == "weir(320)"
    pinned = fit_to_model(weir.policy("pinned(weir(320), 8, 4)"), model)
    assert pinned.brief == "pinned(weir(320), n=8, header=4)"
    # A head gets no more slots than the context window holds.
    assert pinned.for_heads(2, 4, 2)[0].slots == 448
    whole = weir.policy("pinned(weir(436), 8, 4)")  # with 64 new tokens, this fills the window
    assert fit_to_model(whole, model) is whole
    assert weir.Stream(model, str(fitted)).policy == fitted
    assert fit_to_model(weir.policy("weir(320, heads=alike)"), model).slots == 320


def test_no_head_gets_more_than_layers_see_that_all_slide(monkeypatch):
    """In Mistral-7B-v0.1, for example, layers see only 4,096 tokens, although the context window
    has 32,768.
    """
    model = make("mistral-sliding", sliding_window=500, max_position_embeddings=4096)
    found = head_facts.HeadFacts(((0.9, 0.0), (0.0, 0.0)), 0.0)
    monkeypatch.setattr("weir.cache.default_policy.find_head_facts", lambda model: found)
    pipes = weir.Stream(model, "weir(400)").policy.for_heads(0, 2, 2)
    assert [pipe.slots for pipe in pipes] == [436, (400 * 4 - 436) // 3]
    assert weir.Stream(model).policy.slots == 436
    # The window also holds the chunk, so the slots depend on the chunk that was asked for.
    for chunk in (8, 200):
        assert weir.Stream(model, chunk=chunk).policy.slots == 500 - chunk
        assert size_of(model, chunk=chunk).slots == (500 - chunk,) * len(model.model.layers)
        pinned = fit_to_model(weir.policy("pinned(weir, 20, 4)"), model, chunk)
        assert pinned.pipes[0].slots == 500 - chunk
    with pytest.raises(WeirError, match="sees only 500 tokens, fewer than the policy's 5 slots"):
        weir.Stream(model, chunk=600)


@pytest.mark.parametrize("name", [*CONFIGS, "gemma3-multimodal"])
def test_of_a_model_that_sees_the_text_decoder_is_measured(name, kept):
    """The text decoder's layers are inside a module that also contains the vision tower."""
    if name == "gemma3-multimodal":
        text = make(name).config.text_config.to_dict()
        model = make(name, text_config={**text, "vocab_size": 300, "sliding_window": 256})
    else:
        text = {**CONFIGS[name][1]["text_config"], "vocab_size": 300}
        model = make_seeing(name, text_config=text)
    ids = torch.arange(1, 61)
    stream, within = weir.Stream(model), weir.Stream(model, weir.Stream(model).policy)
    assert torch.equal(stream.feed(ids), within.feed(ids))  # the default policy
    assert stream.seen == 60
    found = find_head_facts(model)
    assert found is not None and json.loads(kept.read_text())
    with torch.no_grad():  # without queries, heads have another score
        for module in model.get_decoder().layers[0].modules():
            if hasattr(module, "q_proj"):
                module.q_proj.weight.zero_()
    assert measure_heads(model).lookup[0] != found.lookup[0]
