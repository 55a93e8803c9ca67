"""Room for a system message and tools: how many tokens stay, and the warning if it is too small."""

from __future__ import annotations

import logging

import pytest
from servers import logged, make_client, serving
from test_reread import MORE, USER, ask, said

import weir
from weir.cli.pinning import read_pin
from weir.errors import WeirError, format_size
from weir.policies import Pinned, with_pin
from weir.serve import choose_pin, memory_estimate
from weir.serve.memory_estimate import LEAST_KEPT, MOST_PINNED, STEP, estimate_memory

POLICY = weir.policy("streaming_llm(256)")
HOW = {"chunk": 64, "rows": 4, "kept": None}
SYSTEM = {"role": "system", "content": "You are a clerk of few words, who answers at once."}


@pytest.fixture
def free(monkeypatch):
    def set_to(number: int) -> None:
        monkeypatch.setattr(memory_estimate, "free_memory", lambda device: number)

    return set_to


@pytest.mark.parametrize("form", ["exact", "same"])
def test_pins_are_chosen_from_memory(free, form):
    """The chosen number needs at most half of the memory, and the next step needs more."""
    room = 2_000_000_000
    free(room)
    chosen = choose_pin("nano", POLICY, format=form, **HOW)
    assert chosen % STEP == 0

    def needed(pin: int) -> int:
        how = {**HOW, "kept": LEAST_KEPT}
        return estimate_memory("nano", with_pin(POLICY, pin, form), **how).total

    assert needed(chosen) <= room // 2 < needed(chosen + STEP)
    free(room * 100)
    assert choose_pin("nano", POLICY, format=form, **HOW) == MOST_PINNED
    # Too small for any number, so this is the default, which the memory estimate can still refuse.
    free(room // 100)
    assert choose_pin("nano", POLICY, format=form, **HOW) == with_pin(POLICY).n


def test_quantized_pins_are_more(free):
    free(2_000_000_000)
    exact, same = (choose_pin("nano", POLICY, format=form, **HOW) for form in ("exact", "same"))
    assert same > 2 * exact


def test_where_pins_cannot_be_chosen_it_is_said(free):
    free(1_000_000_000)
    with pytest.raises(WeirError, match="--pin 8192"):
        choose_pin("nano", POLICY, **HOW, loading={"device_map": "auto"})
    for policy in ("dense", "beginning(8) | recent(64)"):
        with pytest.raises(WeirError, match="Leave out --pin"):
            choose_pin("nano", weir.policy(policy), **HOW)
    given = Pinned(POLICY, 8)
    with pytest.raises(WeirError, match="Leave out --pin"):
        choose_pin("nano", given, **HOW)


@pytest.mark.parametrize(
    ("there", "rows", "kept", "remedy"),
    [
        (5 * 10**16, 8, None, "Use fewer --rows or a smaller budget."),
        (5 * 10**16, 8, 0, "Use fewer --rows or a smaller budget."),
        (5 * 10**16, 8, 9, "Use fewer --rows, a smaller --keep, or a smaller budget."),
        (10**9, 1, None, "Use a smaller budget."),
        (10**9, 8, None, "Use a smaller budget."),
        (10**9, 8, 9, "Use a smaller budget."),
    ],
)
def test_a_server_that_needs_too_much_memory_is_refused_with_the_options_that_matter(
    free, there, rows, kept, remedy
):
    free(there)
    policy = f"streaming_llm({10**12})"
    with pytest.raises(WeirError) as error:
        estimate_memory("nano", policy, chunk=64, rows=rows, kept=kept)
    turns = {9: "the states of 9 turns 38,016.0 TB, ", 0: ""}.get(kept, "the states of 1 turn ")
    many = "8 rows take 33,792.0 TB" if rows == 8 else "1 row takes 4,224.0 TB"
    assert str(error.value).startswith(
        f"not enough memory on cpu: {format_size(there)} are free. nano takes 16.8 MB, {many}, "
        f"{turns}"
    )
    assert str(error.value).endswith(f"and 8 states of prompts 33,792.0 TB. {remedy}")


def test_weights_that_exceed_the_memory_are_not_said_to_fit_with_fewer_rows(free):
    free(1000)
    with pytest.raises(WeirError, match=r"1\.0 kB are free\. .* Use a smaller model\.$"):
        estimate_memory("nano", POLICY, chunk=64, rows=4, kept=9)


def test_a_number_of_pins_is_read():
    assert (read_pin(None), read_pin("0"), read_pin("8192")) == (None, 0, 8192)
    for wrong in ("-1", "1e3", "many", "", "9" * 10):
        with pytest.raises(WeirError, match="Use --pin auto or --pin 8192"):
            read_pin(wrong)


def test_a_beginning_without_room_is_told_once(caplog):
    caplog.set_level(logging.INFO, "weir.serve")
    body = {"model": "small", "max_tokens": 5, "temperature": 0}
    with serving(make_client(policy="pinned(streaming_llm(24), n=16, header=4)")) as server:
        path = "/v1/chat/completions"
        first = server.post(path, {**body, "messages": [SYSTEM, USER]})
        warning = first.headers["x-weir-warning"]
        beginning = first.json()["usage"]["weir"]["beginning"]
        assert warning.startswith(f"only the first 16 of the {beginning} tokens of the system")
        assert warning.endswith("start the server with --pin 256")
        assert logged(caplog, "pin")[-1]["pin"] == 256
        history = [SYSTEM, USER, said(first.json()), MORE]
        second = server.post(path, {**body, "messages": history})
        assert "x-weir-warning" not in second.headers
        both = server.post(path, {**body, "messages": [SYSTEM, MORE], "user": "me"})
        assert both.headers["x-weir-warning"].startswith("no effect here: user; only the first 16")
        short = server.post(path, {**body, "messages": [USER]})
        assert "x-weir-warning" not in short.headers
    with serving(make_client(policy="streaming_llm(24)")) as server:
        assert ask(server, SYSTEM, USER)["usage"]["weir"]["pinned"] == 0
        answer = server.post(path, {**body, "messages": [SYSTEM, USER]})
        # This policy pins nothing, so no pins are missing.
        assert "x-weir-warning" not in answer.headers
