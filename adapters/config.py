"""LoraConfig: what a LoRA adapter is, under the keys of ``adapter_config.json``, strict in both directions."""

from __future__ import annotations

import difflib
import json
import math
from collections.abc import Iterable
from dataclasses import dataclass, field, fields
from enum import Enum, StrEnum
from pathlib import Path
from typing import Any

from adapters.patterns import expect_pattern
from peft_core.errors import AdapterError, ConfigError, PeftCoreError, expect
from peft_core.safetensors_io import atomic_write

CONFIG_NAME = "adapter_config.json"

# Keys of other methods: PEFT writes them into every file, so each is read, and refused by name unless it says "unused".
_UNUSED: dict[str, tuple[Any, ...]] = {
    "alora_invocation_tokens": (), "arrow_config": (), "corda_config": (), "ensure_weight_tying": (), "eva_config": (),
    "kasa_config": (), "layer_replication": (), "loftq_config": (), "lora_ga_config": (), "megatron_config": (),
    "megatron_core": ("megatron.core",), "monteclora_config": (), "qalora_group_size": (16,), "target_parameters": (),
    "trainable_token_indices": (), "use_bdlora": (), "use_dora": (), "use_qalora": (), "velora_config": (),
}  # fmt: skip


class TaskType(StrEnum):
    """PEFT's names of tasks; a task that adds a new head is refused, because heads are not trained here yet."""

    CAUSAL_LM = "CAUSAL_LM"
    SEQ_2_SEQ_LM = "SEQ_2_SEQ_LM"
    FEATURE_EXTRACTION = "FEATURE_EXTRACTION"
    SEQ_CLS = "SEQ_CLS"
    TOKEN_CLS = "TOKEN_CLS"
    QUESTION_ANS = "QUESTION_ANS"


_NEW_HEAD = ("SEQ_CLS", "TOKEN_CLS", "QUESTION_ANS")


@dataclass
class LoraConfig:
    """The settings of one LoRA adapter: PEFT's keys and defaults (arXiv:2106.09685; rsLoRA: arXiv:2312.03732).

    An adapted layer computes W x + scale * B A x, with scale = lora_alpha / r, or lora_alpha / sqrt(r) if use_rslora.
    Raises ConfigError for a value of the wrong type or range, and for every setting that is not supported.
    """

    r: int = 8
    lora_alpha: float = 8
    target_modules: list[str] | str | None = None
    lora_dropout: float = 0.0
    exclude_modules: list[str] | str | None = None
    layers_to_transform: list[int] | int | None = None
    layers_pattern: list[str] | str | None = None
    rank_pattern: dict[str, int] = field(default_factory=dict)
    alpha_pattern: dict[str, float] = field(default_factory=dict)
    use_rslora: bool = False
    init_lora_weights: bool | str = True
    fan_in_fan_out: bool = False
    bias: str = "none"
    modules_to_save: list[str] | None = None
    lora_bias: bool = False
    task_type: str | None = None
    base_model_name_or_path: str | None = None
    revision: str | None = None
    inference_mode: bool = False
    peft_type: str = "LORA"
    peft_version: str | None = None
    auto_mapping: dict[str, Any] | None = None
    # Other methods, at their "unused" value only (see _UNUSED); never written.
    alora_invocation_tokens: Any = None
    arrow_config: Any = None
    corda_config: Any = None
    ensure_weight_tying: Any = False
    eva_config: Any = None
    kasa_config: Any = None
    layer_replication: Any = None
    loftq_config: Any = None
    lora_ga_config: Any = None
    megatron_config: Any = None
    megatron_core: Any = None
    monteclora_config: Any = None
    qalora_group_size: Any = None
    target_parameters: Any = None
    trainable_token_indices: Any = None
    use_bdlora: Any = None
    use_dora: Any = False
    use_qalora: Any = False
    velora_config: Any = None

    def __post_init__(self) -> None:
        self._normalise()
        self._check_unused()
        self._check_numbers()
        self._check_names()
        self._check_switches()
        self._check_patterns()

    # ------------------------------------------------------------------ values as they are written

    def _normalise(self) -> None:
        """Sets and tuples become lists, enumerations their text: the value that a JSON file gives back."""
        for f in fields(self):
            value = getattr(self, f.name)
            if isinstance(value, Enum):
                value = value.value
            elif isinstance(value, (set, frozenset)):
                value = sorted(value)
            elif isinstance(value, tuple):
                value = list(value)
            if f.name in _UNUSED:
                value = _unused_value(f.name, value, f.default)
            setattr(self, f.name, value)
        for name in ("rank_pattern", "alpha_pattern"):
            if getattr(self, name) is None:
                setattr(self, name, {})

    def _check_unused(self) -> None:
        for name in _UNUSED:
            value = getattr(self, name)
            expect(not value, ConfigError, f"{name} is {value!r}, which is not supported",
                   expected="plain LoRA", fix=f"Remove {name}.")  # fmt: skip

    def _check_numbers(self) -> None:
        _positive_int("r", self.r)
        _positive("lora_alpha", self.lora_alpha)
        p = self.lora_dropout
        good = _is_number(p) and 0 <= p < 1
        expect(good, ConfigError, f"lora_dropout is {p!r}", expected="a number from 0 up to, not including, 1")

    def _check_names(self) -> None:
        for name in ("target_modules", "exclude_modules", "layers_pattern"):
            _names(name, getattr(self, name), text=True)
        for name in ("target_modules", "exclude_modules"):
            value = getattr(self, name)
            if isinstance(value, str) and not (name == "target_modules" and value == "all-linear"):
                expect_pattern(name, value)
        patterns = self.layers_pattern
        for pattern in [patterns] if isinstance(patterns, str) else patterns or []:
            expect_pattern("layers_pattern", pattern, after_name(pattern))
        _names("modules_to_save", self.modules_to_save, text=False)
        layers = self.layers_to_transform
        if layers is not None:
            listed = layers if isinstance(layers, list) else [layers]
            good = bool(listed) and all(_is_int(i) and i >= 0 for i in listed)
            expect(good, ConfigError, f"layers_to_transform is {layers!r}", expected="layer numbers such as [0, 1, 2]")
            text = isinstance(self.target_modules, str) and self.target_modules != "all-linear"
            expect(not text, ConfigError,
                   f"layers_to_transform is set and target_modules is the regular expression {self.target_modules!r}",
                   expected="a list of module names beside layers_to_transform",
                   fix="Select the layers inside the expression, or list the module names.")  # fmt: skip
        expect(not self.layers_pattern or layers is not None, ConfigError,
               f"layers_pattern is {self.layers_pattern!r} and layers_to_transform is not set",
               expected="layers_to_transform beside it",
               fix="Set layers_to_transform, or remove layers_pattern.")  # fmt: skip
        for name in ("base_model_name_or_path", "revision", "peft_version", "task_type"):
            value = getattr(self, name)
            expect(
                value is None or isinstance(value, str), ConfigError, f"{name} is {value!r}", expected="a text or null"
            )
        good = self.auto_mapping is None or isinstance(self.auto_mapping, dict)
        expect(good, ConfigError, f"auto_mapping is {self.auto_mapping!r}", expected="a table or null")

    def _check_switches(self) -> None:
        for name in ("use_rslora", "fan_in_fan_out", "inference_mode", "lora_bias"):
            value = getattr(self, name)
            expect(isinstance(value, bool), ConfigError, f"{name} is {value!r}", expected="true or false")
        expect(self.peft_type == "LORA", ConfigError, f"peft_type is {self.peft_type!r}", expected="'LORA'",
               fix="Adapters of other methods cannot be read.")  # fmt: skip
        init = self.init_lora_weights
        good = init is True or init is False or init == "gaussian"
        expect(good, ConfigError, f"init_lora_weights is {init!r}, which is not supported yet",
               expected="true, false or 'gaussian'")  # fmt: skip
        bias = self.bias
        expect(bias in ("none", "all", "lora_only"), ConfigError, f"bias is {bias!r}",
               expected="'none', 'all' or 'lora_only'")  # fmt: skip
        expect(self.task_type not in _NEW_HEAD, ConfigError,
               f"task_type is {self.task_type!r}, which trains a new head and is not supported yet",
               expected="'CAUSAL_LM' or null")  # fmt: skip

    def _check_patterns(self) -> None:
        for name in ("rank_pattern", "alpha_pattern"):
            table = getattr(self, name)
            expect(
                isinstance(table, dict), ConfigError, f"{name} is {table!r}", expected="a table from pattern to number"
            )
            for key, value in table.items():
                expect(isinstance(key, str) and key, ConfigError, f"{name} has the key {key!r}", expected="a pattern")
                expect_pattern(f"{name} key", key, at_end(key))
                check = _positive_int if name == "rank_pattern" else _positive
                check(f"{name}[{key!r}]", value)

    # ------------------------------------------------------------------ numbers that follow

    def scaling(self, r: int, alpha: float) -> float:
        """alpha / r, or alpha / sqrt(r) with use_rslora: a Python float, so that no array is promoted."""
        return float(alpha / math.sqrt(r) if self.use_rslora else alpha / r)

    # ------------------------------------------------------------------ files

    def to_dict(self) -> dict[str, Any]:
        """The JSON object of ``adapter_config.json``: supported keys only, because readers refuse unknown ones."""
        return {f.name: getattr(self, f.name) for f in fields(self) if f.name not in _UNUSED}

    @classmethod
    def from_dict(cls, values: dict[str, Any]) -> LoraConfig:
        """The config written as ``values``.  Raises ConfigError for an unknown key, unless its value is empty."""
        known = {f.name for f in fields(cls)}
        unknown = {key: v for key, v in values.items() if key not in known and not _is_empty(v)}
        if unknown:
            text = ", ".join(f"{key!r} = {value!r}{_nearest(key, known)}" for key, value in sorted(unknown.items()))
            raise ConfigError(f"unknown key {text}; expected the keys of a plain LoRA adapter. Remove it.")
        return cls(**{key: v for key, v in values.items() if key in known})

    def save_pretrained(self, directory: str | Path) -> None:
        """Write ``adapter_config.json`` into ``directory``: ``from_pretrained`` gives an equal config back."""
        path = Path(directory)
        path.mkdir(parents=True, exist_ok=True)
        atomic_write(path / CONFIG_NAME, self.to_json())

    def to_json(self) -> str:
        """The text of ``adapter_config.json``; patterns keep their order, in which the first that matches counts."""
        return json.dumps(dict(sorted(self.to_dict().items())), indent=2, ensure_ascii=False) + "\n"

    @classmethod
    def from_pretrained(cls, directory: str | Path) -> LoraConfig:
        """The config of an adapter directory (settings only: it reads no weights).  Raises AdapterError."""
        path = Path(directory) / CONFIG_NAME
        expect(path.is_file(), AdapterError, f"{path} does not exist", expected="an adapter directory with it")
        try:
            values = json.loads(path.read_text(encoding="utf-8"), object_pairs_hook=_no_duplicates)
        except (ValueError, RecursionError) as error:
            raise AdapterError(f"{path} is not valid JSON ({error}); expected the file that PEFT writes.") from error
        expect(
            isinstance(values, dict), AdapterError, f"{path} holds {type(values).__name__}", expected="a JSON object"
        )
        try:
            return cls.from_dict(values)
        except PeftCoreError as error:
            raise AdapterError(f"{path}: {error}") from error


def _no_duplicates(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    keys = [key for key, _ in pairs]
    doubled = sorted({key for key in keys if keys.count(key) > 1})
    if doubled:
        raise ValueError(f"key {doubled[0]!r} appears twice")
    return dict(pairs)


def _is_empty(value: Any) -> bool:
    return value is None or value is False or value in ({}, [], "")


def _unused_value(name: str, value: Any, default: Any) -> Any:
    """Every spelling of "unused" becomes the default, so that equal settings are equal configs."""
    return default if _is_empty(value) or value in _UNUSED[name] else value


def _nearest(key: str, known: Iterable[str]) -> str:
    near = difflib.get_close_matches(key, sorted(known), n=1, cutoff=0.6)
    return f" (did you mean {near[0]!r}?)" if near else ""


def _is_number(value: Any) -> bool:
    return isinstance(value, (int, float)) and not isinstance(value, bool) and abs(value) < 3e38


def _is_int(value: Any) -> bool:
    return isinstance(value, int) and not isinstance(value, bool)


def _positive_int(name: str, value: Any) -> None:
    expect(_is_int(value) and value > 0, ConfigError, f"{name} is {value!r}", expected="a positive whole number")


def _positive(name: str, value: Any) -> None:
    expect(_is_number(value) and value > 0, ConfigError, f"{name} is {value!r}",
           expected="a positive number that float32 can hold")  # fmt: skip


def _names(name: str, value: Any, *, text: bool) -> None:
    good = value is None or (text and isinstance(value, str) and value)
    good = good or (isinstance(value, list) and all(isinstance(v, str) and v for v in value))
    expect(good, ConfigError, f"{name} is {value!r}",
           expected="a list of module names" + (" or one text" if text else "") + ", or null")  # fmt: skip


def at_end(key: str) -> str:
    """PEFT's expression for a key of rank_pattern or alpha_pattern: it matches the end of a path."""
    return rf"(.*\.)?({key})$"


def after_name(pattern: str) -> str:
    """PEFT's expression for an entry of layers_pattern: the number after it is the layer's."""
    return rf"(?:^|.*?\.){pattern}\.(\d+)\."
