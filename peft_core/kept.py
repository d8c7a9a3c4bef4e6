"""What was made of read-only arrays, such as a packed copy, kept as long as the arrays live.

The rule: a read-only array cannot change. Who makes a read-only view of memory and goes on writing to the memory, or
makes an array writable for a moment in which nobody looks at it here, breaks the rule.
"""

from __future__ import annotations

import sys
import weakref
from collections.abc import Sequence
from typing import Any

import numpy as np


class Kept:
    """Values by the identity of arrays and by what else is in the key.

    Ids are used again after an array's death; so a hit counts only where the weak references kept beside the value say
    that these are the arrays it was made of. They live and die with the entry: nothing is left on an array whose
    partners were replaced.
    """

    def __init__(self) -> None:
        self._entries: dict[tuple, tuple[tuple[weakref.ref, ...], Any]] = {}
        self._ids: set[int] = set()  # of arrays in entries, and some that were

    def __len__(self) -> int:
        return len(self._entries)

    def find(self, key: tuple, arrays: Sequence[np.ndarray]) -> Any:
        """The value, or None."""
        entry = self._entries.get((key, *map(id, arrays)))
        if entry is None:
            return None
        for ref, array in zip(entry[0], arrays, strict=True):
            if ref() is not array or array.flags.writeable:
                return None
        return entry[1]

    def keep(self, key: tuple, arrays: Sequence[np.ndarray], value: Any) -> None:
        """Keep ``value`` until one of the arrays dies or is seen writable."""
        ids = tuple(map(id, arrays))
        full = (key, *ids)

        def gone(_: weakref.ref) -> None:
            self._entries.pop(full, None)

        self._ids.update(ids)
        self._entries[full] = tuple(weakref.ref(array, gone) for array in arrays), value

    def forget(self, array: np.ndarray) -> None:
        """Let go of what was made of an array that is writable now: it may be read-only again with other contents."""
        if id(array) in self._ids:  # hardly ever: this is asked for every weight that trains
            self._ids.discard(id(array))
            for full in list(self._entries):
                if id(array) in full[1:]:
                    self._entries.pop(full, None)


class _Holder:
    __slots__ = ("_data",)

    def __init__(self) -> None:
        self._data = np.empty(0)


def _references(holder: Any) -> int:
    return sys.getrefcount(holder._data)


_ALONE = _references(_Holder())


def seal(tensor: Any) -> bool:
    """Make the memory of a Tensor read-only, so that what is made of it can be kept; True where it is now.

    Only memory that this Tensor alone refers to: another holder, such as the program that made the array or a view of
    it, may go on writing, and what was kept would be wrong from then on.
    """
    if not isinstance(tensor._data, np.ndarray):
        return False
    if tensor._data.base is None and _references(tensor) == _ALONE:
        tensor._data.flags.writeable = False
    return not tensor._data.flags.writeable
