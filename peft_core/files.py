"""Writing files and directories so that a reader finds the old content or the new, and never a half of either."""

from __future__ import annotations

import contextlib
import ctypes
import mmap
import os
import secrets
import shutil
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import BinaryIO

from .errors import FileError, expect


class FileMap(mmap.mmap):
    """Pages of a file that is read and nothing else: to let go of them loses nothing, the file has it all.

    Made with access=ACCESS_READ. A map that others made may hold what was written to it alone.
    """


def _sibling(path: Path, word: str) -> Path:
    """A free name next to ``path``: in the same directory, because only there a rename is atomic."""
    return path.with_name(f".{path.name}.{os.getpid()}-{secrets.token_hex(4)}.{word}")


def _sync(path: Path) -> None:
    """Ask the system to put a file or a directory on the disk; directories cannot be opened on Windows."""
    if os.name == "nt":
        return
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


def _failure(path: Path, error: OSError) -> FileError:
    reason = error.strerror or str(error)
    return FileError(
        f"{path} could not be written ({reason}); expected a directory that exists, may be written to and has room. "
        "Nothing was changed; free space or choose another path."
    )


def write_through(
    path: str | os.PathLike, write: Callable[[BinaryIO], object], check: Callable[[Path], object]
) -> None:
    """Create or replace the file at ``path`` by what ``write(file)`` writes, after ``check(temporary path)`` passed.

    The parent directory is created.  On any error the old file is untouched and the temporary one is removed.
    Raises FileError where the system refuses (no room, no permission).
    """
    path = Path(path)
    expect(not path.is_dir(), FileError, f"{path} is a directory", expected="the path of a file",
           fix="Add a file name.")  # fmt: skip
    temporary = _sibling(path, "tmp")
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        with open(temporary, "xb") as file:
            write(file)
            file.flush()
            os.fsync(file.fileno())
        check(temporary)
        os.replace(temporary, path)
        _sync(path.parent)
    except FileError:
        raise
    except OSError as error:
        raise _failure(path, error) from error
    finally:
        with contextlib.suppress(OSError):
            temporary.unlink(missing_ok=True)


def atomic_write(path: str | os.PathLike, content: bytes | str) -> None:
    """Create or replace the file at ``path`` with ``content`` (text as UTF-8, line ends unchanged).

    Raises FileError.
    """
    data = content.encode() if isinstance(content, str) else content
    write_through(path, lambda file: file.write(data), lambda temporary: None)


@contextlib.contextmanager
def atomic_dir(path: str | os.PathLike, replace: bool = False) -> Iterator[Path]:
    """Give a new directory to fill, which becomes ``path`` when the block ends and vanishes if the block raises.

    ``replace``: an existing directory at ``path`` is removed, with all it holds, once the new one stands in its place;
    without it only an empty one is.  Raises FileError if ``path`` is taken or the system refuses.
    """
    path = Path(os.path.realpath(path))  # through a link: the link stays, its target is replaced
    taken = path.is_file() or (path.is_dir() and not replace and any(path.iterdir()))
    what = "is a file" if path.is_file() else "is a directory with files in it"
    expect(not taken, FileError, f"{path} {what}", expected="a new or an empty directory", fix="Choose another path.")
    temporary = _sibling(path, "tmp")
    try:
        try:
            path.parent.mkdir(parents=True, exist_ok=True)
            temporary.mkdir()
        except OSError as error:
            raise _failure(path, error) from error
        yield temporary
        try:
            for folder, _, names in os.walk(temporary):
                for name in names:
                    _sync(Path(folder, name))
                _sync(Path(folder))
            _move_into_place(temporary, path)
            _sync(path.parent)
        except OSError as error:
            raise _failure(path, error) from error
    finally:
        shutil.rmtree(temporary, ignore_errors=True)


def _exchange(a: Path, b: Path) -> bool:
    """Swap two names in one step, so that a reader always finds one of them; False where the system cannot."""
    try:
        rename = ctypes.CDLL(None, use_errno=True).renameat2
    except (AttributeError, OSError, TypeError):  # no such call: macOS, old C libraries, Windows
        return False
    here, exchange = -100, 2  # AT_FDCWD and RENAME_EXCHANGE of <fcntl.h>
    return rename(here, os.fsencode(a), here, os.fsencode(b), exchange) == 0


def _move_into_place(temporary: Path, path: Path) -> None:
    """Rename onto ``path``.  What was there changes places with it, or, where the system cannot do that, is set aside
    first and put back if the rename fails.
    """
    if not path.is_dir():
        os.rename(temporary, path)
        return
    if _exchange(temporary, path):
        return  # the old directory now has the temporary name, and goes with it
    aside = _sibling(path, "old")
    os.rename(path, aside)
    try:
        os.rename(temporary, path)
    except BaseException:
        os.rename(aside, path)
        raise
    shutil.rmtree(aside, ignore_errors=True)
