"""How a step is cut into rows, how a block stores keys, and how sinks are rotated."""

from types import SimpleNamespace

import numpy as np
import pytest
import torch

from weir_vllm.errors import StreamError
from weir_vllm.layout import BlockLayout, _as_strides, find_layout
from weir_vllm.worker import count_rows, cut_rows, rotate_keys, stack_caches


def naive_rows(done, new, size, kept):
    """Cut a request token by token: a row ends where the next token has a different gap."""
    rows = []
    for place in range(done, done + new):
        gap = max(0, place // size - kept)
        if rows and rows[-1][1] == gap:
            rows[-1][0] += 1
        else:
            rows.append([1, gap])
    return rows


def test_rows_are_cut_as_token_by_token():
    draw = np.random.default_rng(0)
    for _ in range(3000):
        size, kept = int(draw.choice([1, 2, 4, 32])), int(draw.integers(1, 6))
        requests = int(draw.integers(1, 5))
        new = draw.integers(1, 4 * size + 3, requests)
        done = draw.integers(0, 12 * size, requests)
        rows = cut_rows(np.append(0, np.cumsum(new)), done + new, size, kept)
        wanted = [
            (request, end, gap)
            for request in range(requests)
            for at, pieces in [(done[request], naive_rows(done[request], new[request], size, kept))]
            for end, gap in zip(
                at + np.cumsum([count for count, _ in pieces]),
                [gap for _, gap in pieces],
                strict=True,
            )
        ]
        assert list(zip(rows.request, rows.end, rows.gap, strict=True)) == wanted
        counts = [c for r in range(requests) for c, _ in naive_rows(done[r], new[r], size, kept)]
        assert np.diff(rows.start).tolist() == counts
        moved = int((rows.gap > 0).sum())
        assert moved <= count_rows(requests, int(new.sum()), size)


def test_the_most_rows_can_happen():
    """Requests of two tokens that lie on both sides of the end of a block."""
    starts = np.arange(0, 9, 2)
    rows = cut_rows(starts, np.full(4, 321), 32, 2)
    assert len(rows.request) == 8 == count_rows(4, 8, 32)
    assert count_rows(4, 512, 32) < 4 + 512 // 32 + 4


def test_padding_is_a_row_without_tokens():
    rows = cut_rows(np.array([0, 1, 1, 1]), np.array([700, 0, 0]), 32, 2)
    assert rows.request.tolist() == [0, 1, 2]
    assert np.diff(rows.start).tolist() == [1, 0, 0]
    assert rows.gap.tolist() == [699 // 32 - 2, 0, 0]


def rotate_naively(keys, cos, sin, neox):
    """Rotate `[blocks, tokens, heads, dimensions]`."""
    half = cos.shape[1]
    made = keys.clone()
    for i in range(half):
        a, b = (i, i + half) if neox else (2 * i, 2 * i + 1)
        c, s = cos[:, i, None, None], sin[:, i, None, None]
        made[..., a] = keys[..., a] * c - keys[..., b] * s
        made[..., b] = keys[..., b] * c + keys[..., a] * s
    return made


@pytest.mark.parametrize("neox", [True, False])
@pytest.mark.parametrize("rotated", [16, 8])
@pytest.mark.parametrize("pair", [1, 2])
def test_keys_are_rotated_in_any_layout(neox, rotated, pair):
    blocks, size, heads, width, inner = 3, 8, 2, 16, 4
    keys = torch.randn(blocks, size, heads, width)
    angle = torch.randn(blocks, rotated // 2)
    wanted = rotate_naively(keys, angle.cos(), angle.sin(), neox)
    split = keys.view(blocks, size // inner, inner, heads, width // pair, pair)
    # In memory: heads, dimensions, tokens, pairs; a view in the order of `BlockLayout`.
    stored = split.permute(0, 3, 1, 4, 2, 5).contiguous()
    view = stored.permute(0, 1, 2, 4, 3, 5)[None]
    rotate_keys(view, angle.cos(), angle.sin(), neox)
    got = view[0].permute(0, 2, 3, 1, 4, 5).reshape(keys.shape)
    torch.testing.assert_close(got, wanted, rtol=0, atol=1e-6)


class Backend:
    """Writes keys into a cache `[blocks, heads, tokens, keys and values]` in some order."""

    def __init__(self, write):
        self.do_kv_cache_update = write

    @staticmethod
    def get_name():
        return "SOME_ATTN"


def layer_of(write):
    impl = Backend(write)
    return SimpleNamespace(num_kv_heads=2, head_size=8, attn_backend=Backend, impl=impl)


def write_transposed(layer, key, value, cache, slots):
    for token, slot in enumerate(slots.tolist()):
        block, at = divmod(slot, 16)
        flat = cache[block].view(2, 2, 8, 16)
        flat[:, 0, :, at] = key[token]
        flat[:, 1, :, at] = value[token]


def write_scaled(layer, key, value, cache, slots):
    write_transposed(layer, key / 2, value, cache, slots)


def write_twice(layer, key, value, cache, slots):
    write_transposed(layer, key, key, cache, slots)


def write_shuffled(layer, key, value, cache, slots):
    order = torch.randperm(8, generator=torch.Generator().manual_seed(0))
    write_transposed(layer, key[..., order], value, cache, slots)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
def test_the_layout_is_found_by_trying(dtype):
    cache = torch.zeros(5, 2, 16, 16, dtype=dtype)
    layout = find_layout(layer_of(write_transposed), cache, 3, 5, 16)
    keys = torch.randn(16, 2, 8).to(dtype)
    write_transposed(None, keys, torch.zeros_like(keys), cache, torch.arange(16) + 16)
    seen = layout.view_keys(cache[1].reshape(1, 1, -1))
    heads, outer, inner, dims, pairs = layout.shape
    assert (heads, outer * inner, dims * pairs) == (2, 16, 8)
    assert torch.equal(seen[0, 0].reshape(2, 16, 8), keys.transpose(0, 1))
    assert not cache[3].any()


@pytest.mark.parametrize("write", [write_scaled, write_twice, write_shuffled])
def test_a_backend_that_stores_anything_else_is_refused(write):
    with pytest.raises(StreamError, match="SOME_ATTN"):
        find_layout(layer_of(write), torch.zeros(5, 2, 16, 16), 3, 5, 16)


def test_a_cache_whose_blocks_cannot_be_told_is_refused():
    with pytest.raises(StreamError, match="axis"):
        find_layout(layer_of(write_transposed), torch.zeros(16, 2, 16, 16), 3, 16, 16)


def test_offsets_that_are_no_strides():
    assert _as_strides(torch.arange(12).view(3, 4)) == (0, (3, 4), (4, 1))
    assert _as_strides(torch.tensor([[0, 1], [2, 4]])) is None
    layout = BlockLayout(0, 1, (2, 2), (4, 2))
    assert layout.view_keys(torch.arange(8)[None, None]).flatten().tolist() == [1, 3, 5, 7]


def test_caches_in_one_allocation_become_one_tensor():
    buffer = torch.arange(3 * 10.0).view(3, 5, 2)
    (stack,) = stack_caches([buffer[0], buffer[1], buffer[2]])
    assert torch.equal(stack, buffer)
    assert stack.data_ptr() == buffer.data_ptr()
    assert len(stack_caches([buffer[0], buffer[2], buffer[1]])) == 3
    assert len(stack_caches([buffer[0], buffer[1].clone()])) == 2
    assert len(stack_caches([buffer[0]])) == 1
