"""Weights of a model directory: which files count, what is wrong with them, and writing one shard at a time."""

import gc
import json
import re
import weakref

import numpy as np
import pytest

from peft_core import checkpoint
from peft_core.checkpoint import Checkpoint, checkpoint_files, parse_size, plan_shards, read_json, write_checkpoint
from peft_core.errors import ConfigError, FileError, ModelError
from peft_core.safetensors_io import load_file, save_file

POINTER = "version https://git-lfs.github.com/spec/v1\noid sha256:0\nsize 9\n"


def tensors(n=5, seed=0):
    rng = np.random.default_rng(seed)
    return {f"t{i}": rng.normal(size=(2, i + 1)).astype(np.float32) for i in range(n)}


def write(directory, values, limit=10**9):
    return write_checkpoint(directory, {n: a.nbytes for n, a in values.items()}, values.__getitem__, limit)


def sharded(directory, values):
    """Two shards or more and their index."""
    assert len(write(directory, values, sum(a.nbytes for a in values.values()) // 2)) > 1
    return directory / "model.safetensors.index.json"


def assert_same(directory, values):
    found = Checkpoint(directory)
    assert set(found) == set(values) and len(found) == len(values) and not found.problems
    for name, array in values.items():
        assert (found.shape(name), found.dtype(name)) == (array.shape, array.dtype)
        assert np.array_equal(found[name], array) and not found[name].flags.writeable and name in found
    assert "ghost" not in found and found.get("ghost") is None


# ---------------------------------------------------------------------- reading


@pytest.mark.parametrize("limit", [10**9, 60, 1])
def test_what_is_written_is_read(tmp_path, limit):
    files = write(tmp_path, tensors(), limit)
    assert [file.name for file in checkpoint_files(tmp_path)] == files
    assert_same(tmp_path, tensors())


def test_the_single_file_wins_over_an_index(tmp_path):
    sharded(tmp_path, tensors())
    write(tmp_path, tensors(seed=1))
    assert [file.name for file in checkpoint_files(tmp_path)] == ["model.safetensors"]
    assert_same(tmp_path, tensors(seed=1))


def test_files_that_the_index_does_not_name_are_not_opened(tmp_path):
    sharded(tmp_path, tensors())
    (tmp_path / "other.safetensors").write_text("nobody looks at it")
    assert_same(tmp_path, tensors())


def test_missing_shards_are_named(tmp_path):
    write(tmp_path, tensors(3), 1)
    (tmp_path / "model-00001-of-00003.safetensors").unlink()
    (tmp_path / "model-00003-of-00003.safetensors").unlink()
    text = (
        "lacks 2 of 3 shards: model-00001-of-00003.safetensors, model-00003-of-00003.safetensors; expected every file "
        "that model.safetensors.index.json names. Download the missing files."
    )
    with pytest.raises(ModelError, match=re.escape(text)):
        checkpoint_files(tmp_path)


def test_a_stale_index_is_a_list_of_problems(tmp_path):
    index = sharded(tmp_path, tensors())
    table = json.loads(index.read_text())
    shard = table["weight_map"].pop("t1")
    table["weight_map"]["ghost"] = shard
    index.write_text(json.dumps(table))
    stale = Checkpoint(tmp_path)
    assert stale.problems == [
        f"missing     ghost: model.safetensors.index.json places it in {shard}, which does not hold it",
        f"unexpected  t1: in {shard}, but not in model.safetensors.index.json",
    ]
    assert set(stale) == set(tensors()) - {"t1"}


def test_a_tensor_in_two_shards_is_the_one_of_the_index(tmp_path):
    index = sharded(tmp_path, tensors())
    table = json.loads(index.read_text())["weight_map"]
    last = tmp_path / list(table.values())[-1]
    save_file({**load_file(last), "t0": np.zeros(3, np.float32)}, last)
    assert_same(tmp_path, tensors())


@pytest.mark.parametrize(("content", "text"), [
    ("{", r"index.json is not valid JSON \(.*\); expected an object. Download it again."),
    ("[]", r"index.json holds a list; expected a JSON object."),
    ("{}", r"has no usable weight_map; expected an object: tensor name -> file name in the same dir.*\. Download it"),
    ('{"weight_map": {}}', "has no usable weight_map"),
    ('{"weight_map": {"a": "../b"}}', "has no usable weight_map"),
    ('{"weight_map": {"a": 1}}', "has no usable weight_map"),
])  # fmt: skip
def test_an_unusable_index(tmp_path, content, text):
    (tmp_path / "model.safetensors.index.json").write_text(content)
    with pytest.raises(ModelError, match=text):
        checkpoint_files(tmp_path)


@pytest.mark.parametrize(("other", "text"), [
    (None, "has neither model.safetensors nor model.safetensors.index.json; expected one of them. Download the model"),
    ("pytorch_model.bin", "It has pytorch_model.bin, pickles that are not read here: convert them once with"),
    ("model-00001-of-00002.safetensors", "the index that names these files is missing; download it."),
])  # fmt: skip
def test_no_weights(tmp_path, other, text):
    if other:
        (tmp_path / other).write_bytes(b"")
    with pytest.raises(ModelError, match=re.escape(text)):
        Checkpoint(tmp_path)


def test_a_path_that_is_no_directory(tmp_path):
    with pytest.raises(ModelError, match=r"nothing is not a directory; expected a model directory. Check the path."):
        Checkpoint(tmp_path / "nothing")


def test_files_that_cannot_be_read_are_one_error(tmp_path):
    write(tmp_path, tensors(2), 1)
    for i in (1, 2):
        (tmp_path / f"model-0000{i}-of-00002.safetensors").write_text(POINTER)
    with pytest.raises(ModelError, match=r"2 of 2 weight files cannot be read:\n(.*is a Git LFS pointer.*\n?){2}"):
        Checkpoint(tmp_path)
    (tmp_path / "model.safetensors").write_text(POINTER)
    with pytest.raises(FileError, match=r"model.safetensors is a Git LFS pointer"):
        Checkpoint(tmp_path)


def test_json_files(tmp_path):
    file = tmp_path / "config.json"
    text = r"config.json does not exist; expected the config.json of a model directory. Check the path, or download"
    with pytest.raises(ModelError, match=text):
        read_json(file)
    assert read_json(file, {}) == {} and read_json(file, {"a": 1}) == {"a": 1}
    file.write_text('{"b": "\u00e9"}', encoding="utf-8")
    assert read_json(file) == read_json(file, {"a": 1}) == {"b": "\u00e9"}
    for content, text in ((b"{", "is not valid JSON"), (b'{"a": "\xff"}', "is not valid JSON"), (b"3", "holds a int")):
        file.write_bytes(content)
        for default in (None, {}):
            with pytest.raises(ModelError, match=text):
                read_json(file, default)


# ---------------------------------------------------------------------- writing


def test_the_index(tmp_path):
    values = tensors()
    files = write(tmp_path, values, 60)
    assert sorted(p.name for p in tmp_path.iterdir()) == [*files, "model.safetensors.index.json"]
    index = read_json(tmp_path / "model.safetensors.index.json")
    assert index["metadata"] == {"total_size": sum(a.nbytes for a in values.values())}
    assert index["weight_map"] == {name: file for file in files for name in load_file(tmp_path / file)}
    assert list(index["weight_map"]) == list(values)


def test_one_shard_at_a_time_is_in_memory(tmp_path, monkeypatch):
    alive, most = weakref.WeakSet(), []

    class Counted(np.ndarray):
        __hash__ = object.__hash__

    def get(name):
        array = np.zeros(8, np.float32).view(Counted)
        alive.add(array)
        return array

    def save(part, path):
        gc.collect()
        most.append(len(alive))
        save_file(part, path)

    monkeypatch.setattr(checkpoint, "save_file", save)
    write_checkpoint(tmp_path, dict.fromkeys("abcdefg", 32), get, 64)
    assert most == [2, 2, 2, 1]


def test_an_interruption_leaves_no_index(tmp_path):
    def get(name):
        if name == "c":
            raise MemoryError
        return np.zeros(8, np.float32)

    with pytest.raises(MemoryError):
        write_checkpoint(tmp_path, dict.fromkeys("abc", 32), get, 32)
    assert not (tmp_path / "model.safetensors.index.json").exists()


@pytest.mark.parametrize(("limit", "groups"), [
    (1000, [["a", "b", "c", "d"]]), (30, [["a", "b"], ["c"], ["d"]]), (29, [["a"], ["b"], ["c"], ["d"]]),
])  # fmt: skip
def test_shards_hold_at_most_the_limit_or_one_tensor(limit, groups):
    shards = plan_shards({"a": 10, "b": 20, "c": 100, "d": 5}, limit)
    assert list(shards.values()) == groups
    n = len(groups)
    want = ["model.safetensors"] if n == 1 else [f"model-{i:05d}-of-{n:05d}.safetensors" for i in range(1, n + 1)]
    assert list(shards) == want


@pytest.mark.parametrize(("size", "n_bytes"), [
    (100, 100), ("100", 100), ("7B", 7), ("5GB", 5 * 10**9), ("0.02 MB", 20_000), ("3kb", 3000),
    ("1.5 MiB", 1536 * 1024), (" 2 GiB ", 2**31), ("1KiB", 1024),
])  # fmt: skip
def test_sizes(size, n_bytes):
    assert parse_size(size) == n_bytes


@pytest.mark.parametrize("size", ["five", "5 parsecs", "5XB", "5IB", "5K", 0, "0GB", 0.5, -3, "-1GB", True, ""])
def test_sizes_that_are_not_understood(size):
    text = f"max_shard_size is {size!r}; expected bytes, or a text such as '5GB' or '500MB'."
    with pytest.raises(ConfigError, match=re.escape(text)):
        parse_size(size)
