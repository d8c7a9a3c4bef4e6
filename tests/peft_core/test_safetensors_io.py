"""The reader against hand-made and damaged bytes, the writer against the safetensors package."""

import json
import os
import re
import stat
import subprocess
import sys
import time

import ml_dtypes
import numpy as np
import pytest
import safetensors
import safetensors.numpy

from peft_core import files, safetensors_io
from peft_core.dtypes import SAFETENSORS_CODES
from peft_core.errors import FileError
from peft_core.safetensors_io import SafeFile, atomic_dir, atomic_write, load_file, save_file


def raw(header, data=b"", length=None):
    text = header if isinstance(header, bytes) else json.dumps(header).encode()
    return (len(text) if length is None else length).to_bytes(8, "little") + text + data


def entry(begin, end, shape=(2,), dtype="U8"):
    return {"dtype": dtype, "shape": list(shape), "data_offsets": [begin, end]}


def written(tmp_path, content):
    path = tmp_path / "x.safetensors"
    path.write_bytes(content)
    return path


def random_bits(dtype, shape, seed=0):
    raw_bytes = np.random.default_rng(seed).integers(0, 256, int(np.prod(shape)) * dtype.itemsize, dtype=np.uint8)
    return (raw_bytes & 1 if dtype == np.bool_ else raw_bytes).view(dtype).reshape(shape)


# ---------------------------------------------------------------------- round trips


@pytest.mark.parametrize("shape", [(), (1,), (0,), (3, 0, 2), (3, 5), (2, 3, 4)])
@pytest.mark.parametrize("code", SAFETENSORS_CODES)
def test_every_dtype_and_shape_survives_bit_for_bit(tmp_path, code, shape):
    dtype = SAFETENSORS_CODES[code]
    a = random_bits(dtype, shape)  # includes NaN payloads, infinities and denormals
    save_file({"pad": np.zeros(3, np.uint8), "a": a}, tmp_path / "a.safetensors")
    file = SafeFile(tmp_path / "a.safetensors")
    b = file.get("a")
    assert (b.dtype, b.shape, file.dtype("a"), file.shape("a")) == (dtype, shape, dtype, shape)
    assert b.tobytes() == a.tobytes()
    assert file.nbytes("a") == a.nbytes
    assert not b.flags.writeable and b.flags.aligned


def test_our_file_read_by_the_package(tmp_path):
    codes = ("F32", "F16", "F64", "I64", "I8", "U8", "BOOL", "BF16")
    tensors = {code: random_bits(SAFETENSORS_CODES[code], (3, 4)) for code in codes}
    save_file(tensors, tmp_path / "a.safetensors")
    with safetensors.safe_open(tmp_path / "a.safetensors", framework="np") as file:
        assert file.metadata() == {"format": "pt"}
        assert set(file.keys()) == set(tensors)
        for name, a in tensors.items():
            assert file.get_tensor(name).tobytes() == a.tobytes(), name
            assert file.get_slice(name).get_dtype() == name


def test_a_file_of_the_package_read_by_us(tmp_path):
    tensors = {"w": random_bits(np.dtype(np.float32), (4, 3)), "h": random_bits(np.dtype(ml_dtypes.bfloat16), (5,))}
    safetensors.numpy.save_file(tensors, tmp_path / "a.safetensors", metadata={"note": "é"})
    file = SafeFile(tmp_path / "a.safetensors")
    assert file.metadata == {"note": "é"}
    assert {n: file.get(n).tobytes() for n in file} == {n: a.tobytes() for n, a in tensors.items()}
    assert file.get("h").dtype == ml_dtypes.bfloat16


def test_views_of_any_strides_are_saved_right(tmp_path):
    a = np.arange(24, dtype=np.float32).reshape(4, 6)
    views = {"t": a.T, "step": a[::2, ::-1], "wide": np.broadcast_to(a[:1], (3, 6)), "big": a.astype(">f4")}
    save_file(views, tmp_path / "a.safetensors")
    with safetensors.safe_open(tmp_path / "a.safetensors", framework="np") as file:
        for name, view in views.items():
            np.testing.assert_array_equal(file.get_tensor(name), view, err_msg=name)


def test_tensors_are_accepted(tmp_path):
    from peft_core import tensor

    save_file({"t": tensor([1.0, 2.0], requires_grad=True)}, tmp_path / "a.safetensors")
    assert load_file(tmp_path / "a.safetensors")["t"].tolist() == [1.0, 2.0]


def test_same_content_gives_the_same_bytes(tmp_path):
    a, b = np.ones(2, np.float32), np.ones(3, np.float64)
    save_file({"a": a, "b": b}, tmp_path / "1", {"x": "1", "a": "2"})
    save_file({"b": b, "a": a.copy()}, tmp_path / "2", {"a": "2", "x": "1"})
    assert (tmp_path / "1").read_bytes() == (tmp_path / "2").read_bytes()


def test_no_tensors_and_no_metadata(tmp_path):
    save_file({}, tmp_path / "a", {})
    file = SafeFile(tmp_path / "a")
    assert (file.keys(), file.metadata, len(file)) == ([], {}, 0)


def test_unaligned_tensors_are_read_right(tmp_path):
    values = np.array([1.5, -2.0], np.float32)
    header = {"a": entry(0, 1, (1,)), "b": entry(1, 9, (2,), "F32")}
    b = SafeFile(written(tmp_path, raw(header, b"\7" + values.tobytes()))).get("b")
    assert b.tolist() == values.tolist() and b.flags.aligned and not b.flags.writeable


def test_reading_maps_the_file_and_does_not_load_it(tmp_path):
    save_file({"a": np.zeros(64 << 20, np.uint8)}, tmp_path / "a")
    code = ("import sys; from peft_core.safetensors_io import SafeFile; from peft_core.backend import rss_bytes\n"
            "before = rss_bytes(); a = SafeFile(sys.argv[1]).get('a'); print(rss_bytes() - before)")  # fmt: skip
    out = subprocess.run([sys.executable, "-c", code, str(tmp_path / "a")], capture_output=True, text=True, check=True)
    assert int(out.stdout) < 8 << 20


def test_get_of_an_unknown_name(tmp_path):
    save_file({"w": np.zeros(1)}, tmp_path / "a")
    for method in (SafeFile.get, SafeFile.shape, SafeFile.dtype, SafeFile.nbytes):
        with pytest.raises(FileError, match=r"has no tensor 'v'; expected one of its 1 names \('w'\)\. Check"):
            method(SafeFile(tmp_path / "a"), "v")


# ---------------------------------------------------------------------- damaged files: each its own text

U8 = {"a": entry(0, 2), "b": entry(2, 4)}
BAD_HEADERS = {
    "empty": (b"", r"is empty \(0 bytes\); expected a safetensors file"),
    "short": (b"\x08\0\0\0", r"is truncated: it ends after 4 bytes"),
    "lfs": (b"version https://git-lfs.github.com/spec/v1\noid sha256:1\nsize 5\n", r"is a Git LFS pointer .*git lfs"),
    "zip": (b"PK\x03\x04" + b"\0" * 80, r"looks like a zip archive, as torch.save"),
    "pickle": (b"\x80\x02}q" + b"\0" * 80, r"looks like a pickle"),
    "html": (b"<!DOCTYPE html><html></html>", r"looks like a web page"),
    "json": (b'{"weight_map": {}}', r"looks like a JSON text"),
    "text": (b"hello hello hello", r"gives a header length of \d+ bytes; expected 2 to 100000000"),
    "negative": (raw(U8, b"1234", (1 << 64) - 5), r"gives a header length of -5 bytes"),
    "huge": (raw(U8, b"1234", 1 << 40), r"gives a header length of 1099511627776 bytes"),
    "zero": (raw(U8, b"1234", 0), r"gives a header length of 0 bytes"),
    "cut": (raw(U8, b"")[:40], r"is truncated inside the header: \d+ bytes are announced and 32 follow"),
    "not {": (raw(b"[1, 2, 3]"), r"its header starts with b'\['"),
    "not JSON": (raw(b'{"a": '), r"header that is not valid JSON"),
    "deep": (raw(b'{"a": ' + b"[" * 100_000), r"header that is not valid JSON"),
    "nearly deep": (raw(b'{"a":' + b"[" * 900 + b"]" * 900 + b"}"), r"has header \[\["),
    "not UTF-8": (raw(b'{"\xff": 1}'), r"header that is not valid JSON"),
    "surrogate": (raw(b'{"\\ud800": 1}'), r"header that is not valid JSON"),
    "NaN": (raw(b'{"a": NaN}'), r"NaN is no JSON number"),
    "long integer": (raw(b'{"a": ' + b"9" * 5000 + b"}"), r"header that is not valid JSON"),
    "duplicate": (raw(b'{"a": 1, "a": 2}'), r"names 'a' twice in its header; expected unique keys"),
    "inner duplicate": (raw(b'{"a": {"dtype": "U8", "dtype": "I8"}}'), r"names 'dtype' twice"),
    "metadata list": (raw({"__metadata__": []}), r"has __metadata__ of type list; expected an object of texts"),
    "metadata int": (raw({"__metadata__": {"k": 1}}), r"has __metadata__ 'k' of type int; expected a text"),
    "entry": (raw({"a": 3}), r"tensor 'a' has header 3; expected dtype, shape and data_offsets"),
    "field missing": (raw({"a": {"dtype": "U8", "shape": []}}), r"tensor 'a' has header .*expected dtype, shape and"),
    "field extra": (raw({"a": {**entry(0, 2), "strides": [1]}}, b"12"), r"tensor 'a' has header .*expected dtype"),
    "dtype": (raw({"a": entry(0, 2, dtype="F4")}, b"12"), r"tensor 'a' has dtype 'F4'; expected one of F64, F32"),
    "dtype list": (raw({"a": entry(0, 2, dtype=["F32"])}, b"12"), r"tensor 'a' has dtype \['F32'\]"),
    "shape": (raw({"a": entry(0, 2, (-2,))}, b"12"), r"tensor 'a' has shape \[-2\]; expected a list of at most 64"),
    "shape bool": (raw({"a": entry(0, 2, (2, True))}, b"12"), r"has shape \[2, True\]; expected a list"),
    "shape float": (raw({"a": entry(0, 2, (2.0,))}, b"12"), r"has shape \[2\.0\]; expected a list"),
    "shape 65": (raw({"a": entry(0, 1, (1,) * 65)}, b"1"), r"expected a list of at most 64 sizes"),
    "shape overflow": (raw({"a": entry(0, 0, (1 << 62, 0, 4))}), r"expected less than 2\^63 bytes"),
    "offsets": (raw({"a": {"dtype": "U8", "shape": [2], "data_offsets": [0]}}, b"12"), r"has data_offsets \[0\]; exp"),
    "negative offsets": (raw({"a": entry(-2, 0)}), r"has data_offsets \[-2, 0\]; expected"),
    "reversed": (raw({"a": entry(2, 0)}, b"12"), r"has reversed data_offsets \[2, 0\]; expected begin <= end"),
    "size": (raw({"a": entry(0, 2, (3,))}, b"12"), r"has 2 bytes for shape \(3,\) of U8; expected 3"),
    "outside": (raw(U8, b"123"), r"tensor 'b' ends at byte 4 of the data, but the file has 3"),
    "overlap": (raw({"a": entry(0, 2), "b": entry(1, 3)}, b"123"), r"'b' starts at byte 1 and overlaps tensor 'a'"),
    "gap": (raw({"a": entry(0, 2), "b": entry(3, 5)}, b"12345"), r"1 unused bytes lie between tensor 'a' and ten"),
    "first gap": (raw({"a": entry(1, 3)}, b"123"), r"1 unused bytes lie between the start of the data and tensor 'a'"),
    "rest": (raw(U8, b"12345"), r"has 1 bytes after tensor 'b'; expected a file that ends with its last tensor"),
}


@pytest.mark.parametrize("case", BAD_HEADERS)
def test_damaged_file(tmp_path, case):
    content, text = BAD_HEADERS[case]
    path = written(tmp_path, content)
    with pytest.raises(FileError, match=text) as caught:
        SafeFile(path)
    message = str(caught.value)
    assert str(path) in message and "; expected " in message
    assert len(message) < 700


def test_the_texts_are_distinct():
    assert len({text for _, text in BAD_HEADERS.values()}) >= len(BAD_HEADERS) - 5


def test_missing_file_and_directory(tmp_path):
    with pytest.raises(FileError, match=r"nothing could not be opened \(No such file or directory\); expected"):
        SafeFile(tmp_path / "nothing")
    with pytest.raises(FileError, match=r"could not be opened \(Is a directory\)"):
        SafeFile(tmp_path)


def test_random_damage_is_always_a_file_error_or_harmless(tmp_path):
    """Whatever is done to a file, SafeFile raises FileError, or the safetensors package accepts it too."""
    rng = np.random.default_rng(0)
    save_file({"w": np.ones((2, 3), np.float32), "b": np.ones(3, np.int8), "e": np.ones((0, 4))}, tmp_path / "good")
    good = (tmp_path / "good").read_bytes()
    tokens = [b'"', b"{", b"}", b"[", b"]", b",", b":", b"-1", b"0", b"999999999999999999999", b"1e9", b"null", b"true",
              b'"F32"', b'"w"', b'"__metadata__"', b"\xff", b"\\ud800", b" "]  # fmt: skip
    refused = 0
    for i in range(1500):
        content = bytearray(good)
        for _ in range(rng.integers(1, 4)):
            at = int(rng.integers(0, len(content) + 1))
            kind = rng.integers(0, 5)
            if kind == 0 and at < len(content):
                content[at] = rng.integers(0, 256)
            elif kind == 1:
                content[at:at] = tokens[rng.integers(0, len(tokens))]
            elif kind == 2:
                del content[at : at + int(rng.integers(1, 9))]
            elif kind == 3:
                content[at : at + 1] = tokens[rng.integers(0, len(tokens))]
            elif i % 4 == 0:
                del content[at:]
            if rng.integers(0, 2):  # half of the time the length is made right again, to reach the deeper checks
                header_end = bytes(content).rfind(b"}") + 1
                content[:8] = max(header_end - 8, 0).to_bytes(8, "little")
        path = tmp_path / f"bad{i}"
        path.write_bytes(content)
        try:
            file = SafeFile(path)
            for name in file:
                assert file.get(name).nbytes == file.nbytes(name)
        except FileError as error:
            refused += 1
            str(error).encode()
        else:
            with safetensors.safe_open(path, framework="np") as theirs:
                assert set(theirs.keys()) == set(file.keys())
        path.unlink()
    assert 1000 < refused < 1500


# ---------------------------------------------------------------------- writing


def names(tmp_path):
    return sorted(p.name for p in tmp_path.iterdir())


@pytest.mark.parametrize(
    ("tensors", "metadata", "text"),
    [
        ({"a": np.zeros(2, complex)}, None, r"tensor 'a' has dtype complex128; expected one of float64.*Convert it"),
        ({"a": np.array(["x"])}, None, r"tensor 'a' has dtype <U1; expected one of"),
        ({1: np.zeros(2)}, None, r"a tensor is named 1; expected a text other than '__metadata__'"),
        ({"__metadata__": np.zeros(2)}, None, r"a tensor is named '__metadata__'"),
        ({"a": np.zeros(2)}, {"k": 1}, r"metadata 'k' is 1; expected texts only"),
    ],
)
def test_what_cannot_be_stored(tmp_path, tensors, metadata, text):
    with pytest.raises(FileError, match=text):
        save_file(tensors, tmp_path / "a", metadata)
    assert names(tmp_path) == []


def test_a_failed_write_leaves_the_old_file_and_no_other(tmp_path, monkeypatch):
    path = tmp_path / "a"
    save_file({"a": np.zeros(2)}, path)
    before = path.read_bytes()

    def full(descriptor):
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(os, "fsync", full)
    with pytest.raises(FileError, match=r"a could not be written \(No space left on device\); expected .*Nothing was"):
        save_file({"a": np.ones(2)}, path)
    assert path.read_bytes() == before and names(tmp_path) == ["a"]


def test_a_write_that_reads_back_wrong_is_refused(tmp_path, monkeypatch):
    monkeypatch.setattr(safetensors_io, "_equal", lambda a, b: False)
    with pytest.raises(FileError, match=r"was read back and differs from what was written; expected the same bits"):
        save_file({"a": np.ones(2)}, tmp_path / "a")
    assert names(tmp_path) == []


def test_the_comparison_sees_one_bit_and_the_sign_of_zero():
    a = np.zeros((3, 4), np.float32)
    b = a.copy()
    assert safetensors_io._equal(a, b) and safetensors_io._equal(a.T, b.T)
    b[2, 3] = -0.0
    assert not safetensors_io._equal(a, b)
    assert not safetensors_io._equal(a, a.reshape(4, 3)) and not safetensors_io._equal(a, a.view(np.int32))


def test_overwriting_a_file_that_is_mapped(tmp_path):
    path = tmp_path / "a"
    save_file({"a": np.arange(5.0)}, path)
    old = load_file(path)["a"]
    save_file({"a": old * 2}, path)
    save_file({"a": load_file(path)["a"]}, path)
    assert old.tolist() == [0, 1, 2, 3, 4] and load_file(path)["a"].tolist() == [0, 2, 4, 6, 8]


def test_atomic_write(tmp_path):
    atomic_write(tmp_path / "deep" / "t.txt", "é\r\n")
    assert (tmp_path / "deep" / "t.txt").read_bytes() == "é\r\n".encode()
    atomic_write(tmp_path / "deep" / "t.txt", b"2")
    assert (tmp_path / "deep" / "t.txt").read_bytes() == b"2" and names(tmp_path / "deep") == ["t.txt"]
    with pytest.raises(FileError, match=r"is a directory; expected the path of a file\. Add a file name\."):
        atomic_write(tmp_path, "x")
    plain = tmp_path / "plain"
    plain.write_text("")
    assert stat.S_IMODE((tmp_path / "deep" / "t.txt").stat().st_mode) == stat.S_IMODE(plain.stat().st_mode)


def test_atomic_dir_appears_whole_or_not_at_all(tmp_path):
    with atomic_dir(tmp_path / "d") as folder:
        (folder / "sub").mkdir()
        (folder / "sub" / "f").write_text("1")
        assert not (tmp_path / "d").exists()
    assert (tmp_path / "d" / "sub" / "f").read_text() == "1"
    with pytest.raises(KeyboardInterrupt), atomic_dir(tmp_path / "e") as folder:
        (folder / "f").write_text("1")
        raise KeyboardInterrupt
    assert names(tmp_path) == ["d"]


def test_atomic_dir_removes_no_strangers_files(tmp_path):
    (tmp_path / "d").mkdir()
    with atomic_dir(tmp_path / "d") as folder:  # an empty one may be taken
        (folder / "f").write_text("1")
    with pytest.raises(FileError, match="is a directory with files in it; expected a new or an empty"):
        atomic_dir(tmp_path / "d").__enter__()
    with pytest.raises(FileError, match="f is a file; expected a new or an empty directory"):
        atomic_dir(tmp_path / "d" / "f").__enter__()
    with atomic_dir(tmp_path / "d", replace=True) as folder:
        (folder / "g").write_text("2")
    assert names(tmp_path) == ["d"] and names(tmp_path / "d") == ["g"]


def test_atomic_dir_puts_the_old_one_back(tmp_path, monkeypatch):
    with atomic_dir(tmp_path / "d") as folder:
        (folder / "f").write_text("1")
    rename = os.rename

    def second_fails(source, target):
        if re.search(r"\.tmp$", str(source)):
            raise OSError(5, "Input/output error")
        rename(source, target)

    monkeypatch.setattr(files, "_exchange", lambda a, b: False)
    monkeypatch.setattr(os, "rename", second_fails)
    with (
        pytest.raises(FileError, match=r"d could not be written \(Input/output error\)"),
        atomic_dir(tmp_path / "d", replace=True) as folder,
    ):
        (folder / "f").write_text("2")
    assert names(tmp_path) == ["d"] and (tmp_path / "d" / "f").read_text() == "1"


def test_atomic_dir_without_an_exchange(tmp_path, monkeypatch):
    monkeypatch.setattr(files, "_exchange", lambda a, b: False)
    for text in ("1", "2"):
        with atomic_dir(tmp_path / "d", replace=True) as folder:
            (folder / "f").write_text(text)
    assert names(tmp_path) == ["d"] and (tmp_path / "d" / "f").read_text() == "2"


@pytest.mark.skipif(sys.platform != "linux", reason="only Linux swaps two names in one step")
def test_atomic_dir_survives_a_kill_at_any_moment(tmp_path):
    code = ("import sys, itertools; from peft_core.files import atomic_dir\n"
            "for i in itertools.count():\n"
            "    with atomic_dir(sys.argv[1], replace=True) as d:\n"
            "        for name in 'abc': (d / name).write_text(str(i))\n"
            "    print(i, flush=True)")  # fmt: skip
    for delay in (0.0, 0.003, 0.007):
        process = subprocess.Popen([sys.executable, "-c", code, str(tmp_path / "d")], stdout=subprocess.PIPE)
        assert process.stdout.readline() == b"0\n"
        time.sleep(delay)
        process.kill()
        process.communicate()
        assert len({(tmp_path / "d" / name).read_text() for name in "abc"}) == 1


def test_atomic_dir_where_nothing_may_be_written(tmp_path):
    (tmp_path / "f").write_text("")
    with pytest.raises(FileError, match=r"could not be written \((Not a directory|File exists)\)"):
        atomic_dir(tmp_path / "f" / "d").__enter__()
