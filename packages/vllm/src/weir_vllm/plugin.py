"""The entry point of the plug-in, which vLLM loads and calls.

If importing a plug-in fails, vLLM only logs the error and continues without the plug-in. An error
in `register` stops vLLM. Therefore everything that can fail is in `register`, and importing this
module needs only the standard library.
"""

from __future__ import annotations

from weir_vllm.settings import read_settings

_registered = False


def register() -> None:
    """Make sure that models which vLLM creates get the policy. vLLM calls this in each process.

    Raises:
        StreamError: the policy in the environment variable cannot be served, or another plug-in
            has replaced one of vLLM's rotary embeddings.
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
    """Return whether vLLM has loaded the plug-in in this process."""
    return _registered
