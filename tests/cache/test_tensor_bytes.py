"""Tensors are read from bytes as safetensors reads them, without a copy, and damage is refused."""

from __future__ import annotations

import json
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from safetensors import SafetensorError
from safetensors.torch import load

from weir.cache.tensor_bytes import DTYPES, TensorBytes, write_tensors

TENSORS = {
    "keys": torch.arange(24.0).reshape(1, 2, 3, 4),
    "places": torch.tensor([[7, -1]]),
    "flags": torch.tensor([True, False, True]),
    "halves": torch.tensor([0.5, -2.0, 3.0], dtype=torch.bfloat16),
    "codes": torch.arange(5, dtype=torch.uint8),
    "nothing": torch.zeros(0, 3),
    "number": torch.tensor(1.5, dtype=torch.float64),
}
DATA = write_tensors(TENSORS, "what", "a text")
HEADER = int.from_bytes(DATA[:8], "little")


def with_header(header: Any, rest: bytes = DATA[8 + HEADER :]) -> bytes:
    text = header if isinstance(header, bytes) else json.dumps(header).encode()
    return len(text).to_bytes(8, "little") + text + rest


def changed(name: str, **fields: Any) -> bytes:
    """The bytes, with fields of one tensor's header entry changed."""
    header = json.loads(DATA[8 : 8 + HEADER])
    header[name] = {**header[name], **fields}
    return with_header(header)


@pytest.mark.parametrize("shift", [0, 1, 4])
def test_what_was_written_is_read_from_any_place_in_memory(shift):
    data = torch.frombuffer(bytearray(bytes(shift) + DATA), dtype=torch.uint8)[shift:]
    for given_as in (DATA, data):
        found = TensorBytes.read(given_as)
        assert found.metadata == {"what": "a text"}
        assert found.sizes == {name: (tuple(t.shape), t.dtype) for name, t in TENSORS.items()}
        for name, t in TENSORS.items():
            assert torch.equal(found.tensor(name), t)
            assert torch.equal(found.tensor(name), load(DATA)[name])


def test_a_tensor_shares_its_memory_with_the_bytes():
    data = torch.frombuffer(bytearray(DATA), dtype=torch.uint8)
    found = TensorBytes.read(data)
    data[8 + HEADER :] = 0
    assert not found.tensor("keys").any()


@pytest.mark.parametrize("dtype", DTYPES.values())
def test_every_dtype_of_a_buffer_comes_back(dtype):
    t = torch.tensor([[0, 1], [1, 0]]).to(dtype)
    found = TensorBytes.read(write_tensors({"t": t}, "k", ""))
    assert torch.equal(found.tensor("t"), t) and found.tensor("t").dtype == dtype


WRONG = {
    "nothing": b"",
    "half a length": DATA[:5],
    "a header without an end": DATA[: HEADER // 2],
    "an endless header": (2**63).to_bytes(8, "little") + DATA[8:],
    "no header": (0).to_bytes(8, "little") + DATA[8:],
    "a byte less": DATA[:-1],
    "a byte more": DATA + b"\0",
    "no JSON": with_header(b"{" * HEADER),
    "a list": with_header([]),
    "lists in lists": with_header(b"[" * 100_000),
    "metadata that are a list": with_header({"__metadata__": []}, b""),
    "metadata that are numbers": with_header({"__metadata__": {"a": 1}}, b""),
    "an entry that is none": with_header({"a": None}, b""),
    "an entry that is a text": with_header({"a": "F32"}, b""),
    "no dtype": with_header({"a": {"shape": [], "data_offsets": [0, 0]}}, b""),
    "another dtype": changed("keys", dtype="F8"),
    "a dtype that is a list": changed("keys", dtype=[]),
    "a larger dtype": changed("keys", dtype="F64"),
    "another shape": changed("keys", shape=[1, 2, 3, 5]),
    "a shape below zero": changed("keys", shape=[1, -2, -3, 4]),
    "a shape of fractions": changed("keys", shape=[1, 2, 3, 4.0]),
    "a shape of truths": changed("keys", shape=[True, 2, 3, 4]),
    "a shape without an end": changed("keys", shape=[2**61, 2**61]),
    "a shape that is a number": changed("keys", shape=24),
    "one place": changed("keys", data_offsets=[0]),
    "places below zero": changed("keys", data_offsets=[-96, 0]),
    "places past the end": changed("keys", data_offsets=[2**40, 2**40 + 96]),
    "the places of another": changed("keys", data_offsets=[0, 96]),
}


@pytest.mark.parametrize("name", WRONG)
def test_damaged_bytes_are_refused(name):
    with pytest.raises((ValueError, RecursionError)):
        TensorBytes.read(WRONG[name])


@settings(max_examples=300)
@given(st.data())
def test_whatever_safetensors_refuses_is_refused(data):
    changed = bytearray(DATA)
    for _ in range(data.draw(st.integers(1, 3))):
        changed[data.draw(st.integers(0, 8 + HEADER - 1))] = data.draw(st.integers(0, 255))
    try:
        found = TensorBytes.read(bytes(changed))
    except (ValueError, RecursionError):
        return
    try:
        wanted = load(bytes(changed))
    except (SafetensorError, KeyError):
        pytest.fail("safetensors refuses it")
    assert {name: found.tensor(name).tolist() for name in found.sizes} == {
        name: t.tolist() for name, t in wanted.items()
    }
