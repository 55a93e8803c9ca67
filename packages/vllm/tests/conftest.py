"""Settings of vLLM that all tests need, before it is imported."""

import os

SETTINGS = {
    "DO_NOT_TRACK": "1",
    "HF_HUB_OFFLINE": "1",
    "OMP_NUM_THREADS": "1",
    "VLLM_ALLOW_LONG_MAX_MODEL_LEN": "1",
    "VLLM_CPU_KVCACHE_SPACE": "1",
    "VLLM_CPU_OMP_THREADS_BIND": "nobind",
    "VLLM_ENABLE_V1_MULTIPROCESSING": "0",
    "VLLM_LOGGING_LEVEL": "WARNING",
    "VLLM_NO_USAGE_STATS": "1",
}
for name, value in SETTINGS.items():
    os.environ.setdefault(name, value)
os.environ.pop("WEIR_VLLM", None)

import pytest  # noqa: E402

import small_models  # noqa: E402


@pytest.fixture(scope="session")
def models(tmp_path_factory):
    """Return the folder of a small model by its name."""
    root = tmp_path_factory.mktemp("models")

    def find(name):
        folder = root / name
        if not folder.exists():
            small_models.save(name, folder)
        return folder

    return find
