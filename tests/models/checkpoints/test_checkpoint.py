import json
import os
from contextlib import suppress
from pathlib import Path
from typing import Any

import ml_dtypes
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from kernel_muster.models.checkpoints import CheckpointError, open_checkpoint
from kernel_muster.models.checkpoints.tensors import read_header
from kernel_muster.registry.errors import UsageError
from safetensors.numpy import save

A, B = "a.weight", "b.weight"
ONE, TWO = "model-00001-of-00002.safetensors", "model-00002-of-00002.safetensors"


def two(disk: Any) -> dict[str, Any]:
    return {A: disk.values(4, 6), B: disk.values(3, 2)}


def raw_file(table: dict[str, Any] | bytes, data: bytes) -> bytes:
    header = table if isinstance(table, bytes) else json.dumps(table).encode()
    header += b" " * (-len(header) % 8)
    return len(header).to_bytes(8, "little") + header + data


def test_open_one_file_gives_every_tensor_bit_for_bit(disk: Any) -> None:
    tensors = two(disk) | {"s": np.arange(256, dtype=np.uint8).view(ml_dtypes.float8_e4m3fn).reshape(16, 16)}
    tensors |= {"g": np.array([1.5], np.float32), "p": np.arange(7, dtype=np.uint8), "none": np.empty((0, 8), np.uint8)}
    checkpoint = open_checkpoint(disk.write(tensors))
    kinds = ("U8", "BF16", "F8_E4M3", "F32")
    for name, wanted in tensors.items():
        got = checkpoint.tensor(name, kinds)
        assert got.dtype == wanted.dtype
        assert got.tobytes() == wanted.tobytes()
        assert got.shape == wanted.shape


def test_open_shards_gives_tensors_of_both(disk: Any) -> None:
    tensors = two(disk)
    checkpoint = open_checkpoint(disk.write(tensors, shards={A: ONE, B: TWO}))
    assert {name: entry.file.name for name, entry in checkpoint.entries.items()} == {A: ONE, B: TWO}
    np.testing.assert_array_equal(checkpoint.tensor(B, ("BF16",), (3, 2)), tensors[B])


def test_tensor_is_a_read_only_view_of_the_file(disk: Any) -> None:
    checkpoint = open_checkpoint(disk.write(two(disk)))
    assert checkpoint._files == {}
    first, again = checkpoint.tensor(A, ("BF16",)), checkpoint.tensor(A, ("BF16",))
    assert not first.flags.writeable
    assert np.shares_memory(first, again)


def test_tensor_that_lies_unaligned_is_read_right(tmp_path: Path) -> None:
    value = np.array([1.5, -2.25], np.float32)
    table = {
        "odd": {"dtype": "U8", "shape": [1], "data_offsets": [0, 1]},
        "f": {"dtype": "F32", "shape": [2], "data_offsets": [1, 9]},
    }
    (tmp_path / "model.safetensors").write_bytes(raw_file(table, b"\7" + value.tobytes()))
    (tmp_path / "config.json").write_text("{}")
    got = open_checkpoint(tmp_path).tensor("f", ("F32",))
    assert got.flags.aligned
    np.testing.assert_array_equal(got, value)


@pytest.mark.parametrize(
    ("dtypes", "shape", "message"),
    [
        (("U8",), None, r"model\.safetensors: a\.weight: expected U8, got BF16 \[4, 6\]"),
        (("BF16", "F32"), (6, 4), r"a\.weight: expected BF16 or F32 \[6, 4\], got BF16 \[4, 6\]"),
    ],
)
def test_tensor_of_another_kind_is_refused(disk: Any, dtypes: Any, shape: Any, message: str) -> None:
    with pytest.raises(CheckpointError, match=message) as caught:
        open_checkpoint(disk.write(two(disk))).tensor(A, dtypes, shape)
    assert (caught.value.tensor, caught.value.got) == (A, "BF16 [4, 6]")


def test_tensor_of_a_type_that_nothing_carries_is_refused(disk: Any) -> None:
    checkpoint = open_checkpoint(disk.write({"i": np.arange(3)}))
    with pytest.raises(CheckpointError, match=r"i: expected U8, got I64 \[3\]"):
        checkpoint.tensor("i", ("U8",))


def test_tensor_that_is_missing_is_named(disk: Any) -> None:
    with pytest.raises(CheckpointError, match=r"c\.weight: expected a tensor, got none of that name"):
        open_checkpoint(disk.write(two(disk))).entry("c.weight")


def test_file_that_shrank_after_opening_is_refused(disk: Any) -> None:
    checkpoint = open_checkpoint(disk.write(two(disk)))
    file = disk.folder / "model.safetensors"
    os.truncate(file, file.stat().st_size - 4)
    with pytest.raises(CheckpointError, match="the file changed since it was opened"):
        [checkpoint.tensor(name, ("BF16",)) for name in (A, B)]


def test_file_that_was_replaced_by_one_of_its_size_after_opening_is_refused(disk: Any) -> None:
    checkpoint = open_checkpoint(disk.write(two(disk)))
    file = disk.folder / "model.safetensors"
    before = file.stat()
    disk.write({name: -value for name, value in two(disk).items()})
    os.utime(file, ns=(before.st_atime_ns, before.st_mtime_ns + 1))
    assert file.stat().st_size == before.st_size
    with pytest.raises(CheckpointError, match="the file changed since it was opened"):
        checkpoint.tensor(A, ("BF16",))


def test_index_with_a_missing_shard_is_refused(disk: Any) -> None:
    folder = disk.write(two(disk), shards={A: ONE, B: TWO})
    (folder / TWO).unlink()
    message = rf"index\.json: b\.weight: expected the shard {TWO}, got no such file; download"
    with pytest.raises(CheckpointError, match=message):
        open_checkpoint(folder)


@pytest.mark.parametrize(
    ("weight_map", "message"),
    [
        ({A: ONE, B: ONE}, rf"{ONE}: b\.weight: expected the tensor that .* puts here, got none"),
        ({A: ONE, B: TWO, "c": TWO}, rf"{TWO}: c: expected the tensor that .* puts here, got none"),
        ({B: TWO, "c": ONE}, rf"{ONE}: a\.weight: expected a tensor that .* lists, got one that it does not list"),
        ({A: TWO, B: ONE}, r"index\.json: a\.weight: expected a tensor in .*2\.safetensors, got one in model-00001"),
        ({A: "../evil.safetensors"}, r"a\.weight: expected the name of a \.safetensors file in this folder"),
        ({A: "/etc/passwd"}, "expected the name of a .safetensors file"),
        (
            {A: "x" * 244 + ".safetensors"},
            r"a\.weight: expected the name of a \.safetensors file in this folder, got 'x",
        ),
        ({A: "\u00e9" * 122 + ".safetensors"}, "expected the name of a .safetensors file in this folder"),
        ({A: "\ud800.safetensors"}, "expected a readable file"),
        ({A: "x" * 243 + ".safetensors"}, "expected the shard x+.safetensors, got no such file"),
        ({A: 3}, "expected the name of a .safetensors file in this folder, got 3"),
        ([A], "expected a weight_map object, got a list"),
        ({}, "expected tensors, got none at all"),
    ],
)
def test_index_that_does_not_match_its_files_is_refused(disk: Any, weight_map: Any, message: str) -> None:
    folder = disk.write(two(disk), shards={A: ONE, B: TWO})
    disk.index(weight_map)
    with pytest.raises(CheckpointError, match=message):
        open_checkpoint(folder)


def test_tensor_in_two_shards_is_refused(disk: Any) -> None:
    folder = disk.write(two(disk), shards={A: ONE, B: TWO})
    (folder / TWO).write_bytes(save(two(disk)))
    with pytest.raises(CheckpointError, match=rf"a\.weight: expected each tensor once, got it is in {ONE} too"):
        open_checkpoint(folder)


def test_tensor_that_stands_twice_in_a_header_is_refused(tmp_path: Path) -> None:
    row = b'"a":{"dtype":"U8","shape":[1],"data_offsets":[0,1]}'
    (tmp_path / "x.safetensors").write_bytes(raw_file(b"{" + row + b"," + row + b"}", b"\0"))
    with pytest.raises(CheckpointError, match="key 'a' stands twice"):
        read_header(tmp_path / "x.safetensors")


def test_two_sets_of_weights_are_refused(disk: Any) -> None:
    folder = disk.write(two(disk), shards={A: ONE, B: TWO})
    (folder / "model.safetensors").write_bytes(save(two(disk)))
    with pytest.raises(CheckpointError, match="one set of weights"):
        open_checkpoint(folder)


def test_folder_without_weights_is_refused(tmp_path: Path) -> None:
    with pytest.raises(CheckpointError, match=r"config\.json: expected a readable file, got No such file"):
        open_checkpoint(tmp_path)
    (tmp_path / "config.json").write_text("{}")
    with pytest.raises(CheckpointError, match=r"expected model\.safetensors or .*index\.json, got neither"):
        open_checkpoint(tmp_path)


@pytest.mark.parametrize("text", ["[]", "{", '{"a": 1, "a": 2}', "[" * 100_000, "\xff", ""])
def test_config_that_is_no_object_is_refused(disk: Any, text: str) -> None:
    folder = disk.write(two(disk))
    (folder / "config.json").write_text(text, encoding="latin-1")
    with pytest.raises(CheckpointError, match=r"config\.json: expected (a JSON object|valid JSON)"):
        open_checkpoint(folder)


def test_weights_that_are_a_pipe_are_refused_without_waiting(disk: Any) -> None:
    folder = disk.write(two(disk))
    (folder / "model.safetensors").unlink()
    os.mkfifo(folder / "model.safetensors")
    with pytest.raises(CheckpointError, match="expected a regular file"):
        open_checkpoint(folder)


def test_shard_that_became_a_pipe_after_opening_is_refused_without_waiting(disk: Any) -> None:
    checkpoint = open_checkpoint(disk.write(two(disk)))
    file = disk.folder / "model.safetensors"
    file.unlink()
    os.mkfifo(file)
    with pytest.raises(CheckpointError, match=r"expected a file that can be mapped, got .*it is no regular file"):
        checkpoint.tensor(A, ("BF16",))


@pytest.mark.parametrize("folder", [None, 5, b"folder", [Path("folder")]])
def test_folder_that_is_no_path_is_refused(folder: Any) -> None:
    message = f"folder is {type(folder).__name__}, expected the path of a checkpoint's folder"
    with pytest.raises(UsageError, match=message):
        open_checkpoint(folder)


def test_folder_may_be_given_as_text(disk: Any) -> None:
    assert open_checkpoint(str(disk.write(two(disk)))).folder == disk.folder


@pytest.mark.parametrize("folder", ["x" * 300, "a\0b", "\ud800"])
def test_folder_that_cannot_be_looked_into_is_refused(folder: str) -> None:
    with pytest.raises(CheckpointError, match="expected a readable file, got "):
        open_checkpoint(folder)


@settings(max_examples=60, deadline=None)
@given(cut=st.integers(0, 400), flips=st.lists(st.tuples(st.integers(0, 399), st.integers(1, 255)), max_size=3))
def test_header_that_is_damaged_is_read_or_refused_cleanly(
    tmp_path_factory: pytest.TempPathFactory, cut: int, flips: list[tuple[int, int]]
) -> None:
    whole = bytearray(save({A: np.ones((4, 4), np.float32), B: np.zeros(8, np.uint8)}))
    for place, mask in flips:
        whole[place % len(whole)] ^= mask
    file = tmp_path_factory.mktemp("damaged") / "x.safetensors"
    file.write_bytes(bytes(whole[: len(whole) - cut % len(whole)]))
    with suppress(CheckpointError):
        entries = read_header(file)
        assert all(entry.start + entry.size_bytes <= file.stat().st_size for entry in entries.values())
