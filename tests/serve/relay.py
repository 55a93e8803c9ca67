"""A relay between a client and a server, which records what passes and can force a tool call."""

from __future__ import annotations

import contextlib
import http.client
import http.server
import json
import re
import threading
from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import Any

LOCAL = {"host", "content-length", "connection", "accept-encoding", "transfer-encoding"}


@dataclass(frozen=True)
class Exchange:
    """A request and its response."""

    path: str
    body: dict[str, Any]
    status: int
    warning: str
    answer: str
    id: str = ""

    @property
    def tokens(self) -> tuple[int, int]:
        """Tokens of the prompt, and how many of them were not read again."""
        if self.path.startswith("/api/"):
            return self._last("prompt_eval_count"), self._last("cached_count")
        if self.path.startswith("/v1/messages"):
            read, cached = self._last("input_tokens"), self._last("cache_read_input_tokens")
            return read + cached, cached
        name = "input_tokens" if self.path.startswith("/v1/responses") else "prompt_tokens"
        return self._last(name), self._last("cached_tokens")

    @property
    def has_call(self) -> bool:
        """Whether the answer calls a tool."""
        return bool(
            re.search(r'"(type": ?"(function_call|tool_use)|tool_calls": ?\[)', self.answer)
        )

    def _last(self, name: str) -> int:
        return int(re.findall(rf'"{name}": ?(\d+)', self.answer)[-1])


@dataclass
class Relay:
    """Passes requests on.

    Attributes:
        forced: a tool that the next answer must call, if the request has it.
        exchanges: what has passed, oldest first.
    """

    target: int
    port: int = 0
    forced: str | None = None
    exchanges: list[Exchange] = field(default_factory=list)

    @property
    def url(self) -> str:
        return f"http://127.0.0.1:{self.port}"

    def take(self) -> list[Exchange]:
        """Return the exchanges whose request has a body, and forget all exchanges so far."""
        taken, self.exchanges = self.exchanges, []
        return [one for one in taken if one.body]

    def take_all(self) -> list[Exchange]:
        """Return all exchanges so far, marks included, and forget them."""
        taken, self.exchanges = self.exchanges, []
        return taken

    def force(self, path: str, body: dict[str, Any]) -> None:
        """Make a request name the tool that its answer must call."""
        names = [tool.get("name") or tool.get("function", {}).get("name") for tool in body["tools"]]
        if self.forced not in names:
            return
        if path.startswith("/v1/messages"):
            body["tool_choice"] = {"type": "tool", "name": self.forced}
            body.pop("thinking", None)
        elif path.startswith("/v1/responses"):
            body["tool_choice"] = {"type": "function", "name": self.forced}
        else:
            body["tool_choice"] = {"type": "function", "function": {"name": self.forced}}
        self.forced = None


@contextlib.contextmanager
def relaying(target: int) -> Iterator[Relay]:
    """A relay to a port of this machine."""
    relay = Relay(target)

    class Handler(http.server.BaseHTTPRequestHandler):
        def do_POST(self) -> None:
            sent = self.rfile.read(int(self.headers.get("content-length") or 0))
            if self.path.startswith("/mark/"):
                relay.exchanges.append(Exchange(self.path, {}, 200, "", ""))
                self.send_response(204)
                self.end_headers()
                return
            body = json.loads(sent) if sent else {}
            if relay.forced and body.get("tools"):
                relay.force(self.path, body)
                sent = json.dumps(body).encode()
            headers = {k: v for k, v in self.headers.items() if k.lower() not in LOCAL}
            onward = http.client.HTTPConnection("127.0.0.1", relay.target, timeout=600)
            onward.request(self.command, self.path, sent or None, headers)
            response = onward.getresponse()
            self.send_response(response.status)
            for name, value in response.getheaders():
                if name.lower() not in LOCAL:
                    self.send_header(name, value)
            self.end_headers()
            # The last piece is passed on when the exchange is recorded: a client that has all of an
            # answer may at once send its next request, or end.
            answer, last = b"", b""
            while piece := response.read1(65536):
                answer += piece
                self.wfile.write(last)
                self.wfile.flush()
                last = piece
            onward.close()
            warning = response.getheader("x-weir-warning") or ""
            text = answer.decode("utf-8", "replace")
            number = response.getheader("x-request-id") or ""
            one = Exchange(self.path, body, response.status, warning, text, number)
            relay.exchanges.append(one)
            self.wfile.write(last)

        do_GET = do_HEAD = do_POST

        def log_message(self, *given: Any) -> None:
            """Print nothing."""

    with http.server.ThreadingHTTPServer(("127.0.0.1", 0), Handler) as server:
        server.daemon_threads = True
        relay.port = server.server_address[1]
        thread = threading.Thread(target=server.serve_forever, daemon=True)
        thread.start()
        try:
            yield relay
        finally:
            server.shutdown()
            thread.join(10)
