"""weir's hooks on a model: threads take turns, gradients are refused, and copies and wrapped models
work.
"""

from __future__ import annotations

import copy
import gc
import io
import pickle
import subprocess
import sys
import threading
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest
import torch
from engines import compiled
from reference.models import make, tokens
from roundings import close_runs
from torch import Tensor, nn
from transformers import DynamicCache, PreTrainedModel

import weir
from weir import Stream, StreamingCache, WeirError
from weir.models import observe_attention

pytestmark = pytest.mark.thinned(3, least=2)

POLICY = "sink(2) | recent(10)"
FAMILIES = ("llama", "gemma3", "falcon", "falcon-alibi", "mpt", "bloom")
GRADIENTS = ("llama", "falcon", "mpt", "bloom")

families = pytest.mark.parametrize("name", FAMILIES)


@pytest.fixture(autouse=True)
def switch_often() -> Iterator[None]:
    """Make Python switch threads several times within a forward."""
    before = sys.getswitchinterval()
    sys.setswitchinterval(1e-5)
    yield
    sys.setswitchinterval(before)


def cached(model: PreTrainedModel) -> StreamingCache:
    return StreamingCache(model, POLICY, chunk=4)


def logits(model: PreTrainedModel, ids: Tensor, **given: Any) -> Tensor:
    with torch.no_grad():
        found: Tensor = model(input_ids=ids, **given).logits
    return found


def written(model: PreTrainedModel, ids: Tensor, cache: Any = None) -> Tensor:
    given = {} if cache is None else {"past_key_values": cache}
    answer: Tensor = model.generate(
        ids, max_new_tokens=12, do_sample=False, use_cache=True, eos_token_id=None, **given
    )
    return answer


def streamed(model: PreTrainedModel, ids: Tensor) -> Tensor:
    stream = Stream(model, POLICY, chunk=4)
    return torch.cat([stream.feed(part, all_logits=True) for part in ids.split(7, dim=1)], dim=1)


def stepped(model: PreTrainedModel, ids: Tensor) -> Tensor:
    cache = cached(model)
    parts = [ids[:, :30], *ids[:, 30:].split(1, dim=1)]
    return torch.cat([logits(model, part, past_key_values=cache) for part in parts], dim=1)


KINDS: dict[str, Callable[[PreTrainedModel, Tensor], Tensor]] = {
    "generate with a cache of weir": lambda model, ids: written(model, ids, cached(model)),
    "generate without one": written,
    "generate with a DynamicCache": lambda model, ids: written(
        model, ids, DynamicCache(config=model.config)
    ),
    "a stream": streamed,
    "a forward without a cache": logits,
    "steps": stepped,
}


def attention(model: PreTrainedModel) -> str | None:
    name: str | None = model.config.get_text_config()._attn_implementation
    return name


def together(*jobs: Callable[[], Any]) -> list[Any]:
    """Run each job in a separate thread, all starting at once, and return their results."""
    begin = threading.Barrier(len(jobs))

    def run(job: Callable[[], Any]) -> Any:
        begin.wait()
        return job()

    with ThreadPoolExecutor(len(jobs)) as pool:
        return [future.result() for future in [pool.submit(run, job) for job in jobs]]


# --- threads


def test_a_call_beside_a_thread_that_observes_is_refused(fresh_llama) -> None:
    model = fresh_llama()
    with (
        observe_attention(model.config, lambda inputs: None),
        pytest.raises(WeirError, match="another thread observes the attention of this model"),
    ):
        together(lambda: model(torch.zeros(1, 4, dtype=torch.int64)))


@pytest.mark.parametrize(
    ("name", "kinds"),
    [
        *((name, [*KINDS]) for name in FAMILIES),
        *((name, ["generate with a cache of weir"] * 2) for name in ("llama", "mpt")),
        ("gemma3", ["generate with a cache of weir"] * 4),
        ("falcon-alibi", ["generate with a cache of weir", "generate without one"]),
    ],
)
@pytest.mark.thinned(6)
def test_each_thread_gets_the_answer_it_would_get_alone(name: str, kinds: list[str]) -> None:
    model = make(name)
    before, texts = attention(model), [tokens(1, 40, seed=n) for n in range(len(kinds))]
    alone = [KINDS[kind](model, ids) for kind, ids in zip(kinds, texts, strict=True)]

    def job(kind: str, ids: Tensor) -> Callable[[], list[Tensor]]:
        return lambda: [KINDS[kind](model, ids) for _ in range(2)]

    found = together(*(job(*it) for it in zip(kinds, texts, strict=True)))
    for kind, mine, answers in zip(kinds, alone, found, strict=True):
        assert all(torch.equal(mine, answer) for answer in answers), kind
    gc.collect()
    assert attention(model) == before
    assert all("forward" not in vars(module) for module in model.modules())


@pytest.mark.parametrize("place", ["before its mask", "in its layers"])
@pytest.mark.parametrize(
    ("name", "attention"),
    [
        ("llama", "sdpa"),
        ("llama", "eager"),
        *((name, "eager") for name in ("gemma3", "gpt-oss", "falcon-alibi", "mpt")),
    ],
)
def test_a_call_that_began_before_the_first_cache_ends_as_it_began(
    name: str, attention: str, place: str
) -> None:
    # The call without a cache holds no lock, because weir had no hooks when it began. It continues
    # while the call with a cache is running.
    model, ids = make(name, attn_implementation=attention), tokens(1, 40)
    alone = [logits(model, ids), logits(model, ids, past_key_values=cached(model))]
    gc.collect()
    decoder = model.get_decoder()
    layers = next(part for part in decoder.children() if isinstance(part, nn.ModuleList))
    begun, inside, ended = threading.Event(), threading.Event(), threading.Event()

    def stop(module: nn.Module, *_: Any) -> None:
        if threading.current_thread() is plain and not begun.is_set():
            begun.set()
            assert inside.wait(60)

    def stay(module: nn.Module, *_: Any) -> None:
        if threading.current_thread() is not plain and not inside.is_set():
            inside.set()
            assert ended.wait(60)

    def call() -> None:
        found.append(logits(model, ids))
        ended.set()

    found: list[Tensor] = []
    plain = threading.Thread(target=call)
    first = model.get_input_embeddings() if place == "before its mask" else layers[0]
    handles = [first.register_forward_pre_hook(stop), layers[-1].register_forward_hook(stay)]
    plain.start()
    assert begun.wait(60)
    found.append(logits(model, ids, past_key_values=cached(model)))
    plain.join(60)
    for handle in handles:
        handle.remove()
    assert all(torch.equal(*pair) for pair in zip(found, alone, strict=True))


@pytest.mark.parametrize("name", ["llama", "falcon-alibi", "mpt"])
@pytest.mark.parametrize("error", [ValueError, KeyboardInterrupt])
def test_a_call_that_fails_leaves_the_others_and_the_model_as_they_are(
    name: str, error: type[BaseException]
) -> None:
    model, ids = make(name), tokens(1, 40)
    before, alone = attention(model), KINDS["steps"](model, ids)

    def fail(module: nn.Module, args: Any, output: Any) -> None:
        if threading.current_thread().name == "fails":
            raise error("out of order")

    cache, raised = cached(model), []

    def failing() -> None:
        threading.current_thread().name = "fails"
        for _ in range(10):
            with pytest.raises(error, match="out of order") as info:
                logits(model, ids, past_key_values=cache)
            raised.append(info.value)

    # Not on the rotary embedding, because a cache refuses hooks that are added to it later.
    parts = dict(model.get_decoder().named_children())
    last = [part for name, part in parts.items() if name != "rotary_emb"][-1]
    handle = last.register_forward_hook(fail)
    others = together(failing, *(lambda: KINDS["steps"](model, ids) for _ in range(2)))[1:]
    handle.remove()
    assert len(raised) == 10
    assert all(torch.equal(answer, alone) for answer in others)
    assert attention(model) == before
    assert cache.seen == []  # failed calls leave no trace
    assert torch.equal(logits(model, ids[:, :30], past_key_values=cache), alone[:, :30])


@pytest.mark.parametrize("name", ["llama", "falcon-alibi", "bloom"])
@pytest.mark.thinned(3)
def test_caches_come_and_go_in_threads_while_others_run(name: str) -> None:
    model, ids = make(name), tokens(1, 24)
    plain, own = logits(model, ids), logits(model, ids, past_key_values=cached(model))

    def come_and_go(how: str) -> None:
        for _ in range(12):
            cache = cached(model)
            assert torch.equal(logits(model, ids, past_key_values=cache), own)
            if how == "detached":
                cache.detach()
            del cache

    def stay() -> None:
        for _ in range(12):
            assert torch.equal(logits(model, ids), plain)

    together(lambda: come_and_go("dropped"), lambda: come_and_go("detached"), stay, stay)
    gc.collect()
    assert torch.equal(logits(model, ids), plain)
    assert attention(model) != "weir"
    assert all("forward" not in vars(module) for module in model.modules())


def test_a_cache_made_during_a_call_reads_the_model_and_not_the_call() -> None:
    # Falcon's eager attention adds its biases twice. A cache must not miss this because the model's
    # attention has weir's name, and not "eager", while another call is running.
    model, ids = make("falcon-alibi", attn_implementation="eager"), tokens(1, 40)
    alone, made = KINDS["steps"](model, ids), []
    cache, inside = cached(model), threading.Event()

    def wait(module: nn.Module, args: Any) -> None:
        if threading.current_thread() is not maker:
            inside.set()
            maker.join(0.2)  # the new cache has to wait for this call

    maker = threading.Thread(target=lambda: made.append(inside.wait(60) and cached(model)))
    handle = model.get_input_embeddings().register_forward_pre_hook(wait)
    maker.start()
    logits(model, ids, past_key_values=cache)
    maker.join(60)
    handle.remove()
    found = logits(model, ids[:, :30], past_key_values=made[0])
    assert torch.equal(found, alone[:, :30])


@pytest.mark.slow
def test_compiled_steps_in_threads() -> None:
    model, ids = make("llama"), tokens(1, 50)
    usual = stepped(model, ids)
    with compiled(model):
        alone = stepped(model, ids)
        torch.compiler.reset()
        found = together(
            lambda: stepped(model, ids), lambda: stepped(model, ids), lambda: written(model, ids)
        )
        for answer in found[:2]:
            assert torch.equal(answer, alone)
        close_runs(alone, usual, model)


@pytest.mark.slow
def test_the_engine_is_switched_on_and_off_while_a_thread_runs() -> None:
    model, ids = make("llama"), tokens(1, 36)
    usual, done = stepped(model, ids), threading.Event()

    def switch() -> None:
        while not done.is_set():
            weir.compile_steps(model)
            done.wait(0.01)  # time for a step or two; otherwise it would only compile
            weir.compile_steps(model, on=False)

    def run() -> Tensor:
        try:
            return stepped(model, ids)
        finally:
            done.set()

    try:
        close_runs(together(run, switch)[0], usual, model)
    finally:
        weir.compile_steps(model, on=False)


def test_weights_are_moved_when_no_call_reads_them(monkeypatch) -> None:
    model, ids = make("llama"), tokens(1, 12)
    cache, called = cached(model), threading.Event()
    caller = threading.Thread(target=lambda: logits(model, ids, past_key_values=cache))

    def move(model: PreTrainedModel) -> None:
        caller.start()
        assert not called.wait(0.2)

    monkeypatch.setattr("weir.native.switching.choose_products", move)
    model.get_input_embeddings().register_forward_pre_hook(lambda *_: called.set())
    try:
        weir.compile_steps(model)
        assert called.wait(60)
    finally:
        weir.compile_steps(model, on=False)
        caller.join(60)


# --- gradients


def loss_of(model: PreTrainedModel, ids: Tensor, **given: Any) -> Tensor:
    loss: Tensor = model(input_ids=ids, labels=ids, **given).loss
    return loss


@pytest.mark.parametrize("name", GRADIENTS)
def test_there_is_no_gradient_through_a_cache(name: str) -> None:
    model, ids = make(name), tokens(2, 11)
    expected = loss_of(model, ids)
    expected.backward()
    gradients = {name: p.grad.clone() for name, p in model.named_parameters()}
    model.zero_grad()
    cache = cached(model)
    loss = loss_of(model, ids, past_key_values=cache, use_cache=True)
    close_runs(loss.detach(), expected.detach(), model)  # no token has been evicted yet
    with pytest.raises(WeirError, match="a StreamingCache has no gradients"):
        loss.backward()
    model.zero_grad()
    loss_of(model, ids).backward()
    assert all(torch.equal(p.grad, gradients[name]) for name, p in model.named_parameters())


@pytest.mark.parametrize("name", GRADIENTS)
def test_with_gradients_enabled_a_cache_answers_as_without(name: str) -> None:
    model, ids = make(name), tokens(2, 40)
    one, other = cached(model), cached(model)
    found = model(input_ids=ids, past_key_values=one).logits
    assert torch.equal(found.detach(), logits(model, ids, past_key_values=other))
    for layer in range(2):
        mine, its = one.slots(layer), other.slots(layer)
        assert torch.equal(mine.keys, its.keys)
        assert not mine.keys.requires_grad  # the slots do not keep a graph alive


# --- copies


@families
def test_a_copied_model_is_a_plain_model_of_its_own(name: str) -> None:
    model, ids = make(name), tokens(1, 40)
    plain, own = logits(model, ids), KINDS["steps"](model, ids)
    cache, stream = cached(model), Stream(model, POLICY, chunk=4)
    logits(model, ids, past_key_values=cache)
    stream.feed(ids)
    copied = copy.deepcopy(model)
    again = copy.deepcopy(copied)
    for it in (copied, again):
        assert torch.equal(logits(it, ids), plain)
        assert torch.equal(KINDS["steps"](it, ids), own)
        with pytest.raises(WeirError, match="another model"):
            logits(it, ids, past_key_values=cached(model))
    with torch.no_grad():
        for parameter in copied.parameters():
            parameter.mul_(1.5)
    changed = logits(copied, ids)
    assert not torch.equal(changed, plain)
    assert torch.equal(logits(model, ids), plain)
    assert torch.equal(logits(again, ids), plain)
    del cache, stream
    gc.collect()
    assert torch.equal(logits(copied, ids), changed)


@families
def test_a_stream_and_a_cache_are_copied_alone_and_with_their_model(name: str) -> None:
    model, ids = make(name), tokens(1, 30)
    stream, cache = Stream(model, POLICY, chunk=4), cached(model)
    stream.feed(ids)
    logits(model, ids, past_key_values=cache)
    more = tokens(1, 9, seed=1)
    other, its_stream, its_cache = copy.deepcopy((model, stream, cache))
    alone, alone_cache = copy.deepcopy(stream), copy.deepcopy(cache)
    expected = stream.feed(more, all_logits=True)
    assert torch.equal(alone.feed(more, all_logits=True), expected)
    assert torch.equal(its_stream.feed(more, all_logits=True), expected)
    assert its_stream.model is other and alone.model is model
    assert torch.equal(logits(model, more, past_key_values=alone_cache), expected)
    assert torch.equal(logits(other, more, past_key_values=its_cache), expected)
    with pytest.raises(WeirError, match="another model"):
        logits(model, more, past_key_values=its_cache)


WITHOUT_WEIR = """
import pickle, sys, torch
sys.modules["weir"] = None
ids, expected = torch.load(sys.argv[1])
with open(sys.argv[2], "rb") as file:
    models = [pickle.load(file), torch.load(sys.argv[3], weights_only=False)]
for model in models:
    with torch.no_grad():
        assert torch.equal(model(input_ids=ids).logits, expected)
assert not [name for name in sys.modules if name.startswith("weir.")]
"""


@pytest.mark.parametrize(
    "name", ["llama", "falcon", pytest.param("mpt", marks=pytest.mark.slow), "bloom"]
)
def test_a_model_is_pickled_without_its_caches(name: str, tmp_path: Path) -> None:
    model, ids = make(name), tokens(1, 20)
    plain, own = logits(model, ids), logits(model, ids, past_key_values=cached(model))
    cache, stream = cached(model), Stream(model, POLICY, chunk=4)
    stream.feed(ids)
    logits(model, ids, past_key_values=cache)
    (tmp_path / "pickle").write_bytes(pickle.dumps(model))
    torch.save(model, tmp_path / "saved")
    loaded = pickle.loads((tmp_path / "pickle").read_bytes())
    assert torch.equal(logits(loaded, ids), plain)
    assert torch.equal(logits(loaded, ids, past_key_values=cached(loaded)), own)
    assert pickle.dumps(loaded)  # the loaded model can be pickled too
    if name == "mpt":  # has the most hooks; only for it, as a process takes seconds
        torch.save((ids, plain), tmp_path / "expected")
        files = [str(tmp_path / part) for part in ("expected", "pickle", "saved")]
        run = subprocess.run(
            [sys.executable, "-c", WITHOUT_WEIR, *files], capture_output=True, text=True
        )
        assert run.returncode == 0, run.stderr


def test_what_another_library_put_on_a_model_is_in_its_copy() -> None:
    hooks = pytest.importorskip("accelerate.hooks")
    model, ids = make("llama"), tokens(1, 20)

    class Doubling(hooks.ModelHook):
        def post_forward(self, module: nn.Module, output: Any) -> Any:
            output.last_hidden_state = output.last_hidden_state * 2
            return output

    hooks.add_hook_to_module(model.get_decoder(), Doubling())
    plain = logits(model, ids)
    cache = cached(model)
    copied = copy.deepcopy(model)
    assert torch.equal(logits(copied, ids), plain)
    hooks.remove_hook_from_module(copied.get_decoder())
    assert not torch.equal(logits(copied, ids), plain)
    assert torch.equal(logits(model, ids), plain)
    del cache


# --- wrapped models


def adapted(name: str, **more: Any) -> Any:
    """Make a model with a LoRA adapter that changes its logits."""
    peft = pytest.importorskip("peft")
    torch.manual_seed(0)
    target = {"llama": ["q_proj", "v_proj", "down_proj"], "falcon": ["query_key_value"]}[name]
    config = peft.LoraConfig(task_type="CAUSAL_LM", r=4, target_modules=target, **more)
    model = peft.get_peft_model(make(name), config).eval()
    with torch.no_grad():
        for key, parameter in model.named_parameters():
            if "lora_B" in key:
                parameter.normal_(std=0.3)
    return model


@pytest.mark.parametrize("name", ["llama", "falcon"])
@pytest.mark.thinned(2)
def test_a_model_with_lora_is_the_merged_model(name: str, tmp_path: Path) -> None:
    model, ids, more = adapted(name), tokens(1, 60), tokens(1, 20, seed=1)
    merged = copy.deepcopy(model).merge_and_unload()
    assert float((logits(merged, ids) - logits(make(name), ids)).abs().max()) > 0.1
    assert torch.equal(written(model, ids, cached(model)), written(merged, ids, cached(merged)))
    stream, expected = (Stream(it, POLICY, chunk=4) for it in (model, merged))
    found = [it.feed(ids, all_logits=True) for it in (stream, expected)]
    close_runs(*found, merged)
    stream.save(tmp_path / "session")
    answers = [list(it.generate(12, stop=[])) for it in (stream, expected)]
    assert answers[0] == answers[1]
    restored = Stream.restore(model, tmp_path / "session")
    assert restored.model is model
    assert list(restored.generate(12, stop=[])) == answers[0]
    assert torch.equal(restored.feed(more), stream.feed(more))


def test_a_session_of_one_adapter_is_not_restored_into_another(tmp_path: Path) -> None:
    model, ids = adapted("llama"), tokens(1, 30)
    stream = Stream(model, POLICY, chunk=4)
    stream.feed(ids)
    stream.save(tmp_path / "session")
    with torch.no_grad():
        for key, parameter in model.named_parameters():
            if "lora_B" in key:
                parameter.mul_(2)
    with pytest.raises(WeirError, match="another model"):
        Stream.restore(model, tmp_path / "session")


def test_learned_prompts_are_refused() -> None:
    peft = pytest.importorskip("peft")
    config = peft.PromptTuningConfig(task_type="CAUSAL_LM", num_virtual_tokens=4)
    model = peft.get_peft_model(make("llama"), config)
    for make_it in (StreamingCache, Stream, weir.compile_steps):
        with pytest.raises(WeirError, match="puts learned prompts before its text"):
            make_it(model)


def compiled_in_place(model: PreTrainedModel) -> PreTrainedModel:
    model.compile(backend="eager")
    return model


@pytest.mark.parametrize(
    ("wrap", "sentence"),
    [
        (lambda model: torch.compile(model, backend="eager"), r"call weir\.compile_steps\(model\)"),
        (compiled_in_place, r"call weir\.compile_steps\(model\)"),
        (nn.DataParallel, r"Pass the inner module, model\.module"),
        (nn.Sequential, r"got a Sequential\. weir\.load returns such a model"),
    ],
    ids=["torch.compile", "model.compile", "DataParallel", "Sequential"],
)
def test_other_wrappers_are_refused_and_the_sentence_says_what_to_do(
    wrap: Callable[[PreTrainedModel], Any], sentence: str
) -> None:
    model = wrap(make("llama"))
    for make_it in (StreamingCache, Stream, weir.compile_steps):
        with pytest.raises(WeirError, match=sentence) as refusal:
            make_it(model)
        assert "\n" not in str(refusal.value)


# --- models that changed


@pytest.mark.parametrize("name", ["llama", "falcon", "mpt"])
def test_a_model_that_moved_to_another_dtype_is_refused(name: str) -> None:
    model, ids = make(name), tokens(1, 20)
    read, unread = cached(model), cached(model)
    logits(model, ids[:, :10], past_key_values=read)
    expected = logits(model, ids[:, 10:], past_key_values=copy.deepcopy(read))
    model.to(torch.bfloat16)
    with pytest.raises(
        WeirError, match="float32 on cpu when this cache got its first tokens and is b"
    ):
        logits(model, ids[:, 10:], past_key_values=read)
    # A cache that has been fed nothing has no slots yet. It creates them in the dtype of the first
    # keys.
    logits(model, ids, past_key_values=unread)
    assert unread.slots(0).keys.dtype == torch.bfloat16
    assert read.seen == [10]
    model.to(torch.float32)
    with torch.no_grad():
        model.load_state_dict(make(name).state_dict())
    assert torch.equal(logits(model, ids[:, 10:], past_key_values=read), expected)


def test_gradient_checkpointing_in_training_is_refused() -> None:
    model, ids = make("llama"), tokens(1, 20)
    cache = cached(model)
    expected = logits(model, ids, past_key_values=cached(model))
    model.gradient_checkpointing_enable()
    model.train()
    with pytest.raises(WeirError, match=r"layers twice.*model\.eval\(\)"):
        model(input_ids=ids, past_key_values=cache, use_cache=True)
    loss_of(model, ids, use_cache=False).backward()  # without a cache it trains as usual
    model.eval()
    assert torch.equal(logits(model, ids, past_key_values=cache), expected)


@pytest.mark.parametrize("name", ["llama", "falcon-alibi", "mpt"])
def test_a_model_without_weights_is_refused(name: str) -> None:
    model, ids = make(name), tokens(1, 20)
    cache = cached(model)
    model.to("meta")
    for make_it in (StreamingCache, Stream):
        with pytest.raises(WeirError, match="this model has no weights"):
            make_it(model)
    for given in (ids, ids.to("meta")):
        with pytest.raises(WeirError, match="this model has no weights"):
            logits(model, given, past_key_values=cache)
    assert attention(model) != "weir"
    assert cache.seen == []


def test_a_pickled_model_does_not_hold_the_call(fresh_llama) -> None:
    # The model is not shared with other tests: if one of them asks a model for hidden states,
    # transformers leaves a hook on it that cannot be pickled.
    model, buffer = fresh_llama(), io.BytesIO()
    cache = cached(model)
    torch.save(model, buffer)
    assert b"weir" not in buffer.getvalue()
    del cache
