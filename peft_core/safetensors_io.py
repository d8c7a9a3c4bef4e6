"""safetensors files: zero-copy reading that trusts nothing in the header, and the one writer.

A file is 8 bytes (length of the header, little-endian), the header (JSON: name -> dtype, shape, data_offsets), and the
tensors' bytes without gaps. Format: https://github.com/huggingface/safetensors, README, "Format".
"""

from __future__ import annotations

import json
import math
import mmap
import os
import reprlib
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, BinaryIO, NoReturn

import numpy as np

from .backend import to_numpy
from .dtypes import SAFETENSORS_CODES, code_of, dtype_name
from .errors import FileError, expect
from .files import FileMap, atomic_dir, atomic_write, write_through
from .tensor import Tensor

__all__ = ["SafeFile", "atomic_dir", "atomic_write", "load_file", "save_file"]

MAX_HEADER_BYTES = 100_000_000  # the format's own limit
_MAX_NDIM = 64  # NumPy's limit
_COMPARE_BYTES = 1 << 24
_FIELDS = {"dtype", "shape", "data_offsets"}
_AGAIN = "Download or copy the file again."
_REWRITE = "The program that wrote it is at fault: write it again, or get it from its source again."
_OTHER_KINDS = {
    b"PK\x03\x04": "a zip archive, as torch.save writes (.bin, .pt)",
    b"\x80\x02": "a pickle, as torch.save used to write (.bin, .pt)",
    b"\x89HDF": "an HDF5 file (.h5)",
    b"GGUF": "a GGUF file",
    b"\x1f\x8b": "a gzip archive",
    b"<": "a web page",
    b"{": "a JSON text",
}


@dataclass(frozen=True)
class _Entry:
    dtype: np.dtype
    shape: tuple[int, ...]
    begin: int  # bytes from the start of the data
    end: int


class SafeFile:
    """A safetensors file, memory-mapped; tensors are read-only views of the file.

    ``metadata``: the header's free texts.  Raises FileError, which names the path and the fault, for anything that is
    not a valid file: wrong lengths, JSON, offsets, sizes or dtypes, a Git LFS pointer, another format.
    """

    def __init__(self, path: str | os.PathLike) -> None:
        self.path = Path(path)
        try:
            with open(path, "rb") as file:
                size = os.fstat(file.fileno()).st_size
                start, header = _read_header(str(path), file, size)
                self._map = FileMap(file.fileno(), 0, access=mmap.ACCESS_READ)
        except FileError:
            raise
        except (OSError, ValueError) as error:
            reason = getattr(error, "strerror", None) or str(error)
            raise FileError(
                f"{path} could not be opened ({reason}); expected a safetensors file that may be read. Check the path."
            ) from error
        self._start = start
        self._entries, self.metadata = _validated(str(path), header, size - start)

    def keys(self) -> list[str]:
        """Names of the tensors, in the order of the header."""
        return list(self._entries)

    def __iter__(self) -> Iterator[str]:
        return iter(self._entries)

    def __len__(self) -> int:
        return len(self._entries)

    def __contains__(self, name: object) -> bool:
        return name in self._entries

    def __repr__(self) -> str:
        return f"SafeFile({str(self.path)!r}, {len(self)} tensors)"

    def shape(self, name: str) -> tuple[int, ...]:
        """Shape of a tensor.  Raises FileError for a name that is not in the file."""
        return self._entry(name).shape

    def dtype(self, name: str) -> np.dtype:
        """Element type of a tensor.  Raises FileError for a name that is not in the file."""
        return self._entry(name).dtype

    def nbytes(self, name: str) -> int:
        """Size of a tensor in bytes.  Raises FileError for a name that is not in the file."""
        return self._entry(name).end - self._entry(name).begin

    def get(self, name: str) -> np.ndarray:
        """A tensor as a read-only array that shares the file's pages (a copy if it is not aligned in the file).

        Raises FileError for a name that is not in the file.
        """
        entry = self._entry(name)
        if entry.begin == entry.end:
            array = np.empty(entry.shape, entry.dtype)
        else:
            count = (entry.end - entry.begin) // entry.dtype.itemsize
            array = np.frombuffer(self._map, entry.dtype, count, self._start + entry.begin).reshape(entry.shape)
            if not array.flags.aligned:  # kernels and BLAS want whole elements at their own addresses
                array = array.copy()
        array.flags.writeable = False
        return array

    def _entry(self, name: str) -> _Entry:
        if name not in self._entries:
            shown = ", ".join(map(repr, self.keys()[:5])) + (", ..." if len(self) > 5 else "")
            raise FileError(
                f"{self.path} has no tensor {name!r}; expected one of its {len(self)} names ({shown}). "
                "Check that the file belongs to this model or adapter."
            )
        return self._entries[name]


# ---------------------------------------------------------------------- the header


def _read_header(path: str, file: BinaryIO, size: int) -> tuple[int, Any]:
    """Where the data starts, and the header as parsed JSON."""
    expect(size > 0, FileError, f"{path} is empty (0 bytes)", expected="a safetensors file", fix=_AGAIN)
    begin = file.read(64)
    expect(
        not begin.startswith(b"version https://git-lfs"),
        FileError,
        f"{path} is a Git LFS pointer ({size} bytes of text), not the file itself",
        expected="the weights that it points to",
        fix="Run `git lfs pull` in that directory, or download the file directly.",
    )
    kind = next((text for magic, text in _OTHER_KINDS.items() if begin.startswith(magic) and begin[8:9] != b"{"), None)
    expect(kind is None, FileError, f"{path} is not a safetensors file but looks like {kind}",
           expected="a safetensors file", fix="Use the .safetensors version of these weights.")  # fmt: skip
    expect(size >= 10, FileError, f"{path} is truncated: it ends after {size} bytes",
           expected="at least 8 bytes of header length and a header", fix=_AGAIN)  # fmt: skip
    length = int.from_bytes(begin[:8], "little")
    signed = int.from_bytes(begin[:8], "little", signed=True)
    expect(2 <= length <= MAX_HEADER_BYTES, FileError,
           f"{path} is not a safetensors file, or its start is damaged: it gives a header length of {signed} bytes",
           expected=f"2 to {MAX_HEADER_BYTES}", fix=_AGAIN)  # fmt: skip
    expect(begin[8:9] == b"{", FileError, f"{path} is not a safetensors file: its header starts with {begin[8:9]!r}",
           expected="b'{'", fix=_AGAIN)  # fmt: skip
    expect(length <= size - 8, FileError,
           f"{path} is truncated inside the header: {length} bytes are announced and {size - 8} follow",
           expected="the whole header", fix=_AGAIN)  # fmt: skip
    file.seek(8)
    try:
        text = file.read(length).decode("utf-8")
        return 8 + length, json.loads(text, object_pairs_hook=_no_duplicates, parse_constant=_no_constant)
    except _DuplicateError as error:
        text = f"{path} names {error.args[0]!r} twice in its header; expected unique keys. {_REWRITE}"
        raise FileError(text) from None
    except (ValueError, RecursionError) as error:  # JSON, UTF-8 and far too long integers are all ValueErrors
        what = str(error).partition("\n")[0][:200]
        text = f"{path} has a header that is not valid JSON ({what}); expected a JSON object. {_AGAIN}"
        raise FileError(text) from error


class _DuplicateError(Exception):
    pass


def _no_duplicates(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    result: dict[str, Any] = {}
    for key, value in pairs:
        key.encode("utf-8")  # a lone surrogate is legal in JSON and in no file or message
        if key in result:
            raise _DuplicateError(key)
        result[key] = value
    return result


def _no_constant(text: str) -> NoReturn:
    raise ValueError(f"{text} is no JSON number")


def _validated(path: str, header: Any, data_bytes: int) -> tuple[dict[str, _Entry], dict[str, str]]:
    """The entries and the metadata of a parsed header, after every check that needs no tensor bytes."""
    expect(isinstance(header, dict), FileError, f"{path} has a header that is a {type(header).__name__}",
           expected="a JSON object", fix=_REWRITE)  # fmt: skip
    metadata = header.pop("__metadata__", {})
    expect(isinstance(metadata, dict), FileError, f"{path} has __metadata__ of type {type(metadata).__name__}",
           expected="an object of texts", fix=_REWRITE)  # fmt: skip
    for key, value in metadata.items():
        expect(isinstance(value, str), FileError, f"{path} has __metadata__ {key!r} of type {type(value).__name__}",
               expected="a text", fix=_REWRITE)  # fmt: skip
    entries = {name: _entry(f"{path}: tensor {name!r}", value) for name, value in header.items()}
    position, previous = 0, "the start of the data"
    for name, entry in sorted(entries.items(), key=lambda item: (item[1].begin, item[1].end)):
        expect(entry.end <= data_bytes, FileError,
               f"{path}: tensor {name!r} ends at byte {entry.end} of the data, but the file has {data_bytes}",
               expected="a whole file: this one is truncated or its header wrong", fix=_AGAIN)  # fmt: skip
        expect(entry.begin >= position, FileError,
               f"{path}: tensor {name!r} starts at byte {entry.begin} and overlaps {previous}, which ends at "
               f"{position}",
               expected="tensors that share no bytes", fix=_REWRITE)  # fmt: skip
        expect(entry.begin == position, FileError,
               f"{path}: {entry.begin - position} unused bytes lie between {previous} and tensor {name!r}",
               expected="tensors without gaps", fix=_REWRITE)  # fmt: skip
        position, previous = entry.end, f"tensor {name!r}"
    expect(position == data_bytes, FileError, f"{path} has {data_bytes - position} bytes after {previous}",
           expected="a file that ends with its last tensor", fix=_REWRITE)  # fmt: skip
    return entries, metadata


def _entry(where: str, value: Any) -> _Entry:
    """One tensor's header, checked by itself."""
    # Plain ifs: the texts of faults that are not there took most of the time of a large header.
    if not (isinstance(value, dict) and value.keys() == _FIELDS):
        raise FileError(f"{where} has header {reprlib.repr(value)}; expected dtype, shape and data_offsets. {_REWRITE}")
    code, shape, offsets = value["dtype"], value["shape"], value["data_offsets"]
    if not (isinstance(code, str) and code in SAFETENSORS_CODES):
        codes = f"one of {', '.join(SAFETENSORS_CODES)}. Convert the file to one of these."
        raise FileError(f"{where} has dtype {reprlib.repr(code)}; expected {codes}")
    dtype = SAFETENSORS_CODES[code]
    if not (isinstance(shape, list) and len(shape) <= _MAX_NDIM and all(map(_is_size, shape))):
        sizes = f"a list of at most {_MAX_NDIM} sizes from 0 to 2^63 - 1"
        raise FileError(f"{where} has shape {reprlib.repr(shape)}; expected {sizes}. {_REWRITE}")
    elements = math.prod(shape)
    if (elements or math.prod(max(n, 1) for n in shape)) * dtype.itemsize >= 1 << 63:
        raise FileError(f"{where} has shape {reprlib.repr(shape)}; expected less than 2^63 bytes. {_REWRITE}")
    if not (isinstance(offsets, list) and len(offsets) == 2 and all(map(_is_size, offsets))):
        pair = "[begin, end], two integers from 0 to 2^63 - 1"
        raise FileError(f"{where} has data_offsets {reprlib.repr(offsets)}; expected {pair}. {_REWRITE}")
    begin, end = offsets
    expect(begin <= end, FileError, f"{where} has reversed data_offsets [{begin}, {end}]", expected="begin <= end",
           fix=_REWRITE)  # fmt: skip
    expect(end - begin == elements * dtype.itemsize, FileError,
           f"{where} has {end - begin} bytes for shape {tuple(shape)} of {code}",
           expected=f"{elements * dtype.itemsize}", fix=_REWRITE)  # fmt: skip
    return _Entry(dtype, tuple(shape), begin, end)


def _is_size(number: Any) -> bool:
    return type(number) is int and 0 <= number < 1 << 63  # not isinstance: True is an int in Python, not in JSON


def load_file(path: str | os.PathLike) -> dict[str, np.ndarray]:
    """All tensors of a file as read-only, memory-mapped arrays.  Raises FileError as SafeFile does."""
    file = SafeFile(path)
    return {name: file.get(name) for name in file}


# ---------------------------------------------------------------------- writing


def save_file(tensors: Mapping[str, Any], path: str | os.PathLike, metadata: Mapping[str, str] | None = None) -> None:
    """Write arrays (NumPy, CuPy, Tensors; any strides) to ``path``: all of it, or nothing.

    Same content, same bytes: widest dtype first, then by name.  ``metadata`` is {"format": "pt"} unless given: some
    readers need it.  The file is written under a temporary name, read back, compared bit for bit, then renamed.
    Raises FileError if a name, a dtype or a text cannot be stored, or the system refuses.
    """
    metadata = {"format": "pt"} if metadata is None else metadata
    for key, value in metadata.items():
        expect(isinstance(key, str) and isinstance(value, str), FileError, f"{path}: metadata {key!r} is {value!r}",
               expected="texts only", fix="Convert it with str() or json.dumps().")  # fmt: skip
    arrays = {name: _storable(path, name, value) for name, value in tensors.items()}
    names = sorted(arrays, key=lambda name: (-arrays[name].dtype.itemsize, name))
    header: dict[str, Any] = {"__metadata__": dict(sorted(metadata.items()))} if metadata else {}
    position = 0
    for name in names:
        array = arrays[name]
        offsets = [position, position + array.nbytes]
        header[name] = {"dtype": code_of(array.dtype), "shape": list(array.shape), "data_offsets": offsets}
        position += array.nbytes
    text = json.dumps(header, separators=(",", ":")).encode()
    text += b" " * (-len(text) % 8)  # the data starts at a multiple of 8, so that its views are aligned

    def write(file: BinaryIO) -> None:
        file.write(len(text).to_bytes(8, "little") + text)
        for name in names:
            file.write(_bytes(arrays[name]).data)

    def check(temporary: Path) -> None:
        written = SafeFile(temporary)
        same = written.metadata == dict(metadata) and set(written) == set(names)
        for name in names:
            same = same and _equal(arrays[name], written.get(name))
        expect(same, FileError, f"{path} was read back and differs from what was written", expected="the same bits",
               fix="Disk or memory is unreliable, or the arrays changed meanwhile; nothing was saved.")  # fmt: skip

    write_through(path, write, check)


def _storable(path: Any, name: Any, value: Any) -> np.ndarray:
    """A value as an array of native byte order, after the checks; not copied, strides as they are."""
    expect(isinstance(name, str) and name != "__metadata__", FileError, f"{path}: a tensor is named {name!r}",
           expected="a text other than '__metadata__'", fix="Rename it.")  # fmt: skip
    array = np.asarray(to_numpy(value.data if isinstance(value, Tensor) else value))
    native = array.dtype.newbyteorder("=") if array.dtype.byteorder == ">" else array.dtype
    expect(native in SAFETENSORS_CODES.values(), FileError,
           f"{path}: tensor {name!r} has dtype {dtype_name(array.dtype)}",
           expected=f"one of {', '.join(map(dtype_name, SAFETENSORS_CODES.values()))}",
           fix="Convert it first.")  # fmt: skip
    return array.astype(native, copy=False)


def _bytes(array: np.ndarray) -> np.ndarray:
    """The bytes of an array in C order: a view of a contiguous one, else of a copy."""
    return np.asarray(array, order="C").reshape(-1).view(np.uint8)


def _equal(a: np.ndarray, b: np.ndarray) -> bool:
    """Same dtype, shape and bits (NaNs too), compared in pieces: a comparison makes one more byte per byte."""
    if a.dtype != b.dtype or a.shape != b.shape:
        return False
    x, y = _bytes(a), _bytes(b)
    return all(np.array_equal(x[i : i + _COMPARE_BYTES], y[i : i + _COMPARE_BYTES])
               for i in range(0, len(x), _COMPARE_BYTES))  # fmt: skip
