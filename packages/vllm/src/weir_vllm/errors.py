"""The errors of weir-vllm. A message says what cannot be served, what can, and what to do."""

from __future__ import annotations


class StreamError(ValueError):
    """A model, feature or setting of vLLM that the plug-in cannot serve."""


class StreamPolicyError(StreamError):
    """A policy that cannot be read, or that vLLM's blocks cannot hold."""
