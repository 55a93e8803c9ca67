"""Ollama's API: `/api/chat`, `/api/generate`, and the routes that describe models."""

from __future__ import annotations

import hashlib
import json
import time
from collections.abc import AsyncIterator, Callable, Sequence
from datetime import UTC, datetime
from functools import partial
from typing import Any

from fastapi import APIRouter, Request
from starlette.responses import JSONResponse, Response

from weir import __version__
from weir.models import stored_bytes
from weir.native import describe_weights, has_block_weights
from weir.serve.api.chat_request import AnswerReader, ChatRequest, answer_chat
from weir.serve.api.dependencies import Client, Owner, run_in_thread
from weir.serve.api.errors import CODES, APIError, ollama_error
from weir.serve.api.generation import (
    Events,
    Renderer,
    make_request,
    send_answers,
    usage_of,
    warn,
)
from weir.serve.api.models import STARTED, WINDOW, check_model, names_of
from weir.serve.api.openapi import describe_body
from weir.serve.api.output_format import refuse_own_tools
from weir.serve.api.requests import read_body, read_content
from weir.serve.api.schemas.formats import ToolOffer
from weir.serve.api.schemas.ollama import (
    TAG,
    OllamaBody,
    OllamaChatBody,
    OllamaGenerateBody,
    ShowBody,
)
from weir.serve.api.thinking import note_without_template
from weir.serve.client import EngineClient, Generation
from weir.serve.messages import Call
from weir.serve.thoughts import ThoughtDelta
from weir.serve.tools.parser import AnswerPart, CallStart, TextDelta

SPOKEN = "0.12.6"
"""The version of Ollama whose API this is. Clients refuse older versions."""
NDJSON = "application/x-ndjson"

router = APIRouter()


@router.post(
    "/api/chat", openapi_extra=describe_body(OllamaChatBody, streams=True, media_type=NDJSON)
)
async def chat(request: Request, client: Client, owner: Owner) -> Response:
    """Answer a chat, for Ollama's clients."""
    body, messages = await read_content(request, OllamaChatBody, owner, "messages", "history")
    body.model = own_name(client, body.model)
    if await _examine(_is_empty, messages):
        return _loaded(request, client, body, {"message": {"role": "assistant", "content": ""}})
    limit = ("options.num_predict", body.max_tokens)
    asked = ChatRequest(body, messages, body.offer, limit, None, body.held_to, "format")
    make = partial(OllamaRenderer, client)
    return await answer_chat(request, client, owner, asked, make)


@router.post(
    "/api/generate",
    openapi_extra=describe_body(OllamaGenerateBody, streams=True, media_type=NDJSON),
)
async def generate(request: Request, client: Client, owner: Owner) -> Response:
    """Answer a prompt, for Ollama's clients. With `raw`, the model continues the prompt without a
    chat template.
    """
    field, what = "prompt", "history"
    body, messages = await read_content(request, OllamaGenerateBody, owner, field, what)
    body.model = own_name(client, body.model)
    if await _examine(_has_no_prompt, messages):
        return _loaded(request, client, body, {"response": ""})
    limit = ("options.num_predict", body.max_tokens)
    make = partial(OllamaTextRenderer, client)
    if not body.raw:
        offer = ToolOffer(())
        asked = ChatRequest(body, messages, offer, limit, None, body.held_to, "format")
        return await answer_chat(request, client, owner, asked, make)
    check_model(client, body.model)
    refuse_own_tools(body)
    if body.held_to is not None:
        raise APIError(
            400, "raw and format cannot be combined. Send only one of them.", param="format"
        )
    note_without_template(body)
    is_here = isinstance(messages, list)
    text = messages[-1].content if is_here else await run_in_thread(messages.map, _text_of)
    match = partial(client.matcher.complete, owner, text)
    job = make_request(client, body, match, limit, None, client.limits.answer_default)
    return await send_answers(request, job, "prompt", make, body)


async def _examine(test: Callable[[Any, Sequence[Any]], bool], messages: Any) -> bool:
    """Return the result of a test on messages. The worker holds them if the body is large."""
    if isinstance(messages, list):
        return test(None, messages)
    found: bool = await run_in_thread(messages.call, test)
    return found


def _is_empty(_: Any, messages: Sequence[Any]) -> bool:
    return not messages


def _has_no_prompt(_: Any, messages: Sequence[Any]) -> bool:
    return not messages[-1].content


def _text_of(_: Any, messages: Sequence[Any]) -> str:
    text: str = messages[-1].content
    return text


@router.get("/api/version")
async def version() -> dict[str, Any]:
    """Return the version of Ollama's API that is served."""
    return {"version": SPOKEN, "weir": __version__}


@router.get("/api/tags")
async def tags(client: Client) -> dict[str, Any]:
    """List the models: only one, which may have several names."""
    return {"models": [_card(client, name) for name in names_of(client)]}


@router.get("/api/ps")
async def running(client: Client) -> dict[str, Any]:
    """List the models in memory: only one."""
    size = {"size_vram": 0, "expires_at": "2100-01-01T00:00:00Z", "context_length": WINDOW}
    return {"models": [{**_card(client, client.name), **size}]}


@router.post("/api/show", openapi_extra=describe_body(ShowBody))
async def show(request: Request, client: Client, owner: Owner) -> Response:
    """Describe the model."""
    body = await read_body(request, ShowBody, owner)
    name = body.model or body.name
    if not name:
        message = "Missing required parameter: 'model'."
        raise APIError(400, message, param="model", code=CODES["missing"])
    check_model(client, own_name(client, name))
    config = client.engine.model.config.get_text_config(decoder=True)
    kind = str(config.model_type)
    can = ["completion", "tools"] + ["thinking"] * client.renderer.thinks
    described = {
        "modelfile": "",
        "parameters": "",
        "template": str(client.tokenizer.chat_template or ""),
        "details": _details(client),
        "model_info": {
            "general.architecture": kind,
            "general.parameter_count": describe_weights(client.engine.model)[0],
            f"{kind}.context_length": WINDOW,
            f"{kind}.embedding_length": config.hidden_size,
            f"{kind}.block_count": config.num_hidden_layers,
        },
        "capabilities": can,
        "modified_at": _time(STARTED),
    }
    given = [name for name in ("system", "template", "options", "verbose") if getattr(body, name)]
    return JSONResponse(described, headers=warn(request, given))


def own_name(client: EngineClient, name: str) -> str:
    """Return the name of a model without the tag that Ollama's clients add, unless the model has a
    name with this tag.
    """
    plain = name.removesuffix(TAG)
    return plain if name != client.name and name not in client.aliases else name


def _loaded(
    request: Request, client: EngineClient, body: OllamaBody, fields: dict[str, Any]
) -> Response:
    """Answer a request without a prompt, which clients send to load a model."""
    check_model(client, body.model)
    head = {"model": client.name, "created_at": _time(time.time())}
    ended = {**head, **fields, "done": True, "done_reason": "load"}
    return JSONResponse(ended, headers=warn(request, body.skipped))


def _card(client: EngineClient, name: str) -> dict[str, Any]:
    model = client.engine.model
    return {
        "name": name,
        "model": name,
        "modified_at": _time(STARTED),
        "size": stored_bytes(model),
        "digest": hashlib.sha256(client.name.encode()).hexdigest(),
        "details": _details(client),
    }


def _details(client: EngineClient) -> dict[str, Any]:
    model = client.engine.model
    kind = str(model.config.get_text_config(decoder=True).model_type)
    weights, stored_as = describe_weights(model)
    millions = weights / 1e6
    return {
        "parent_model": "",
        "format": "gguf" if has_block_weights(model) else "safetensors",
        "family": kind,
        "families": [kind],
        "parameter_size": f"{millions / 1e3:.2f}B" if millions >= 1e3 else f"{millions:.2f}M",
        "quantization_level": stored_as.upper(),
    }


def _time(seconds: float) -> str:
    return datetime.fromtimestamp(seconds, UTC).isoformat().replace("+00:00", "Z")


class OllamaRenderer(Renderer):
    """Writes answers as lines of JSON. The last line has the counts and times."""

    media_type = NDJSON

    def __init__(self, client: EngineClient, generation: Generation) -> None:
        self._generation = generation
        self._model = client.name
        self._reader = AnswerReader(client, generation)
        self._first: float | None = None

    async def whole(self, events: Events) -> dict[str, Any]:
        """Write the answer as one object."""
        parts: list[AnswerPart | ThoughtDelta] = []
        async for several in events:
            for event in several:
                self._note_time()
                parts += self._reader.read(event)
        return {**self._line(parts), **self._end()}

    async def stream(self, events: Events) -> AsyncIterator[bytes]:
        """Write the answer as lines."""
        calls: list[AnswerPart | ThoughtDelta] = []  # calls are sent whole
        async for several in events:
            self._note_time()
            now: list[AnswerPart | ThoughtDelta] = []
            for event in several:
                for part in self._reader.read(event):
                    is_text = isinstance(part, ThoughtDelta) or (
                        isinstance(part, TextDelta) and part.call is None
                    )
                    (now if is_text else calls).append(part)
            if now:
                yield _encode({**self._line(now), "done": False})
        if calls:
            yield _encode({**self._line(calls), "done": False})
        yield _encode({**self._line([]), **self._end()})

    def keep_alive(self, generation: Generation) -> bytes:
        """Write a line without text, because this API has no comments."""
        return _encode({**self._line([]), "done": False})

    def failure(self, error: APIError) -> bytes:
        """Write that the answer has failed."""
        return _encode(ollama_error(error))

    def _note_time(self) -> None:
        if self._first is None:
            self._first = time.perf_counter()

    def _line(self, parts: Sequence[AnswerPart | ThoughtDelta]) -> dict[str, Any]:
        """Return a line with parts of the answer."""
        head = {"model": self._model, "created_at": _time(time.time())}
        text = "".join(p.text for p in parts if isinstance(p, TextDelta) and p.call is None)
        thoughts = "".join(part.text for part in parts if isinstance(part, ThoughtDelta))
        names = [part.name for part in parts if isinstance(part, CallStart)]
        arguments = [""] * len(names)
        for part in parts:
            if isinstance(part, TextDelta) and part.call is not None:
                arguments[part.call] += part.text
        calls = [
            {"function": {"name": name, "arguments": _arguments(given)}}
            for name, given in zip(names, arguments, strict=True)
        ]
        return {**head, **self._content(text, thoughts, calls)}

    def _content(self, text: str, thoughts: str, calls: list[dict[str, Any]]) -> dict[str, Any]:
        """Return the fields of a line with the answer."""
        message: dict[str, Any] = {"role": "assistant", "content": text}
        if thoughts:
            message["thinking"] = thoughts
        if calls:
            message["tool_calls"] = calls
        return {"message": message}

    def _end(self) -> dict[str, Any]:
        """Return the fields of the last line. Times are in nanoseconds."""
        generation, now = self._generation, time.perf_counter()
        first = now if self._first is None else self._first
        return {
            "done": True,
            "done_reason": generation.finished[0].reason,
            "total_duration": round((now - generation.began) * 1e9),
            "load_duration": 0,
            "prompt_eval_count": generation.prompt.length,
            "prompt_eval_duration": round((first - generation.began) * 1e9),
            "eval_count": generation.tokens,
            "eval_duration": round((now - first) * 1e9),
            "cached_count": generation.cached,
            "weir": usage_of(generation)["weir"],
        }


class OllamaTextRenderer(OllamaRenderer):
    """Writes answers to `/api/generate`."""

    def _content(self, text: str, thoughts: str, calls: list[dict[str, Any]]) -> dict[str, Any]:
        return {"response": text, **({"thinking": thoughts} if thoughts else {})}


def _encode(data: dict[str, Any]) -> bytes:
    return json.dumps(data, separators=(",", ":")).encode() + b"\n"


def _arguments(text: str) -> Any:
    """Return the arguments of a call as an object. Empty if the answer was cut off."""
    found = Call("", "", text).parse_arguments()
    return found if isinstance(found, dict) else {}
