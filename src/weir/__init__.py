"""weir: run Hugging Face decoders on endless token streams, in a KV cache of fixed size."""

# A name is imported when it is first used (PEP 562), because importing PyTorch and transformers
# takes seconds, and `weir --help` needs neither.

from importlib import import_module
from typing import TYPE_CHECKING

from weir.errors import PolicyError, WeirError

if TYPE_CHECKING:
    from weir.cache import StreamingCache, generate
    from weir.loading import load
    from weir.native import choose_products, compile_steps
    from weir.policies import policy
    from weir.stream import Archive, Stream

__version__ = "0.1.0"
__all__ = [
    "Archive",
    "PolicyError",
    "Stream",
    "StreamingCache",
    "WeirError",
    "__version__",
    "choose_products",
    "compile_steps",
    "generate",
    "load",
    "policy",
]

_HANDED_OUT_BY = {
    "Archive": "stream",
    "Stream": "stream",
    "StreamingCache": "cache",
    "choose_products": "native",
    "compile_steps": "native",
    "generate": "cache",
    "load": "loading",
    "policy": "policies",
}
"""The room (subpackage) from which each public name is imported when it is first used."""
_ROOMS = (
    "cache",
    "kernels",
    "loading",
    "models",
    "native",
    "policies",
    "pools",
    "slab",
    "stream",
)
"""The rooms that are attributes of `weir` without a separate import, such as `weir.pools`."""

if not TYPE_CHECKING:  # with __getattr__, a type checker would accept any name

    def __getattr__(name):
        if name in _ROOMS:
            return import_module(f"weir.{name}")
        if name not in _HANDED_OUT_BY:
            raise AttributeError(f"module 'weir' has no attribute {name!r}")
        found = getattr(import_module(f"weir.{_HANDED_OUT_BY[name]}"), name)
        globals()[name] = found
        return found


def __dir__() -> list[str]:
    return sorted({*globals(), *__all__, *_ROOMS})
