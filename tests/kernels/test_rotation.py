"""The kernel that rotates keys is exact up to rounding, at any position in a stream."""

from __future__ import annotations

import math

import pytest
import torch

from weir.slab import Rotary

pytest.importorskip("numba", reason="not installed: pip install '.[fast]'")

from weir.kernels.cpu.rotation import rotate_keys

EPS = 2.0**-24


@pytest.mark.parametrize("dim", [64, 80, 2])
@pytest.mark.parametrize("far", [1, 1000, 4_000_000])
def test_keys_are_turned_to_rounding(dim, far):
    """Compare with float64. At most the first 64 of the `dim` numbers of a key are rotated.

    The bound adds up these errors: the fraction of a turn, at most 1/2, is rounded to float32
    (pi EPS in radians). After whole quarters are taken off, at most 1/8 of a turn is left. It is
    multiplied by 2 pi, which gives at most pi / 4, with two roundings. Sine and cosine are off by
    EPS, and every product and sum is rounded once.
    """
    rotary = Rotary(1e4 ** (-torch.arange(min(dim, 64) // 2, dtype=torch.float64) / 32))
    generator = torch.Generator().manual_seed(dim + far)
    wide = torch.randn(2, 3, 50, dim + 3, generator=generator)  # strides differ from `out`
    keys, by = wide[:, :, 5:42, :dim], torch.randint(-9, far, (2, 3, 37), generator=generator)
    out = torch.full((2, 3, 90, dim), math.nan)
    rotate_keys(keys, by, rotary._per_turn, out[:, :, 40:77])
    half = min(dim, 64) // 2
    angles = by[..., None] * rotary.frequencies
    cos, sin = angles.cos(), angles.sin()
    one, two = keys[..., :half].double(), keys[..., half : 2 * half].double()
    exact = torch.cat([one * cos - two * sin, two * cos + one * sin], dim=3)
    # At far positions, the angles in float64 are inexact as well.
    slack = (math.pi + 2 * math.pi / 4 + 4) * EPS + far * 2.0**-50
    bound = slack * (one.abs() + two.abs()).repeat(1, 1, 1, 2)
    got = out[:, :, 40:77]
    assert ((got[..., : 2 * half] - exact).abs() <= bound).all()
    assert torch.equal(got[..., 2 * half :], keys[..., 2 * half :])
    assert out[:, :, :40].isnan().all() and out[:, :, 77:].isnan().all()


def test_a_move_goes_through_it_and_back(monkeypatch):
    rotary = Rotary(1e4 ** (-torch.arange(8, dtype=torch.float64) / 8))
    keys, by = torch.randn(1, 2, 9, 16), torch.arange(18).view(1, 2, 9) * 100
    moved = rotary.move(keys, by)
    monkeypatch.setenv("WEIR_KERNELS", "reference")
    reference = rotary.move(keys, by)
    size = keys.abs().max()
    assert (moved - reference).abs().max() <= 20 * EPS * size
    into = torch.zeros(1, 2, 12, 16)
    assert rotary.move(keys, by, into[:, :, 2:11]).data_ptr() == into[:, :, 2:].data_ptr()
    assert torch.equal(into[:, :, 2:11], reference)


def test_keys_are_written_in_another_precision_as_by_pytorch():
    rotary = Rotary(1e4 ** (-torch.arange(8, dtype=torch.float64) / 8))
    keys, by = torch.randn(1, 2, 9, 16), torch.arange(18).view(1, 2, 9)
    into = torch.zeros(1, 2, 12, 16, dtype=torch.bfloat16)
    rotary.move(keys, by, into[:, :, 1:10])
    assert torch.equal(into[:, :, 1:10], rotary.rotation_at(by).apply(keys).bfloat16())
    assert not into[:, :, 0].any() and not into[:, :, 10:].any()


def test_frequencies_may_be_on_another_device():
    class Elsewhere(torch.Tensor):
        """A tensor that behaves as if it were on a GPU."""

        def numpy(self):
            raise TypeError("can't convert cuda tensor to numpy")

        def to(self, _device):
            return self.as_subclass(torch.Tensor)

    rotary = Rotary(1e4 ** (-torch.arange(8, dtype=torch.float64) / 8))
    keys, by = torch.randn(1, 2, 9, 16), torch.arange(18).view(1, 2, 9)
    moved = rotary.move(keys, by)
    rotary.__dict__["_per_turn"] = rotary._per_turn.as_subclass(Elsewhere)
    assert torch.equal(rotary.move(keys, by), moved)


@pytest.mark.parametrize("shape", [(1, 1, 9), (2, 1, 9), (1, 3, 9)])
def test_one_move_is_for_all_rows_or_heads(shape):
    rotary = Rotary(1e4 ** (-torch.arange(8, dtype=torch.float64) / 8))
    keys, by = torch.randn(2, 3, 9, 16), torch.arange(math.prod(shape)).view(shape) * 100
    assert torch.equal(rotary.move(keys, by), rotary.move(keys, by.expand(2, 3, 9).contiguous()))
