"""The HTTP APIs of OpenAI, Anthropic and Ollama for an engine, served by FastAPI and uvicorn."""

from weir.serve.api.access import Access
from weir.serve.api.app import bind, make_app, run_app
from weir.serve.api.dependencies import Keys
from weir.serve.api.middleware import log_event, log_json
