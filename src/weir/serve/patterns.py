"""Regular expressions of names and ids in requests.

Each has a sentence for error messages, because most users cannot read regular expressions.
"""

from __future__ import annotations

SESSION = r"^[A-Za-z0-9][A-Za-z0-9_.:-]{0,127}$"
"""Name of a session."""
TURN = r"^(resp_)?[0-9a-f]{32}$"
"""Id of a turn."""
NAME = r"^[a-zA-Z0-9_-]{1,64}$"
"""Name of a function or a schema in OpenAI's API."""
LONG_NAME = r"^[a-zA-Z0-9_-]{1,128}$"
"""Name of a function in the other APIs. Names from MCP servers are long."""
CHECKSUM = r"^[0-9a-f]{0,64}$"
"""Checksum in the file of a session."""

SENTENCES = {
    SESSION: "must have 1 to 128 letters, digits or any of `_.:-`, the first a letter or digit",
    TURN: "must be the id of a turn: resp_ and 32 hexadecimal digits in lower case",
    NAME: "must have 1 to 64 letters, digits, underscores or hyphens",
    LONG_NAME: "must have 1 to 128 letters, digits, underscores or hyphens",
    CHECKSUM: "must be a checksum of at most 64 hexadecimal digits in lower case",
}
"""The end of the sentence about a text that does not match, for errors."""
