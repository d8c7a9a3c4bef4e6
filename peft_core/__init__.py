"""Tensors, gradients, kernels, modules, optimisers and a training loop over NumPy (CPU) and CuPy (NVIDIA GPU)."""

from . import amp, cuda, dtypes, nn, ops, optim, random, utils
from .amp import autocast, compute_dtype
from .backend import Device, as_device
from .dtypes import bfloat16, float16, float32, float64, int32, int64
from .grad_scaler import GradScaler
from .kernels import get_num_threads, set_num_threads
from .nn import utils as _nn_utils  # noqa: F401  reached as nn.utils
from .random import Generator, manual_seed
from .recompute import recompute
from .tape import enable_grad, is_grad_enabled, no_grad, op, set_grad_enabled
from .tensor import Tensor, tensor

__version__ = "0.1.0"

__all__ = [
    "Device", "Generator", "GradScaler", "Tensor", "amp", "as_device", "autocast", "bfloat16", "compute_dtype", "cuda",
    "dtypes", "enable_grad",
    "float16", "float32", "float64", "get_num_threads", "int32", "int64", "is_grad_enabled", "manual_seed", "nn",
    "no_grad", "op", "ops", "optim", "random", "recompute", "set_grad_enabled", "set_num_threads", "tensor",
    "utils",
]  # fmt: skip
