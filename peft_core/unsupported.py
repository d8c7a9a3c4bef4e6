"""What this library leaves out of torch, and of its models elsewhere, said by name where it is asked for."""

from __future__ import annotations

from collections.abc import Iterable
from typing import NoReturn

from .errors import PeftCoreError


class UnsupportedError(PeftCoreError, NotImplementedError):
    """Something that torch has was asked for and this library leaves out."""


class UnsupportedNameError(UnsupportedError, AttributeError):
    """The same for a name; an AttributeError, so that ``hasattr`` answers False."""


_HOOKS = "there are no hooks; expected the computation in forward(), or a module wrapped around it"
_SECOND = "gradients are plain arrays of first order; expected backward() once on a scalar"
_IN_PLACE = "in-place functions are limited to those that fill or update a leaf under no_grad(); use the plain form"
_FILES = "files are read and written as safetensors; expected peft_core.safetensors_io"
_BATCH_NORM = "batch statistics are left out; expected LayerNorm or RMSNorm, or norms folded into the convolutions"
_LISTS = "expected a plain list or dict of Parameters as an attribute: its elements are found"
_ORDER = "expected NumPy on x.numpy()"
_LEGACY = "expected tensor(data, dtype=...), or zeros(...) and the like for a size"
_POOLING = "expected MaxPool2d, or x.mean((-2, -1)) for the mean of each channel"
_SETTING = "there is no such setting; leave the line out"

REASONS = {  # name -> why it is missing and what to use; what stands here needs no other mention
    "BatchNorm1d": _BATCH_NORM,
    "BatchNorm2d": _BATCH_NORM,
    "BatchNorm3d": _BATCH_NORM,
    "SyncBatchNorm": _BATCH_NORM,
    "InstanceNorm2d": _BATCH_NORM,
    "batch_norm": _BATCH_NORM,
    "GroupNorm": "expected LayerNorm or RMSNorm",
    "DataParallel": "training runs on one device",
    "ParameterDict": _LISTS,
    "ParameterList": _LISTS,
    "MultiheadAttention": "expected Linears and functional.scaled_dot_product_attention",
    "Transformer": "expected the stack of the package transformer",
    "TransformerEncoderLayer": "expected the stack of the package transformer",
    "LSTM": "recurrent layers are left out",
    "GRU": "recurrent layers are left out",
    "RNN": "recurrent layers are left out",
    "autograd": _SECOND,
    "func": _SECOND,
    "vmap": "expected a batch dimension, as the ops take one",
    "jit": "nothing is compiled; the function runs as it is",
    "compile": "nothing is compiled; the function runs as it is",
    "distributed": "training runs on one device",
    "sparse": "tensors are dense",
    "load": _FILES,
    "save": _FILES,
    "kthvalue": _ORDER,
    "median": _ORDER,
    "quantile": _ORDER,
    "unique": _ORDER,
    "FloatTensor": _LEGACY,
    "LongTensor": _LEGACY,
    "AvgPool2d": _POOLING,
    "AdaptiveAvgPool2d": _POOLING,
    "avg_pool2d": _POOLING,
    "adaptive_avg_pool2d": _POOLING,
    "Conv1d": "expected Conv2d with one row",
    "backends": _SETTING,
    "use_deterministic_algorithms": _SETTING,
    "set_printoptions": _SETTING,
    "set_float32_matmul_precision": _SETTING,
    "set_default_dtype": "there is no global dtype; pass dtype= where a tensor is made",
    "set_default_device": "there is no global device; pass device= where a tensor is made",
    "retain_grad": "only leaves keep a gradient; expected a leaf with requires_grad",
    "register_hook": _HOOKS,
    "register_forward_hook": _HOOKS,
    "register_forward_pre_hook": _HOOKS,
    "register_full_backward_hook": _HOOKS,
    "register_backward_hook": _HOOKS,
    "resize_token_embeddings": "expected the vocabulary of the checkpoint: resize it with transformers and save it",
    "share_memory_": "processes share no tensors",
}


def unsupported(what: str, why: str) -> NoReturn:
    """Raise UnsupportedError for a use that is left out."""
    raise UnsupportedError(f"{what} is not supported: {why}.")


def missing_attribute(kind: str, name: str, known: Iterable[str]) -> AttributeError:
    """The error for an attribute that a Module of class ``kind`` lacks."""
    if name in REASONS and name not in ("load", "save", "func", "sort", "unique", "median", "compile"):
        return UnsupportedNameError(f"{kind}.{name} is not supported: {REASONS[name]}.")
    close = _close(name, known)
    return AttributeError(f"{kind!r} object has no attribute {name!r}.{close}")


def _close(name: str, known: Iterable[str]) -> str:
    import difflib

    found = difflib.get_close_matches(name, [k for k in known if not k.startswith("_")], n=3, cutoff=0.7)
    return f" Close to it: {', '.join(found)}." if found else ""


def missing(owner: str, name: str, known: Iterable[str]) -> AttributeError:
    """The error for a name that ``owner`` (a module, "Tensor", ...) lacks."""
    if name.startswith("__"):
        return AttributeError(f"{owner} has no attribute {name!r}.")
    reason = REASONS.get(name)
    if reason is None and name.endswith("_") and not name.startswith("_") and owner == "Tensor":
        reason = _IN_PLACE
    if reason is not None:
        return UnsupportedNameError(f"{owner}.{name} is not supported: {reason}.")
    return UnsupportedNameError(
        f"{owner}.{name} is not supported: it is none of torch's names that are here; dir({owner}) lists those."
        + _close(name, known)
    )
