"""The names that PEFT users know, thin faces over inject, io and merge."""

from __future__ import annotations

import contextlib
import dataclasses
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

from adapters import inject as _inject
from adapters import io as _io
from adapters import rows as _rows
from adapters.config import LoraConfig
from adapters.inject import active_adapters, adapter_names, count_parameters, only_active, set_active
from adapters.merge import MergeReport, merge, unload
from peft_core.errors import ConfigError, expect
from peft_core.nn import Module
from peft_core.random import Generator

PeftConfig = LoraConfig  # the one kind of config there is

_NOT_HERE = {  # names of PEFT's that mean something else here, or nothing
    "merge_adapter": "merge_and_unload(), which gives a model without the merged adapters",
    "unmerge_adapter": "unload(), or disable_adapter() for a while: the base's weights are never written to",
    "add_weighted_adapter": "set_adapter() with a list: the adapters are then added up with their own scales",
}


def get_peft_model(
    model: Module, peft_config: LoraConfig, adapter_name: str = "default", *, generator: Generator | None = None
) -> PeftModel:
    """Inject a new, trainable adapter into ``model`` and wrap it; see ``adapters.inject`` for what is raised."""
    face = PeftModel(model)
    face.add_adapter(adapter_name, peft_config, generator)
    return face


class PeftModel(Module):
    """A model with adapters; what this class does not define is the base model's.

    ``peft_config`` is adapter name -> LoraConfig, ``merge_report`` what merge_and_unload did. Which adapters are active
    (``set_adapter``) and which are trainable (``requires_grad``) are separate.
    """

    def __init__(self, base_model: Module) -> None:
        expect(not isinstance(base_model, PeftModel), ConfigError, "the model is a PeftModel already",
               expected="a model without that wrapper",
               fix="Call its add_adapter() or load_adapter(), or pass get_base_model().")  # fmt: skip
        self.base_model = base_model
        self.peft_config: dict[str, LoraConfig] = {}
        self.training = base_model.training
        self.merge_report: MergeReport | None = None

    @classmethod
    def from_pretrained(
        cls, model: Module, model_id: str | Path, adapter_name: str = "default", is_trainable: bool = False
    ) -> PeftModel:
        """``model`` with the adapter in the directory ``model_id``, active, frozen unless ``is_trainable``.

        Raises AdapterError, one text with all that does not fit.
        """
        face = cls(model)
        face.load_adapter(model_id, adapter_name, is_trainable=is_trainable, active=True)
        return face

    def forward(self, *args: Any, adapter_names: Sequence[str] | None = None, **kwargs: Any) -> Any:
        """The base model's output, with the active adapters, or row b with the adapter ``adapter_names[b]``.

        "__base__" stands for no adapter; see ``adapters.rows``.
        """
        if adapter_names is not None:
            return _rows.call(self.base_model, adapter_names, args, kwargs)
        return self.base_model(*args, **kwargs)

    def generate(self, input_ids: Any, adapter_names: Sequence[str] | None = None, **options: Any) -> Any:
        """What the base model generates, with the active adapters or, per row, with ``adapter_names``."""
        model: Any = self.base_model
        if adapter_names is not None:
            return _rows.generate(model, adapter_names, input_ids, options)
        return model.generate(input_ids, **options)

    def __getattr__(self, name: str) -> Any:
        if name.startswith("__") or name == "base_model":  # not there yet, while copying or unpickling
            raise AttributeError(name)
        if name in _NOT_HERE:
            raise AttributeError(f"{name} is not supported; expected {_NOT_HERE[name]}.")
        return getattr(self.base_model, name)

    def get_base_model(self) -> Module:
        """The wrapped model, adapters inside."""
        return self.base_model

    # ------------------------------------------------------------------ several adapters

    @property
    def active_adapters(self) -> list[str]:
        """Names of the adapters that are applied."""
        return active_adapters(self.base_model)

    @property
    def active_adapter(self) -> str:
        """The first of them."""
        names = self.active_adapters
        expect(names, ConfigError, "no adapter is active", expected=f"one of {adapter_names(self.base_model)}",
               fix="Call set_adapter(name).")  # fmt: skip
        return names[0]

    def add_adapter(self, adapter_name: str, peft_config: LoraConfig, generator: Generator | None = None) -> None:
        """Inject another adapter, trainable; it is active only if no other is (call ``set_adapter``)."""
        active = not self.active_adapters
        report = _inject.inject(self.base_model, peft_config, adapter_name, generator, active=active)
        name = peft_config.base_model_name_or_path or _name_of(self.base_model)
        self.peft_config[adapter_name] = dataclasses.replace(report.config, base_model_name_or_path=name)

    def load_adapter(
        self, model_id: str | Path, adapter_name: str, is_trainable: bool = False, active: bool | None = None
    ) -> None:
        """Add the adapter in the directory ``model_id``; by default it is active only if no other is."""
        active = not self.active_adapters if active is None else active
        report = _io.load_adapter(self.base_model, model_id, adapter_name, trainable=is_trainable, active=active)
        self.peft_config[adapter_name] = dataclasses.replace(report.config, inference_mode=not is_trainable)

    def set_adapter(self, adapter_name: str | Sequence[str]) -> None:
        """Apply exactly this adapter, or these; what is trainable does not change."""
        set_active(self.base_model, [adapter_name] if isinstance(adapter_name, str) else list(adapter_name))

    def set_requires_grad(self, adapter_names: str | Sequence[str], requires_grad: bool = True) -> None:
        """Train this adapter, or these, or freeze them; which are active does not change."""
        names = [adapter_names] if isinstance(adapter_names, str) else list(adapter_names)
        _inject.set_trainable(self.base_model, names, requires_grad)

    def delete_adapter(self, adapter_name: str) -> None:
        """Remove an adapter; if it was the only active one, the first of the others becomes active (a warning)."""
        _inject.delete_adapter(self.base_model, adapter_name)
        self.peft_config.pop(adapter_name, None)

    @contextlib.contextmanager
    def disable_adapter(self) -> Iterator[None]:
        """Inside, the model is its base; afterwards the same adapters are active again."""
        with only_active(self.base_model, []):
            yield

    # ------------------------------------------------------------------ out of it

    def save_pretrained(
        self,
        save_directory: str | Path,
        safe_serialization: bool = True,
        selected_adapters: Sequence[str] | None = None,
    ) -> None:
        """Write the adapters in PEFT's format: "default" into ``save_directory``, others into a folder of their name.

        Raises ConfigError for an unknown name and for safe_serialization=False: pickled files are not written.
        """
        expect(safe_serialization is True, ConfigError, f"safe_serialization is {safe_serialization!r}",
               expected="True: adapters are written as safetensors")  # fmt: skip
        expect(not isinstance(selected_adapters, str), ConfigError, f"selected_adapters is {selected_adapters!r}",
               expected="a list of adapter names")  # fmt: skip
        for name in adapter_names(self.base_model) if selected_adapters is None else selected_adapters:
            expect(name in self.peft_config, ConfigError, f"adapter {name!r} is not in the model",
                   expected=f"names among {list(self.peft_config)}")  # fmt: skip
            path = Path(save_directory) if name == "default" else Path(save_directory) / name
            _io.save_adapter(self.base_model, path, self.peft_config[name], name)

    def merge_and_unload(
        self, progressbar: bool = False, safe_merge: bool = True, adapter_names: Sequence[str] | None = None
    ) -> Module:
        """Merge the active adapters (or ``adapter_names``) and return the base model; see ``adapters.merge``.

        ``progressbar`` and ``safe_merge`` are PEFT's: there is no bar, and every merge is checked. Active adapters that
        were not merged stay in the model and stay active.
        """
        self.merge_report = merge(self.base_model, adapter_names)
        left = _inject.adapter_names(self.base_model)
        self.peft_config = {name: config for name, config in self.peft_config.items() if name in left}
        return self.base_model

    def unload(self) -> Module:
        """Remove all adapters without merging and return the base model."""
        unload(self.base_model)
        self.peft_config = {}
        return self.base_model

    def get_nb_trainable_parameters(self) -> tuple[int, int]:
        """(trainable, all) numbers, a shared parameter counted once."""
        return count_parameters(self.base_model)

    def print_trainable_parameters(self) -> None:
        """Print both counts and their ratio on one line."""
        trainable, total = self.get_nb_trainable_parameters()
        share = 100 * trainable / total
        print(f"trainable params: {trainable:,d} || all params: {total:,d} || trainable%: {share:.4f}")


def _name_of(model: Module) -> str | None:
    """Where the base came from, if it says so."""
    owners = (model, getattr(model, "config", None), getattr(model, "source", None))
    names = (getattr(owner, key, None) for owner in owners for key in ("name_or_path", "_name_or_path", "directory"))
    return next((str(name) for name in names if name and isinstance(name, (str, Path))), None)
