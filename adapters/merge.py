"""Merge adapters into their base weights, in memory: W + sum of scaling * B A, float32, rounded once."""

from __future__ import annotations

import warnings
from collections.abc import Sequence
from dataclasses import dataclass, field

import numpy as np

from adapters import inject
from adapters.layer import AdapterLayer, TrainedCopy
from adapters.match import base_of
from peft_core.backend import Array, all_finite, xp_of
from peft_core.dtypes import dtype_name
from peft_core.errors import AdapterError, ConfigError, FileError, ModelError, expect
from peft_core.nn import Module

_PIECE = 1 << 22  # elements
MOSTLY_LOST = 0.5  # above this share of the delta lost, a person should hear of it


@dataclass
class MergeReport:
    """What a merge did: tensors looked at and changed, and how much of the delta rounding lost (0 none, 1 all)."""

    n_targets: int = 0
    changed: list[str] = field(default_factory=list, repr=False)
    unchanged: list[str] = field(default_factory=list, repr=False)
    lost: float = 0.0
    _delta_sq: float = field(default=0.0, repr=False)
    _error_sq: float = field(default=0.0, repr=False)

    @property
    def n_changed(self) -> int:
        """The number of tensors that differ from the base's."""
        return len(self.changed)

    def add(self, path: str, old: Array, new: Array, delta: Array, where: str = "") -> None:
        """Take one merged weight into account; ``where`` follows its path in an error.

        Raises AdapterError if it holds NaN or infinity, ModelError if the base is to blame.
        """
        xp, changed = xp_of(new), False
        if new.ndim != 2:
            old, new, delta = (array.reshape(array.shape[0] if array.ndim else 1, -1) for array in (old, new, delta))
        step = max(1, _PIECE // max(1, new.shape[1]))
        for i in range(0, new.shape[0], step):  # in pieces: float64 copies of a whole weight would be large
            part = delta[i : i + step].astype(np.float64)
            applied = new[i : i + step].astype(np.float64) - old[i : i + step].astype(np.float64)
            if not bool(xp.isfinite(applied).all()):
                raise _not_finite(path + where, old, new, delta)
            changed = changed or bool((applied != 0).any())
            self._delta_sq += float(xp.square(part).sum())
            self._error_sq += float(xp.square(applied - part).sum())
        self.n_targets += 1
        (self.changed if changed else self.unchanged).append(path)
        self.lost = (self._error_sq / self._delta_sq) ** 0.5 if self._delta_sq else 0.0

    def finish(self) -> MergeReport:
        """Raise AdapterError if a delta that is not zero changed no tensor; warn if rounding lost most of it."""
        expect(self.changed or not self._delta_sq, AdapterError,
               f"merging changed none of the {self.n_targets} tensors, although the adapter is not zero",
               expected="weights that differ from the base's",
               fix="Its update is smaller than the dtype can hold: merge into float32.")  # fmt: skip
        if self.lost > MOSTLY_LOST:
            warnings.warn(
                f"rounding to the weights' dtype lost {self.lost:.0%} of the adapter's update; "
                "merge into float32 to keep it",
                stacklevel=3,
            )
        return self


def wider(dtype: np.dtype) -> str:
    """The dtypes with a larger range, in words; for one that has the range of float32 the other half type."""
    return "bfloat16 or float32" if dtype_name(dtype) == "float16" else "float32"


def _not_finite(path: str, old: Array, new: Array, delta: Array) -> FileError:
    """Which of the three is at fault: the base, the adapter, or the dtype that cannot hold their sum."""
    if not all_finite(old):
        return ModelError(
            f"merging {path}: the base's own weight holds NaN or infinity; expected finite weights; nothing was "
            "changed. Download the base again."
        )
    fix = "Look at the adapter: did its training diverge?"
    if all_finite(delta) and new.dtype != np.float32:
        fix = f"Merge into {wider(new.dtype)}, or look at the adapter."
    peak = float(xp_of(delta).abs(delta).max())
    return AdapterError(
        f"merging {path} gives NaN or infinity (largest delta {peak:.3g}, dtype {dtype_name(new.dtype)}); "
        f"expected finite weights; nothing was changed. {fix}"
    )


def merge(model: Module, adapter_names: Sequence[str] | None = None) -> MergeReport:
    """Replace the adapted layers of ``model`` by plain ones with W + delta; arrays that others hold stay as they are.

    Without ``adapter_names`` the active adapters are merged, and every adapter must be active. With it, exactly those
    are merged; a layer with another active adapter keeps that one around its merged base, inactive ones are dropped.
    A model without adapters is left alone. Tied weights of which one changes are tied no longer, with a warning.
    Raises AdapterError (ModelError where the base is to blame), with nothing changed, if a merged weight is not finite,
    if nothing changes although B is not zero, or if an adapter would be dropped unasked.
    """
    layers = inject.adapter_layers(model)
    if not layers:
        return MergeReport()
    chosen = _chosen(model, adapter_names)
    report, new_layers = MergeReport(), {}
    for path, layer in layers.items():
        names = [name for name in chosen if name in layer.adapters]
        expect(len(names) <= 1 or not isinstance(layer, TrainedCopy), ConfigError,
               f"adapters {names} both train a copy of {path}", expected="one of them to merge")  # fmt: skip
        new_layers[path] = _merged_layer(layer, names, path, report)
    report.finish()
    for path, new in new_layers.items():
        model.set_submodule(path, new)
    _untie(model)
    return report


def _chosen(model: Module, names: Sequence[str] | None) -> list[str]:
    known, active = inject.adapter_names(model), inject.active_adapters(model)
    if names is None:
        idle = [name for name in known if name not in active]
        expect(not idle, AdapterError, f"adapters {idle} are not active and would be lost by merging",
               expected="all adapters active, or a choice", fix=f"Pass adapter_names, some of {known}.")  # fmt: skip
        return active
    unknown = [name for name in names if name not in known]
    expect(not isinstance(names, str), ConfigError, f"adapter_names is {names!r}", expected="a list of adapter names")
    expect(names and not unknown, ConfigError, f"adapter_names is {list(names)}", expected=f"names among {known}")
    return list(dict.fromkeys(names))


def _merged_layer(layer: AdapterLayer, names: list[str], path: str, report: MergeReport) -> Module:
    base = layer.base_layer
    if names:
        base, changes = layer.applied(names)
        for change in changes:
            shown = path if change.name == "weight" else f"{path}.{change.name}"
            report.add(shown, change.old, change.new, change.delta)
    left = {name: adapter for name, adapter in layer.adapters.items() if name not in names}
    still_active = [name for name in layer.active if name in left]
    if not still_active:
        return base
    expect(not (names and isinstance(layer, TrainedCopy)), ConfigError,
           f"adapter {still_active} is active and trains a copy of {path}, as {names} do", expected="one of them",
           fix="Deactivate it before merging.")  # fmt: skip
    rest = type(layer)(base, left, still_active)
    rest.training = layer.training
    return rest


def _untie(model: Module) -> None:
    """Where the config ties head and embedding and merging changed one of them, it says from now on what is true."""
    config = getattr(model, "config", None)
    if not getattr(config, "tie_word_embeddings", False):
        return
    ends = (getattr(model, name, Module)() for name in ("get_input_embeddings", "get_output_embeddings"))
    weights = [getattr(base_of(end), "weight", None) for end in ends]
    if all(weight is not None for weight in weights) and weights[0] is not weights[1]:
        config.tie_word_embeddings = False  # type: ignore[union-attr]
        warnings.warn("the head and the embedding were tied; the merged model has two weights, and its config says "
                      "tie_word_embeddings = false", stacklevel=4)  # fmt: skip


def unload(model: Module) -> None:
    """Replace every adapted layer by its base layer: the model as it was before any adapter."""
    for path, layer in inject.adapter_layers(model).items():
        model.set_submodule(path, layer.base_layer)
