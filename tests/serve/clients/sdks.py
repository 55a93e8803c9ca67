"""Talks to a server with one Python client: streamed turns, one of them longer than the model's
window, a resumed conversation, and a forced call with its result.

Run as `python sdks.py URL CLIENT` in an environment that has the client. URL is a relay in front of
the server, so that the test can check what was read. `GET URL/mark/fresh` tells the relay that a
new history begins. Prints one line of JSON with the name and the arguments of the call, how many
answers had text, and whether the client rewrites calls.
"""

import asyncio
import json
import os
import sys
import tempfile
import urllib.request
from pathlib import Path
from typing import Any

os.environ["LITELLM_LOCAL_MODEL_COST_MAP"] = "True"  # LiteLLM fetches no list of prices
os.environ["OPENAI_AGENTS_DISABLE_TRACING"] = "1"
os.environ["ANONYMIZED_TELEMETRY"] = os.environ["OTEL_SDK_DISABLED"] = "false"
URL, WHICH = sys.argv[1:]
V1 = f"{URL}/v1"
MODEL, CLAUDE = "nano", "claude-sonnet-4-5-20250929"
# Messages whose answers are not empty with greedy decoding. Each client has a conversation that
# no other client has had. The second message is longer than the 512 tokens that nano was trained
# on.
FIRST = f"{WHICH}: Prince Andrew went to the"
LONG = " ".join(
    f"Then the {n}th officer of the regiment rode to the village by the river and he"
    for n in range(45)
)
AGAIN = ["In winter he was a", "He went to the"]
ANSWER, CALL = 16, 64  # tokens
PLACE: dict[str, Any] = {
    "type": "object",
    "properties": {"place": {"type": "string", "maxLength": 8}},
    "required": ["place"],
    "additionalProperties": False,
}
TELLS = "Tells where somebody is."
CHAT_TOOL = {
    "type": "function",
    "function": {"name": "where", "description": TELLS, "parameters": PLACE, "strict": True},
}
LOOP = asyncio.new_event_loop()


def mark(what: str) -> None:
    """Say that a new history begins."""
    urllib.request.urlopen(f"{URL}/mark/{what}", timeout=60).read()


def run(work: Any) -> Any:
    """Run a coroutine, and return its result."""
    return LOOP.run_until_complete(work)


class Talk:
    """A conversation by one client."""

    calls, rewrites = True, False
    """Whether it can call tools; whether it sends calls back in other words than the model's."""

    def start(self) -> None:
        """Connect."""

    def say(self, words: str) -> str:
        """Send a message; returns the answer's text."""
        raise NotImplementedError

    def resume(self) -> None:
        """Save the history as the client does, connect again, and load it."""
        self.messages = json.loads(json.dumps(self.messages))
        self.start()

    def call(self) -> tuple[str, Any]:
        """Make the model call a tool in a new history, and send the result."""
        raise NotImplementedError

    messages: Any


class OpenAIChat(Talk):
    def __init__(self) -> None:
        self.messages = []

    def start(self) -> None:
        from openai import OpenAI

        self.client = OpenAI(base_url=V1, api_key="none", max_retries=0)

    def say(self, words: str) -> str:
        self.messages.append({"role": "user", "content": words})
        chunks = self.client.chat.completions.create(
            model=MODEL,
            messages=self.messages,
            max_completion_tokens=ANSWER,
            temperature=0,
            stream=True,
            stream_options={"include_usage": True},
            store=False,
        )
        text = "".join(c.choices[0].delta.content or "" for c in chunks if c.choices)
        self.messages.append({"role": "assistant", "content": text})
        return text

    def call(self) -> tuple[str, Any]:
        messages: list[Any] = [{"role": "user", "content": f"{WHICH}: where is he?"}]
        asked = {"model": MODEL, "tools": [CHAT_TOOL], "max_completion_tokens": CALL}
        said = self.client.chat.completions.create(
            messages=messages, tool_choice="required", temperature=0, **asked
        )
        (call,) = said.choices[0].message.tool_calls
        messages.append(said.choices[0].message)
        messages.append({"role": "tool", "tool_call_id": call.id, "content": "Moscow"})
        with self.client.chat.completions.stream(
            messages=messages, tool_choice="none", temperature=0, **asked
        ) as stream:
            stream.get_final_completion()
        return call.function.name, json.loads(call.function.arguments)


class OpenAIResponses(Talk):
    """Responses with the whole input each time; nothing is stored."""

    def __init__(self) -> None:
        self.messages = []

    start = OpenAIChat.start

    def say(self, words: str) -> str:
        self.messages.append({"role": "user", "content": words})
        events = self.client.responses.create(
            model=MODEL,
            input=self.messages,
            max_output_tokens=ANSWER,
            temperature=0,
            store=False,
            stream=True,
        )
        response = [*events][-1].response
        self.messages += [item.model_dump() for item in response.output]
        return response.output_text

    def call(self) -> tuple[str, Any]:
        items: list[Any] = [{"role": "user", "content": f"{WHICH}: where is he?"}]
        tool = {"type": "function", **CHAT_TOOL["function"]}
        asked = {"model": MODEL, "tools": [tool], "max_output_tokens": CALL, "temperature": 0}
        said = self.client.responses.create(input=items, tool_choice="required", **asked)
        (call,) = (item for item in said.output if item.type == "function_call")
        items += said.output
        items.append({"type": "function_call_output", "call_id": call.call_id, "output": "Moscow"})
        self.client.responses.create(input=items, tool_choice="none", **asked)
        return call.name, json.loads(call.arguments)


class OpenAIById(OpenAIResponses):
    """Each response continues the one before by its id."""

    def __init__(self) -> None:
        self.messages = None

    def say(self, words: str) -> str:
        response = self.client.responses.create(
            model=MODEL,
            input=words,
            max_output_tokens=ANSWER,
            temperature=0,
            **({"previous_response_id": self.messages} if self.messages else {}),
        )
        self.messages = response.id
        return response.output_text


class OpenAIConversation(OpenAIResponses):
    """The server keeps a conversation's items."""

    def __init__(self) -> None:
        self.messages = None

    def say(self, words: str) -> str:
        if self.messages is None:
            self.messages = self.client.conversations.create(metadata={"topic": "war"}).id
        response = self.client.responses.create(
            model=MODEL,
            input=words,
            conversation=self.messages,
            max_output_tokens=ANSWER,
            temperature=0,
        )
        return response.output_text


GREEDY = {"extra_body": {"temperature": 0}}  # Anthropic's newest client has no argument for it


class AnthropicMessages(Talk):
    def __init__(self) -> None:
        self.messages = []

    def start(self) -> None:
        from anthropic import Anthropic

        self.client = Anthropic(base_url=URL, api_key="none", max_retries=0)

    def say(self, words: str) -> str:
        self.messages.append({"role": "user", "content": words})
        with self.client.messages.stream(
            model=MODEL, messages=self.messages, max_tokens=ANSWER, **GREEDY
        ) as stream:
            said = stream.get_final_message()
        content = [block.model_dump(exclude_none=True) for block in said.content]
        self.messages.append({"role": "assistant", "content": content})
        return "".join(block.text for block in said.content)

    def call(self) -> tuple[str, Any]:
        messages: list[Any] = [{"role": "user", "content": f"{WHICH}: where is he?"}]
        tools = [{"name": "where", "description": TELLS, "input_schema": PLACE}]
        asked = {"model": MODEL, "tools": tools, "max_tokens": CALL, **GREEDY}
        said = self.client.messages.create(messages=messages, tool_choice={"type": "any"}, **asked)
        (call,) = (block for block in said.content if block.type == "tool_use")
        messages.append({"role": "assistant", "content": said.content})
        result = {"type": "tool_result", "tool_use_id": call.id, "content": "Moscow"}
        messages.append({"role": "user", "content": [result]})
        counted = self.client.messages.count_tokens(model=MODEL, messages=messages, tools=tools)
        last = self.client.messages.create(
            messages=messages, tool_choice={"type": "none"}, **asked
        ).usage
        assert counted.input_tokens == last.input_tokens + last.cache_read_input_tokens
        return call.name, call.input


class Ollama(Talk):
    """Ollama cannot force a call, so the history has one that the client made up."""

    rewrites = True

    def __init__(self) -> None:
        self.messages = []

    def start(self) -> None:
        from ollama import Client

        self.client = Client(host=URL)

    def say(self, words: str) -> str:
        self.messages.append({"role": "user", "content": words})
        options = {"num_predict": ANSWER, "temperature": 0}
        parts = self.client.chat(MODEL, self.messages, stream=True, options=options)
        text = "".join(part.message.content or "" for part in parts)
        self.messages.append({"role": "assistant", "content": text})
        return text

    def call(self) -> tuple[str, Any]:
        def where(place: str) -> str:
            """Tells where somebody is.

            Args:
                place: a town.
            """
            return place

        options = {"num_predict": ANSWER, "temperature": 0}
        messages: list[Any] = [{"role": "user", "content": f"{WHICH}: where is he?"}]
        self.client.chat(MODEL, messages, tools=[where], options=options)
        call = {"function": {"name": "where", "arguments": {"place": "Rome"}}}
        messages.append({"role": "assistant", "tool_calls": [call]})
        messages.append({"role": "tool", "tool_name": "where", "content": "Moscow"})
        self.client.chat(MODEL, messages, tools=[where], options=options)
        return "where", {"place": "Rome"}


class LangChain(Talk):
    """A LangChain model, whose messages are saved as LangChain saves them."""

    def __init__(self, kind: str) -> None:
        self.kind, self.messages, self.rewrites = kind, [], kind == "ollama"

    def model(self, tokens: int) -> Any:
        given: dict[str, Any] = {"model": MODEL, "temperature": 0}
        if self.kind == "ollama":
            from langchain_ollama import ChatOllama

            return ChatOllama(base_url=URL, num_predict=tokens, **given)
        given |= {"max_tokens": tokens, "max_retries": 0, "api_key": "none"}
        if self.kind == "anthropic":
            from langchain_anthropic import ChatAnthropic

            return ChatAnthropic(base_url=URL, **given)
        from langchain_openai import ChatOpenAI

        responses = {"use_responses_api": True, "use_previous_response_id": True}
        # Its streams have no usage with an address that is not OpenAI's, unless it is asked for.
        given["stream_usage"] = True
        return ChatOpenAI(base_url=V1, **given, **(responses if self.kind == "responses" else {}))

    def say(self, words: str) -> str:
        from langchain_core.messages import HumanMessage, message_chunk_to_message

        self.messages.append(HumanMessage(words))
        whole = None
        for chunk in self.model(ANSWER).stream(self.messages):
            whole = chunk if whole is None else whole + chunk
        assert whole is not None
        assert whole.usage_metadata["input_tokens"] > 0
        self.messages.append(message_chunk_to_message(whole))
        return str(whole.text)

    def resume(self) -> None:
        from langchain_core.messages import messages_from_dict, messages_to_dict

        self.messages = messages_from_dict(json.loads(json.dumps(messages_to_dict(self.messages))))

    def call(self) -> tuple[str, Any]:
        from langchain_core.messages import AIMessage, HumanMessage, ToolMessage

        messages: list[Any] = [HumanMessage(f"{WHICH}: where is he?")]
        forced = {} if self.kind == "ollama" else {"tool_choice": "where"}
        said = self.model(CALL).bind_tools([CHAT_TOOL], **forced).invoke(messages)
        made = {"name": "where", "args": {"place": "Rome"}, "id": "call_1"}
        if self.kind == "ollama":
            said = AIMessage("", tool_calls=[made])
        (call,) = said.tool_calls
        messages += [said, ToolMessage("Moscow", tool_call_id=call["id"], name="where")]
        none = {"type": "none"} if self.kind == "anthropic" else "none"
        after = {} if self.kind == "ollama" else {"tool_choice": none}
        self.model(CALL).bind_tools([CHAT_TOOL], **after).invoke(messages)
        return call["name"], call["args"]


class LangChainAgent(Talk):
    """LangChain's agent with a checkpoint, which sends new messages and the last response's id."""

    calls = False

    def start(self) -> None:
        from langchain.agents import create_agent
        from langchain_openai import ChatOpenAI
        from langgraph.checkpoint.memory import InMemorySaver

        self.saver = getattr(self, "saver", None) or InMemorySaver()
        model = ChatOpenAI(
            model=MODEL, base_url=V1, api_key="none", max_tokens=ANSWER, temperature=0,
            use_responses_api=True, use_previous_response_id=True,
        )  # fmt: skip
        self.agent = create_agent(model, [], checkpointer=self.saver)

    def say(self, words: str) -> str:
        thread = {"configurable": {"thread_id": "one"}}
        return str(self.agent.invoke({"messages": [("user", words)]}, thread)["messages"][-1].text)

    def resume(self) -> None:
        self.start()


class LlamaIndex(Talk):
    """LlamaIndex' chat engine, whose memory is saved as JSON."""

    def __init__(self, kind: str) -> None:
        self.kind = kind
        self.memory = None

    def model(self, tokens: int) -> Any:
        if self.kind == "ollama":
            from llama_index.llms.ollama import Ollama as LlamaOllama

            options = {"num_predict": tokens}
            return LlamaOllama(
                model=MODEL, base_url=URL, temperature=0, context_window=1_000_000_000,
                request_timeout=300, additional_kwargs=options,
            )  # fmt: skip
        if self.kind == "anthropic":
            from llama_index.llms.anthropic import Anthropic as LlamaAnthropic

            # It accepts only models whose window it knows, so the server has an alias.
            return LlamaAnthropic(
                model=CLAUDE, base_url=URL, api_key="none", temperature=0, max_tokens=tokens
            )
        from llama_index.llms.openai_like import OpenAILike

        return OpenAILike(
            model=MODEL, api_base=V1, api_key="none", temperature=0, max_tokens=tokens,
            context_window=1_000_000_000, is_chat_model=True, is_function_calling_model=True,
        )  # fmt: skip

    def start(self) -> None:
        from llama_index.core.chat_engine import SimpleChatEngine
        from llama_index.core.memory import ChatMemoryBuffer

        self.memory = self.memory or ChatMemoryBuffer.from_defaults(token_limit=1_000_000_000)
        self.engine = SimpleChatEngine.from_defaults(llm=self.model(ANSWER), memory=self.memory)

    def say(self, words: str) -> str:
        return "".join(self.engine.stream_chat(words).response_gen)

    def resume(self) -> None:
        from llama_index.core.base.llms.types import ChatMessage
        from llama_index.core.memory import ChatMemoryBuffer

        saved = json.dumps([(one.role, one.content) for one in self.memory.get_all()])
        history = [ChatMessage(role=role, content=text) for role, text in json.loads(saved)]
        self.memory = ChatMemoryBuffer.from_defaults(history, token_limit=1_000_000_000)
        self.start()

    def call(self) -> tuple[str, Any]:
        from typing import Literal

        from llama_index.core.base.llms.types import ChatMessage
        from llama_index.core.tools import FunctionTool

        def where(place: Literal["Rome", "Moscow"]) -> str:
            """Tells where somebody is."""
            return place

        tool, llm = FunctionTool.from_defaults(where), self.model(CALL)
        asked = [ChatMessage(role="user", content=f"{WHICH}: where is he?")]
        forced = {} if self.kind == "ollama" else {"tool_required": True}
        said = llm.chat_with_tools([tool], chat_history=asked, **forced)
        if self.kind == "ollama":
            return "where", {"place": "Rome"}
        calls = llm.get_tool_calls_from_response(said, error_on_no_tool_call=False)
        result = {"tool_call_id": calls[0].tool_id, "name": "where"}
        done = ChatMessage(role="tool", content="Moscow", additional_kwargs=result)
        llm.chat_with_tools([tool], chat_history=[*asked, said.message, done])
        return calls[0].tool_name, calls[0].tool_kwargs


class LiteLLM(Talk):
    def __init__(self, provider: str) -> None:
        self.messages = []
        base = V1 if provider == "openai" else URL
        self.given = {"model": f"{provider}/{MODEL}", "api_base": base, "api_key": "none"}
        self.provider = provider

    def say(self, words: str) -> str:
        import litellm

        self.messages.append({"role": "user", "content": words})
        chunks = litellm.completion(
            messages=self.messages, max_tokens=ANSWER, temperature=0, stream=True,
            stream_options={"include_usage": True}, num_retries=0, **self.given,
        )  # fmt: skip
        text = "".join(chunk.choices[0].delta.content or "" for chunk in chunks if chunk.choices)
        self.messages.append({"role": "assistant", "content": text})
        return text

    def call(self) -> tuple[str, Any]:
        import litellm

        messages: list[Any] = [{"role": "user", "content": f"{WHICH}: where is he?"}]
        asked = {"tools": [CHAT_TOOL], "max_tokens": CALL, "temperature": 0, **self.given}
        if self.provider == "ollama_chat":
            litellm.completion(messages=messages, **asked)
            return "where", {"place": "Rome"}
        said = litellm.completion(messages=messages, tool_choice="required", **asked)
        (call,) = said.choices[0].message.tool_calls
        messages.append(said.choices[0].message.model_dump())
        messages.append({"role": "tool", "tool_call_id": call.id, "content": "Moscow"})
        litellm.completion(messages=messages, tool_choice="none", **asked)
        return call.function.name, json.loads(call.function.arguments)


class LiteLLMResponses(Talk):
    """LiteLLM's responses. Each continues the one before by its id."""

    calls = False

    def __init__(self) -> None:
        self.messages = None

    def say(self, words: str) -> str:
        import litellm

        given = {"previous_response_id": self.messages} if self.messages else {}
        said = litellm.responses(
            model=f"openai/{MODEL}", api_base=V1, api_key="none", input=words,
            max_output_tokens=ANSWER, temperature=0, **given,
        )  # fmt: skip
        self.messages = said.id
        return "".join(p.text for item in said.output for p in item.content)


class PydanticAI(Talk):
    def __init__(self, kind: str) -> None:
        self.kind, self.messages = kind, []

    def model(self) -> Any:
        if self.kind == "anthropic":
            from pydantic_ai.models.anthropic import AnthropicModel
            from pydantic_ai.providers.anthropic import AnthropicProvider

            return AnthropicModel(MODEL, provider=AnthropicProvider(base_url=URL, api_key="none"))
        if self.kind == "ollama":  # by Ollama's copy of OpenAI's API
            from pydantic_ai.models.ollama import OllamaModel
            from pydantic_ai.providers.ollama import OllamaProvider

            return OllamaModel(MODEL, provider=OllamaProvider(base_url=V1))
        from pydantic_ai.models.openai import OpenAIChatModel, OpenAIResponsesModel
        from pydantic_ai.providers.openai import OpenAIProvider

        kind = OpenAIResponsesModel if self.kind == "responses" else OpenAIChatModel
        return kind(MODEL, provider=OpenAIProvider(base_url=V1, api_key="none"))

    def start(self) -> None:
        from pydantic_ai import Agent

        settings = {"max_tokens": ANSWER, "temperature": 0}
        self.agent = Agent(self.model(), model_settings=settings, instructions="Be brief.")

    def say(self, words: str) -> str:
        async def stream() -> str:
            async with self.agent.run_stream(words, message_history=self.messages) as result:
                text = await result.get_output()
            self.messages = result.all_messages()
            return text

        return run(stream())

    def resume(self) -> None:
        from pydantic_ai.messages import ModelMessagesTypeAdapter as Saved

        self.messages = Saved.validate_json(Saved.dump_json(self.messages))
        self.start()

    def call(self) -> tuple[str, Any]:
        """Force a call of an output tool, and send its result in a further turn."""
        from typing import Annotated

        from pydantic import BaseModel, Field
        from pydantic_ai import Agent, ToolOutput

        class Where(BaseModel):
            model_config = {"extra": "forbid"}
            place: Annotated[str, Field(max_length=8)]

        settings = {"max_tokens": CALL, "temperature": 0}
        agent = Agent(
            self.model(), output_type=ToolOutput(Where, name="where"), model_settings=settings,
            retries=0,
        )  # fmt: skip
        first = agent.run_sync(f"{WHICH}: where is he?")
        agent.run_sync("And then?", message_history=first.all_messages())
        return "where", first.output.model_dump()


class OpenAIAgents(Talk):
    """OpenAI's agents with a session in SQLite, which sends the whole history."""

    def __init__(self, kind: str) -> None:
        self.kind = kind
        self.file = Path(tempfile.mkdtemp()) / "session.db"

    def start(self) -> None:
        from agents import SQLiteSession, set_tracing_disabled

        set_tracing_disabled(True)
        self.session = SQLiteSession("one", self.file)

    def agent(self, **given: Any) -> Any:
        from agents import Agent, ModelSettings, OpenAIChatCompletionsModel, OpenAIResponsesModel
        from openai import AsyncOpenAI

        client = AsyncOpenAI(base_url=V1, api_key="none", max_retries=0)
        kind = OpenAIResponsesModel if self.kind == "responses" else OpenAIChatCompletionsModel
        choice = given.pop("choice", None)
        # Its runner treats an answer that is cut short as a failure, so answers stop at a letter.
        ends = {"extra_body": {"stop": ["e", "a", "o", ","]}} if choice != "required" else {}
        settings = ModelSettings(
            max_tokens=CALL, temperature=0, tool_choice=choice, include_usage=True, **ends
        )
        return Agent(
            "one", instructions="Be brief.", model=kind(MODEL, client), model_settings=settings,
            **given,
        )  # fmt: skip

    def say(self, words: str) -> str:
        from agents import Runner

        async def stream() -> str:
            result = Runner.run_streamed(self.agent(), words, session=self.session)
            async for _ in result.stream_events():
                pass
            return str(result.final_output)

        return run(stream())

    def resume(self) -> None:
        self.start()

    def call(self) -> tuple[str, Any]:
        from typing import Annotated

        from agents import Runner, function_tool
        from pydantic import Field

        places = []

        @function_tool
        def where(place: Annotated[str, Field(max_length=8)]) -> str:
            """Tells where somebody is."""
            places.append(place)
            return "Moscow"

        ends = {"tools": [where], "tool_use_behavior": "stop_on_first_tool"}
        done = run(Runner.run(self.agent(choice="required", **ends), f"{WHICH}: where is he?"))
        more = [*done.to_input_list(), {"role": "user", "content": "And then?"}]
        run(Runner.run(self.agent(choice="none", **ends), more))
        return "where", {"place": places[0]}


class Smolagents(Talk):
    rewrites = True

    def __init__(self) -> None:
        self.messages = []

    def start(self) -> None:
        from smolagents import OpenAIModel

        self.model = OpenAIModel(MODEL, api_base=V1, api_key="none", temperature=0)

    def say(self, words: str) -> str:
        from smolagents import ChatMessage

        self.messages.append({"role": "user", "content": [{"type": "text", "text": words}]})
        said = [ChatMessage.from_dict(one) for one in self.messages]
        parts = self.model.generate_stream(said, max_tokens=ANSWER)
        text = "".join(part.content or "" for part in parts)
        self.messages.append({"role": "assistant", "content": [{"type": "text", "text": text}]})
        return text

    def call(self) -> tuple[str, Any]:
        """Run two steps of an agent. Smolagents always forces tool calls."""
        from smolagents import ToolCallingAgent, tool

        places = []

        @tool
        def where(place: str) -> str:
            """Tells where somebody is.

            Args:
                place: A town.
            """
            places.append(place)
            return "Moscow"

        self.model.kwargs["max_tokens"] = CALL
        agent = ToolCallingAgent([where], self.model, max_steps=2, verbosity_level=0)
        agent.run(f"{WHICH}: where is he?")
        return "where", {"place": "it may call final_answer"}


class Instructor(Talk):
    """Instructor makes every answer a call or JSON, which a pydantic model reads."""

    def __init__(self) -> None:
        self.messages = []

    def start(self) -> None:
        import instructor
        from openai import OpenAI
        from pydantic import BaseModel, Field

        class Where(BaseModel):
            """Tells where somebody is."""

            model_config = {"extra": "forbid"}
            place: str = Field(max_length=8)

        self.kind = Where
        client = OpenAI(base_url=V1, api_key="none", max_retries=0)
        self.client = instructor.from_openai(client, mode=instructor.Mode.JSON_SCHEMA)
        self.tools = instructor.from_openai(client, mode=instructor.Mode.TOOLS)

    def ask(self, client: Any, messages: list[Any]) -> Any:
        return client.chat.completions.create_with_completion(
            model=MODEL, messages=messages, response_model=self.kind, temperature=0,
            max_tokens=CALL, max_retries=0,
        )  # fmt: skip

    def say(self, words: str) -> str:
        self.messages.append({"role": "user", "content": words})
        _, whole = self.ask(self.client, self.messages)
        text = whole.choices[0].message.content
        self.messages.append({"role": "assistant", "content": text})
        return text

    def call(self) -> tuple[str, Any]:
        messages = [{"role": "user", "content": f"{WHICH}: where is he?"}]
        return "where", self.ask(self.tools, messages)[0].model_dump()


class DSPy(Talk):
    calls = False

    def __init__(self) -> None:
        self.messages = []

    def start(self) -> None:
        import dspy

        self.model = dspy.LM(
            f"openai/{MODEL}", api_base=V1, api_key="none", temperature=0, max_tokens=ANSWER,
            cache=False, num_retries=0,
        )  # fmt: skip

    def say(self, words: str) -> str:
        self.messages.append({"role": "user", "content": words})
        (said,) = self.model(messages=self.messages)
        text = said if isinstance(said, str) else said["text"]
        self.messages.append({"role": "assistant", "content": text})
        return text


class AutoGen(Talk):
    def start(self) -> None:
        from autogen_agentchat.agents import AssistantAgent

        self.agent = AssistantAgent("one", self.model(ANSWER), model_client_stream=True)

    def model(self, tokens: int) -> Any:
        from autogen_ext.models.openai import OpenAIChatCompletionClient

        can = {"vision": False, "function_calling": True, "json_output": True}
        info = {**can, "structured_output": True, "family": "unknown"}
        return OpenAIChatCompletionClient(
            model=MODEL, base_url=V1, api_key="none", model_info=info, temperature=0,
            max_tokens=tokens, max_retries=0,
        )  # fmt: skip

    def say(self, words: str) -> str:
        return str(run(self.agent.run(task=words)).messages[-1].content)

    def resume(self) -> None:
        state = json.loads(json.dumps(run(self.agent.save_state())))
        self.start()
        run(self.agent.load_state(state))

    def call(self) -> tuple[str, Any]:
        from typing import Annotated

        from autogen_core import CancellationToken
        from autogen_core.models import (
            AssistantMessage,
            FunctionExecutionResult,
            FunctionExecutionResultMessage,
            UserMessage,
        )
        from autogen_core.tools import FunctionTool

        def where(place: Annotated[str, "A town"]) -> str:
            return place

        tool = FunctionTool(where, description=TELLS, strict=True)
        messages: list[Any] = [UserMessage(content=f"{WHICH}: where is he?", source="user")]
        given = {"tools": [tool], "cancellation_token": CancellationToken()}
        model = self.model(CALL)
        said = run(model.create(messages, tool_choice="required", **given))
        (call,) = said.content
        result = FunctionExecutionResult(
            content="Moscow", name="where", call_id=call.id, is_error=False
        )
        messages.append(AssistantMessage(content=said.content, source="one"))
        messages.append(FunctionExecutionResultMessage(content=[result]))
        run(model.create(messages, tool_choice="none", **given))
        return call.name, json.loads(call.arguments)


class CrewAI(Talk):
    calls = False

    def __init__(self) -> None:
        self.messages = []

    def start(self) -> None:
        from crewai import LLM

        self.model = LLM(
            model=f"openai/{MODEL}", base_url=V1, api_key="none", temperature=0, max_tokens=ANSWER
        )

    def say(self, words: str) -> str:
        self.messages.append({"role": "user", "content": words})
        text = str(self.model.call(self.messages))
        self.messages.append({"role": "assistant", "content": text})
        return text


CLIENTS: dict[str, Any] = {
    "openai-chat": OpenAIChat,
    "openai-responses": OpenAIResponses,
    "openai-by-id": OpenAIById,
    "openai-conversation": OpenAIConversation,
    "anthropic": AnthropicMessages,
    "ollama": Ollama,
    "langchain-chat": lambda: LangChain("chat"),
    "langchain-responses": lambda: LangChain("responses"),
    "langchain-anthropic": lambda: LangChain("anthropic"),
    "langchain-ollama": lambda: LangChain("ollama"),
    "langchain-agent": LangChainAgent,
    "llamaindex-openai": lambda: LlamaIndex("openai"),
    "llamaindex-anthropic": lambda: LlamaIndex("anthropic"),
    "llamaindex-ollama": lambda: LlamaIndex("ollama"),
    "litellm-openai": lambda: LiteLLM("openai"),
    "litellm-anthropic": lambda: LiteLLM("anthropic"),
    "litellm-ollama": lambda: LiteLLM("ollama_chat"),
    "litellm-responses": LiteLLMResponses,
    "pydantic-ai-chat": lambda: PydanticAI("chat"),
    "pydantic-ai-responses": lambda: PydanticAI("responses"),
    "pydantic-ai-anthropic": lambda: PydanticAI("anthropic"),
    "pydantic-ai-ollama": lambda: PydanticAI("ollama"),
    "openai-agents-chat": lambda: OpenAIAgents("chat"),
    "openai-agents-responses": lambda: OpenAIAgents("responses"),
    "smolagents": Smolagents,
    "instructor": Instructor,
    "dspy": DSPy,
    "autogen": AutoGen,
    "crewai": CrewAI,
}


def main() -> None:
    talk = CLIENTS[WHICH]()
    mark("fresh")
    talk.start()
    said = [talk.say(FIRST), talk.say(LONG)]
    talk.resume()
    said += [talk.say(words) for words in AGAIN]
    mark("fresh")
    call = talk.call() if talk.calls else None
    answered = sum(bool(one.strip()) for one in said)
    print(json.dumps({"call": call, "answered": answered, "rewrites": talk.rewrites}))


if __name__ == "__main__":
    main()
