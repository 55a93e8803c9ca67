"""Bodies of chat and text completions.

Unknown fields of a body are refused, as with OpenAI, unless they ask for nothing. Unknown fields of
messages and their parts have no effect, and a warning names them. Fields marked `Only` ask for
features that weir does not have, so they may be left out or have the listed values.
`function_call` and `audio` of a message are refused. Other fields of type `Any` have no effect.
"""

from __future__ import annotations

from collections.abc import Mapping
from itertools import islice
from typing import Annotated, Any, ClassVar, Literal, Self, get_args

from pydantic import (
    AfterValidator,
    BaseModel,
    Discriminator,
    Field,
    ModelWrapValidatorHandler,
    PrivateAttr,
    StringConstraints,
    Tag,
    ValidationError,
    ValidationInfo,
    field_validator,
    model_validator,
)
from pydantic_core import ErrorDetails, InitErrorDetails, PydanticCustomError
from pydantic_core.core_schema import ErrorType

from weir.serve.api.schemas.base import (
    MAX_NOTES,
    Given,
    Lenient,
    ListOf,
    Name,
    Only,
    Strict,
    Whole,
    bounded_dict,
    check_call_ids,
    check_content,
    check_limit,
    is_nothing,
    show_name,
    unknown_fields,
    unsupported,
)
from weir.serve.api.schemas.formats import (
    AllowedTools,
    AnyTool,
    FunctionTool,
    NamedTool,
    ResponseFormat,
    ToolCall,
    ToolChoice,
    ToolOffer,
    offered_places,
    skipped_tools,
)
from weir.serve.engine.sampler import SamplingParams
from weir.serve.messages import Call, Message
from weir.stream import Sampling

OPTIONS = {
    "n_predict": "max_tokens",
    "num_predict": "max_tokens",
    "repeat_penalty": "repetition_penalty",
}
"""Names in llama.cpp and Ollama for fields of these bodies."""
HONORED_OPTIONS = {
    "max_tokens",
    "repetition_penalty",
    "temperature",
    "top_k",
    "top_p",
    "min_p",
    "seed",
    "stop",
    "presence_penalty",
    "frequency_penalty",
}
"""Options in Ollama's `options` that have an effect, by the names of these bodies' fields
(`OPTIONS` renames some).
"""
SKIPPED_OPTIONS = "skipped_options"
ZERO_ASKS = {"keep_alive", "repeat_last_n", "id_slot", "typical_p"}
"""Fields without an effect that ask for something when they are 0. Other fields are off at 0."""
MAX_OPTIONS = 64
Limit = Annotated[Whole, Field(ge=-2, lt=2**63), AfterValidator(check_limit)]
"""The most tokens of an answer. -1 and -2 mean as many as the server allows, as in llama.cpp and
Ollama.
"""
Variable = Annotated[str, StringConstraints(max_length=1024)] | bool | Whole | float | None
"""A variable of a chat template."""
Effort = Annotated[str, StringConstraints(max_length=64)]
Stop = Annotated[str, StringConstraints(min_length=1, max_length=1024)]
Token = Annotated[Whole, Field(ge=0, lt=2**31)]
Bias = Annotated[float, Field(ge=-100, le=100, allow_inf_nan=False)]


def _wrong_at(field: str, words: str) -> ValidationError:
    """Make the error for a wrong field, for a validator of the whole body."""
    lines = InitErrorDetails(type=unsupported(words), loc=(field,), input=None)
    return ValidationError.from_exception_data("body", [lines])


def _renamed(
    error: ErrorDetails, names: Mapping[tuple[str | int, ...], tuple[str, ...]]
) -> InitErrorDetails:
    """Copy an error, with the client's name for the field (`names`) in place of the new name."""
    loc, kind = error["loc"], error["type"]
    known = kind in get_args(ErrorType)
    return InitErrorDetails(
        type=kind if known else PydanticCustomError(kind, error["msg"]),
        loc=(*names.get(loc[:1], loc[:1]), *loc[1:]),
        input=error["input"],
        ctx=error.get("ctx", {}),
    )


class TextPart(Lenient):
    """Text content of a message, in any of OpenAI's APIs."""

    type: Literal["text", "input_text", "output_text"]
    text: Annotated[str, Given]


class RefusalPart(Lenient):
    """An answer in which a model refused. It is treated as text."""

    type: Literal["refusal"]
    refusal: Annotated[str, Given]

    @property
    def text(self) -> str:
        """The text of the part."""
        return self.refusal


def kind_of_part(value: Any) -> str:
    """Distinguish a refusal from text, for a discriminator."""
    kind = value.get("type") if isinstance(value, dict) else getattr(value, "type", None)
    return "a refusal" if kind == "refusal" else "a text"


AnyPart = Annotated[
    Annotated[TextPart, Tag("a text")] | Annotated[RefusalPart, Tag("a refusal")],
    Discriminator(kind_of_part),
]


class ChatMessage(Lenient):
    """A message of the conversation."""

    role: Literal["system", "developer", "user", "assistant", "tool"]
    content: str | ListOf[AnyPart] | None = None
    refusal: str | None = None
    name: Annotated[str, StringConstraints(max_length=64)] | None = None
    tool_calls: Annotated[ListOf[ToolCall], Field(max_length=128)] | None = None
    tool_call_id: Annotated[str, StringConstraints(max_length=256)] | None = None
    function_call: Any = None
    audio: Any = None

    @field_validator("function_call")
    @classmethod
    def _check_function_call(cls, value: Any) -> Any:
        if value:
            raise unsupported("functions are not supported. Use tools and tool_calls.")
        return value

    @field_validator("audio")
    @classmethod
    def _check_audio(cls, value: Any) -> Any:
        if value:
            raise unsupported("audio is not supported. Send the text as content.")
        return value

    @model_validator(mode="after")
    def _check_role(self) -> Self:
        if self.tool_calls and self.role != "assistant":
            raise unsupported("tool_calls are allowed only in messages with the role assistant")
        check_call_ids(call.id for call in self.tool_calls or ())
        if (self.role == "tool") != (self.tool_call_id is not None):
            raise unsupported(
                "tool_call_id is required with the role tool, and not allowed with any other role"
            )
        check_content(self, self.role, self.tool_calls, self.refusal is not None)
        return self

    def message(self) -> Message:
        """Convert to the server's own type."""
        content = self.content or self.refusal or ""
        if not isinstance(content, str):
            content = "".join(part.text for part in content)  # a part may end inside a word
        role = "system" if self.role == "developer" else self.role
        calls = tuple(
            Call(call.id, call.function.name, call.function.arguments)
            for call in self.tool_calls or ()
        )
        return Message(role, content, self.name, calls, self.tool_call_id)


class StreamOptions(Strict):
    """Options of a streamed response."""

    include_usage: bool | None = None
    continuous_usage_stats: bool | None = None
    include_obfuscation: bool | None = None


MAX_RECALL = 8192
"""The most tokens of recalled text that a request may ask for."""


Calls = Annotated[
    ListOf[Annotated[str, StringConstraints(min_length=1, max_length=256)]], Field(max_length=128)
]
"""Ids of tool calls."""


class WeirOptions(Strict):
    """Options that only this server has.

    `tools` are tools of the server that the model may call. The server executes such a call within
    the answer. `drop` lists the ids of tool calls whose outputs are dropped before the answer.
    `pin` lists the ids of tool calls whose outputs stay in the cache for good.

    `tell_forgotten` lets the model read a note that says what has left its cache.

    `recall` is the most tokens of earlier text that the server may put before the user's new
    message if that message asks for text that has left the cache; 0 for none. If it is left out,
    the server's setting applies.
    """

    recall: Annotated[Whole, Field(ge=0, le=MAX_RECALL)] | None = None
    tools: Annotated[ListOf[Name], Field(max_length=16)] | None = None
    tell_forgotten: bool | None = None
    drop: Calls | None = None
    pin: Calls | None = None


class GenerationBody(Strict):
    """Fields of every request for a completion: the model and the sampling parameters.

    Fields of the type `Any` that are not `Only` have no effect. A warning names those that a
    request has.
    """

    _notes: list[str] = PrivateAttr(default_factory=list)

    model: Annotated[str, StringConstraints(max_length=512)]
    stream: bool | None = None
    weir: WeirOptions | None = None
    return_progress: bool | None = None
    seed: Annotated[Whole, Field(ge=-(2**63), lt=2**63)] | None = None
    stop: Stop | Annotated[ListOf[Stop], Field(max_length=4)] | None = None
    stop_token_ids: Annotated[ListOf[Token], Field(max_length=16)] | None = None
    ignore_eos: bool | None = None
    temperature: Annotated[float, Field(ge=0, le=2, allow_inf_nan=False)] | None = None
    top_p: Annotated[float, Field(ge=0, le=1, allow_inf_nan=False)] | None = None
    top_k: Annotated[Whole, Field(ge=-1, lt=2**31)] | None = None
    min_p: Annotated[float, Field(ge=0, le=1, allow_inf_nan=False)] | None = None
    presence_penalty: Annotated[float, Field(ge=-2, le=2, allow_inf_nan=False)] | None = None
    frequency_penalty: Annotated[float, Field(ge=-2, le=2, allow_inf_nan=False)] | None = None
    repetition_penalty: Annotated[float, Field(ge=0.01, le=10, allow_inf_nan=False)] | None = None
    logit_bias: Annotated[dict[str, Bias], Field(max_length=1024), bounded_dict(1024)] | None = None

    # Options of other servers for sampling, for output, and for memory.
    cache_prompt: Any = None
    id_slot: Any = None
    n_keep: Any = None
    samplers: Any = None
    mirostat: Any = None
    mirostat_tau: Any = None
    mirostat_eta: Any = None
    typical_p: Any = None
    tfs_z: Any = None
    dry_multiplier: Any = None
    dry_base: Any = None
    dry_allowed_length: Any = None
    dry_penalty_last_n: Any = None
    dry_sequence_breakers: Any = None
    xtc_probability: Any = None
    xtc_threshold: Any = None
    dynatemp_range: Any = None
    dynatemp_exponent: Any = None
    repeat_last_n: Any = None
    min_keep: Any = None
    timings_per_token: Any = None
    post_sampling_probs: Any = None
    t_max_predict_ms: Any = None
    keep_alive: Any = None
    priority: Any = None
    request_id: Any = None
    cache_salt: Any = None
    skip_special_tokens: Any = None
    spaces_between_special_tokens: Any = None
    include_reasoning: Any = None
    reasoning_format: Any = None
    litellm_session_id: Any = None

    @model_validator(mode="before")
    @classmethod
    def _rename(cls, value: Any) -> Any:
        """Give options of llama.cpp and Ollama the names of this body's fields, and move the
        entries of Ollama's `options` into the body.
        """
        if not isinstance(value, dict):
            return value
        value, options = dict(value), value.get("options")
        if "options" in value and "options" not in cls.model_fields and options is not None:
            if not isinstance(options, dict):
                raise _wrong_at("options", "must be an object")
            if len(options) > MAX_OPTIONS:
                words = f"has {len(options)} entries, and at most {MAX_OPTIONS} are allowed"
                raise _wrong_at("options", words)
            del value["options"]
            for name, given in options.items():
                known = OPTIONS.get(name, name)
                target = cls.limit_field if known == "max_tokens" else known
                is_known = known in HONORED_OPTIONS and target in cls.model_fields
                if is_known and target not in value:
                    value[target] = given
                elif not is_nothing(given):
                    value.setdefault(SKIPPED_OPTIONS, {})[name] = None
        for name, known in OPTIONS.items():
            target = cls.limit_field if known == "max_tokens" else known
            is_free = name not in cls.model_fields and target not in value
            if name in value and is_free and target in cls.model_fields:
                value[target] = value.pop(name)
            elif name in value and name not in cls.model_fields and not is_nothing(value[name]):
                raise _wrong_at(name, f"is another name for {target}. Send only one of them")
        return value

    @model_validator(mode="wrap")
    @classmethod
    def _name_as_given(cls, value: Any, handler: ModelWrapValidatorHandler[Self]) -> Self:
        """Report a wrong field under the client's name for it, if `_rename` renamed it."""
        try:
            return handler(value)
        except ValidationError as error:
            names = cls._names_given(value)
            found = error.errors(include_url=False)
            if not any(one["loc"][:1] in names for one in found):
                raise
            raise ValidationError.from_exception_data(
                error.title, [_renamed(one, names) for one in found]
            ) from None

    @classmethod
    def _names_given(cls, value: Any) -> dict[tuple[str | int, ...], tuple[str, ...]]:
        """Return where the client wrote the fields that `_rename` renames, by their new paths."""
        if not isinstance(value, dict):
            return {}
        options = value.get("options")
        given: dict[str, tuple[str, ...]] = {name: (name,) for name in OPTIONS if name in value}
        if isinstance(options, dict):
            given = {name: ("options", name) for name in options} | given
        return {
            (target,): place
            for name, place in reversed(given.items())
            if (known := OPTIONS.get(name, name)) in HONORED_OPTIONS
            and (target := cls.limit_field if known == "max_tokens" else known) not in value
        }

    @model_validator(mode="after")
    def _note_unknown(self) -> Self:
        """Note unknown fields of messages and items.

        This happens here, because the worker, which parses large bodies, returns them without
        their messages.
        """
        found = (
            one
            for name in type(self).model_fields
            if isinstance(value := getattr(self, name), list | BaseModel)
            for one in unknown_fields(value, name)
        )
        self._notes += islice(found, MAX_NOTES)
        return self

    chat_template_kwargs: (
        Annotated[dict[str, Variable], Field(max_length=16), bounded_dict(16)] | None
    ) = None
    enable_thinking: bool | None = None

    @property
    def effort_field(self) -> str:
        """The field that says how much the model should think."""
        return "reasoning_effort"

    @property
    def effort(self) -> str | None:
        """How much the model should think."""
        return None

    skipped_options: Annotated[dict[str, None], Field(max_length=MAX_OPTIONS)] | None = None
    limit_field: ClassVar[str] = "max_tokens"

    @property
    def skipped(self) -> list[str]:
        """Return the parts of the request that have no effect, for a warning."""
        fields = type(self).model_fields.items()
        without = [
            name
            for name, field in fields
            if field.annotation is Any
            and not any(isinstance(one, Only) for one in field.metadata)
            and not is_nothing(getattr(self, name))
            and (getattr(self, name) != 0 or name in ZERO_ASKS)
        ]
        options = [f"options.{show_name(name)}" for name in self.skipped_options or ()]
        alone = ["return_progress (without stream)"] if self.wants_progress > self.streams else []
        return [*without, *options, *alone, *self._notes]

    @field_validator("stream_options", mode="after", check_fields=False)
    @classmethod
    def _check_stream_options(cls, value: Any, info: ValidationInfo) -> Any:
        if value is not None and not info.data.get("stream"):
            raise unsupported("needs stream: true")
        return value

    def note(self, what: str) -> None:
        """Add to the warning something that is not done as the client asks."""
        self._notes.append(what)

    @property
    def tells_forgotten(self) -> bool:
        """Whether the model is told what has left the cache."""
        return self.weir is not None and bool(self.weir.tell_forgotten)

    @property
    def drops(self) -> list[str]:
        """The ids of calls whose outputs are dropped."""
        return [] if self.weir is None else list(self.weir.drop or ())

    @property
    def pins(self) -> list[str]:
        """The ids of calls whose outputs are pinned."""
        return [] if self.weir is None else list(self.weir.pin or ())

    @property
    def recall(self) -> int | None:
        """Number of tokens of recalled text that the request asks for. None if it does not say."""
        return None if self.weir is None else self.weir.recall

    @property
    def own_tools(self) -> list[str]:
        """The names of the server's tools that the model may call."""
        return [] if self.weir is None else list(self.weir.tools or ())

    @property
    def streams(self) -> bool:
        """Whether the answers are sent while they are generated."""
        return bool(self.stream)

    @property
    def wants_progress(self) -> bool:
        """Whether a stream reports the progress of reading the prompt, as in llama.cpp."""
        return bool(self.return_progress)

    @property
    def num_answers(self) -> int:
        """Number of completions to generate."""
        return 1

    @property
    def stops(self) -> list[str]:
        """The stop sequences."""
        return [self.stop] if isinstance(self.stop, str) else list(self.stop or ())

    def sampling_params(
        self, logprobs: int | None, seed: int, defaults: SamplingParams
    ) -> list[SamplingParams]:
        """Sampling parameters of each completion; `seed` is the default seed."""
        usual = defaults.sampling
        top_k = usual.top_k if self.top_k is None else self.top_k
        top_p = usual.top_p if self.top_p is None else self.top_p
        min_p = usual.min_p if self.min_p is None else self.min_p
        sampling = Sampling(
            temperature=usual.temperature if self.temperature is None else self.temperature,
            top_k=top_k if top_k and top_k > 0 else None,
            top_p=None if top_p == 1 else top_p,
            min_p=min_p or None,
        )
        first = seed if self.seed is None else self.seed
        return [
            SamplingParams(
                sampling=sampling,
                repetition=self.repetition_penalty or defaults.repetition,
                presence=self.presence_penalty or 0.0,
                frequency=self.frequency_penalty or 0.0,
                bias={int(token): bias for token, bias in (self.logit_bias or {}).items()},
                logprobs=logprobs,
                seed=first + answer,
            )
            for answer in range(self.num_answers)
        ]


class CompletionBody(GenerationBody):
    """Fields that chat and text completions have in common."""

    stream_options: StreamOptions | None = None
    max_tokens: Limit | None = None
    n: Annotated[Whole, Field(ge=1, le=128)] | None = None

    client_metadata: Any = None
    metadata: Any = None
    prediction: Any = None
    prompt_cache_key: Any = None
    prompt_cache_options: Any = None
    prompt_cache_retention: Any = None
    reasoning_effort: Effort | None = None
    safety_identifier: Any = None
    service_tier: Any = None
    store: Any = None
    user: Any = None
    verbosity: Any = None

    audio: Annotated[Any, Only(None)] = None
    best_of: Annotated[Any, Only(None, 1)] = None
    echo: Annotated[Any, Only(None, False)] = None
    function_call: Annotated[Any, Only(None, "none", "auto", instead="Use tool_choice")] = None
    functions: Annotated[Any, Only(None, [], instead="Use tools")] = None
    modalities: Annotated[Any, Only(None, ["text"])] = None
    suffix: Annotated[Any, Only(None, "")] = None
    web_search_options: Annotated[Any, Only(None)] = None

    @property
    def skipped(self) -> list[str]:
        """The parts of the request that have no effect, for a warning."""
        padded = self.stream_options is not None and self.stream_options.include_obfuscation
        return [*super().skipped, *["stream_options.include_obfuscation"] * bool(padded)]

    @property
    def num_answers(self) -> int:
        """Number of completions to generate."""
        return self.n or 1

    @property
    def effort(self) -> str | None:
        """How much the model should think."""
        return self.reasoning_effort

    @property
    def counts_always(self) -> bool:
        """Whether every chunk of a stream has the token usage so far."""
        return bool(self.stream_options and self.stream_options.continuous_usage_stats)

    @property
    def include_usage(self) -> bool:
        """Whether the last chunk of a stream has the token usage."""
        return bool(self.stream_options and self.stream_options.include_usage)


class ChatBody(CompletionBody):
    """Request body of `POST /v1/chat/completions`."""

    messages: Annotated[ListOf[ChatMessage], Field(min_length=1), Given]
    max_completion_tokens: Limit | None = None
    logprobs: bool | None = None
    top_logprobs: Annotated[Whole, Field(ge=0, le=20)] | None = None
    response_format: ResponseFormat | None = None
    tools: Annotated[ListOf[AnyTool], Field(max_length=128)] | None = None
    tool_choice: ToolChoice | None = None
    parallel_tool_calls: bool | None = None
    continue_final_message: bool | None = None
    add_generation_prompt: bool | None = None

    @model_validator(mode="after")
    def _check_end(self) -> Self:
        """Refuse an option about continuing the last message if it asks for something else than
        what the server does anyway.
        """
        continues = self.messages[-1].role == "assistant"
        for name, asked in (
            ("continue_final_message", self.continue_final_message),
            ("add_generation_prompt", _opposite(self.add_generation_prompt)),
        ):
            if asked is not None and asked != continues:
                raise unsupported(
                    f"{name} does not match the messages: an assistant message at the end is "
                    f"continued, and any other message is answered. Leave {name} out"
                )
        return self

    @property
    def skipped(self) -> list[str]:
        """The parts of the request that have no effect, for a warning."""
        form = self.response_format
        described = (
            form is not None and form.json_schema is not None and form.json_schema.description
        )
        forms = ["response_format.json_schema.description"] if described else []
        newer = self.max_completion_tokens
        limits = (
            ["max_tokens"] if newer is not None and self.max_tokens not in (None, newer) else []
        )
        return [*super().skipped, *skipped_tools(self.tools), *forms, *limits]

    @property
    def history(self) -> list[Message]:
        """The messages, as the server's own."""
        return [message.message() for message in self.messages]

    @property
    def offer(self) -> ToolOffer:
        """The tools of the request."""
        offered = [tool for tool in self.tools or () if isinstance(tool, FunctionTool)]
        tools = [tool.function.tool() for tool in offered]
        parallel, choice = self.parallel_tool_calls is not False, self.tool_choice
        schema, chosen = "tools[{}].function.parameters", "tool_choice.function.name"
        places = offered_places(self.tools)
        if isinstance(choice, NamedTool):
            names = [choice.function.name]
            return ToolOffer(tools, "required", names, False, schema, chosen, places=places)
        if isinstance(choice, AllowedTools):
            some, chosen = choice.allowed_tools, "tool_choice.allowed_tools.tools"
            names = [tool.function.name for tool in some.tools]
            return ToolOffer(tools, some.mode, names, parallel, schema, chosen, places=places)
        return ToolOffer(tools, choice, None, parallel, schema, places=places)


class TextBody(CompletionBody):
    """Request body of `POST /v1/completions`."""

    prompt: Annotated[str | ListOf[Token] | ListOf[str] | ListOf[ListOf[Token]], Given]
    logprobs: Annotated[Whole, Field(ge=0, le=5)] | None = None

    @field_validator("prompt", mode="after")
    @classmethod
    def _check_prompt(cls, value: Any) -> Any:
        if isinstance(value, list) and len(value) != 1 and not _is_ids(value):
            raise unsupported(
                "a request can have only one prompt. Send one request for each prompt"
                if value
                else "the list is empty, and a request needs a prompt"
            )
        return value

    @property
    def only_prompt(self) -> str | list[int]:
        """The prompt, without the list around it."""
        prompt: Any = self.prompt
        one: str | list[int] = prompt if isinstance(prompt, str) or _is_ids(prompt) else prompt[0]
        return one


def _opposite(value: bool | None) -> bool | None:
    return None if value is None else not value


def _is_ids(prompt: list[Any]) -> bool:
    """Return whether a list is a single prompt of token ids, not a list of prompts."""
    return bool(prompt) and isinstance(prompt[0], int)
