"""Endless token streams inside vLLM: attention sinks and a window, in whole blocks of its KV cache.

vLLM finds `register` through the entry point `vllm.general_plugins`. Without a policy, the plug-in
changes nothing.
"""

from weir_vllm.errors import StreamError, StreamPolicyError
from weir_vllm.plugin import register
from weir_vllm.policy import StreamPolicy, parse_policy

__version__ = "0.1.0"
__all__ = ["StreamError", "StreamPolicy", "StreamPolicyError", "parse_policy", "register"]
