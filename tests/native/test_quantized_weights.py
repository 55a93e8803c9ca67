"""Models whose weights torchao has quantized to 8 or 4 bits are streamed like any other."""

from __future__ import annotations

import copy
import sys
from contextlib import nullcontext

import pytest
import torch
from engines import compiled
from reference.models import CONFIGS, make, tokens
from roundings import close, close_runs
from torch import nn
from torch.fx.experimental.proxy_tensor import make_fx
from transformers import DynamicCache, TorchAoConfig

import weir
from weir import StreamingCache, WeirError, compile_steps
from weir.cache import size_of
from weir.loading import skeleton
from weir.models import output_weight, stored_bytes
from weir.native import quantize_weights, quantized_weights

pytest.importorskip("torchao")

POLICY = "sink(2) | recent(14)"


@pytest.fixture(params=quantized_weights.BITS)
def few(request, fresh_llama):
    """A small model with weights of 8 or 4 bits."""
    model = fresh_llama()
    quantize_weights(model, request.param)
    return model


def dense(model):
    """Return a copy of the model with dense float32 weights: the numbers that the quantized ones
    stand for.
    """
    twin = copy.deepcopy(model)
    for module in twin.modules():
        if isinstance(module, nn.Linear):
            with torch.no_grad():  # the layer maps unit vectors to the columns of its weight
                units = torch.eye(module.in_features)
                weight = (module(units) - (0 if module.bias is None else module.bias)).T
            module.__class__ = nn.Linear
            module.weight = nn.Parameter(weight.contiguous(), requires_grad=False)
    return twin


@pytest.mark.parametrize("name", CONFIGS)
def test_every_family_streams_in_8_bits_as_with_a_cache_of_transformers(name):
    model = make(name, num_hidden_layers=2)
    quantize_weights(model, "int8")
    kinds = {type(module) for module in model.modules() if isinstance(module, nn.Linear)}
    assert quantized_weights.Int8Linear in kinds
    text = tokens(1, 24)
    with torch.no_grad():
        wanted = model(text).logits[0]
    found = weir.Stream(model, "sink(4) | recent(28)", chunk=4).feed(text[0], all_logits=True)
    close_runs(found.view(wanted.shape), wanted, dense(model))


def test_a_stream_past_its_budget_is_that_of_the_dense_numbers(few, ids):
    text, twin = ids(1, 60), dense(few)
    found, wanted = (
        torch.cat([stream.feed(part[0], all_logits=True) for part in text.split(20, dim=1)])
        for stream in (weir.Stream(it, POLICY, chunk=4) for it in (few, twin))
    )
    close_runs(found, wanted, twin)


@pytest.mark.parametrize("rows", [1, 3, quantized_weights.FEW])
@pytest.mark.parametrize("way", ["kernel", "graph"])
def test_few_rows_get_what_many_get(few, rows, way, monkeypatch):
    layer = few.model.layers[0].mlp.up_proj
    x = torch.randn(1, quantized_weights.FEW + 1, layer.in_features, generator=torch.manual_seed(0))
    many = layer(x)[:, :rows]
    if way == "graph":
        monkeypatch.setattr(torch.compiler, "is_compiling", lambda: True)
    size = float(x.abs().amax() * dense(few).model.layers[0].mlp.up_proj.weight.abs().sum(1).amax())
    close(layer(x[:, :rows]), many, 2 * layer.in_features, size)


@pytest.mark.parametrize("weights", quantized_weights.BITS)
def test_compiled_steps_are_the_usual_ones(fresh_llama, ids, weights):
    few, text, found = fresh_llama(layers=1), ids(1, 32), []
    quantize_weights(few, weights)
    for way in (nullcontext(), compiled(few)):
        cache = StreamingCache(few, POLICY, chunk=4)
        with torch.no_grad(), way as taken:
            parts = [text[:, :20], *text[:, 20:].split(1, dim=1)]
            logits = [few(input_ids=part, past_key_values=cache).logits for part in parts]
        found.append((torch.cat(logits, dim=1), cache.slots(0)))
    assert taken == [1] * 12
    (usual, slots), (other, its) = found
    close_runs(other, usual, dense(few))
    assert torch.equal(its.position, slots.position)
    close_runs(its.keys, slots.keys, dense(few))


@pytest.mark.parametrize("weights", quantized_weights.BITS)
def test_a_model_is_moved_after_it_was_compiled(fresh_llama, ids, weights):
    few = fresh_llama(layers=1)
    quantize_weights(few, weights)
    compile_steps(few)
    kept = weir.Stream(few, POLICY, chunk=4)
    kept.feed(ids(1, 20)[0])
    kept.feed([7])
    few.to(torch.float32).to("cpu")
    wanted = weir.Stream(dense(few), POLICY, chunk=4).feed(ids(1, 20)[0])
    close_runs(weir.Stream(few, POLICY, chunk=4).feed(ids(1, 20)[0]), wanted, dense(few))
    if weights == "int4":
        with pytest.raises(
            WeirError, match=r"cannot leave the dtype in which they were made \(torch.float32"
        ):
            few.to(torch.bfloat16)
    else:
        few.to(torch.bfloat16)
        twin = dense(few).to(torch.bfloat16)
        streams = [weir.Stream(it, POLICY, chunk=4) for it in (few, twin)]
        for part in (ids(1, 20)[0], [7]):
            close_runs(*(stream.feed(part) for stream in streams), twin)
    compile_steps(few, on=False)


def test_a_session_goes_on(few, ids, tmp_path):
    stream = weir.Stream(few, POLICY, chunk=4)
    stream.feed(ids(1, 40)[0])
    stream.save(tmp_path / "session")
    wanted = stream.feed([3, 1, 4])
    assert torch.equal(weir.Stream.restore(few, tmp_path / "session").feed([3, 1, 4]), wanted)


def test_4_bits_take_half_of_8_and_8_a_quarter_of_what_they_replace(fresh_llama):
    # Wide enough that scales take little memory compared with numbers.
    held = {}
    for weights in (None, *quantized_weights.BITS):
        model = fresh_llama(hidden_size=256, intermediate_size=512)
        if weights is not None:
            quantize_weights(model, weights)
        held[weights] = stored_bytes(model.model.layers[0].mlp)
    assert 0.25 * held[None] < held["int8"] < 0.26 * held[None]
    # There are a scale and a zero point for every 32 numbers.
    assert held["int4"] == held[None] * (4 + 64 / 32) / 32


@pytest.mark.parametrize("weights", quantized_weights.BITS)
def test_what_a_model_will_take_is_known_without_its_weights(weights):
    model, _ = weir.load("nano", weights=weights, device="cpu")
    found, foretold = (
        size_of(it, POLICY) for it in (model, skeleton("nano", weights=weights, device="cpu"))
    )
    plain = size_of(skeleton("nano", device="cpu"), POLICY)
    assert found == foretold
    assert found.step_weights < 0.35 * plain.step_weights
    assert found.stream == plain.stream


def test_nano_in_8_bits_reads_as_well():
    text = "It was a bright morning in the palace, and the prince was speaking to the princess. "
    model, tokenizer = weir.load("nano", device="cpu")
    ids, found = tokenizer(4 * text, return_tensors="pt").input_ids, []
    for weights in (None, "int8"):
        if weights is not None:
            quantize_weights(model, weights)
        with torch.no_grad():
            found.append(float(model(ids, labels=ids).loss))
    # The numbers of a row are off by up to a 254th of its largest number.
    assert abs(found[0] - found[1]) < found[0] / 254


def test_projections_are_read_where_they_are_of_8_bits(fresh_llama):
    model = fresh_llama()
    was = output_weight(model.model.layers[0].self_attn)
    assert was is not None
    quantize_weights(model, "int8")
    now = output_weight(model.model.layers[0].self_attn)
    step = was.abs().amax(1, keepdim=True) / 127
    assert now is not None and bool(((now - was).abs() <= 0.501 * step).all())
    weir.Stream(model, "defensivekv(budget=16)").feed(list(range(40)))


def test_projections_of_4_bits_are_not_read(fresh_llama):
    model = fresh_llama()
    quantize_weights(model, "int4")
    assert output_weight(model.model.layers[0].self_attn) is None
    weir.Stream(model, "defensivekv(budget=16)").feed(list(range(40)))


def test_a_model_that_transformers_quantized_on_its_way_in(fresh_llama, ids, tmp_path):
    quantization = pytest.importorskip("torchao.quantization")
    fresh_llama().save_pretrained(tmp_path)
    config = quantization.Int8WeightOnlyConfig(set_inductor_config=False)
    model = type(fresh_llama()).from_pretrained(tmp_path, quantization_config=TorchAoConfig(config))
    text, cache = ids(1, 30), DynamicCache()
    stream = weir.Stream(model, "sink(4) | recent(28)", chunk=4)
    with torch.no_grad():
        wanted = model(text, past_key_values=cache).logits[0]
    close_runs(stream.feed(text[0], all_logits=True).view(wanted.shape), wanted, dense(model))
    with pytest.raises(WeirError, match="already quantized or distributed"):
        quantize_weights(model, "int8")


def test_what_was_saved_in_few_bits_is_not_quantized_again(fresh_llama):
    config = fresh_llama().config
    config.quantization_config = {"quant_method": "gptq", "bits": 4}
    with pytest.raises(WeirError, match=r"a/b is already quantized \(gptq\)"):
        quantized_weights.check_not_quantized("a/b", config)


def test_weights_of_many_bits_are_not_loaded_into_few(few, fresh_llama):
    before = few.model.layers[0].mlp.up_proj.weight
    with pytest.raises(WeirError, match=r"up_proj\.weight|q_proj\.weight"):
        few.load_state_dict(fresh_llama(seed=5).state_dict())
    assert few.model.layers[0].mlp.up_proj.weight is before
    few.load_state_dict(few.state_dict())


def changed(model, how):
    """Change the weight of the first layer's up projection, or move or copy the model. Return the
    model.
    """
    up = model.model.layers[0].mlp.up_proj
    if how == "replaced":
        up.weight = copy.deepcopy(model.model.layers[1].mlp.up_proj.weight)
    elif how == "replaced behind its back":
        up._parameters["weight"] = copy.deepcopy(model.model.layers[1].mlp.up_proj.weight)
    elif how == "of other bits":
        up.weight = nn.Parameter(torch.ones_like(up.weight.dequantize()), requires_grad=False)
    elif how == "moved":
        model._apply(torch.clone)  # as `to` does for another device
    elif how == "copied":
        model = copy.deepcopy(model)
        model.model.layers[0].mlp.up_proj.weight.qdata.neg_()
    else:
        other = copy.deepcopy(model).state_dict()
        for name, weight in other.items():
            if name.endswith("up_proj.weight"):
                weight.qdata.neg_()
        model.load_state_dict(other, assign=how == "loaded in its place")
    return model


@pytest.mark.parametrize(
    "how",
    [
        "replaced",
        "replaced behind its back",
        "of other bits",
        "moved",
        "copied",
        "loaded",
        "loaded in its place",
    ],
)
def test_a_product_is_that_of_the_weight_there_is(fresh_llama, how):
    model = fresh_llama()
    quantize_weights(model, "int8")
    model = changed(model, how)
    layer = model.model.layers[0].mlp.up_proj
    x = torch.randn(quantized_weights.FEW + 1, layer.in_features, generator=torch.manual_seed(0))
    meant = layer.weight.data
    meant = meant.dequantize() if hasattr(meant, "qdata") else meant
    close(layer(x[:1]), x[:1] @ meant.T, 2 * layer.in_features, float(x.abs().sum(1).amax()))
    if layer.numbers is not None:
        assert layer.numbers.data_ptr() == layer.weight.qdata.data_ptr()


@torch.no_grad()
def test_what_cannot_be_told_by_its_address_goes_the_usual_way(few):
    layer = next(each for each in few.modules() if isinstance(each, quantized_weights.Int8Linear))
    x = torch.randn(3, layer.in_features, generator=torch.manual_seed(0))
    close(make_fx(layer)(x)(2 * x), 2 * layer(x), 2 * layer.in_features, float(x.abs().sum()))
    layer = copy.deepcopy(layer).to("meta")
    with pytest.raises(RuntimeError, match="meta"):
        layer(x)


def test_training_says_that_nothing_can_be_trained(few, ids):
    with pytest.raises(RuntimeError, match="does not require grad"):
        few(ids(1, 8), labels=ids(1, 8)).loss.backward()


def test_nothing_of_pytorch_is_left_changed(fresh_llama):
    before = torch._inductor.config.save_config(), torch.get_float32_matmul_precision()
    for weights in quantized_weights.BITS:
        quantize_weights(fresh_llama(), weights)
    assert (torch._inductor.config.save_config(), torch.get_float32_matmul_precision()) == before


@pytest.mark.parametrize("weights", ["int3", "INT8", "", 8])
def test_other_bits_are_refused(weights):
    with pytest.raises(WeirError, match="weights must be one of int8, int4, q8_0, q4_0, q4_1"):
        weir.load("nano", weights=weights)


def test_without_torchao_it_is_named(fresh_llama, monkeypatch):
    monkeypatch.setitem(sys.modules, "torchao.quantization", None)
    with pytest.raises(WeirError, match=r"needs torchao.*pip install '\.\[quant\]'"):
        quantize_weights(fresh_llama(), "int8")


def test_a_device_that_torchao_has_no_kernel_for_is_named(fresh_llama):
    with pytest.raises(WeirError, match="torchao cannot make weights of few bits on meta: "):
        quantize_weights(fresh_llama().to("meta"), "int4")


def test_a_model_without_linear_layers_is_refused():
    class Bare(nn.Module):
        get_output_embeddings = staticmethod(lambda: None)

    with pytest.raises(WeirError, match="except its head is a linear layer that can be quantized"):
        quantize_weights(Bare(), "int8")
