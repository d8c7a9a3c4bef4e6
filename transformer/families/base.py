"""What a family of models is made of: data that says how its files differ from the shared stack."""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any


@dataclass(frozen=True)
class Family:
    """One ``model_type``.

    ``architecture``: the class name people see where config.json gives none.  ``defaults``: the value of a config key
    that a file may leave out, as in transformers.  ``ignored``: keys of the stack that this family does not have.
    ``refused``: keys that would change the computation, with the values that do not.  ``extra_buffers``: full-match
    patterns of tensors that its checkpoints may carry and that follow from the config.
    """

    model_type: str
    architecture: str
    defaults: Mapping[str, Any]
    ignored: tuple[str, ...] = ()
    refused: Mapping[str, tuple] = field(default_factory=dict)
    extra_buffers: tuple[str, ...] = ()

    def is_extra_buffer(self, name: str) -> bool:
        """True for a checkpoint tensor that is known and not needed."""
        return any(re.fullmatch(pattern, name) for pattern in self.extra_buffers)
