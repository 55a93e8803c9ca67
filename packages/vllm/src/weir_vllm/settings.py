"""Where the policy comes from: `--additional-config`, or the environment."""

from __future__ import annotations

import os
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from weir_vllm.errors import StreamError
from weir_vllm.policy import StreamPolicy, parse_policy

KEY = "weir"
"""The plug-in's key in vLLM's `--additional-config`."""
VARIABLE = "WEIR_VLLM"
"""The environment variable with a policy."""
UNTESTED_VARIABLE = "WEIR_VLLM_UNTESTED_MODELS"
"""The environment variable that admits models the plug-in has not been tested with."""
FIELDS = ("policy", "untested_models")
"""The fields that users can set under this key. The plug-in adds the field `version`."""


@dataclass(frozen=True)
class Settings:
    """The user's settings of the plug-in.

    Attributes:
        policy: what each layer keeps.
        untested_models: whether models that the tests do not cover may be served.
    """

    policy: StreamPolicy
    untested_models: bool = False

    def as_config(self) -> dict[str, Any]:
        """Return the settings as they are written into vLLM's configuration."""
        return {"policy": self.policy.text, "untested_models": self.untested_models}


def read_settings(additional: Any, environment: Mapping[str, str] = os.environ) -> Settings | None:
    """Return the settings, or None if there is no policy or the policy keeps every token.

    Args:
        additional: vLLM's `additional_config`, with a policy under the key `weir`: text, or an
            object with the fields `policy` and `untested_models`.
        environment: the environment variables.

    Raises:
        StreamError: the settings contradict each other or cannot be read.
    """
    given = additional.get(KEY) if isinstance(additional, Mapping) else None
    variable = environment.get(VARIABLE, "").strip() or None
    untested = environment.get(UNTESTED_VARIABLE, "") not in ("", "0")
    text = given
    if isinstance(given, Mapping):
        unknown = sorted(set(given) - {*FIELDS, "version"})
        if unknown or "policy" not in given:
            raise StreamError(
                f"'{KEY}' in --additional-config must be a policy or an object with the fields "
                f"{' and '.join(FIELDS)}, got {dict(given)!r}"
            )
        text = given["policy"]
        if not isinstance(given.get("untested_models", False), bool):
            raise StreamError(
                f"untested_models must be true or false, got {given['untested_models']!r}"
            )
        untested = untested or given.get("untested_models", False)
    both = text is not None and variable is not None
    if both and parse_policy(text).layers != parse_policy(variable).layers:
        raise StreamError(
            f"--additional-config says {text!r}, and {VARIABLE} says {variable!r}. Remove one of "
            "them."
        )
    text = variable if text is None else text
    if text is None:
        return None
    policy = parse_policy(text)
    return None if policy.keeps_all else Settings(policy, untested)
