"""OpenAI's HTTP API in front of an engine, served by FastAPI and uvicorn."""

from weir.serve.api.app import make_app
from weir.serve.api.keys import Keys
from weir.serve.api.logs import log_json
from weir.serve.api.server import bind, run_app

__all__ = ["Keys", "bind", "log_json", "make_app", "run_app"]
