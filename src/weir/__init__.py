"""weir: any Hugging Face decoder on token streams without end, in a KV cache of fixed size."""

from weir.attach import compile_steps
from weir.cache import StreamingCache
from weir.errors import WeirError
from weir.load import load
from weir.policy import PolicyError, policy
from weir.stream import Stream

__version__ = "0.1.0"
__all__ = [
    "PolicyError",
    "Stream",
    "StreamingCache",
    "WeirError",
    "__version__",
    "compile_steps",
    "load",
    "policy",
]
