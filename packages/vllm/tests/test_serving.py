"""Many requests at once: blocks, the prefix cache, preemption, aborts and forks."""

import random
from types import SimpleNamespace

import pytest
import torch
from vllm import SamplingParams

from engines import BLOCK, ask, engine, greedy, held, pool_of, scheduler_of
from reference import allowed, weir_says
from small_models import random_tokens

POLICY = "sink(32) | recent(128)"
KEPT = (32 + 128) // BLOCK
"""Blocks of sinks and window."""


def run(llm, requests, seen=None):
    """Run requests `{name: (prompt, parameters)}` to their end and return their outputs."""
    for name, (prompt, parameters) in requests.items():
        llm.llm_engine.add_request(name, {"prompt_token_ids": prompt}, parameters)
    done = {}
    while llm.llm_engine.has_unfinished_requests():
        for output in llm.llm_engine.step():
            if output.finished:
                done[output.request_id] = output
        if seen is not None:
            seen(llm)
    return done


def said(output):
    (only,) = output.outputs
    pairs = zip(only.logprobs, only.token_ids, strict=True)
    return list(only.token_ids), torch.tensor([found[token].logprob for found, token in pairs])


def check(folder, prompt, output, policy=POLICY):
    """Compare an answer with weir."""
    tokens, ours = said(output)
    theirs = weir_says(folder, policy, list(prompt) + tokens)[-len(tokens) :]
    assert (ours - theirs).abs().max() <= allowed(folder)


def test_64_requests_stay_in_a_bounded_pool(models):
    """All requests have more tokens than the pool. Each holds sinks, window and one block."""
    folder = models("llama")
    draw = random.Random(0)
    requests = {
        str(n): (random_tokens(draw.randint(40, 700), seed=n), greedy(draw.randint(150, 300)))
        for n in range(64)
    }
    total = sum(len(prompt) + p.max_tokens for prompt, p in requests.values())
    with engine(folder, POLICY, max_num_seqs=64, num_gpu_blocks_override=620) as llm:
        assert held(llm) == 0
        assert total > 1.2 * BLOCK * pool_of(llm).num_gpu_blocks
        peak = [0]
        most = {}

        def watch(llm):
            peak[0] = max(peak[0], held(llm))
            manager = scheduler_of(llm).kv_cache_manager.coordinator.single_type_managers[0]
            for name, blocks in manager.req_to_blocks.items():
                request = scheduler_of(llm).requests[name]
                if request.num_computed_tokens > request.num_prompt_tokens + 1:
                    most[name] = max(most.get(name, 0), sum(not block.is_null for block in blocks))

        done = run(llm, requests, watch)
        assert len(done) == 64
        assert held(llm) == 0
        # When the window moves on, the block that it leaves is freed before the next step.
        assert max(most.values()) == KEPT + 1
        assert peak[0] <= 64 * (KEPT + 1) + 512 // BLOCK + 64
        assert llm.reset_prefix_cache()
    for name in ("0", "17", "63"):
        check(folder, requests[name][0], done[name])


def test_pool_without_the_plug_in_grows(models):
    """The same request without a policy holds a block for every 32 tokens."""
    with engine(models("llama"), None, max_model_len=512) as llm:
        peak = [0]
        run(llm, {"a": (random_tokens(300), greedy(100))}, lambda llm: peak.append(held(llm)))
        assert max(peak) == -(-399 // BLOCK)


def test_a_hit_in_the_prefix_cache_equals_a_cold_start(models):
    folder = models("llama")
    tokens = random_tokens(2000)
    with engine(folder, POLICY, enable_prefix_caching=True) as llm:
        cold = {}
        for length in (40, 100, 170, 193, 600, 1300):
            ((cold[length], logs, cached),) = ask(llm, [tokens[:length]])
            if length == 40:
                assert cached == 0
        ((again, warm, cached),) = ask(llm, [tokens[:1300]])
        assert cached == 1299 // BLOCK * BLOCK
        assert again == cold[1300]
        assert torch.equal(warm, logs) or (warm - logs).abs().max() <= allowed(folder)
        theirs = weir_says(folder, POLICY, tokens[:1300] + again)[-16:]
        assert (warm - theirs).abs().max() <= allowed(folder)
        # A longer prompt, which includes the answer, continues where the shorter one ended.
        ((more, longer, cached),) = ask(llm, [tokens[:1300] + again + tokens[1300:1700]])
        assert cached == 1280  # vLLM caches the windows at the ends of prompts, not of answers
        theirs = weir_says(folder, POLICY, tokens[:1300] + again + tokens[1300:1700] + more)[-16:]
        assert (longer - theirs).abs().max() <= allowed(folder)
        # Several prompts that share a prefix, at once.
        lengths = (100, 600, 1300)
        for length, (same, logs, _) in zip(
            lengths, ask(llm, [tokens[:length] for length in lengths]), strict=True
        ):
            assert same == cold[length]
            theirs = weir_says(folder, POLICY, tokens[:length] + same)[-16:]
            assert (logs - theirs).abs().max() <= allowed(folder)
        assert held(llm) == 0
        assert llm.reset_prefix_cache()
        ((same, _, cached),) = ask(llm, [tokens[:1300]])
        assert cached == 0
        assert same == again


def test_a_prefix_that_is_computed_in_the_same_step_is_shared(models):
    """The second request finds blocks that the first one is about to write."""
    folder = models("llama")
    tokens = random_tokens(900)
    prompts = [tokens[:800], tokens[:700] + random_tokens(90, seed=1), tokens[:40], tokens]
    with engine(folder, POLICY, enable_prefix_caching=True, max_num_batched_tokens=2048) as llm:
        answers = ask(llm, prompts)
        # vLLM caches the windows at the ends of prompts, and every block of sinks.
        assert [cached for *_, cached in answers] == [0, 32, 32, 768]
    for prompt, (more, ours, _) in zip(prompts, answers, strict=True):
        theirs = weir_says(folder, POLICY, prompt + more)[-16:]
        assert (ours - theirs).abs().max() <= allowed(folder)


def test_evicted_sinks_make_no_hit(models):
    """A window without its sinks is computed again."""
    folder = models("llama")
    tokens = random_tokens(1000)
    with engine(folder, POLICY, enable_prefix_caching=True) as llm:
        ((first, logs, _),) = ask(llm, [tokens])
        pool = pool_of(llm)
        hashes = list(pool.cached_block_hash_to_block._cache)
        sink = min(
            (pool.cached_block_hash_to_block.get_one_block(key) for key in hashes),
            key=lambda block: block.block_hash_num_tokens,
        )
        assert sink.block_hash_num_tokens == BLOCK
        pool.evict_blocks({sink.block_id})
        ((second, again, cached),) = ask(llm, [tokens])
        assert cached == 0
        assert first == second
        assert (again - logs).abs().max() <= allowed(folder)


def test_preempted_requests_answer_the_same(models):
    """The pool is too small for all requests. Those that are preempted are computed again."""
    folder = models("llama")
    requests = {str(n): (random_tokens(40 + n, seed=n), greedy(250)) for n in range(4)}
    scratch = 4 + (512 + 4 * 30) // BLOCK
    with engine(
        folder, POLICY, num_gpu_blocks_override=1 + scratch + 17 + 3, max_model_len=2000
    ) as llm:
        preempted = set()

        def watch(llm):
            for name, request in scheduler_of(llm).requests.items():
                if request.num_preemptions:
                    preempted.add(name)

        done = run(llm, requests, watch)
        assert preempted
        assert held(llm) == 0
    for name, (prompt, _) in requests.items():
        check(folder, prompt, done[name])


@pytest.mark.parametrize("batched", [32, 50, 2048])
def test_prompts_can_be_cut_anywhere(models, batched):
    folder = models("llama")
    prompts = [random_tokens(n, seed=n) for n in (1, 31, 33, 700, 1111)]
    with engine(
        folder, POLICY, max_num_batched_tokens=batched, max_num_seqs=5, num_gpu_blocks_override=400
    ) as llm:
        answers = ask(llm, prompts, tokens=40)
    for prompt, (tokens, ours, _) in zip(prompts, answers, strict=True):
        theirs = weir_says(folder, POLICY, prompt + tokens)[-40:]
        assert (ours - theirs).abs().max() <= allowed(folder)


def test_forks_and_aborts_give_their_blocks_back(models):
    folder = models("llama")
    prompt = random_tokens(500)
    with engine(folder, POLICY, enable_prefix_caching=True) as llm:
        parameters = SamplingParams(
            n=3, temperature=1.0, max_tokens=80, ignore_eos=True, logprobs=0, detokenize=False
        )
        (answer,) = llm.generate([{"prompt_token_ids": prompt}], parameters, use_tqdm=False)
        forks = answer.outputs
        assert len({tuple(output.token_ids) for output in forks}) == 3
        steps = [0]

        def abort(llm):
            steps[0] += 1
            if steps[0] in (2, 30):
                names = [
                    r.request_id for r in llm.llm_engine.output_processor.request_states.values()
                ]
                llm.llm_engine.abort_request(names[:1], internal=True)

        done = run(llm, {str(n): (prompt[n:], greedy(60)) for n in range(3)}, abort)
        assert len(done) == 1
        assert held(llm) == 0
        assert llm.reset_prefix_cache()
    for output in forks:
        tokens, ours = said(SimpleNamespace(outputs=[output]))
        theirs = weir_says(folder, POLICY, prompt + tokens)[-80:]
        assert (ours - theirs).abs().max() <= allowed(folder)


def test_1000_random_requests_leak_no_block(models):
    """Random lengths and aborts in a pool that is too small, with and without shared prefixes."""
    draw = random.Random(1)
    base = random_tokens(900)
    with engine(
        models("llama"),
        POLICY,
        enable_prefix_caching=True,
        max_num_seqs=12,
        max_num_batched_tokens=256,
        num_gpu_blocks_override=70,
        max_model_len=2000,
    ) as llm:
        pool, llm_engine = pool_of(llm), llm.llm_engine
        sent = finished = aborted = 0
        preempted = set()
        while sent < 1000 or llm_engine.has_unfinished_requests():
            while sent < 1000 and llm_engine.get_num_unfinished_requests() < 20:
                cut = draw.choice((0, draw.randint(0, 600)))
                prompt = base[:cut] + random_tokens(draw.randint(1, 200), seed=sent)
                parameters = greedy(draw.randint(1, 60))
                parameters.temperature = draw.choice((0, 1.0))
                llm_engine.add_request(str(sent), {"prompt_token_ids": prompt}, parameters)
                sent += 1
            finished += sum(output.finished for output in llm_engine.step())
            preempted |= {n for n, r in scheduler_of(llm).requests.items() if r.num_preemptions}
            if draw.random() < 0.05 and (names := list(llm_engine.output_processor.request_states)):
                llm_engine.abort_request([draw.choice(names)], internal=True)
                aborted += 1
        assert finished + aborted == 1000
        assert aborted > 20
        assert len(preempted) > 20
        assert held(llm) == 0
        assert llm.reset_prefix_cache()
        assert all(block.ref_cnt == 0 for block in pool.free_block_queue.get_all_free_blocks())
        manager = scheduler_of(llm).kv_cache_manager.coordinator.single_type_managers[0]
        assert not manager.req_to_blocks
        assert not manager.num_cached_block
