"""The size of a cache is known from a model's configuration, to the byte."""

from __future__ import annotations

import copy

import pytest
import torch
from reference.models import FAMILIES, WIDE_WINDOW, make, shared, tokens

from weir import StreamingCache, WeirError
from weir.cache import Size, read_bytes, size_of
from weir.loading import skeleton

pytestmark = pytest.mark.thinned(3, least=2)

POLICIES = [
    "sink(4) | recent(28)",
    "window(20)",
    "recent(8) | heavy(8)",
    "snap(24, 8, 3)",
    "recent(8) | snap(6, 2, 3)",
    "sink(1) | recent(4) | hive(9, 3)",
    "sink(1) | recent(4) | reservoir(5, weighted=true)",
    "sink(1) | recent(4) | subgen(6, 3, 2)",
    "sink(1) | recent(4) | balance(8, block=4)",
    "recent(4) | balance(8, sets=separate)",
    "recent(4) | kcenter(4)",
    "pyramid(snap(32, 8, 3), beta=3)",
]


@pytest.fixture
def bare(tmp_path):
    """A function that makes a family's model without weights, from a config.json alone."""

    def make(name):
        shared(name).config.save_pretrained(tmp_path)
        return skeleton(str(tmp_path / "config.json"), dtype="float32")

    return make


@pytest.mark.parametrize("name", FAMILIES)
def test_a_configuration_tells_what_a_model_and_its_streams_take(bare, name):
    # In some families, a call leaves the model with fewer buffers, so each stream uses a copy.
    model, empty = make(name), bare(name)
    assert {t.device.type for t in empty.parameters()} == {"meta"}
    weights = sum(t.nbytes for t in [*model.parameters(), *model.buffers()])
    for policy in POLICIES:
        found = size_of(empty, policy, chunk=3)
        fed = copy.deepcopy(model)
        cache = StreamingCache(fed, policy, chunk=3)
        with torch.no_grad():
            fed(tokens(1, 1), past_key_values=cache, use_cache=True)
        assert found.stream == cache.nbytes > 0, policy
        assert list(found.slots) == cache.slots_by_layer, policy
        assert found.weights == weights
        assert found.dtype == "float32"
        assert size_of(model, policy, chunk=3) == found
        assert 0 < found.step_stream <= found.stream
        cache.detach()


def test_a_stream_in_half_precision_takes_half_the_keys_and_values(bare):
    whole = size_of(bare("llama"), "sink(4) | recent(28)", chunk=4)
    half = size_of(bare("llama").to(torch.bfloat16), "sink(4) | recent(28)", chunk=4)
    assert (whole.dtype, half.dtype) == ("float32", "bfloat16")
    assert half.step_stream * 2 == whole.step_stream
    assert whole.stream / 2 < half.stream < whole.stream  # positions keep their size


def test_a_step_reads_every_slot_and_all_weights_but_a_table_that_is_looked_up(bare):
    model = bare("llama")
    found = size_of(model, "recent(13)", chunk=3)
    heads = model.config.num_key_value_heads * model.config.head_dim
    assert found.step_stream == 2 * 16 * 2 * heads * 4  # layers, slots, keys and values, float32
    table = model.get_input_embeddings().weight
    assert found.weights - found.step_weights == table.numel() * 4
    tied = bare("gemma")  # the same table makes the logits, so it is read
    assert tied.get_input_embeddings().weight is tied.get_output_embeddings().weight
    assert size_of(tied, "recent(13)").step_weights == size_of(tied, "recent(13)").weights


def test_what_remains_beside_the_weights_is_shared_among_streams():
    size = Size("recent(4)", "float32", (4,), (4, 4), 1000, 30, 900, 20)
    assert [size.streams_in(n) for n in (0, 999, 1029, 1030, 1089, 1090)] == [0, 0, 0, 1, 2, 3]
    assert size.tokens_per_second(9200) == 10
    assert size.tokens_per_second(9600, streams=3) == 30


@pytest.mark.parametrize("policy", ["dense", "sink(4) | recent(none)"])
def test_only_what_has_a_limit_has_a_size(bare, policy):
    with pytest.raises(WeirError, match="has no limit"):
        size_of(bare("llama"), policy)


def test_what_a_cache_refuses_has_no_size_either(bare):
    with pytest.raises(WeirError) as size_error:
        size_of(bare("mistral-sliding"), f"recent({2 * WIDE_WINDOW})")
    with pytest.raises(WeirError) as cache_error:
        StreamingCache(shared("mistral-sliding"), f"recent({2 * WIDE_WINDOW})")
    assert str(size_error.value) == str(cache_error.value)


@pytest.mark.parametrize(
    ("text", "number"),
    [
        ("80GB", 80 * 10**9),
        ("24 GiB", 24 * 2**30),
        ("1.5 TiB", 3 * 2**39),
        ("512 mb", 512 * 10**6),
        ("3.35TB/s", 3_350_000_000_000),
        ("50 GB/s", 50 * 10**9),
        ("7", 7),
        ("7 B", 7),
        ("16k", 16_000),
        ("1_000 KiB", 1_024_000),
        ("2e3", 2000),
        (" 1P ", 10**15),
    ],
)
def test_bytes_are_read_as_people_write_them(text, number):
    assert read_bytes(text) == number


@pytest.mark.parametrize(
    "text",
    ["", "GB", "much", "-1GB", "0", "0.4", "0 GB", "nan", "inf", "1e99", "80 GB GB", "80 XB",
     "8 0GB", "80GB/m", "1/s/s", "99999 PB"],
)  # fmt: skip
def test_what_is_no_number_of_bytes_is_refused(text):
    with pytest.raises(
        WeirError,
        match=(
            r"must be a number of bytes, at least 1 and less than 2\^63. Write, for example, 80GB"
        ),
    ):
        read_bytes(text)
