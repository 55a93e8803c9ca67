"""Responses, with OpenAI's own client over a real socket."""

from __future__ import annotations

import hashlib
import json
import shutil
import subprocess
import threading

import httpx
import openai
import pytest
from servers import fields_without_effect, make_client, make_tokenizer, serving

import weir
from weir.errors import WeirError
from weir.serve import Engine, EngineClient, Limits, SessionStore
from weir.serve.api import Keys
from weir.serve.api.schemas.responses import ResponseBody

ALICE, BOB = "wk-alice-0123456789", "wk-bob-0123456789"
KEYS = Keys([hashlib.sha256(key.encode()).hexdigest() for key in (ALICE, BOB)])


@pytest.fixture(scope="module")
def server():
    with serving(make_client(limits=Limits(prompt=2000, answer=100)), KEYS) as server:
        yield server


@pytest.fixture(scope="module")
def client(server):
    return server.client(ALICE)


def say(client, text, **given):
    given = {"model": "small", "max_output_tokens": 8, "temperature": 0, **given}
    return client.responses.create(input=text, **given)


def cached(response) -> int:
    return response.usage.input_tokens_details.cached_tokens


def chat(client, messages) -> str:
    given = {"model": "small", "max_tokens": 8, "temperature": 0}
    answer = client.chat.completions.create(messages=messages, **given)
    return answer.choices[0].message.content


def user(text) -> dict:
    return {"role": "user", "content": text}


def test_a_response_has_all_that_the_client_reads(client):
    told = say(client, "Hello", metadata={"a": "b"}, instructions="Be kind.", top_p=0.5)
    assert (told.object, told.model, told.store) == ("response", "small", True)
    assert told.id.startswith("resp_") and len(told.output_text) == 8
    assert (told.status, told.incomplete_details.reason) == ("incomplete", "max_output_tokens")
    assert (told.metadata, told.instructions, told.top_p) == ({"a": "b"}, "Be kind.", 0.5)
    (item,) = told.output
    assert (item.type, item.role, item.content[0].type) == ("message", "assistant", "output_text")
    assert told.usage.output_tokens == 8
    assert told.usage.total_tokens == told.usage.input_tokens + 8 == told.usage.weir["seen"]
    assert client.responses.retrieve(told.id) == told
    # A chat with the same messages has the same answer.
    alone = say(client, "Hello", instructions="Be kind.")
    messages = [{"role": "system", "content": "Be kind."}, user("Hello")]
    assert chat(client, messages) == alone.output_text


def test_a_stop_token_completes_a_response(server, client):
    (end,) = server.engine_client.stop_ids
    told = say(client, "Hello", extra_body={"logit_bias": {str(end): 100}})
    assert (told.status, told.incomplete_details, told.output_text) == ("completed", None, "")
    stop = say(client, "Hello").output_text[3]
    cut = say(client, "Hello", extra_body={"stop": stop})
    assert cut.status == "completed" and stop not in cut.output_text


def test_a_stream_has_typed_events_in_order_and_says_the_same(server, client):
    whole = say(client, "Stream")
    events = list(say(client, "Stream", stream=True))
    kinds = [event.type for event in events]
    assert kinds == [
        "response.created",
        "response.in_progress",
        "response.output_item.added",
        "response.content_part.added",
        *["response.output_text.delta"] * 8,
        "response.output_text.done",
        "response.content_part.done",
        "response.output_item.done",
        "response.incomplete",
    ]
    assert [event.sequence_number for event in events] == list(range(len(events)))
    deltas = [event for event in events if event.type.endswith("text.delta")]
    assert "".join(event.delta for event in deltas) == whole.output_text == events[-4].text
    last = events[-1].response
    assert {event.item_id for event in deltas} == {last.output[0].id}
    assert events[0].response.id == last.id
    assert (events[0].response.status, events[0].response.output) == ("in_progress", [])
    # It was saved before its end was sent.
    assert client.responses.retrieve(last.id) == last
    body = {"model": "small", "input": "x", "max_output_tokens": 2, "stream": True}
    text = server.post("/v1/responses", body, Authorization=f"Bearer {ALICE}").text
    assert text.startswith("event: response.created\ndata: {")
    assert text.endswith("\n\ndata: [DONE]\n\n")
    stop = {"stop": whole.output_text[2:]}
    given = {"model": "small", "temperature": 0, "extra_body": stop}
    with client.responses.stream(input="Stream", **given) as stream:
        assert stream.get_final_response().output_text == whole.output_text[:2]


def test_logprobs_are_those_of_the_tokens(client):
    told = say(client, "Hello", top_logprobs=2)
    (part,) = told.output[0].content
    assert "".join(one.token for one in part.logprobs) == part.text
    assert all(one.top_logprobs[0].logprob == one.logprob for one in part.logprobs)
    plain = say(client, "Hello", include=["message.output_text.logprobs"])
    assert [one.top_logprobs for one in plain.output[0].content[0].logprobs] == [[]] * 8
    assert say(client, "Hello").output[0].content[0].logprobs == []
    streamed = [e for e in say(client, "Hello", top_logprobs=2, stream=True) if "delta" in e.type]
    assert [one.token for event in streamed for one in event.logprobs] == list(part.text)


def test_an_answer_is_held_to_a_schema(client):
    schema = {
        "type": "object",
        "properties": {"a": {"enum": ["b"]}},
        "required": ["a"],
        "additionalProperties": False,
    }
    wanted = {"type": "json_schema", "name": "x", "schema": schema, "strict": True}
    given = {"model": "small", "input": "Hello", "temperature": 0, "max_output_tokens": 60}
    told = client.responses.create(text={"format": wanted}, **given)
    assert json.loads(told.output_text) == {"a": "b"}
    assert (told.status, told.text.format.name) == ("completed", "x")


def test_a_response_goes_on_from_another_and_reads_only_what_is_new(client):
    first = say(client, "One")
    second = say(client, "Two", previous_response_id=first.id)
    assert second.previous_response_id == first.id
    assert cached(second) == first.usage.total_tokens - 1
    messages = [user("One"), {"role": "assistant", "content": first.output_text}, user("Two")]
    assert chat(client, messages) == second.output_text
    template = make_tokenizer().apply_chat_template(messages, tokenize=False)
    length = len(make_tokenizer()(template, add_special_tokens=False)["input_ids"])
    assert second.usage.input_tokens == length + len("<|im_start|>assistant\n") - 11


def test_going_on_twice_is_a_fork_and_asking_again_does_no_harm(client):
    first = say(client, "Root")
    branches = [say(client, text, previous_response_id=first.id) for text in ("A", "B", "A")]
    assert branches[0].output_text == branches[2].output_text
    assert len({branch.id for branch in branches}) == 3
    assert {cached(branch) for branch in branches} == {first.usage.total_tokens - 1}
    third = say(client, "C", previous_response_id=branches[0].id)
    again = say(client, "C", previous_response_id=branches[2].id)
    assert third.output_text == again.output_text


def test_instructions_are_a_responses_own(client):
    first = say(client, "One", instructions="Be kind.")
    same = say(client, "Two", previous_response_id=first.id, instructions="Be kind.")
    assert cached(same) == first.usage.total_tokens - 1
    other = say(client, "Two", previous_response_id=first.id, instructions="Be rude.")
    none = say(client, "Two", previous_response_id=first.id)
    said = [user("One"), {"role": "assistant", "content": first.output_text}, user("Two")]
    assert cached(other) == 0
    system = {"role": "system", "content": "Be rude."}
    assert chat(client, [system, *said]) == other.output_text
    assert chat(client, said) == none.output_text
    on = say(client, "Three", previous_response_id=other.id, instructions="Be rude.")
    assert cached(on) == other.usage.total_tokens - 1


def test_what_has_lost_its_state_is_read_again(server, client):
    first = say(client, "Far away", instructions="Be kind.")
    second = say(client, "Two", previous_response_id=first.id, instructions="Be kind.")
    given = {"previous_response_id": second.id, "instructions": "Be kind."}
    wanted = say(client, "Three", **given)
    for told in (first, second):
        server.engine.forget(told.id.removeprefix("resp_"))
    again = say(client, "Three", **given)
    assert (again.output_text, cached(again)) == (wanted.output_text, 0)
    assert again.usage.input_tokens == wanted.usage.input_tokens
    client.responses.delete(first.id)
    server.engine.forget(second.id.removeprefix("resp_"))
    with pytest.raises(openai.BadRequestError) as error:
        say(client, "Three", **given | {"instructions": "Other"})
    assert error.value.code == "history_not_kept"


@pytest.mark.parametrize("is_answered", [False, True])
def test_a_compaction_leaves_out_only_what_it_stands_for(server, client, is_answered):
    first = say(client, f"Further away {is_answered}")
    second = say(client, "Two", previous_response_id=first.id)
    more = [user("Three"), {"role": "assistant", "content": "x"}] if is_answered else []
    given = {"model": "small", "previous_response_id": second.id, "input": [*more, user("Last")]}
    new = ["Three", "x", "Last"] if is_answered else ["Last"]
    said = [["Two", second.output_text], [f"Further away {is_answered}", first.output_text]]
    wanted = say(client, given["input"], previous_response_id=second.id)
    for told, before in ((None, []), (second, said[0]), (first, said[1] + said[0])):
        if told is not None:
            server.engine.forget(told.id.removeprefix("resp_"))
        made = client.responses.compact(**given).output
        assert [item.type for item in made].count("compaction") == (told is not first)
        messages = [item for item in made if item.type == "message"]
        assert [item.content[0].text for item in messages] == [*before, *new]
        items = [item.model_dump(exclude_none=True) for item in made]
        assert say(client, items).output_text == wanted.output_text
    client.responses.delete(first.id)
    with pytest.raises(openai.BadRequestError) as error:
        client.responses.compact(**given)
    assert error.value.code == "history_not_kept"


def test_a_compaction_is_refused_as_the_response_would_be(client):
    hidden = say(client, "Hidden", store=False)
    for name in (hidden.id, "resp_none"):
        for ask in (client.responses.create, client.responses.compact):
            with pytest.raises(openai.NotFoundError) as error:
                ask(model="small", input="More", previous_response_id=name)
            told = error.value.code, error.value.param
            assert told == ("previous_response_not_found", "previous_response_id")
    with pytest.raises(openai.BadRequestError, match="Send its items as input") as error:
        client.responses.compact(
            model="small",
            input="More",
            extra_body={"conversation": client.conversations.create().id},
        )
    assert error.value.param == "conversation"
    for name in ("drop", "pin"):
        with pytest.raises(openai.BadRequestError, match="changes no cache") as error:
            client.responses.compact(
                model="small", input="More", extra_body={"weir": {name: ["call_1"]}}
            )
        assert error.value.param == f"weir.{name}"
    for given in ({}, {"input": []}, {"input": [{"type": "reasoning", "summary": []}]}):
        for ask in (client.responses.create, client.responses.compact):
            with pytest.raises(
                openai.BadRequestError, match="input is missing, or is a list"
            ) as error:
                ask(model="small", **given)
            assert error.value.param == "input"
    stray = {"type": "function_call_output", "call_id": "c", "output": "x"}
    for ask in (client.responses.create, client.responses.compact):
        with pytest.raises(openai.BadRequestError) as error:
            ask(model="small", input=[user("One"), stray])
        assert error.value.param == "input[1].call_id"


def test_an_empty_input_is_a_message_with_an_empty_text(client):
    told = say(client, "")
    (item,) = client.responses.input_items.list(told.id)
    assert (item.role, item.content[0].text) == ("user", "")
    assert say(client, [user("")]).output_text == told.output_text
    assert client.responses.input_tokens.count(model="small", input="").input_tokens > 0
    (kept,) = client.responses.compact(model="small", input="").output
    assert (kept.role, kept.content[0].text) == ("user", "")


def test_instructions_alone_are_answered_like_a_system_message_alone(client):
    told = client.responses.create(
        model="small", instructions="Be kind.", max_output_tokens=8, temperature=0
    )
    same = chat(client, [{"role": "system", "content": "Be kind."}])
    assert told.output_text == same
    assert list(client.responses.input_items.list(told.id)) == []
    with pytest.raises(openai.BadRequestError, match="nothing to compact") as error:
        client.responses.compact(model="small", instructions="Be kind.")
    assert error.value.param == "input"
    for words in ("Be kind.", "Be rude."):
        with pytest.raises(openai.BadRequestError, match="there is nothing to answer") as error:
            client.responses.create(model="small", instructions=words, previous_response_id=told.id)
        assert error.value.param == "input"


def test_a_turn_of_a_chat_is_gone_on_from_by_its_name(server, client):
    chat(client, [{"role": "system", "content": "Be kind."}, user("Chat")])
    headers = {"Authorization": f"Bearer {ALICE}"}
    (session, *_) = httpx.get(f"{server.url}/v1/sessions", headers=headers).json()["data"]
    on = say(client, "On", previous_response_id=session["head"])
    assert cached(on) == session["seen"] - 1
    same = say(client, "On", previous_response_id=session["head"], instructions="Be kind.")
    assert (cached(same), same.output_text) == (cached(on), on.output_text)
    other = say(client, "On", previous_response_id=session["head"], instructions="Be rude.")
    assert cached(other) == 0
    assert other.usage.input_tokens == on.usage.input_tokens  # one instruction replaces the other


def test_input_may_be_items_and_answers_may_be_sent_back(client):
    first = say(client, [user("One")])
    assert first.output_text == say(client, "One").output_text
    parts = [{"type": "input_text", "text": "One"}]
    history = [{"type": "message", "role": "user", "content": parts}]
    history += [item.model_dump() for item in first.output]
    second = say(client, [*history, user("Two")])
    assert cached(second) == first.usage.total_tokens - 1
    on = say(client, "Two", previous_response_id=first.id)
    assert on.output_text == second.output_text
    items = client.responses.input_items.list(second.id, order="asc")
    assert [item.role for item in items] == ["user", "assistant", "user"]
    assert items.data[0].content[0].text == "One"
    found = client.responses.input_items.list(second.id, limit=2)
    assert [item.content[0].text for item in found.data] == ["Two", first.output_text]
    assert found.has_more and [item.content[0].text for item in found][-1] == "One"
    assert [i.content[0].text for i in client.responses.input_items.list(on.id)] == ["Two"]


def test_what_is_not_to_be_stored_is_not_found_by_its_id(server, client):
    headers = {"Authorization": f"Bearer {ALICE}"}
    first = say(client, "Secret base")
    before = httpx.get(f"{server.url}/v1/sessions", headers=headers).json()
    kept = len(server.store._memory.list_all())
    told = say(client, "Secret", store=False, previous_response_id=first.id)
    assert not told.store and cached(told) == first.usage.total_tokens - 1
    assert httpx.get(f"{server.url}/v1/sessions", headers=headers).json() == before
    # Saved only so that later histories match.
    assert len(server.store._memory.list_all()) == kept + 1
    hidden = server.store._memory.list_all()[-1].session
    for path in ("", "/memory", "/turns"):
        found = httpx.get(f"{server.url}/v1/sessions/{hidden}{path}", headers=headers)
        assert found.status_code == 404
    with pytest.raises(openai.NotFoundError):
        client.responses.retrieve(told.id)
    with pytest.raises(openai.NotFoundError) as error:
        say(client, "More", previous_response_id=told.id)
    assert error.value.code == "previous_response_not_found"


def test_a_deleted_response_is_gone_and_what_went_on_from_it_stays(client):
    first = say(client, "To go")
    second = say(client, "To stay", previous_response_id=first.id)
    client.responses.delete(first.id)
    for ask in (client.responses.retrieve, client.responses.delete, client.responses.cancel):
        with pytest.raises(openai.NotFoundError):
            ask(first.id)
    with pytest.raises(openai.NotFoundError):
        say(client, "More", previous_response_id=first.id)
    third = say(client, "Three", previous_response_id=second.id)
    assert cached(third) == second.usage.total_tokens - 1


def test_nobody_cancels_what_has_ended(server, client):
    told = say(client, "Hello")
    with pytest.raises(openai.BadRequestError, match="Cannot cancel a synchronous response"):
        client.responses.cancel(told.id)
    with pytest.raises(openai.BadRequestError) as error:
        client.responses.retrieve(told.id, stream=True)
    assert error.value.param == "stream"


def test_a_deleted_session_takes_its_responses_along(server, client):
    headers = {"Authorization": f"Bearer {ALICE}"}
    given = {"extra_headers": {"x-session-id": "mine"}}
    first = say(client, "One", **given)
    second = say(client, "Two", previous_response_id=first.id)
    url = f"{server.url}/v1/sessions/mine"
    turns = httpx.get(f"{url}/turns", headers=headers).json()["data"]
    assert [turn["id"] for turn in turns] == [first.id, second.id]
    httpx.post(f"{url}/rewind", headers=headers, json={"turn": first.id})
    with pytest.raises(openai.NotFoundError):
        client.responses.retrieve(second.id)
    assert client.responses.retrieve(first.id) == first
    server.engine.forget(first.id.removeprefix("resp_"))
    third = say(client, "Three", previous_response_id=first.id, **given)
    httpx.delete(url, headers=headers)
    for gone in (first, third):
        with pytest.raises(openai.NotFoundError):
            client.responses.retrieve(gone.id)


def test_responses_of_another_key_are_as_unknown_as_those_that_never_were(server, client):
    told = say(client, "My secret")
    bob = server.client(BOB)
    guessed = "resp_" + "0" * 32
    for ask in (
        bob.responses.retrieve,
        bob.responses.delete,
        bob.responses.cancel,
        lambda name: bob.responses.input_items.list(name),
    ):
        bodies = []
        for name in (told.id, guessed):
            with pytest.raises(openai.NotFoundError) as error:
                ask(name)
            bodies.append(error.value.body)
        assert bodies[0] == bodies[1]
    for name in (told.id, guessed):
        with pytest.raises(openai.NotFoundError) as error:
            say(bob, "And?", previous_response_id=name)
        assert (
            str(error.value) == f"Error code: 404 - Previous response with id '{name}' not found."
        )
        assert error.value.code == "previous_response_not_found"
        assert error.value.param == "previous_response_id"
    assert client.responses.retrieve(told.id) == told


BAD = {
    "no input": ({}, "input"),
    "no items": ({"input": []}, "input"),
    "an answer last": ({"input": [{"role": "assistant", "content": "x"}]}, "input"),
    "a number": ({"input": 7}, "input"),
    "a wrong role": ({"input": [{"role": "king", "content": "x"}]}, "input[0].role"),
    "a picture": (
        {"input": [{"role": "user", "content": [{"type": "input_image"}]}]},
        "input[0].content[0].type",
    ),
    "an unknown item": ({"input": [{"type": "input_image"}]}, "input[0].type"),
    "an enormous prompt": ({"input": "x" * 2001}, "input"),
    "no answer": ({"max_output_tokens": 0}, "max_output_tokens"),
    "absurdly many": ({"max_output_tokens": 10**30}, "max_output_tokens"),
    "a hot one": ({"temperature": 2.5}, "temperature"),
    "a truncation": ({"truncation": "half"}, "truncation"),
    "the background": ({"background": True}, "background"),
    "tools": ({"tools": [{"type": 5, "name": "x"}]}, "tools[0].type"),
    "a choice of tools": ({"tool_choice": "required"}, "tool_choice"),
    "a form of its own": ({"text": {"format": {"type": "xml"}}}, "text.format.type"),
    "a schema without": ({"text": {"format": {"type": "json_schema"}}}, "text.format"),
    "a bad schema": (
        {"text": {"format": {"type": "json_schema", "name": "x", "schema": {"type": "king"}}}},
        "text.format.schema",
    ),
    "a prompt of theirs": ({"prompt": {"id": "pmpt_1"}}, "prompt"),
    "many answers": ({"n": 2}, "n"),
    "a field of chats": ({"max_tokens": 2}, "max_tokens"),
    "likely ones": ({"top_logprobs": 21}, "top_logprobs"),
    "much metadata": ({"metadata": {str(n): "x" for n in range(17)}}, "metadata"),
    "a long word": ({"metadata": {"x": "x" * 513}}, "metadata.x"),
    "no metadata": ({"metadata": {"x": 1}}, "metadata.x"),
    "two pasts": (
        {"previous_response_id": "resp_1", "conversation": "conv_1"},
        "previous_response_id",
    ),
    "a long name": ({"previous_response_id": "x" * 129}, "previous_response_id"),
    "a conversation of nothing": ({"conversation": {}}, "conversation"),
    "options of no stream": ({"stream_options": {}}, "stream_options"),
    "one that is not kept": ({"conversation": "conv_1", "store": False}, "store"),
}


@pytest.mark.parametrize("name", BAD)
def test_a_bad_request_is_refused_where_it_is_wrong(server, name):
    body, param = BAD[name]
    given = {"model": "small", "max_output_tokens": 2}
    given |= {} if name == "no input" else {"input": "Hi"}
    answer = server.post("/v1/responses", given | body, Authorization=f"Bearer {ALICE}")
    error = answer.json()["error"]
    assert (answer.status_code, error["param"]) == (400, param), error


def test_what_a_client_calls_it_is_told_back(client):
    told = say(client, "Hello", safety_identifier="me", prompt_cache_key="mine")
    assert (told.safety_identifier, told.prompt_cache_key) == ("me", "mine")


def test_what_is_ignored_is_taken_and_what_is_refused_may_ask_for_nothing(server, client):
    unserved, ignored = fields_without_effect(ResponseBody)
    assert len(unserved) == 3 and {"service_tier", "client_metadata", "user"} <= {*ignored}
    plain = say(client, "Hello")
    given = {"truncation": "auto", **dict.fromkeys(ignored, "x"), **unserved}
    given["stream_options"] = None  # it is only allowed in streams
    told = say(client, "Hello", extra_body=given)
    assert (told.output_text, told.truncation) == (plain.output_text, "auto")
    for name in unserved:
        body = {"model": "small", "input": "Hi", name: {"a": "b"}}
        answer = server.post("/v1/responses", body, Authorization=f"Bearer {ALICE}")
        error = answer.json()["error"]
        assert (answer.status_code, error["param"]) == (400, name)
        assert "not supported" in error["message"]


def test_a_turn_that_cannot_be_kept_fails_and_leaves_nothing(server, client, monkeypatch):
    def refuse(*given):
        raise WeirError("the disk is full")

    before = len(server.store._memory.list_all())
    monkeypatch.setattr(server.engine_client.responses, "save_response", refuse)
    with pytest.raises(openai.InternalServerError):
        say(client, "Hello")
    *_, last = say(client, "Hello", stream=True)
    assert (last.type, last.response.status) == ("response.failed", "failed")
    assert last.response.error.code == "server_error"
    assert len(server.store._memory.list_all()) == before


def test_a_chain_goes_on_after_a_restart(tmp_path):
    with serving(make_client(data=tmp_path), KEYS) as server:
        client = server.client(ALICE)
        first = say(client, "One", instructions="Be kind.")
        conversation = client.conversations.create(items=[{"type": "message", **user("Hi")}])
        inside = say(client, "Two", conversation=conversation.id)
    with serving(make_client(data=tmp_path), KEYS) as server:
        client = server.client(ALICE)
        assert client.responses.retrieve(first.id) == first
        given = {"previous_response_id": first.id, "instructions": "Be kind."}
        second = say(client, "Two", **given)
        assert cached(second) == first.usage.total_tokens - 1
        on = say(client, "Three", conversation=conversation.id)
        assert cached(on) == inside.usage.total_tokens - 1
        texts = [item.content[0].text for item in client.conversations.items.list(conversation.id)]
        assert texts[::-1] == ["Hi", "Two", inside.output_text, "Three", on.output_text]
        with pytest.raises(openai.NotFoundError):
            server.client(BOB).responses.retrieve(first.id)
    with serving(make_client(), KEYS) as server:  # a server in memory, which reads the same words
        client = server.client(ALICE)
        alone = say(client, "One", instructions="Be kind.")
        given["previous_response_id"] = alone.id
        assert say(client, "Two", **given).output_text == second.output_text


# --- conversations


def texts(client, conversation) -> list[str]:
    items = client.conversations.items.list(conversation, order="asc", limit=2)
    return [item.content[0].text for item in items]


def message(text, role="user") -> dict:
    return {"type": "message", "role": role, "content": text}


def test_a_conversation_collects_what_is_said_in_it(server, client):
    made = client.conversations.create(items=[message("One")], metadata={"topic": "x"})
    assert made.id.startswith("conv_") and made.metadata == {"topic": "x"}
    assert client.conversations.retrieve(made.id) == made
    first = say(client, "Two", conversation=made.id)
    assert first.conversation.id == made.id
    second = say(client, "Three", conversation={"id": made.id}, stream=True)
    second = list(second)[-1].response
    assert cached(second) == first.usage.total_tokens - 1
    said = ["One", "Two", first.output_text, "Three", second.output_text]
    assert texts(client, made.id) == said
    added = client.conversations.items.create(made.id, items=[message("Four")])
    assert [item.content[0].text for item in added.data] == ["Four"]
    third = say(client, [], conversation=made.id)
    assert cached(third) == second.usage.total_tokens - 1
    assert texts(client, made.id) == [*said, "Four", third.output_text]
    roles = ["user", "user", "assistant", "user", "assistant", "user"]
    history = [
        {"role": role, "content": text} for role, text in zip(roles, [*said, "Four"], strict=True)
    ]
    assert chat(client, history) == third.output_text
    changed = client.conversations.update(made.id, metadata={"topic": "y"})
    assert client.conversations.retrieve(made.id) == changed
    assert changed.metadata == {"topic": "y"}


def test_a_conversation_has_its_own_session(client):
    made = client.conversations.create()
    headers = {"x-session-id": "mine"}
    with pytest.raises(openai.BadRequestError) as error:
        say(client, "One", conversation=made.id, extra_headers=headers)
    assert error.value.param == "x-session-id"
    say(client, "One", conversation=made.id, extra_headers={"x-session-id": made.id})
    assert len(texts(client, made.id)) == 2


def test_a_body_whose_fields_may_all_be_left_out_may_be_left_out(server):
    key = {"Authorization": f"Bearer {ALICE}"}
    url = f"{server.url}/v1/conversations"
    made = httpx.post(url, headers=key)
    assert made.status_code == 200 and made.json()["metadata"] == {}
    named = httpx.post(url, headers=key | {"Content-Type": "application/json"})
    assert named.status_code == 200
    # A page in a browser sends its origin. It must send the type, and needs permission for that.
    assert httpx.post(url, headers=key | {"Origin": "http://elsewhere"}).status_code == 415
    page = key | {"Origin": "http://elsewhere"}
    assert httpx.post(url, headers=page, content=b"{}").status_code == 415
    # Here a body is required.
    assert httpx.post(f"{url}/{made.json()['id']}", headers=key).status_code == 400
    described = httpx.get(f"{server.url}/openapi.json", headers=key).json()["paths"]
    needed = [
        described[path]["post"]["requestBody"]["required"]
        for path in ("/v1/conversations", "/v1/conversations/{name}", "/v1/responses")
    ]
    assert needed == [False, True, True]


def test_items_are_listed_one_by_one_and_by_pages(client):
    made = client.conversations.create(items=[message(str(n)) for n in range(5)])
    newest = client.conversations.items.list(made.id, limit=2)
    assert [item.content[0].text for item in newest.data] == ["4", "3"]
    assert newest.has_more and (newest.first_id, newest.last_id) == (
        newest.data[0].id,
        newest.data[1].id,
    )
    assert [item.content[0].text for item in newest] == list("43210")
    after = client.conversations.items.list(made.id, order="asc", after=newest.data[1].id)
    assert [item.content[0].text for item in after.data] == ["4"]
    assert not after.has_more
    one = client.conversations.items.retrieve(newest.data[0].id, conversation_id=made.id)
    assert one == newest.data[0]
    empty = client.conversations.create()
    assert client.conversations.items.list(empty.id).data == []
    for ask in (
        lambda: client.conversations.items.list(made.id, after="msg_0"),
        lambda: client.conversations.items.list(empty.id, after=one.id),
        lambda: client.conversations.items.retrieve(one.id, conversation_id=empty.id),
        lambda: client.conversations.items.delete(one.id, conversation_id=empty.id),
    ):
        with pytest.raises(openai.NotFoundError):
            ask()


def test_a_deleted_item_was_never_read(client):
    made = client.conversations.create()
    first = say(client, "One", conversation=made.id)
    say(client, "Forget this", conversation=made.id)
    unread = client.conversations.items.create(made.id, items=[message("Nor this")])
    client.conversations.items.delete(unread.data[0].id, conversation_id=made.id)
    newest = client.conversations.items.list(made.id, limit=2)
    for item in newest.data:
        client.conversations.items.delete(item.id, conversation_id=made.id)
    assert texts(client, made.id) == ["One", first.output_text]
    again = say(client, "Two", conversation=made.id)
    assert cached(again) == first.usage.total_tokens - 1  # from the turn before
    plain = say(client, "Two", previous_response_id=first.id)
    assert plain.output_text == again.output_text
    (oldest, *_) = client.conversations.items.list(made.id, order="asc").data
    client.conversations.items.delete(oldest.id, conversation_id=made.id)
    anew = say(client, "Three", conversation=made.id)
    assert cached(anew) == 0


def test_a_deleted_conversation_takes_all_along(server, client):
    headers = {"Authorization": f"Bearer {ALICE}"}
    made = client.conversations.create()
    told = say(client, "One", conversation=made.id)
    url = f"{server.url}/v1/sessions/{made.id}"
    assert httpx.get(url, headers=headers).json()["head"] == told.id
    assert httpx.delete(url, headers=headers).status_code == 409
    rewind = httpx.post(f"{url}/rewind", headers=headers, json={"turn": told.id})
    assert rewind.status_code == 409
    assert client.conversations.delete(made.id).deleted
    assert httpx.get(url, headers=headers).status_code == 404
    for ask in (
        lambda: client.responses.retrieve(told.id),
        lambda: client.conversations.retrieve(made.id),
        lambda: client.conversations.delete(made.id),
        lambda: client.conversations.update(made.id, metadata={}),
        lambda: client.conversations.items.list(made.id),
        lambda: client.conversations.items.create(made.id, items=[message("x")]),
        lambda: say(client, "Two", conversation=made.id),
    ):
        with pytest.raises(openai.NotFoundError):
            ask()


def test_one_request_at_a_time_is_at_a_conversation(server, client):
    made = client.conversations.create()
    letters = server.engine_client.tokenizer("abc")["input_ids"]
    bias = {str(token): 100 for token in letters}
    started, ended = threading.Event(), threading.Event()

    def long():
        given = {"max_output_tokens": 100, "extra_body": {"logit_bias": bias}, "stream": True}
        with say(client, "Long", conversation=made.id, **given) as stream:
            next(iter(stream))
            started.set()
            assert ended.wait(60)
            for _ in stream:
                pass

    thread = threading.Thread(target=long)
    thread.start()
    try:
        assert started.wait(60)
        # Locks a conversation of this name for another owner only.
        server.engine_client.locked.add(("", made.id))
        for ask in (
            lambda: say(client, "Short", conversation=made.id),
            lambda: client.conversations.items.create(made.id, items=[message("x")]),
            lambda: client.conversations.delete(made.id),
        ):
            with pytest.raises(openai.ConflictError) as error:
                ask()
            assert error.value.code == "conversation_locked"
            assert error.value.response.headers["retry-after"] == "1"
    finally:
        server.engine_client.locked.discard(("", made.id))
        ended.set()
        thread.join()
    say(client, "Short", conversation=made.id)
    assert len(texts(client, made.id)) == 4


def test_conversations_of_another_key_are_as_unknown_as_those_that_never_were(server, client):
    made = client.conversations.create(items=[message("My secret")])
    (item,) = client.conversations.items.list(made.id).data
    bob = server.client(BOB)
    guessed = "conv_" + "0" * 32
    for ask in (
        bob.conversations.retrieve,
        bob.conversations.delete,
        bob.conversations.items.list,
        lambda name: bob.conversations.update(name, metadata={}),
        lambda name: bob.conversations.items.create(name, items=[message("x")]),
        lambda name: bob.conversations.items.retrieve(item.id, conversation_id=name),
        lambda name: bob.conversations.items.delete(item.id, conversation_id=name),
        lambda name: say(bob, "x", conversation=name),
    ):
        told = []
        for name in (made.id, guessed):
            with pytest.raises(openai.NotFoundError) as error:
                ask(name)
            told.append(str(error.value).replace(name, ""))
        assert told[0] == told[1]
    assert texts(client, made.id) == ["My secret"]


@pytest.mark.parametrize(
    ("path", "body", "param"),
    [
        ("", {"items": [message("x")] * 21}, "items"),
        ("", {"items": "x"}, "items"),
        ("", {"metadata": {"x": None}}, "metadata.x"),
        ("", {"title": "x"}, "title"),
        ("/{}", {}, "metadata"),
        ("/{}/items", {"items": []}, "items"),
        ("/{}/items", {"items": [{"type": "item_reference", "id": "x"}]}, "items"),
    ],
)
def test_bad_items_are_refused(server, client, path, body, param):
    path = "/v1/conversations" + path.format(client.conversations.create().id)
    answer = server.post(path, body, Authorization=f"Bearer {ALICE}")
    assert (answer.status_code, answer.json()["error"]["param"]) == (400, param)


@pytest.mark.slow
@pytest.mark.skipif(shutil.which("llm-comply") is None, reason="llm-comply is not installed")
def test_llm_comply_is_answered_as_it_wants_but_for_images():
    model, tokenizer = weir.load("nano")  # a model that ends its answers
    engine = Engine(model, "weir(256)", 2, SessionStore(keep=32), queue=8)
    with serving(EngineClient(engine, tokenizer, "nano", Limits())) as server:
        command = ["llm-comply", "-u", f"{server.url}/v1", "-k", "none", "-m", "nano", "--json"]
        ended = subprocess.run(
            [*command, "--timeout", "300"], capture_output=True, text=True, check=False
        )
    results = json.loads(ended.stdout)["results"]
    assert [test["id"] for test in results if test["status"] == "failed"] == ["image-input"], (
        results
    )
