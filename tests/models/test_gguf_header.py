"""Headers of GGUF files are checked, and the shards of a file are read as one file."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from weir.errors import WeirError
from weir.models.gguf import find_gguf, read_header

gguf = pytest.importorskip("gguf")

TENSORS = {f"blk.{n}.attn_q.weight": np.full((4, 32), n, dtype=np.float32) for n in range(5)}


def write_shard(path: Path, names: list[str], **fields: int | str) -> None:
    """Write a shard as `gguf-split` does: only the first one has the fields of the model."""
    out = gguf.GGUFWriter(path, "llama")
    if fields.get("split.no", 0) == 0:
        out.add_block_count(5)
    else:
        del out.kv_data[0]["general.architecture"]
    for key, value in fields.items():
        add: Any = out.add_int32 if key.endswith("tensors.count") else out.add_int16
        (out.add_string if isinstance(value, str) else add)(key, value)
    for name in names:
        out.add_tensor(name, TENSORS[name])
    out.write_header_to_file()
    out.write_kv_data_to_file()
    out.write_tensors_to_file()
    out.close()


def write_split(folder: Path) -> list[Path]:
    names = list(TENSORS)
    parts = [names[:2], names[2:4], names[4:]]
    paths = [folder / f"tiny-{number:05}-of-00003.gguf" for number in (1, 2, 3)]
    for number, (path, part) in enumerate(zip(paths, parts, strict=True)):
        write_shard(
            path, part, **{"split.no": number, "split.count": 3, "split.tensors.count": len(names)}
        )
    return paths


def test_any_shard_stands_for_the_whole_file(tmp_path: Path) -> None:
    paths = write_split(tmp_path)
    for given in [*paths, tmp_path]:
        found = find_gguf(str(given))
        assert found == paths[0]
    for given in paths:
        header = read_header(given)
        assert header.path == paths[0]
        assert header.paths == tuple(paths)
        assert header.architecture == "llama"
        assert header.fields["llama.block_count"] == 5
        assert [tensor.name for tensor in header.tensors] == list(TENSORS)
        for tensor in header.tensors:
            stored = np.fromfile(tensor.path, np.float32, 128, offset=tensor.at)
            assert np.array_equal(stored.reshape(tensor.shape[::-1]), TENSORS[tensor.name])


def test_missing_shards_are_named(tmp_path: Path) -> None:
    first, second, third = write_split(tmp_path)
    first.unlink()
    third.unlink()
    assert find_gguf(str(second)) == find_gguf(str(tmp_path)) == first
    with pytest.raises(WeirError, match=r"2 of them are missing") as refused:
        read_header(second)
    assert first.name in str(refused.value)
    assert third.name in str(refused.value)
    assert f"{second.name}," not in str(refused.value)


def swap(paths: list[Path]) -> None:
    kept = paths[1].read_bytes()
    paths[1].write_bytes(paths[2].read_bytes())
    paths[2].write_bytes(kept)


def of_two(paths: list[Path]) -> None:
    write_shard(paths[2], [], **{"split.no": 2, "split.count": 2, "split.tensors.count": 5})


def without_fields(paths: list[Path]) -> None:
    write_shard(paths[2], ["blk.4.attn_q.weight"])


def too_few(paths: list[Path]) -> None:
    write_shard(paths[2], [], **{"split.no": 2, "split.count": 3, "split.tensors.count": 5})


def twice(paths: list[Path]) -> None:
    fields = {"split.no": 2, "split.count": 3, "split.tensors.count": 5}
    write_shard(paths[2], ["blk.0.attn_q.weight"], **fields)


def of_another_model(paths: list[Path]) -> None:
    fields = {"split.no": 2, "split.count": 3, "split.tensors.count": 6}
    write_shard(paths[2], ["blk.4.attn_q.weight"], **fields)


@pytest.mark.parametrize(
    ("spoil", "message"),
    [
        (swap, r"split\.no is 2, where 1 is expected"),
        (of_two, r"split\.count is 2, where 3 is expected"),
        (without_fields, r"split\.count is None, where 3 is expected"),
        (of_another_model, r"split\.tensors\.count is 6, where 5 is expected"),
        (too_few, r"hold 4 tensors, but the first one declares 5"),
        (twice, r"both hold the tensor blk\.0\.attn_q\.weight"),
    ],
)
def test_shards_that_do_not_belong_together_are_refused(
    spoil: Callable[[list[Path]], None], message: str, tmp_path: Path
) -> None:
    paths = write_split(tmp_path)
    spoil(paths)
    with pytest.raises(WeirError, match=message):
        read_header(paths[0])


def test_a_shard_with_another_name_is_refused(tmp_path: Path) -> None:
    paths = write_split(tmp_path)
    renamed = paths[0].rename(tmp_path / "model.gguf")
    with pytest.raises(WeirError, match=r"one of the 3 shards.*Rename"):
        read_header(renamed)


def test_a_number_of_shards_that_is_a_text_is_refused(tmp_path: Path) -> None:
    path = tmp_path / "model.gguf"
    write_shard(path, ["blk.0.attn_q.weight"], **{"split.count": "2"})
    with pytest.raises(WeirError, match=r"split\.count = '2', which is not a whole number"):
        read_header(path)


def test_a_negative_number_of_shards_is_refused(tmp_path: Path) -> None:
    path = tmp_path / "model.gguf"
    write_shard(path, ["blk.0.attn_q.weight"], **{"split.count": -5})
    with pytest.raises(WeirError, match=r"split\.count = -5, which must be at least 0"):
        read_header(path)


def test_a_number_of_tensors_that_is_a_text_is_refused(tmp_path: Path) -> None:
    paths = write_split(tmp_path)
    for number, path in enumerate(paths):
        fields = {"split.no": number, "split.count": 3, "split.tensors.count": "abc"}
        write_shard(path, [list(TENSORS)[number]], **fields)
    with pytest.raises(WeirError, match="hold 3 tensors, but the first one declares 'abc'"):
        read_header(paths[0])


def test_names_may_end_in_capital_letters(tmp_path: Path) -> None:
    paths = [path.rename(path.with_suffix(".GGUF")) for path in write_split(tmp_path)]
    assert find_gguf(str(tmp_path)) == find_gguf(str(paths[2])) == paths[0]
    assert read_header(paths[1]).paths == tuple(paths)
    folder = tmp_path / "folder.gguf"
    folder.mkdir()
    assert find_gguf(str(folder)) is None
    write_shard(folder / "ONE.GGUF", [])
    assert find_gguf(str(folder)) == folder / "ONE.GGUF"


def test_a_file_of_any_name_is_read_by_its_content(tmp_path: Path) -> None:
    blob = tmp_path / "sha256-2af3b81862c6"
    write_shard(blob, [])
    assert find_gguf(str(blob)) == blob
    other = tmp_path / "sha256-000000000000"
    other.write_bytes(b"{}")
    assert find_gguf(str(other)) is None


@pytest.mark.parametrize(
    ("content", "message"),
    [
        (b"", "it is empty. Download it again"),
        (b"<!DOCTYPE html>", "it is a web page. Download it again"),
        (b"version https://git-lfs", "only a pointer of Git LFS, whose file was not fetched"),
        (b"ggjt....", "has a format older than GGUF"),
        (b"PK\3\4....", r"it begins with b'PK.*\. Download it again"),
        (
            b"GGUF\4\0\0\0",
            r"has version 4 of the GGUF format, but weir reads versions 2 and 3. Use",
        ),
    ],
)
def test_what_is_no_gguf_file_is_named(content: bytes, message: str, tmp_path: Path) -> None:
    path = tmp_path / "some.gguf"
    path.write_bytes(content)
    with pytest.raises(WeirError, match=message) as refused:
        read_header(path)
    assert "damaged" not in str(refused.value)


def test_what_cannot_be_opened_is_said(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    paths = write_split(tmp_path)

    def refuse(*args: Any, **more: Any) -> Any:
        raise PermissionError(13, "Permission denied")

    with monkeypatch.context() as barred:  # not with chmod: root may read everything
        barred.setattr(Path, "open", refuse)
        with pytest.raises(
            WeirError, match=r"cannot read .*00001-of-00003\.gguf: Permission denied"
        ):
            read_header(paths[0])
    monkeypatch.setattr(Path, "iterdir", refuse)
    with pytest.raises(WeirError, match=r"cannot read the folder .*: Permission denied"):
        find_gguf(str(tmp_path))


def test_a_folder_may_hold_an_image_encoder_too(tmp_path: Path) -> None:
    paths = write_split(tmp_path)
    write_shard(tmp_path / "mmproj-tiny.gguf", [])
    assert find_gguf(str(tmp_path)) == paths[0]
    write_shard(tmp_path / "other.gguf", [])
    with pytest.raises(WeirError, match=r"several GGUF files \(other.gguf, tiny-00001-of-00003"):
        find_gguf(str(tmp_path))


def replaced(data: bytes, old: bytes, new: bytes) -> bytes:
    assert data.count(old) == 1
    assert len(old) == len(new)
    return data.replace(old, new)


@pytest.mark.parametrize(
    ("old", "new", "message"),
    [
        (b"blk.1.attn_q.weight", b"blk.0.attn_q.weight", "two tensors 'blk.0.attn_q.weight'"),
        (b"llama.block_count", b"general.alignment", "declares its data aligned to 5"),
        (b"GGUF\x03\x00\x00\x00", b"GGUF\x00\x00\x00\x03", "big-endian"),
        (b"GGUF\x03\x00\x00\x00", b"GGUF\x01\x00\x00\x00", "version 1"),
    ],
)
def test_damage_is_refused(old: bytes, new: bytes, message: str, tmp_path: Path) -> None:
    path = tmp_path / "tiny.gguf"
    write_shard(path, list(TENSORS))
    assert len(read_header(path).tensors) == 5
    path.write_bytes(replaced(path.read_bytes(), old, new))
    with pytest.raises(WeirError, match=message):
        read_header(path)


def test_a_field_or_an_offset_that_cannot_be_is_refused(tmp_path: Path) -> None:
    path = tmp_path / "tiny.gguf"
    out: Any = gguf.GGUFWriter(path, "llama")
    out.add_block_count(1)
    out.add_uint32("llama.block_counx", 1)
    out.add_tensor("blk.0.attn_q.weight", TENSORS["blk.0.attn_q.weight"])
    out.add_tensor("blk.1.attn_q.weight", TENSORS["blk.1.attn_q.weight"])
    out.write_header_to_file()
    out.write_kv_data_to_file()
    out.write_tensors_to_file()
    out.close()
    data = path.read_bytes()
    path.write_bytes(replaced(data, b"llama.block_counx", b"llama.block_count"))
    with pytest.raises(WeirError, match=r"two fields 'llama\.block_count'"):
        read_header(path)
    kind_and_offset = [bytes(4) + n.to_bytes(8, "little") for n in (512, 513)]
    path.write_bytes(replaced(data, *kind_and_offset))
    with pytest.raises(WeirError, match=r"blk\.1\.attn_q\.weight' begins at byte 513"):
        read_header(path)
