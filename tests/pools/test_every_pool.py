"""Every pool must cope with strange keys and values, odd sizes, and too few slots.

Most tests feed a single layer without a model, so that its head dimensions can be ones that no
model here has. A test checks that `PIPES` below contains every pool of `POOLS`.
"""

from __future__ import annotations

import inspect

import pytest
import torch
from roundings import close, largest, off, softmax_off, within
from torch import Tensor

import weir
from weir.cache.layer.layer import Layer
from weir.cache.layer.layer_state import LayerSpec
from weir.errors import PolicyError
from weir.loading.loader import ASSETS
from weir.policies.grammar import policy
from weir.policies.pipe import Pipe
from weir.policies.registry import NAMED
from weir.pools import POOLS
from weir.pools.counter_rng import CounterRNG
from weir.slab.attention import AttentionParams

pytestmark = pytest.mark.thinned(4, least=2)

PIPES = {
    "sink": ["sink(3) | recent(6)"],
    "beginning": ["beginning(3) | sink(2) | recent(5)"],
    "header": ["recent(5) | header(3)", "recent(4) | header(3) | heavy(5)"],
    "kept": ["beginning(3) | recent(5) | kept(3)", "beginning(3) | recent(4) | kept(3) | heavy(5)"],
    "recent": ["recent(8)", "recent(3) | recent(5)", "recent(none)"],
    "reservoir": ["recent(4) | reservoir(6)", "recent(4) | reservoir(6, weighted=true)"],
    "uniform": [
        "recent(4) | uniform(6)",
        "recent(4) | uniform(6, weighted=true)",
        "recent(4) | uniform(rate=0.3, weighted=true)",
    ],
    "heavy": ["recent(4) | heavy(6)"],
    "hive": ["sink(2) | recent(4) | hive(9, stride=3)", "recent(4) | hive(9, local_max=false)"],
    "kcenter": [
        "recent(4) | kcenter(6)",
        "kcenter(k=6)",
        "recent(4) | kcenter(6, spans=1, use=0.5, fresh=0.5)",
    ],
    "subgen": [
        "recent(4) | subgen(8, clusters=4, per_cluster=2)",
        "recent(4) | subgen(8, clusters=none, per_cluster=2, delta=1.5)",
        "recent(4) | subgen(8, clusters=4, per_cluster=2, exact=false)",
    ],
    "balance": [
        "sink(2) | recent(2) | balance(8)",
        "recent(2) | balance(8, halves=authors, sets=flat)",
        "recent(2) | balance(8, halves=paper, gamma=none)",
        "recent(2) | balance(16, sets=separate)",
    ],
    "outliers": ["recent(4) | outliers(6, over=4, dilate=1)"],
    "tail": ["recent(4) | tail(6, watch=2)", "recent(4) | tail(6, attention=false, floor=0.0)"],
    "defend": [
        "recent(4) | defend(6, window=4, wide=1)",
        "defend(9, window=4, kernel=3, value=false, half_life=none)",
    ],
    "residue": [
        "recent(4) | residue(6, window=4)",
        "residue(9, half_life=none, spread=false, gate=false)",
    ],
    "match": ["recent(4) | match(heavy(6), window=4)", "match(kcenter(9), half_life=none)"],
    "gated": ["recent(4) | gated(6)"],
    "snap": ["snap(12, window=4, kernel=3)", "snap(12, window=4, average=true)"],
    "knorm": ["recent(4) | knorm(6)"],
    "keydiff": ["sink(2) | recent(4) | keydiff(6)"],
    "curdkv": ["recent(4) | curdkv(6)", "recent(4) | curdkv(6, window=none)"],
    "lagkv": ["recent(8) | lagkv(6, lag=3)", "lagkv(9, lag=2)"],
    "tova": ["tova(8)", "sink(2) | recent(4) | heavy(3) | tova(6, per_head=true)"],
    "scissorhands": ["recent(4) | scissorhands(6, window=9)"],
    "keyformer": ["recent(4) | keyformer(6, over=40)"],
    "rkv": ["rkv(9, window=3, kernel=3)", "recent(4) | rkv(6)"],
    "critical": ["recent(4) | critical(6, window=5)"],
    "caote": ["recent(4) | caote(6, window=5)"],
    "vase": ["recent(4) | vase(6, wide=2)", "recent(4) | vase(6, window=3, kernel=1)"],
    "qfilters": ["recent(4) | qfilters(6)"],
    "expected": [
        "recent(4) | expected(6)",
        "recent(4) | expected(6, covariance=false, floor=0.02)",
    ],
    "tri": ["recent(4) | tri(6)"],
    "chunks": [
        "recent(4) | chunks(knorm(9), size=3)",
        "recent(4) | chunks(keyformer(9), size=4)",
        "recent(4) | heavy(3) | chunks(snap(9, window=2), size=2)",
    ],
    "ladder": ["sink(2) | ladder(8)", "recent(4) | ladder(9, keep=2, of=5)"],
}
EVERY = [
    pytest.param(text, marks=[] if text == texts[0] else pytest.mark.slow)
    for texts in PIPES.values()
    for text in texts
]
"""All pipes. Those after the first pipe of each pool are marked as slow."""

LENGTH, CHUNK = 90, 4


def random(*shape: int) -> Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(sum(shape)))


def fed(
    text: str,
    queries: Tensor,
    keys: Tensor,
    values: Tensor,
    seed: int | tuple[int, ...] = 0,
) -> tuple[Tensor, Layer]:
    """Answers [batch, heads, LENGTH, value_dim] in forwards of several lengths, and the layer.

    Asserts after each forward that the slab is as large as before, and that its slots are valid.
    """
    pipe = policy(text).for_layer(0, 1)
    gate = lambda keys, values: keys.float().sum(dim=3).tanh()  # noqa: E731
    layer = Layer(LayerSpec(pipe, chunk=CHUNK, draws=CounterRNG(seed), gate=gate))
    seen, answers, sizes = 0, [], set()
    for width in (1, 1, 13, 2, 40, 33):
        span = slice(seen, seen + width)
        q, k, v = (t[:, :, span] for t in (queries, keys, values))
        form = AttentionParams(scale=0.4)
        answers.append(layer.feed(q, k, v, form, seen=seen, waiting=seen % CHUNK))
        seen += width
        assert layer.state.slab is not None
        sizes.add(layer.state.slab.nbytes)
        held = layer.state.slab.run(0, sum(layer.state.lengths[0]))
        assert pipe.slots is None or len(held) <= pipe.slots
        assert (held.position < seen).all()
        assert not held.a.isnan().any() and not held.b.isnan().any()
        assert len(held) == 0 or held.held.any(dim=2).all()
    assert seen == LENGTH
    assert pipe.slots is None or len(sizes) == 1
    out = torch.cat(answers, dim=2)
    assert out.isfinite().all()
    return out, layer


def exactly(queries: Tensor, keys: Tensor, values: Tensor) -> Tensor:
    """Causal softmax attention over everything, in float64."""
    group = queries.shape[1] // keys.shape[1]
    k, v = (t.double().repeat_interleave(group, dim=1) for t in (keys, values))
    logits = queries.double() @ k.transpose(2, 3) * 0.4
    hidden = torch.ones(keys.shape[2], keys.shape[2], dtype=torch.bool).triu(1)
    return (logits.masked_fill(hidden, -torch.inf).softmax(dim=-1) @ v).float()


def test_every_pool_is_tested_here():
    assert set(PIPES) == set(POOLS) - {"every", "loud"}  # other tests register these for a while
    for name, texts in PIPES.items():
        assert all(name in {pool.name for pool in policy(text).pools} for text in texts)


@pytest.mark.parametrize(
    ("heads", "dims"),
    [pytest.param((1, 1), (7, 5), marks=pytest.mark.slow), ((4, 2), (1, 3))],
)
@pytest.mark.parametrize("text", EVERY)
def test_head_dimensions_may_be_odd_and_differ_and_there_may_be_one_head(text, heads, dims):
    queries, keys = random(2, heads[0], LENGTH, dims[0]), random(2, heads[1], LENGTH, dims[0])
    values = random(2, heads[1], LENGTH, dims[1])
    out, layer = fed(text, queries, keys, values)
    assert out.shape == (2, heads[0], LENGTH, dims[1])
    if "exact=false" not in text:  # such a pool draws tokens at random from the first one on
        first = min(sum(pool.slots() or 99 for pool in policy(text).pools), 6)
        logit = 0.4 * largest(queries.norm(dim=-1)) * largest(keys.norm(dim=-1))
        bound = (softmax_off(dims[0], logit) + off(first)) * largest(values)
        within(out[:, :, :first], exactly(queries, keys, values)[:, :, :first], bound)
    # Each slot holds a token of the stream with the value that it had there.
    if policy(text).pools[-1].synthetic:
        return
    held = layer.state.slab.run(0, sum(layer.state.lengths[0]))
    for row in range(2):
        for head in range(heads[1]):
            place = held.position[row, head]
            real = place >= 0
            assert torch.equal(held.values[row, head][real], values[row, head][place[real]])


@pytest.mark.parametrize("text", EVERY)
@pytest.mark.thinned(8)
def test_strange_keys_and_values_are_borne(text):
    queries, keys, values = (random(1, 2, LENGTH, n) for n in (7, 7, 5))
    alike = (random(1, 2, 1, n).expand(-1, -1, LENGTH, -1) for n in (7, 5))
    same_key, same_value = alike
    # If a slot has the same weight in numerator and denominator, answers lie between the smallest
    # and the largest value.
    among = not policy(text).two_weights
    out, _ = fed(text, queries, same_key, values)
    if among:
        bound = off(LENGTH) * largest(values)
        assert (out <= values.amax(dim=2, keepdim=True) + bound).all()
        assert (out >= values.amin(dim=2, keepdim=True) - bound).all()
        out, _ = fed(text, queries, same_key, same_value)
        close(out, same_value.expand_as(out), LENGTH)
    for zero in (keys, torch.zeros_like(keys)):
        assert fed(text, queries, zero, torch.zeros_like(values))[0].eq(0).all()
    out, _ = fed(text, 10 * queries, 1e4 * keys, values)
    if among:
        assert largest(out) <= largest(values) * (1 + off(LENGTH))


@pytest.mark.parametrize("text", [texts[0] for texts in PIPES.values()])
@pytest.mark.parametrize("dtype", [torch.float64, torch.bfloat16])
def test_every_dtype_of_a_model_is_borne(text, dtype):
    parts = [random(1, 2, LENGTH, n).to(dtype) for n in (7, 7, 5)]
    out, layer = fed(text, *parts)
    assert out.dtype == dtype
    assert layer.state.slab.keys.dtype == dtype


CHANCE = [
    pytest.param(
        text,
        marks=[]
        if text == texts[0] and any(pool.is_stochastic for pool in policy(text).pools)
        else pytest.mark.slow,
    )
    for texts in PIPES.values()
    for text in texts
]


@pytest.mark.parametrize("text", CHANCE)
def test_a_row_with_a_seed_of_its_own_holds_what_it_would_hold_alone(text):
    parts = [random(2, 2, LENGTH, n) for n in (7, 7, 5)]
    seeds = (4, 9)
    _, together = fed(text, *parts, seed=seeds)
    held = together.state.slab.run(0, sum(together.state.lengths[0]))
    for row, seed in enumerate(seeds):
        _, alone = fed(text, *(t[row : row + 1] for t in parts), seed=seed)
        own = alone.state.slab.run(0, sum(alone.state.lengths[0]))
        position = held.position[row]
        for head in range(2):
            assert position[head][position[head] >= 0].tolist() == [
                place for place in own.position[0, head].tolist() if place >= 0
            ]


@pytest.mark.parametrize("name", PIPES)
def test_seeds_change_what_is_held_by_stochastic_pools_only(name):
    text = PIPES[name][0]
    parts = [random(1, 2, LENGTH, n) for n in (7, 7, 5)]
    places = []
    for seed in (1, 2):
        _, layer = fed(text, *parts, seed=seed)
        places.append(layer.state.slab.run(0, sum(layer.state.lengths[0])).position)
    stochastic = any(pool.is_stochastic for pool in policy(text).pools)
    assert torch.equal(*places) != stochastic


# --- too little room

TOO_SMALL = {
    "beginning": "beginning(0) | recent(4)",
    "header": "sink(4) | header(0)",
    "kept": "beginning(3) | kept(4)",
    "sink": "sink(0) | recent(4)",
    "recent": "recent(0)",
    "reservoir": "recent(4) | reservoir(0)",
    "uniform": "recent(4) | uniform(0)",
    "heavy": "recent(4) | heavy(0)",
    "hive": "recent(4) | hive(4, stride=5)",
    "kcenter": "recent(4) | kcenter(0)",
    "subgen": "recent(4) | subgen(0, clusters=4)",
    "balance": "recent(4) | balance(3)",
    "outliers": "recent(4) | outliers(0)",
    "residue": "recent(4) | residue(0)",
    "match": "recent(4) | match(snap(9))",
    "snap": "snap(32, window=32)",
    "gated": "recent(4) | gated(0)",
    "knorm": "recent(4) | knorm(0)",
    "keydiff": "recent(4) | keydiff(0)",
    "curdkv": "recent(4) | curdkv(0)",
    "lagkv": "recent(4) | lagkv(8, lag=8)",
    "tova": "recent(4) | tova(0)",
    "scissorhands": "recent(4) | scissorhands(0)",
    "keyformer": "recent(4) | keyformer(0)",
    "rkv": "recent(4) | rkv(0)",
    "critical": "recent(4) | critical(0)",
    "caote": "recent(4) | caote(0)",
    "vase": "recent(4) | vase(0)",
    "qfilters": "recent(4) | qfilters(0)",
    "expected": "recent(4) | expected(0)",
    "tri": "recent(4) | tri(0)",
    "chunks": "recent(4) | chunks(knorm(3), size=4)",
    "ladder": "recent(4) | ladder(1)",
    "defend": "recent(4) | defend(0)",
    "tail": "recent(4) | tail(0)",
}


@pytest.mark.parametrize("name", POOLS)
def test_a_pool_without_room_is_refused_where_it_stands(name):
    text = TOO_SMALL[name]
    with pytest.raises(PolicyError) as refusal:
        policy(text)
    begins = 0 if text.startswith(name) else text.index("| ") + 2
    assert refusal.value.at in (begins, begins + len(name) + 1)
    assert "\n" not in str(refusal.value)


BUDGETED = [n for n, it in NAMED.items() if "budget" in inspect.signature(it.make).parameters]


@pytest.mark.parametrize("name", BUDGETED)
def test_a_budget_is_kept_or_refused_with_a_reason(name):
    kept = []
    for budget in range(-3, 60):
        try:
            made = policy(f"{name}(budget={budget})")
        except PolicyError as refusal:
            # The place of the call or of the number.
            assert refusal.at in (0, len(f"{name}(budget="))
            assert str(refusal).count("\n") == 0
            continue
        kept.append(budget)
        if isinstance(made, Pipe):
            assert 1 <= made.slots <= budget
    # If a budget is enough, so is every larger one.
    assert kept == list(range(kept[0], 60))
    assert kept[0] >= 1


# --- a slab has the slots that its policy announces


@pytest.fixture(scope="module")
def nano():
    return weir.load("nano")[0]


@pytest.mark.skipif(not (ASSETS / "nano").exists(), reason="nano is not packaged here")
@pytest.mark.parametrize("name", sorted(set(NAMED) - {"dense", "recompute", "kvzip"}))
def test_a_slab_has_the_slots_that_are_announced_and_keeps_its_bytes(nano, name):
    text = f"{name}(budget=96)" if name in BUDGETED else f"{name}(snap(96))"
    stream = weir.Stream(nano, text, chunk=16)
    stream.feed([1])
    first = stream.nbytes
    ids = torch.randint(2, 4096, (200,), generator=torch.Generator().manual_seed(0))
    for piece in ids.split(100):
        stream.feed(piece)
        assert stream.nbytes == first
    layers = stream.cache.stack
    announced = [stream.policy.for_layer(n, len(layers)).slots for n in range(len(layers))]
    assert [len(layer.state.slab) - 16 for layer in layers] == announced
    more = 64 + 16 if name == "pinned" else 0  # slots that `pinned` adds to its policy's
    assert sum(announced) <= (96 + more) * len(layers)
    slabs = [layer.state.slab.tensors() for layer in layers]
    states = [layer.state.slab.state for layer in layers]
    buffers = [t for found in (*slabs, *states) for t in found.values()]
    assert first == sum({t.data_ptr(): t.untyped_storage().nbytes() for t in buffers}.values())
