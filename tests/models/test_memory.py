"""Free memory, as the system and the limits of a container report it."""

from __future__ import annotations

import torch

from weir.models import memory


def test_a_container_has_what_its_limit_leaves(monkeypatch, tmp_path):
    cpu = torch.device("cpu")
    monkeypatch.setattr(memory, "GROUP", tmp_path)
    (tmp_path / "memory.current").write_text("1000\n")
    (tmp_path / "memory.stat").write_text("anon 900\n")
    (tmp_path / "memory.max").write_text("max\n")
    assert memory.free_memory(cpu) > 3000
    (tmp_path / "memory.max").write_text("4000\n")
    assert memory.free_memory(cpu) == 3000
    # Pages of files count as used, but the system can reclaim them.
    (tmp_path / "memory.stat").write_text("anon 500\nactive_file 100\ninactive_file 300\n")
    assert memory.free_memory(cpu) == 3400
