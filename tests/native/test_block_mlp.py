"""One kernel computes a whole MLP with weights in blocks, but only if the module computes what the
names of its layers suggest.
"""

from __future__ import annotations

import copy

import pytest
import torch

from weir.native import dispatch, quantize_weights
from weir.native.block_mlp import run_mlps_whole

kernel = pytest.importorskip("weir.native.kernels.mlp_blocks", reason="needs numba")
pytestmark = pytest.mark.skipif(not kernel.SUPPORTED, reason="needs VNNI or AVX2")
SIZES = {"hidden_size": 64, "intermediate_size": 96}


@pytest.fixture
def x():
    """An input with enough rows for the kernel. PyTorch uses one thread."""
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    yield torch.randn(1, 130, 64, generator=torch.manual_seed(0))
    torch.set_num_threads(before)


@pytest.fixture
def ran(monkeypatch):
    """The results of the kernel's calls, in order."""
    found = []
    real = dispatch.mlp_blocks

    def noted(x):
        kernel = real(x)

        def run(*given):
            found.append(kernel(*given))
            return found[-1]

        return kernel and run

    monkeypatch.setattr(dispatch, "mlp_blocks", noted)
    return found


@pytest.fixture
def mlp(fresh_llama):
    model = fresh_llama(**SIZES)
    quantize_weights(model, "q8_0")
    return model.model.layers[1].mlp


def own(module, x):
    return type(module).forward(module, x)


@torch.no_grad()
@pytest.mark.own_kernels
def test_many_rows_are_the_kernels(mlp, x, ran):
    found, wanted = mlp(x), own(mlp, x)
    assert ran[0] is found and not torch.equal(found, wanted)
    assert (found - wanted).norm() < 2**-10 * wanted.norm()


@torch.no_grad()
def test_few_rows_are_the_modules(mlp, x):
    assert torch.equal(mlp(x[:, :9]), own(mlp, x[:, :9]))


@torch.no_grad()
@pytest.mark.own_kernels
def test_a_hook_on_a_layer_is_called(mlp, x, ran):
    seen = []
    handle = mlp.down_proj.register_forward_pre_hook(lambda _, given: seen.append(given))
    assert torch.equal(mlp(x), own(mlp, x)) and seen and not ran
    handle.remove()
    assert mlp(x) is ran[-1]


@torch.no_grad()
@pytest.mark.own_kernels
def test_a_module_that_computes_something_else_runs_itself(mlp, x, ran, monkeypatch):
    kind = type(mlp)

    def doubled(self, x):
        return 1.01 * self.down_proj(self.act_fn(self.gate_proj(x)) * self.up_proj(x))

    monkeypatch.setattr(kind, "forward", doubled)
    del vars(mlp)["forward"]
    run_mlps_whole(mlp)
    assert torch.equal(mlp(x), doubled(mlp, x)) and len(ran) == 1
    assert torch.equal(mlp(x), doubled(mlp, x)) and len(ran) == 1  # not tried again


@torch.no_grad()
@pytest.mark.own_kernels
def test_gate_and_up_exchanged_run_themselves(mlp, x, ran, monkeypatch):
    def exchanged(self, x):
        return self.down_proj(self.act_fn(self.up_proj(x)) * self.gate_proj(x))

    mlp.up_proj.codes, mlp.up_proj.scales = mlp.gate_proj.codes, mlp.gate_proj.scales
    monkeypatch.setattr(type(mlp), "forward", exchanged)
    del vars(mlp)["forward"]
    run_mlps_whole(mlp)
    assert torch.equal(mlp(x), exchanged(mlp, x)) and len(ran) == 1


@torch.no_grad()
def test_a_hook_of_the_activation_is_called(mlp, x, ran):
    mlp.act_fn.register_forward_hook(lambda *given: given[2] * 0.5)
    assert torch.equal(mlp(x), own(mlp, x)) and not ran


@torch.no_grad()
def test_other_weights_are_proved_again(mlp, x, ran):
    mlp(x)
    mlp.up_proj.codes = mlp.up_proj.codes.flip(0).contiguous()
    wanted = own(mlp, x)
    assert (mlp(x) - wanted).norm() < 2**-10 * wanted.norm()


@torch.no_grad()
def test_a_copy_has_weights_of_its_own(mlp, x):
    twin = copy.deepcopy(mlp)
    twin.up_proj.codes.fill_(128)  # zeros
    assert twin(x).count_nonzero() == 0 and mlp(x).count_nonzero() > 0
