"""Dropout."""

from __future__ import annotations

from .. import ops, random
from ..errors import ConfigError, expect
from ..tensor import Tensor
from .module import Module


class Dropout(Module):
    """While training: each element is zero with probability ``p``, the others are divided by 1 - p; else the identity.

    Each call takes one key of the default generator, from which the mask is made again in backward. Raises ConfigError
    for p outside [0, 1).  ``inplace`` changes nothing.  (Srivastava et al., JMLR 15, 2014, section 4.)
    """

    def __init__(self, p: float = 0.5, inplace: bool = False) -> None:
        expect(0 <= p < 1, ConfigError, f"dropout probability is {p}", expected="a number in [0, 1)")
        self.p = p

    def forward(self, x: Tensor) -> Tensor:
        """x of any shape -> the same shape."""
        if not self.training or self.p == 0:
            return x
        return ops.dropout(x, p=self.p, key=random.default_generator.key())

    def extra_repr(self) -> str:
        return f"p={self.p}"
