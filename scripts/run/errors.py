"""From an exception to an exit code and one block of text: a person reads what to do, a script reads the number."""

from __future__ import annotations

import sys
import traceback
from collections.abc import Callable, Sequence

from peft_core.errors import (
    AdapterError,
    ConfigError,
    DataError,
    DivergedError,
    ExportError,
    FileError,
    ModelError,
    OutOfMemoryError,
    PeftCoreError,
)

DONE, BUG, CONFIG, DATA, FILES, MEMORY, DIVERGED, EXPORT = range(8)

# Most special first: ModelError and AdapterError are FileErrors.
_KINDS: tuple[tuple[type[BaseException], str, int], ...] = (
    (ConfigError, "config error", CONFIG),
    (DataError, "data error", DATA),
    (AdapterError, "adapter error", FILES),
    (ModelError, "model error", FILES),
    (FileError, "file error", FILES),
    (OutOfMemoryError, "out of memory", MEMORY),
    (MemoryError, "out of memory", MEMORY),
    (DivergedError, "diverged", DIVERGED),
    (ExportError, "export error", EXPORT),
)


class Interrupted(BaseException):
    """A signal ended the run; ``code`` is 128 + its number.  Not an Exception: no handler on the way may swallow it."""

    def __init__(self, signum: int, text: str = "") -> None:
        super().__init__(text)
        self.code, self.text = 128 + signum, text


def classify(error: BaseException) -> tuple[str, int] | None:
    """The kind of an expected error and its exit code; None for a bug."""
    if type(error).__name__ == "OutOfMemoryError":  # CuPy's own class, without importing CuPy
        return "out of memory", MEMORY
    for cls, kind, code in _KINDS:
        if isinstance(error, cls):
            return kind, code
    if isinstance(error, OSError) and error.filename is not None:  # the system refused a path that a person named
        return "file error", FILES
    return ("error", CONFIG) if isinstance(error, PeftCoreError) else None


def _text(error: BaseException) -> str:
    if isinstance(error, OSError) and not isinstance(error, PeftCoreError) and error.filename is not None:
        return (
            f"{error.filename}: {error.strerror or error}; expected a path that exists, may be read and "
            "written, and has room. Check the path, its permissions and the free space."
        )
    return str(error) or "an allocation failed"


def run_page(page: Callable[[Sequence[str]], int], argv: Sequence[str]) -> int:
    """``page(argv)``, with every exception turned into an exit code; a bug keeps its traceback."""
    debug = "--debug" in argv
    try:
        return page(argv)
    except Interrupted as stop:
        print(f"\nstopped: {stop.text or 'nothing was written.'}", file=sys.stderr)
        return stop.code
    except KeyboardInterrupt:
        print("\nstopped: interrupted from the keyboard.", file=sys.stderr)
        return 130
    except BrokenPipeError:
        # The reader of our output left (as in "| head"); there is nobody to tell.
        sys.stderr.close()
        return 141
    except Exception as error:
        found = classify(error)
        if found is None:
            traceback.print_exc()
            print("This is a bug. Please report it with the text above.", file=sys.stderr)
            return BUG
        if debug:
            traceback.print_exc()
        kind, code = found
        text = _text(error)
        print(text if text.startswith(kind) else f"{kind}: {text}", file=sys.stderr)
        return code
