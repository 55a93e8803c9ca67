"""Weights in GGUF's blocks are read and made as ggml defines them, and models with such weights are
streamed like all others.
"""

from __future__ import annotations

import copy
import warnings
from contextlib import nullcontext

import pytest
import torch
from engines import compiled
from models.gguf_files import quantized, tensors_of, write_tensors
from models.test_gguf import write
from reference.blocks import blocks_of, dequantized, random_lines
from reference.models import make
from roundings import close_runs
from torch import nn
from transformers import LlamaConfig, LlamaForCausalLM

import weir
from weir import WeirError, kernels
from weir.cache import size_of
from weir.loading import skeleton
from weir.models import stored_bytes
from weir.models.gguf import fill, make_empty, plan_fillings, read_header
from weir.native import dispatch, quantize_weights
from weir.native.block_formats import BLOCK, BLOCK_TYPES
from weir.native.block_types import describe_widened
from weir.native.block_weights import (
    BLOCK_FORMATS,
    STORED_FORMATS,
    BlockEmbedding,
    Blocks,
    describe_weights,
)
from weir.native.stored_blocks import put_stored_blocks, stored_in_blocks

gguf = pytest.importorskip("gguf")
POLICY = "sink(2) | recent(14)"
LLAMA = {"hidden_size": 64, "intermediate_size": 96}


def dense(model):
    """Return a copy of the model with dense weights: the numbers that its codes stand for."""
    twin = copy.deepcopy(model)
    for module in twin.modules():
        if hasattr(module, "codes"):
            weight = module.weight
            del module.codes, module.scales
            module.__class__ = nn.Linear if isinstance(module, nn.Linear) else nn.Embedding
            module.weight = nn.Parameter(weight, requires_grad=False)
    return twin


@pytest.fixture
def written_out(monkeypatch):
    """Run without kernels, so that weights are dequantized for each product and rows are not
    rounded.
    """
    monkeypatch.setenv("WEIR_KERNELS", "reference")
    warnings.simplefilter("ignore")


@pytest.fixture(params=BLOCK_FORMATS)
def few(request, fresh_llama, written_out):
    model = fresh_llama(**LLAMA, tie_word_embeddings=True)
    quantize_weights(model, request.param)
    return model


@pytest.mark.parametrize("kind", STORED_FORMATS)
def test_blocks_of_a_file_are_what_ggml_says(kind):
    """The numbers are equal to the last bit: nothing is rounded, even if a scale is small."""
    lines = random_lines(kind, 600, 2)
    wanted, found = dequantized(lines, kind), blocks_of(lines, kind)
    assert torch.equal(found.rows(), wanted)
    which = torch.tensor([3, 599, 3])
    assert torch.equal(found.rows(which), wanted[which])


@pytest.mark.parametrize("kind", ["Q8_0", "Q4_K", "Q6_K", "IQ2_S"])
def test_a_weight_is_filled_in_pieces(kind):
    lines = random_lines(kind, 75, 3)
    whole = blocks_of(lines, kind)
    found = Blocks(kind, 75, whole.rows().shape[1])
    for first, stop in ((48, 75), (0, 16), (16, 48)):
        found.fill(first, lines[first:stop])
    assert torch.equal(found.rows(), whole.rows())


def test_it_is_said_which_types_take_more_room():
    said = describe_widened(["Q4_K", "IQ2_XXS", "Q6_K", "Q2_K", "F32", "IQ2_XXS"])
    assert said == (
        "weights take more bits each in memory than in the file: "
        "IQ2_XXS (from 2.06 to 3.31), Q2_K (from 2.62 to 3.12)"
    )
    assert describe_widened(["Q4_K", "Q8_0", "F16", "F32"]) == ""


def test_powers_of_two_that_float16_does_not_have_are_refused():
    lines = random_lines("MXFP4", 20, 3)
    lines[7, 0] = 160
    with pytest.raises(WeirError, match=r"MXFP4 blocks with scales outside 2\^-24 to 2\^15"):
        blocks_of(lines, "MXFP4")


@pytest.mark.parametrize("kind", BLOCK_FORMATS)
def test_a_number_is_off_by_half_a_step(kind):
    weight = torch.randn(20, 96, generator=torch.manual_seed(0))
    form = BLOCK_TYPES[BLOCK_FORMATS[kind]]
    bits, minima = form.bits, form.minima
    parts = weight.view(20, 3, 32)
    peak = parts.abs().amax(2, keepdim=True)
    step = peak / (127 if bits == 8 else 8)
    if minima:
        step = (parts.amax(2, keepdim=True) - parts.amin(2, keepdim=True)) / 15
    off = (Blocks.quantize(weight, kind).rows().view(20, 3, 32) - parts).abs()
    if kind == "q4_0":  # codes go from -8 to 7 steps, so one sign can be off by a whole step
        off = torch.where(parts * parts.gather(2, parts.abs().argmax(2, True)) < 0, off / 2, off)
    assert bool((off <= step / 2 + peak * 2**-10).all())


def test_a_stream_past_its_budget_is_that_of_the_dense_numbers(few, ids):
    text, twin = ids(1, 60), dense(few)
    found, wanted = (
        torch.cat([stream.feed(part[0], all_logits=True) for part in text.split(20, dim=1)])
        for stream in (weir.Stream(it, POLICY, chunk=4) for it in (few, twin))
    )
    close_runs(found, wanted, twin)


def test_the_kernel_changes_answers_by_the_rounding_of_rows(fresh_llama, ids):
    if dispatch.linear_blocks(torch.empty(1, BLOCK)) is None:
        pytest.skip("needs numba, and VNNI or AVX2")
    model = fresh_llama(**LLAMA)
    quantize_weights(model, "q8_0")
    with torch.no_grad():
        found, wanted = (it(ids(1, 30)).logits for it in (model, dense(model)))
    off = float((found - wanted).norm() / wanted.norm())
    assert 1e-5 < off < 7 * 2 / 127  # seven products a layer, each off by at most half a step


def test_weights_in_blocks_count_as_before_and_are_called_by_their_type(fresh_llama):
    for tied in (False, True):
        model = fresh_llama(**LLAMA, tie_word_embeddings=tied)
        assert describe_weights(model) == (model.num_parameters(), "float32")
        whole = model.num_parameters()
        quantize_weights(model, "q8_0")
        assert describe_weights(model) == (whole, "Q8_0")


@pytest.mark.parametrize("kind", BLOCK_FORMATS)
@pytest.mark.thinned(3)
def test_compiled_steps_are_the_usual_ones(fresh_llama, ids, kind, monkeypatch):
    # Steps are compiled on GPUs, which have no kernel for blocks and dequantize each weight.
    monkeypatch.setenv(kernels.VARIABLE, "reference")
    model, found = fresh_llama(layers=1, **LLAMA), []
    quantize_weights(model, kind)
    for way in (nullcontext(), compiled(model)):
        with way as taken:
            stream = weir.Stream(model, POLICY, chunk=4)
            stream.feed(ids(1, 20)[0])
            found.append(torch.stack([stream.feed([n]) for n in range(9)]))
    assert taken == [1] * 9
    close_runs(*found, dense(model))


def test_a_tied_table_is_kept_once_and_looked_up(few, ids):
    embedding, head = few.get_input_embeddings(), few.get_output_embeddings()
    assert isinstance(embedding, BlockEmbedding)
    assert embedding.codes.data_ptr() == head.codes.data_ptr()
    text = ids(2, 7)
    assert torch.equal(embedding(text), embedding.weight[text])


def test_a_scaled_table_is_scaled_when_it_is_looked_up(ids):
    """Gemma scales its embedding, and uses the same table without the scale as its head."""
    model = make("gemma3", hidden_size=64, tie_word_embeddings=True)
    embedding, text = model.get_input_embeddings(), ids(2, 7)
    scale, plain = embedding.embed_scale, embedding(text).detach()
    quantize_weights(model, "q8_0")
    head = model.get_output_embeddings()
    assert float(scale) == 8
    assert embedding.codes.data_ptr() == head.codes.data_ptr()
    assert torch.equal(embedding(text), 8 * embedding.weight[text])
    assert float((embedding(text) - plain).abs().max() / plain.abs().max()) < 1 / 127


def test_a_model_is_copied_moved_and_saved(few, ids, tmp_path):
    text, wanted = ids(1, 9), few(ids(1, 9)).logits
    assert torch.equal(copy.deepcopy(few)(text).logits, wanted)
    few.save_pretrained(tmp_path)
    again = LlamaForCausalLM.from_pretrained(tmp_path)
    close_runs(again(text).logits, wanted, again)
    few.to(torch.bfloat16)
    assert few(text).logits.dtype == few.get_input_embeddings().weight.dtype == torch.bfloat16
    with pytest.raises(WeirError, match=r"embed_tokens\.weight cannot be replaced by loading"):
        few.load_state_dict(again.state_dict())


def test_a_session_goes_on_and_other_bits_are_another_model(fresh_llama, written_out, tmp_path):
    models = [fresh_llama(**LLAMA) for _ in range(2)]
    for model, kind in zip(models, ("q8_0", "q4_1"), strict=True):
        quantize_weights(model, kind)
    stream = weir.Stream(models[0], POLICY, chunk=4)
    stream.feed(list(range(40)))
    stream.save(tmp_path / "session")
    wanted = stream.feed([3, 1, 4])
    again = weir.Stream.restore(models[0], tmp_path / "session")
    assert torch.equal(again.feed([3, 1, 4]), wanted)
    with pytest.raises(WeirError):
        weir.Stream.restore(models[1], tmp_path / "session")


@pytest.mark.slow
def test_bytes_are_known_without_weights(written_out):
    for kind, most in (("q8_0", 0.28), ("q4_0", 0.20), ("q4_1", 0.21)):
        model, _ = weir.load("nano", weights=kind, device="cpu")
        found, foretold = (
            size_of(it, POLICY) for it in (model, skeleton("nano", weights=kind, device="cpu"))
        )
        assert found == foretold
        plain = skeleton("nano", device="cpu", dtype="float32")
        assert stored_bytes(model) < most * stored_bytes(plain)


@pytest.fixture(scope="module")
def stored(tmp_path_factory):
    """A small model, and a file that stores its weights in blocks of several kinds."""
    torch.manual_seed(0)
    config = LlamaConfig(
        vocab_size=300,
        **LLAMA,
        num_hidden_layers=2,
        num_attention_heads=4,
        num_key_value_heads=2,
        head_dim=16,
        max_position_embeddings=128,
        rope_theta=5000.0,
        bos_token_id=0,
        eos_token_id=0,
    )
    kinds = {"ffn_up": "Q4_0", "ffn_gate": "Q4_1", "attn_v": "Q5_0", "ffn_down": "F32"}

    def store(name, weight):
        kind = kinds.get(name.split(".")[-2], "Q8_0")
        if weight.ndim < 2 or kind == "F32":
            return weight, None
        of = gguf.GGMLQuantizationType[kind]
        return gguf.quants.quantize(weight, of), of

    model = LlamaForCausalLM(config).eval()
    folder = tmp_path_factory.mktemp("blocks")
    return write(folder / "few.gguf", model, store=store)


def test_a_file_is_multiplied_as_it_is_stored(stored, tmp_path, monkeypatch, written_out):
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    few, _ = weir.load(str(stored), weights="gguf")
    assert not (tmp_path / "cache").exists()  # no copy of the weights is kept
    assert not any(weight.requires_grad for weight in few.parameters())
    plain, _ = weir.load(str(stored), dtype="float32")
    text = torch.arange(40)[None]
    same = [n for n, m in few.named_modules() if hasattr(m, "codes")]
    for name, module in few.named_modules():
        if hasattr(module, "weight"):  # the file's numbers, in blocks or not
            assert torch.equal(module.weight, plain.get_submodule(name).weight), name
    assert len(same) == 2 * 6 + 2
    assert not any("down_proj" in name for name in same)  # float32 stays as it is
    close_runs(few(text).logits, plain(text).logits, plain)
    foretold = skeleton(str(stored), weights="gguf")
    assert size_of(few, POLICY) == size_of(foretold, POLICY)


def test_blocks_are_kept_by_default_where_a_kernel_multiplies_them(stored, monkeypatch):
    def kinds(**given):
        models = weir.load(str(stored), device="cpu", **given)[0], skeleton(str(stored), **given)
        found = {any(hasattr(m, "codes") for m in model.modules()) for model in models}
        assert len(found) == 1 and size_of(models[0], POLICY) == size_of(models[1], POLICY)
        return found.pop()

    kernel = dispatch.linear_blocks(torch.empty(1, BLOCK)) is not None
    assert kinds() == kinds(dtype="auto") == kernel
    assert not kinds(dtype="float32") and not kinds(dtype="bfloat16")
    if kernel:
        assert kinds(weights="gguf", dtype="bfloat16")
    monkeypatch.setenv("WEIR_KERNELS", "reference")
    assert not kinds()


def test_a_file_without_blocks_is_dense_and_refuses_to_keep_them(tmp_path, stored):
    model = LlamaForCausalLM(
        LlamaConfig(
            vocab_size=300,
            **LLAMA,
            num_hidden_layers=1,
            head_dim=16,
            num_attention_heads=4,
            num_key_value_heads=2,
        )
    ).eval()
    path = write(tmp_path / "plain.gguf", model)
    assert not any(hasattr(m, "codes") for m in weir.load(str(path))[0].modules())
    says = r"no linear layer in a type of blocks .* \(its types are F32\)\. Leave"
    with pytest.raises(WeirError, match=says):
        weir.load(str(path), weights="gguf")


def test_a_tied_head_and_a_scaled_embedding_share_the_blocks_of_a_file(tmp_path, written_out):
    model = make("gemma3", hidden_size=64, intermediate_size=96, tie_word_embeddings=True)
    path = write_tensors(
        tmp_path / "gemma.gguf", "gemma3", tensors_of(model), quantized("Q8_0"), lambda out: None
    )
    few = make_empty(lambda: type(model)(model.config))
    fillings = plan_fillings(few, read_header(path))
    found = stored_in_blocks(few, fillings)
    done = put_stored_blocks(few, found, fillings, lambda nbytes: None)
    fill(few, ((key, it.read(torch.float32)) for key, it in fillings.items() if key not in done))
    embedding, head = few.get_input_embeddings(), few.get_output_embeddings()
    assert embedding.codes.data_ptr() == head.codes.data_ptr()
    text = torch.arange(9)[None]
    assert torch.equal(embedding(text), 8 * embedding.weight[text])
    dense = {key: it.read(torch.float32) for key, it in fillings.items()}
    assert torch.equal(head.weight, dense["model.embed_tokens.weight"])


@pytest.mark.parametrize("weights", ["q8_0", "int8", "int4"])
def test_weights_in_blocks_are_not_quantized_again(weights):
    model = make("llama", hidden_size=64, intermediate_size=96)
    quantize_weights(model, "q8_0")
    with pytest.raises(WeirError, match="already quantized or distributed"):
        quantize_weights(model, weights)


class Shifted(nn.Embedding):
    embed_scale = 2.0

    def forward(self, ids):
        return super().forward(ids) * self.embed_scale + 1


def shift(embedding):
    embedding.__class__ = Shifted


def limit_norms(embedding):
    embedding.max_norm = 1.0  # PyTorch then scales rows down when they are looked up


@pytest.mark.parametrize("change", [shift, limit_norms])
def test_an_embedding_that_computes_something_else_keeps_its_numbers(tmp_path, written_out, change):
    model = make("llama", hidden_size=64, intermediate_size=96, tie_word_embeddings=True)
    path = write_tensors(
        tmp_path / "llama.gguf", "llama", tensors_of(model), quantized("Q8_0"), lambda out: None
    )
    few = make_empty(lambda: type(model)(model.config))
    change(few.get_input_embeddings())
    fillings = plan_fillings(few, read_header(path))
    done = put_stored_blocks(few, stored_in_blocks(few, fillings), fillings, lambda nbytes: None)
    assert "model.embed_tokens.weight" not in done
    fill(few, ((key, it.read(torch.float32)) for key, it in fillings.items() if key not in done))
    embedding, head = few.get_input_embeddings(), few.get_output_embeddings()
    assert not hasattr(embedding, "codes") and hasattr(head, "codes")
    assert torch.equal(embedding.weight, head.weight)


def test_what_is_no_kind_of_weights_is_refused():
    with pytest.raises(WeirError, match="keeps the blocks of a GGUF file, but nano is not one"):
        weir.load("nano", weights="gguf")
    with pytest.raises(WeirError, match="int8, int4, q8_0, q4_0, q4_1, gguf, got 'q4_k'"):
        weir.load("nano", weights="q4_k")


def test_it_is_said_where_products_are_slow(fresh_llama, monkeypatch):
    monkeypatch.setenv("WEIR_KERNELS", "reference")
    model = fresh_llama(**LLAMA)
    with pytest.warns(UserWarning, match="dequantized for every product"):
        quantize_weights(model, "q8_0")


@pytest.mark.parametrize("kernels_used", ["reference", "native"])
@pytest.mark.parametrize("wrong", [-1, 50, 55, 64])
def test_an_id_that_the_table_does_not_have_is_refused(monkeypatch, kernels_used, wrong):
    """Also a negative id, and one of the outputs that fill up the last panel."""
    if kernels_used == "reference":
        monkeypatch.setenv("WEIR_KERNELS", "reference")
        warnings.simplefilter("ignore")
    model = make("llama", **LLAMA, vocab_size=50, tie_word_embeddings=True)
    quantize_weights(model, "q8_0")
    embedding = model.get_input_embeddings()
    assert isinstance(embedding, BlockEmbedding)
    ids = torch.tensor([[3, 49]])
    assert torch.equal(embedding(ids), embedding.weight[ids])
    with pytest.raises(IndexError, match="out of range"):
        embedding(torch.tensor([[3, wrong]]))
