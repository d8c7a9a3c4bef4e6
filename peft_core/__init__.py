"""Tensors, gradients, kernels, modules, optimisers and a training loop over NumPy (CPU) and CuPy (NVIDIA GPU).

``import peft_core as torch`` runs what a PyTorch user knows; what is left out says so by name (unsupported.py).
"""

import math as _math
from typing import TYPE_CHECKING as _TYPE_CHECKING

from numpy import iinfo

from . import amp, creation, cuda, dtypes, functions, nn, ops, optim, random, reductions, shapes, utils
from .amp import autocast, compute_dtype
from .backend import Device, as_device, device
from .creation import *  # noqa: F403
from .dtypes import bfloat16, bool_, finfo, float16, float32, float64, int8, int16, int32, int64, uint8
from .dtypes import promote as promote_types
from .functions import *  # noqa: F403
from .grad_scaler import GradScaler
from .kernels import get_num_threads, set_num_threads
from .nn import utils as _nn_utils  # noqa: F401  reached as nn.utils
from .random import Generator, manual_seed
from .recompute import recompute
from .reductions import *  # noqa: F403
from .shapes import *  # noqa: F403
from .tape import enable_grad, is_grad_enabled, no_grad, op, set_grad_enabled
from .tape import no_grad as inference_mode
from .tensor import Tensor
from .unsupported import UnsupportedError

__version__ = "0.1.0"

half, float, double = float16, float32, float64  # dtypes under torch's names, no longer Python's types
short, int, long, bool = int16, int32, int64, bool_
inf, nan, pi = _math.inf, _math.nan, _math.pi
Size = tuple  # a shape is a plain tuple

__all__ = [
    "Device", "Generator", "GradScaler", "Size", "Tensor", "UnsupportedError", "amp", "as_device", "autocast",
    "bfloat16", "bool", "bool_", "compute_dtype", "cuda", "device", "double", "dtypes", "enable_grad", "finfo",
    "float", "float16", "float32", "float64", "get_num_threads", "half", "iinfo", "inf", "inference_mode", "int",
    "int8", "int16", "int32", "int64", "is_grad_enabled", "long", "manual_seed", "nan", "nn", "no_grad", "op", "ops",
    "optim", "pi", "promote_types", "random", "recompute", "set_grad_enabled", "set_num_threads", "short", "uint8",
    "utils",
    *creation.__all__, *functions.__all__, *reductions.__all__, *shapes.__all__,
]  # fmt: skip

if not _TYPE_CHECKING:  # a type checker has to see what is missing

    def __getattr__(name):
        from .unsupported import missing

        raise missing("peft_core", name, globals())
