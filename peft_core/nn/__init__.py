"""Modules: parameters in a tree of plain attributes, and the layers that networks are made of."""

from typing import TYPE_CHECKING as _TYPE_CHECKING

from . import functional, init
from .activation import GELU, Identity, LogSoftmax, ReLU, Sigmoid, SiLU, Softmax, Tanh
from .container import ModuleDict, ModuleList, Sequential
from .conv import Conv2d, Flatten, MaxPool2d
from .conv1d import Conv1D
from .dropout import Dropout
from .embedding import Embedding
from .linear import Linear
from .loss import CrossEntropyLoss, MSELoss, NLLLoss
from .module import Module, Parameter
from .norm import LayerNorm, RMSNorm
from .project import project

__all__ = [
    "GELU", "Conv1D", "Conv2d", "CrossEntropyLoss", "Dropout", "Embedding", "Flatten", "Identity", "LayerNorm",
    "Linear", "LogSoftmax", "MSELoss", "MaxPool2d", "Module", "ModuleDict", "ModuleList", "NLLLoss", "Parameter",
    "RMSNorm", "ReLU", "Sequential", "SiLU", "Sigmoid", "Softmax", "Tanh", "functional", "init", "project",
]  # fmt: skip

if not _TYPE_CHECKING:  # a type checker has to see what is missing

    def __getattr__(name):
        from ..unsupported import missing

        raise missing("peft_core.nn", name, __all__)
