"""What vLLM loads: the entry point, and what happens while a model is made.

Only the standard library is imported here. vLLM logs and ignores an error in an import of a
plug-in, but not one in `register`, so everything that can fail is in there.
"""

from __future__ import annotations

from weir_vllm.settings import read_settings

_registered = False


def register() -> None:
    """Make vLLM ask for the policy when it makes a model. vLLM calls this in each of its processes.

    Raises:
        StreamError: the environment variable has no policy that can be served.
    """
    global _registered
    read_settings({})  # a wrong environment variable is an error here, before a model is loaded
    if _registered:
        return
    from torch.nn.modules.module import register_module_module_registration_hook

    from weir_vllm.rotary import register_rotary
    from weir_vllm.streams import watch_modules

    register_rotary()
    register_module_module_registration_hook(watch_modules)
    _registered = True


def is_registered() -> bool:
    """Whether vLLM has loaded the plug-in in this process."""
    return _registered
