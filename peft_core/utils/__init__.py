"""Faces under the names of ``torch.utils``: recompute as ``checkpoint``, and data loading."""

from . import checkpoint, data

__all__ = ["checkpoint", "data"]
