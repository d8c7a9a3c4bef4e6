"""Modules: parameters in a tree of plain attributes, and the few layers a transformer is made of."""

from . import functional, init
from .container import Sequential
from .conv1d import Conv1D
from .dropout import Dropout
from .embedding import Embedding
from .linear import Linear
from .module import Module, Parameter
from .norm import LayerNorm, RMSNorm
from .project import project

__all__ = [
    "Conv1D", "Dropout", "Embedding", "LayerNorm", "Linear", "Module", "Parameter", "RMSNorm", "Sequential",
    "functional", "init", "project",
]  # fmt: skip
