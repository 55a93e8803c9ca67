"""Loading a GGUF file: memory, progress, and what is refused before a model is made."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest
import torch
from models.gguf_files import quantized, write_tensors
from models.test_gguf import tokenizer, write
from transformers import LlamaConfig, LlamaForCausalLM
from transformers.utils import logging

import weir
from weir.errors import WeirError
from weir.loading import is_gguf
from weir.models import stored_bytes
from weir.native import dispatch

gguf = pytest.importorskip("gguf")

PEAK = """
import sys, torch, weir

def peak():
    with open("/proc/self/status") as file:
        return next(int(line.split()[1]) * 1024 for line in file if line.startswith("VmHWM"))

small, large, *given = sys.argv[1:]
given = dict(each.split("=") for each in given)
weir.load(small, **given)  # imports, and kernels that are compiled once
before = peak()
model, _ = weir.load(large, **given)
print(peak() - before)
"""


def write_large(path: Path, width: int, layers: int) -> Path:
    """Write a Llama of random Q8_0 blocks, so that no time is spent on quantizing."""
    small = LlamaForCausalLM(
        LlamaConfig(
            vocab_size=300,
            hidden_size=width,
            intermediate_size=4 * width,
            num_hidden_layers=layers,
            num_attention_heads=8,
            num_key_value_heads=8,
            head_dim=width // 8,
            max_position_embeddings=128,
            rope_theta=5000.0,
            tie_word_embeddings=False,
            bos_token_id=0,
            eos_token_id=0,
        )
    )
    draw = np.random.default_rng(0)

    def store(name, weight):
        if weight.ndim < 2:
            return weight, None
        blocks = draw.integers(0, 256, (weight.shape[0], weight.shape[1] // 32, 34), np.uint8)
        blocks[..., :2] = np.array([0.001], np.float16).view(np.uint8)
        return blocks.reshape(weight.shape[0], -1), gguf.GGMLQuantizationType.Q8_0

    return write(path, small, store=store)


@pytest.mark.slow
@pytest.mark.skipif(not Path("/proc/self/status").exists(), reason="needs Linux's figures")
@pytest.mark.parametrize("given", [(), ("dtype=bfloat16",)])
def test_a_process_takes_little_more_memory_than_the_weights(tmp_path, given):
    """Loading takes at most 1.3 times the memory of the weights. They take as many bytes as the
    file, or two bytes for each number in bfloat16.
    """
    if not given and dispatch.linear_blocks(torch.empty(1, 32)) is None:
        pytest.skip("needs numba, and VNNI or AVX2")
    small = write_large(tmp_path / "small.gguf", 64, 1)
    large = write_large(tmp_path / "large.gguf", 1024, 9)  # 150 MB
    command = [sys.executable, "-W", "ignore", "-c", PEAK, str(small), str(large), *given]
    found = subprocess.run(command, capture_output=True, text=True, check=True)
    size = large.stat().st_size * (1 if not given else 2 * 32 / 34)
    assert size * 0.9 < int(found.stdout) < 1.3 * size


@pytest.fixture
def file(tmp_path: Path) -> Path:
    return write_large(tmp_path / "some.gguf", 64, 1)


def test_nothing_is_said_where_there_is_no_terminal(file, capfd):
    weir.load(str(file))
    assert capfd.readouterr() == ("", "")


def test_a_bar_takes_one_line_of_a_terminal(file, capsys, monkeypatch):
    monkeypatch.setattr(sys.stderr, "isatty", lambda: True)
    shown = logging.is_progress_bar_enabled()
    logging.enable_progress_bar()  # commands disable transformers' bars
    weir.load(str(file), dtype="float32")
    if not shown:
        logging.disable_progress_bar()
    told = capsys.readouterr().err
    assert "Loading some.gguf" in told and "\n" not in told.strip()
    assert told.endswith("\r")  # the bar is removed at the end


def test_a_name_is_that_of_a_gguf_file(file, tmp_path):
    assert is_gguf(str(file)) and is_gguf(str(file.parent))
    assert not is_gguf("nano") and not is_gguf(str(tmp_path / "other.gguf"))


@pytest.mark.parametrize("device", ["cuda:77", "abacus"])
def test_a_device_that_is_not_there_is_named(file, device):
    with pytest.raises(WeirError, match=rf"cannot be put on the device '{device}' \("):
        weir.load(str(file), device=device)


def test_an_encoder_is_not_read_from_a_gguf_file(file):
    with pytest.raises(
        WeirError, match=(r"some\.gguf is a GGUF file, and an encoder can only be loaded " r"from")
    ):
        weir.loading.load_encoder(str(file))


def test_a_file_of_the_wrong_kind_of_blocks_is_refused(tmp_path):
    """A row of 64 numbers cannot be cut into blocks of 256."""
    of = gguf.GGMLQuantizationType.Q4_K
    weight = {"blk.0.ffn_up.weight": torch.ones(4, 256)}
    path = write_tensors(tmp_path / "a.gguf", "llama", weight, quantized("Q8_0"))
    data = path.read_bytes().replace(
        np.array([gguf.GGMLQuantizationType.Q8_0], np.uint32).tobytes() + bytes(8),
        np.array([of], np.uint32).tobytes() + bytes(8),
    )
    data = data.replace(
        np.array([256, 4], np.uint64).tobytes(), np.array([64, 4], np.uint64).tobytes()
    )
    path.write_bytes(data)
    with pytest.raises(WeirError, match=r"rows of 64 numbers, .* into blocks of 256 \(Q4_K\)"):
        weir.models.gguf.check_readable(weir.models.gguf.read_header(path))


@pytest.mark.filterwarnings("ignore:.*numba and a processor with AVX2")  # on older processors
@pytest.mark.parametrize("weights", ["q8_0", "q4_1"])
def test_other_weights_are_made_from_the_dense_numbers(file, weights):
    model, _ = weir.load(str(file), weights=weights, device="cpu")
    assert model.model.layers[0].mlp.up_proj.codes.dtype == torch.uint8
    assert stored_bytes(model) < 4 * file.stat().st_size


def test_the_tokenizer_is_that_of_the_file(file):
    _, words = weir.load(str(file))
    assert words("the river").input_ids == tokenizer().encode("the river").ids
