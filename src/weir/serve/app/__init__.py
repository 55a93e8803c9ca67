"""OpenAI's HTTP API in front of an engine, which FastAPI and uvicorn serve."""

from weir.serve.app.app import make_app
from weir.serve.app.keys import Keys
from weir.serve.app.logs import log_json
from weir.serve.app.running import bind, run_app

__all__ = ["Keys", "bind", "log_json", "make_app", "run_app"]
