"""The lock around forwards: which models share one, and how long it exists."""

from __future__ import annotations

import threading
from concurrent.futures import ThreadPoolExecutor

from weir.models.interception import forward_lock_of


class Config:
    """Stands for a model's configuration, of which the lock needs only the identity."""


def test_turns_last_as_long_as_one_thread_has_its_turn() -> None:
    # Only the threads refer to the lock, as while a model's first cache is being created.
    config, order = Config(), []
    waiting = threading.Event()

    def other() -> None:
        waiting.set()
        with forward_lock_of(config):
            order.append("other")

    with ThreadPoolExecutor(1) as pool:
        with forward_lock_of(config):
            done = pool.submit(other)
            waiting.wait(60)
            threading.Event().wait(0.05)
            order.append("first")
        done.result(60)
    assert order == ["first", "other"]


def test_each_configuration_has_turns_of_its_own() -> None:
    one, another = Config(), Config()
    assert forward_lock_of(one) is not forward_lock_of(another)
    held = forward_lock_of(one)
    assert forward_lock_of(one) is held
