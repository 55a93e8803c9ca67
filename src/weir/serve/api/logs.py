"""Logs as lines of JSON: what was asked for and how it went, and never what was said."""

from __future__ import annotations

import json
import logging
import sys
import time
from typing import Any

LOG = logging.getLogger("weir.serve")


class AsJson(logging.Formatter):
    """A line of JSON for each record; what is not ASCII or controls terminals is escaped."""

    def format(self, record: logging.LogRecord) -> str:
        """The line."""
        line: dict[str, Any] = {
            "time": time.strftime("%Y-%m-%dT%H:%M:%S", time.gmtime(record.created))
            + f".{int(record.msecs):03d}Z",
            "level": record.levelname.lower(),
            "event": record.getMessage(),
            **getattr(record, "facts", {}),
        }
        if record.exc_info and record.exc_info[0] is not None:
            line["error"] = self.formatException(record.exc_info)
        return json.dumps(line, default=str).replace("\x7f", "\\u007f")


def log_json() -> None:
    """Write logs of the server, and of uvicorn, to standard error as lines of JSON."""
    handler = logging.StreamHandler(sys.stderr)
    handler.setFormatter(AsJson())
    for name, level in (("weir.serve", logging.INFO), ("uvicorn", logging.WARNING)):
        logger = logging.getLogger(name)
        logger.handlers = [handler]
        logger.setLevel(level)
        logger.propagate = False


def told(event: str, level: int = logging.INFO, **facts: Any) -> None:
    """Log an event with facts; none of them may be what somebody said."""
    LOG.log(level, event, extra={"facts": facts})
