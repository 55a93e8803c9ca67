"""weir: any Hugging Face decoder on token streams without end, in a KV cache of fixed size."""

from weir.cache import StreamingCache
from weir.errors import PolicyError, WeirError
from weir.models import compile_steps, load
from weir.policies import policy
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
