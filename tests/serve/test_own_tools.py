"""Tools of the server: a model calls one, and the server executes it within the same answer."""

from __future__ import annotations

import json
import threading

import anthropic
import httpx
import pytest
from anything import CITY, TAKES_ARGS, TAKES_TOOLS, random_client
from servers import CHATML, make_tokenizer, serving

from weir.errors import WeirError
from weir.serve.sessions.records import unpack_ids
from weir.serve.tools.formats import HERMES, LLAMA, MISTRAL, MISTRAL_ARGS, Tool
from weir.serve.tools.own import MAX_CALLS, MAX_RESULT, OwnTool
from weir.serve.tools.parser import CallEnd, CallParser, CallStart, TextDelta

WORD = {
    "type": "object",
    "properties": {"word": {"type": "string", "maxLength": 3}},
    "required": ["word"],
    "additionalProperties": False,
}
USER = {"role": "user", "content": "What was it?"}
LOOK_UP = Tool("look_up", "Look up a word.", WORD)
NAMED = {"type": "function", "function": {"name": "look_up"}}
ONE = {"const": {"a": 1}}
OWN = {"tools": ["look_up"]}
RESULT = "it was <|im_end|> red"


class Book:
    """A tool of the server that records its calls."""

    def __init__(self) -> None:
        self.asked: list[dict] = []
        self.contexts: list = []
        self.result: str | Exception = RESULT
        self.may_go_on, self.called = threading.Event(), threading.Event()
        self.may_go_on.set()

    def run(self, context, arguments) -> str:
        self.asked.append(dict(arguments))
        self.called.set()
        self.contexts.append(context)
        self.may_go_on.wait(30)
        if isinstance(self.result, Exception):
            raise self.result
        return self.result


def with_book(template: str | None = TAKES_TOOLS, **given):
    engine_client = random_client(template, **given)
    book = Book()
    engine_client.own_tools["look_up"] = OwnTool(LOOK_UP, book.run)
    return engine_client, book


@pytest.fixture(scope="module")
def served():
    engine_client, book = with_book()
    with serving(engine_client) as server:
        yield server, book


@pytest.fixture
def server(served):
    server, book = served
    book.asked.clear()
    book.contexts.clear()
    book.called.clear()
    book.result = RESULT
    yield server
    book.may_go_on.set()
    server.settled()


def ask(server, *messages, path="/v1/chat/completions", **given):
    body = {"model": "small", "messages": list(messages or [USER]), "max_tokens": 80, "seed": 1}
    return server.post(path, {**body, "weir": OWN, "tool_choice": NAMED, **given})


def used(answer: dict) -> list[dict]:
    return answer["usage"]["weir"].get("tools", [])


def text_of(server, node: str) -> str:
    """Return the text of all tokens of a turn."""
    (*_, turn) = server.store.ancestry("", node)
    ids = list(unpack_ids(turn.ids))
    return server.engine_client.tokenizer.decode(ids, clean_up_tokenization_spaces=False)


# --- in an answer


@pytest.mark.parametrize(
    "template", [TAKES_TOOLS, TAKES_ARGS, CHATML, None], ids=["told", "args", "words", "none"]
)
@pytest.mark.thinned(2)
def test_a_call_is_executed_within_the_answer_and_the_next_turn_reads_only_what_is_new(template):
    engine_client, book = with_book(template, rows=1)
    with serving(engine_client) as server:
        whole = ask(server, max_tokens=120).json()
        (choice,), (use,) = whole["choices"], used(whole)
        assert "tool_calls" not in choice["message"]
        assert choice["finish_reason"] in ("stop", "length")
        assert [json.loads(use["arguments"])] == book.asked
        assert (use["name"], use["result"]) == ("look_up", RESULT)
        content = choice["message"]["content"] or ""
        assert "look_up" not in content
        assert "tool_response" not in content
        facts = whole["usage"]
        assert facts["weir"]["seen"] == facts["total_tokens"] + use["tokens"]
        assert facts["completion_tokens"] <= 120
        (turn,) = server.store.list_turns("", book.contexts[0].prompt.session)
        said = text_of(server, turn.node)
        assert RESULT in said
        assert said.index("look_up") < said.index(RESULT)
        assert len(turn.ids) // 4 == turn.seen
        history = [USER, {"role": "assistant", "content": content}, USER]
        again = ask(server, *history, tool_choice="none", max_tokens=5).json()
        cached = again["usage"]["prompt_tokens_details"]["cached_tokens"]
        assert cached == facts["weir"]["seen"] - 1
        assert "reread" not in again["usage"]["weir"]
        # The result cannot end its turn, because its control token is read as plain text.
        if template is not None:
            end = engine_client.tokenizer.convert_tokens_to_ids("<|im_end|>")
            ids = list(unpack_ids(turn.ids))
            written = engine_client.tokenizer(RESULT.split("<")[1][:3], add_special_tokens=False)
            assert ids.count(end) <= said.count("<|im_end|>") - 1
            assert written["input_ids"]


def test_a_stream_says_the_same(server):
    whole = ask(server, n=2).json()
    body = {"stream": True, "stream_options": {"include_usage": True}, "n": 2}
    lines = ask(server, **body).text.splitlines()
    chunks = [json.loads(line[6:]) for line in lines if line.startswith("data: {")]
    for index in (0, 1):
        choices = [choice for chunk in chunks for choice in chunk["choices"]]
        own = [choice for choice in choices if choice["index"] == index]
        assert not any(choice["delta"].get("tool_calls") for choice in own)
        content = "".join(choice["delta"].get("content") or "" for choice in own)
        assert content == (whole["choices"][index]["message"]["content"] or "")
        assert own[-1]["finish_reason"] == whole["choices"][index]["finish_reason"]
    assert used(chunks[-1]) == used(whole)
    assert len(used(whole)) == 2


def test_every_api_executes_calls(server):
    client = anthropic.Anthropic(base_url=server.url, api_key="none", max_retries=0)
    choice = {"type": "tool", "name": "look_up"}
    given = {"model": "small", "max_tokens": 80, "tool_choice": choice}
    message = client.messages.create(messages=[USER], extra_body={"weir": OWN}, **given)
    assert message.stop_reason in ("end_turn", "max_tokens")
    assert {block.type for block in message.content} <= {"text"}
    assert message.usage.model_dump()["weir"]["tools"][0]["result"] == RESULT
    with client.messages.stream(messages=[USER], extra_body={"weir": OWN}, **given) as stream:
        assert {block.type for block in stream.get_final_message().content} <= {"text"}
    bias = {str(make_tokenizer()("<")["input_ids"][0]): 9.0}
    body = {"model": "small", "messages": [USER], "weir": OWN, "logit_bias": bias}
    body["format"] = ONE
    body["options"] = {"num_predict": 1500, "seed": 3}
    lines = [json.loads(line) for line in server.post("/api/chat", body).text.splitlines()]
    assert not any("tool_calls" in line["message"] for line in lines)
    assert used({"usage": lines[-1]})[0]["name"] == "look_up"


def test_responses_go_on_after_a_call(server):
    choice = {"type": "function", "name": "look_up"}
    given = {"model": "small", "weir": OWN, "max_output_tokens": 80, "temperature": 0}
    first = server.post("/v1/responses", {**given, "input": "What?", "tool_choice": choice}).json()
    assert {item["type"] for item in first["output"]} == {"message"}
    assert first["weir"] == OWN
    assert used(first)[0]["result"] == RESULT
    seen = first["usage"]["weir"]["seen"]
    second = {**given, "input": "And?", "previous_response_id": first["id"]}
    told = server.post("/v1/responses", {**second, "max_output_tokens": 5}).json()
    assert told["usage"]["input_tokens_details"]["cached_tokens"] == seen - 1
    # The same with the whole history sent back, and streamed.
    asked = {"role": "user", "content": "What?"}
    history = [asked, *first["output"], {"role": "user", "content": "?"}]
    body = {**given, "input": history, "store": False, "stream": True, "max_output_tokens": 5}
    lines = server.post("/v1/responses", body).text.splitlines()
    last = [json.loads(line[6:]) for line in lines if line.startswith("data: {")][-1]
    assert last["response"]["usage"]["input_tokens_details"]["cached_tokens"] == seen - 1


def test_calls_of_one_answer_are_bounded(server):
    bias = {str(make_tokenizer()("<")["input_ids"][0]): 9.0}
    form = {"type": "json_schema", "json_schema": {"name": "x", "schema": ONE}}
    whole = ask(server, logit_bias=bias, max_tokens=1500, response_format=form).json()
    assert len(used(whole)) == MAX_CALLS
    assert json.loads(whole["choices"][0]["message"]["content"]) == ONE["const"]
    assert "tool_calls" not in whole["choices"][0]["message"]


def test_an_answer_that_ends_at_its_limit_within_a_call_executes_nothing(server, served):
    whole = ask(server, max_tokens=20).json()
    assert whole["choices"][0]["finish_reason"] == "length"
    assert served[1].asked == []
    assert used(whole) == []
    assert whole["choices"][0]["message"]["content"] is None or (
        whole["choices"][0]["message"]["content"] == ""
    )


@pytest.mark.parametrize(
    ("result", "told"),
    [
        (WeirError("there is no such word"), "Error: there is no such word"),
        (RuntimeError("secret"), "Error: the tool has failed"),
        ("x" * (2 * MAX_RESULT), "x [cut]"),
        ("", ""),
        ("a lone \ud800 surrogate", "a lone"),
    ],
    ids=["error", "bug", "long", "empty", "surrogate"],
)
def test_what_goes_wrong_in_a_tool_is_told_to_the_model(server, served, result, told):
    served[1].result = result
    whole = ask(server)
    assert whole.status_code == 200
    (use,) = used(whole.json())
    assert told in use["result"]
    assert len(use["result"]) <= MAX_RESULT


def test_others_are_answered_while_a_tool_runs_and_who_hangs_up_frees_the_row(server, served):
    book = served[1]
    book.may_go_on.clear()
    body = {"model": "small", "messages": [USER], "weir": OWN, "tool_choice": NAMED, "seed": 1}
    url = f"{server.url}/v1/chat/completions"
    with httpx.stream("POST", url, json={**body, "stream": True}, timeout=60) as stream:
        chunks = stream.iter_raw()  # closing this iterator would hang up
        next(chunks)
        for _ in range(3):
            plain = {"model": "small", "messages": [USER], "max_tokens": 3}
            assert server.post("/v1/chat/completions", plain).status_code == 200
        assert book.called.wait(30)
        load = server.engine.load()
        assert load.busy == 1
    server.settled()
    book.may_go_on.set()
    assert ask(server).status_code == 200


def test_a_schema_holds_for_what_is_said_after_the_call(server):
    form = {"type": "json_schema", "json_schema": {"name": "x", "schema": ONE}}
    for seed in range(3):
        whole = ask(server, response_format=form, seed=seed, max_tokens=1500).json()
        assert json.loads(whole["choices"][0]["message"]["content"]) == {"a": 1}
        assert used(whole)


# --- refused


def test_what_cannot_be_switched_on_is_refused_by_name(server):
    tool = {"type": "function", "function": {"name": "look_up", "parameters": CITY}}
    cases = [
        ({"weir": {"tools": ["nothing"]}}, "weir.tools[0]", "'look_up'"),
        ({"weir": {"tools": ["look_up", "look_up"]}}, "weir.tools[1]", "twice"),
        ({"tools": [tool]}, "weir.tools[0]", "Rename that tool"),
        ({"weir": {"tools": "look_up"}}, "weir.tools", "list"),
        ({"weir": {"tool": ["look_up"]}}, "weir.tool", ""),
        ({"weir": {"tools": ["../x"]}}, "weir.tools[0]", ""),
        ({"weir": {**OWN, "recall": 5}}, "weir.recall", "Start it with --archive"),
    ]
    for given, param, words in cases:
        wrong = ask(server, **given)
        assert wrong.status_code == 400
        error = wrong.json()["error"]
        assert error["param"] == param, error
        assert words in error["message"]
    body = {"model": "small", "prompt": "x", "weir": OWN}
    assert server.post("/v1/completions", body).json()["error"]["param"] == "weir.tools"
    for chats_only in ("recall", "tell_forgotten"):
        wrong = {**body, "weir": {chats_only: True if chats_only == "tell_forgotten" else 5}}
        refused = server.post("/v1/completions", wrong)
        assert refused.json()["error"]["param"] == f"weir.{chats_only}"
    raw = {"model": "small", "prompt": "x", "weir": OWN, "raw": True}
    assert server.post("/api/generate", raw).status_code == 400
    no_tools = {"model": "small", "messages": [USER], "weir": {"tools": []}, "max_tokens": 3}
    assert server.post("/v1/chat/completions", no_tools).status_code == 200


def test_a_template_that_needs_the_call_before_its_result_is_refused():
    picky = TAKES_TOOLS.replace(
        "{% for m in messages %}",
        "{% for m in messages %}{% if m.role == 'tool' and not loop.previtem.tool_calls %}"
        "{{ raise_exception('a result of no call') }}{% endif %}",
    )
    engine_client, _ = with_book(picky)
    with serving(engine_client) as server:
        wrong = ask(server)
        assert wrong.status_code == 400
        assert wrong.json()["error"]["param"] == "weir.tools"
        assert "chat template" in wrong.json()["error"]["message"]


# --- reading


@pytest.mark.parametrize("size", [1, 4, 1000])
def test_calls_of_the_servers_tools_are_not_parts_and_texts_become_paragraphs(size):
    rounds = [
        'Let me see.\n<tool_call>\n{"name": "look_up", "arguments": {"word": "a}"}}\n</tool_call>',
        '  <tool_call>{"name": "look_up", "arguments": {}}</tool_call>',
        ' It is red. \n<tool_call>{"name": "get", "arguments": {"x": 1}}</tool_call>',
    ]
    parser = CallParser(HERMES, {"look_up", "get"}, own={"look_up"})
    parts, calls = [], []
    for number, text in enumerate(rounds):
        for at in range(0, len(text), size):
            parts += parser.feed(text[at : at + size])
        calls += parser.own_calls
        parts += parser.finish() if number == 2 else parser.next_round()
    assert calls == [("look_up", '{"word": "a}"}'), ("look_up", "{}")]
    text = "".join(p.text for p in parts if isinstance(p, TextDelta) and p.call is None)
    assert text == "Let me see.\n\nIt is red."
    assert [p for p in parts if isinstance(p, CallStart)] == [CallStart(0, "get")]
    assert [p for p in parts if isinstance(p, CallEnd)] == [CallEnd(0)]
    assert parser.num_complete == 1


ROME = '{"name": "get", "arguments": {"city": "Rome", "hot": true}}'
WORD_CALL = '{"name": "look_up", "arguments": {"word": "a"}}'


@pytest.mark.parametrize("form", ["hermes", "llama", "mistral", "args"])
def test_a_call_of_the_servers_ends_a_part_and_never_joins_others(form):
    from test_tool_parser import accepts, shape_of

    forms = {"hermes": HERMES, "llama": LLAMA, "mistral": MISTRAL, "args": MISTRAL_ARGS}
    shape = {
        "hermes": lambda *calls: "".join(f"<tool_call>{call}</tool_call>" for call in calls),
        "llama": lambda *calls: "".join(calls).replace("arguments", "parameters"),
        "mistral": lambda *calls: f"[TOOL_CALLS] [{', '.join(calls)}]",
        "args": lambda *calls: "".join(
            f"[TOOL_CALLS]{json.loads(c)['name']}[ARGS]{json.dumps(json.loads(c)['arguments'])}"
            for c in calls
        ),
    }[form]
    theirs = [Tool("get", None, CITY)]
    for choice in ("auto", "required"):
        both = shape_of(forms[form], choice, theirs, own=[LOOK_UP])
        assert accepts(both, shape(ROME))
        assert accepts(both, shape(WORD_CALL))
        assert accepts(both, shape(ROME, ROME)) == (form != "llama")
        for mixed in ((ROME, WORD_CALL), (WORD_CALL, ROME), (WORD_CALL, WORD_CALL)):
            assert not accepts(both, shape(*mixed))
        alone = shape_of(forms[form], choice, [], own=[LOOK_UP])
        assert accepts(alone, shape(WORD_CALL))
        assert not accepts(alone, shape(ROME))
        assert accepts(alone, "Hello") == (choice == "auto")
