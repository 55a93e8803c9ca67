"""Fingerprints tell models apart, also when weights are sharded, quantized or offloaded."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.tensor import Shard, distribute_tensor, init_device_mesh
from torch.utils._pytree import tree_map
from transformers import PreTrainedModel

from weir.models import fingerprints as module
from weir.models.fingerprints import PLACES, fingerprint, weights_of


class Quantized(Tensor):
    """A weight with eight bits per number and one scale per row that, like torchao's quantized
    tensors, is not a dense tensor.
    """

    def __new__(cls, bits: Tensor, scale: Tensor) -> Quantized:
        return Tensor._make_wrapper_subclass(cls, bits.shape, dtype=scale.dtype)

    def __init__(self, bits: Tensor, scale: Tensor) -> None:
        self.bits, self.scale = bits, scale

    def __tensor_flatten__(self) -> tuple[list[str], None]:
        return ["bits", "scale"], None

    @staticmethod
    def __tensor_unflatten__(inner: dict[str, Tensor], *args: Any) -> Quantized:
        return Quantized(inner["bits"], inner["scale"])

    @classmethod
    def __torch_dispatch__(cls, operation: Any, types: Any, args: Any, kwargs: Any = None) -> Any:
        if operation is not torch.ops.aten.detach.default:
            raise NotImplementedError(f"{operation} would need the dense weight")
        return tree_map(
            lambda it: Quantized(it.bits, it.scale) if isinstance(it, cls) else it, args
        )[0]


def replaced(model: PreTrainedModel, by: Callable[[Tensor], Tensor]) -> PreTrainedModel:
    """Replace the weights of a model's linear layers by other tensors, and return the model."""
    for each in model.modules():
        if isinstance(each, nn.Linear):
            each.weight = nn.Parameter(by(each.weight.detach()), requires_grad=False)
    return model


def quantized(weight: Tensor) -> Tensor:
    scale = weight.abs().amax(dim=1, keepdim=True) / 127
    return Quantized((weight / scale).round().to(torch.int8), scale)


@pytest.fixture
def mesh() -> Iterator[Any]:
    """A device mesh that consists of this process only."""
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    yield init_device_mesh("cpu", (1,))
    dist.destroy_process_group()


def apart(make: Callable[[PreTrainedModel], PreTrainedModel], fresh_llama: Any) -> dict[str, Any]:
    """Check that two models that `make` changes in the same way have the same fingerprint, unless
    their weights differ. Return the fingerprint.
    """
    first, again, other = (fingerprint(make(fresh_llama(seed=seed))) for seed in (0, 0, 1))
    assert first == again
    assert [name for name in first if first[name] != other[name]] == ["weights"]
    return first


def test_a_dense_model(fresh_llama):
    found = apart(lambda model: model, fresh_llama)
    assert (found["kind"], found["layers"], found["width"]) == ("llama", 2, 32)
    assert (found["vocabulary"], found["dtype"]) == (61, "float32")


def test_a_quantized_model_is_never_made_dense(fresh_llama):
    assert apart(lambda model: replaced(model, quantized), fresh_llama) != apart(
        lambda model: model, fresh_llama
    )


def test_a_model_that_torchao_quantized(fresh_llama):
    quantization = pytest.importorskip("torchao.quantization")

    def make(model: PreTrainedModel) -> PreTrainedModel:
        quantization.quantize_(model, quantization.Int8WeightOnlyConfig())
        return model

    apart(make, fresh_llama)


def test_a_sharded_model_is_known_by_its_shard(fresh_llama, mesh):
    apart(
        lambda model: replaced(model, lambda weight: distribute_tensor(weight, mesh, [Shard(0)])),
        fresh_llama,
    )


@pytest.mark.parametrize("where", ["cpu", "disk"])
def test_an_offloaded_model_is_the_model_it_was(fresh_llama, tmp_path, where):
    accelerate = pytest.importorskip("accelerate")
    folders = iter(tmp_path / str(n) for n in range(3))

    def make(model: PreTrainedModel) -> PreTrainedModel:
        if where == "cpu":
            accelerate.cpu_offload(model, execution_device=torch.device("cpu"))
        else:
            folder = next(folders)
            accelerate.disk_offload(model, str(folder), execution_device=torch.device("cpu"))
        assert {p.device.type for p in model.parameters()} == {"meta"}
        return model

    assert apart(make, fresh_llama) == apart(lambda model: model, fresh_llama)


def test_weights_that_nobody_knows_the_place_of_are_known_by_name_and_shape(fresh_llama):
    first, other = fresh_llama().to("meta"), fresh_llama(intermediate_size=40).to("meta")
    assert fingerprint(first) == fingerprint(fresh_llama(seed=1).to("meta"))
    assert fingerprint(first)["weights"] != fingerprint(other)["weights"]


def test_weights_in_buffers_count_and_what_is_not_saved_does_not(fresh_llama):
    model = fresh_llama()
    before = fingerprint(model)
    model.model.rotary_emb.inv_freq.mul_(2)
    assert fingerprint(model) == before
    model.model.register_buffer("qweight", torch.zeros(3, dtype=torch.int32))
    with_zeros = fingerprint(model)
    model.model.qweight[1] = 7
    assert len({it["weights"] for it in (before, with_zeros, fingerprint(model))}) == 3


@pytest.mark.parametrize("name", PLACES)
def test_a_model_that_places_or_sees_tokens_otherwise_is_another(fresh_llama, name):
    model = fresh_llama()
    before = fingerprint(model)
    setattr(model.config, name, {"rope_theta": 5e5})
    assert fingerprint(model) != before


def test_weights_are_looked_at_again_only_where_one_was_written_to_or_replaced(
    fresh_llama, monkeypatch
):
    model = fresh_llama()
    decoder, config, looks = model.model, model.config, []
    numbers = module._numbers
    monkeypatch.setattr(module, "_numbers", lambda t: looks.append(1) or numbers(t))
    first = weights_of(decoder, config)
    assert looks
    looks.clear()
    assert weights_of(decoder, config) == first
    assert not looks
    weight = decoder.layers[0].mlp.up_proj
    with torch.no_grad():
        weight.weight[0, 0] += 1
    written = weights_of(decoder, config)
    weight.weight = nn.Parameter(weight.weight.detach() * 2)
    replaced_one = weights_of(decoder, config)
    config.sliding_window = 7
    assert len({first, written, replaced_one, weights_of(decoder, config)}) == 4
    assert weights_of(fresh_llama().model, fresh_llama().config) == first


def test_weights_that_were_made_in_inference_mode_have_a_digest_too(fresh_llama):
    with torch.inference_mode():
        model = fresh_llama()
    assert weights_of(model.model, model.config) == weights_of(
        fresh_llama().model, fresh_llama().config
    )
