"""RunConfig: one class per section of a run's TOML file; a field is one setting, its description is what it accepts.

The descriptions end up in error texts ("expected <description>"): they say what a person has to write.
"""

from __future__ import annotations

from typing import Annotated, Any, Literal

from pydantic import BaseModel, ConfigDict, Field

Positive = Annotated[int, Field(ge=1)]
NonNegative = Annotated[int, Field(ge=0)]
Names = list[str] | str
Sources = list[str | dict[str, Any]] | str  # a list may hold { path = ..., weight = ... }


class Section(BaseModel):
    """A section is strict: no unknown key, no conversion from text to number."""

    model_config = ConfigDict(strict=True, extra="forbid", protected_namespaces=(), validate_default=True)


class ModelSection(Section):
    """The frozen base model."""

    path: str = Field(min_length=1, description='a model directory or a hub id, such as "models/smollm2-135m-instruct"')
    dtype: Literal["auto", "float32", "bfloat16", "float16"] = Field(
        "auto", description='one of "auto", "float32", "bfloat16", "float16"'
    )
    compute_dtype: Literal["auto", "float32", "bfloat16"] = Field(
        "auto", description='one of "auto", "float32", "bfloat16"'
    )
    chat_template: str | None = Field(None, description="the path of a jinja file")


class LoraSection(Section):
    """The adapter, under PEFT's names."""

    r: Positive = Field(16, description="a positive whole number such as 16")
    lora_alpha: float = Field(32, gt=0, allow_inf_nan=False, description="a positive number such as 32")
    lora_dropout: float = Field(0.0, ge=0, lt=1, description="a number from 0 up to, not including, 1")
    target_modules: Names = Field("all-linear", description='"all-linear" or a list such as ["q_proj", "v_proj"]')
    exclude_modules: Names | None = Field(None, description="a list of module names, or one regular expression")
    layers_to_transform: list[NonNegative] | NonNegative | None = Field(
        None, description="layer numbers such as [0, 1, 2]"
    )
    layers_pattern: Names | None = Field(None, description='the name of the list of layers, such as "layers"')
    rank_pattern: dict[str, Positive] = Field({}, description='a table from pattern to rank, such as { "q_proj" = 8 }')
    alpha_pattern: dict[str, float] = Field({}, description='a table from pattern to alpha, such as { "q_proj" = 16 }')
    use_rslora: bool = Field(False, description="true or false")
    init_lora_weights: bool | Literal["gaussian"] = Field(True, description='true, false or "gaussian"')
    bias: Literal["none", "all", "lora_only"] = Field("none", description='"none", "all" or "lora_only"')
    lora_bias: bool = Field(False, description="true or false")
    modules_to_save: list[str] | None = Field(None, description='a list of module names such as ["lm_head"]')


class DataSection(Section):
    """Rows, how they become tokens, and which tokens are trained."""

    path: Sources = Field(description='a file, a folder, a glob or a list of them, such as "data/train.jsonl"')
    val_path: Sources | None = Field(None, description='a file, a folder, a glob or a list, such as "data/val.jsonl"')
    val_size: float | int | None = Field(None, ge=0, description="a share below 1 such as 0.05, or a number of rows")
    format: Literal["auto", "messages", "conversations", "alpaca", "prompt", "text", "input_ids"] = Field(
        "auto", description='"auto", "messages", "conversations", "alpaca", "prompt", "text" or "input_ids"'
    )
    columns: dict[str, str] | None = Field(None, description='a table such as { prompt = "question" }')
    loss_on: Literal["assistant", "all"] = Field("assistant", description='"assistant" or "all"')
    max_seq_length: Annotated[int, Field(ge=2)] = Field(2048, description="a whole number of tokens such as 2048")
    overlong: Literal["drop", "truncate", "error"] = Field("drop", description='"drop", "truncate" or "error"')
    shuffle: bool = Field(True, description="true or false")


class TrainSection(Section):
    """How long, how many rows at a time, and how the optimizer moves."""

    num_train_epochs: float = Field(3.0, gt=0, allow_inf_nan=False, description="a positive number such as 3")
    max_steps: Positive | None = Field(None, description="a positive whole number of optimizer steps")
    batch_size: Positive | None = Field(None, description="a positive whole number of rows such as 4")
    max_tokens_per_step: Positive | None = Field(None, description="a positive whole number of tokens such as 8192")
    gradient_accumulation_steps: Positive = Field(1, description="a positive whole number such as 4")
    learning_rate: float = Field(2e-4, gt=0, allow_inf_nan=False, description="a positive number such as 2e-4")
    lr_scheduler_type: Literal["constant", "linear", "cosine", "constant_with_warmup"] = Field(
        "cosine", description='"constant", "linear", "cosine" or "constant_with_warmup"'
    )
    warmup_ratio: float | None = Field(None, ge=0, le=1, description="a number from 0 to 1 such as 0.03")
    warmup_steps: NonNegative | None = Field(None, description="a whole number of steps such as 10")
    weight_decay: float = Field(0.0, ge=0, allow_inf_nan=False, description="a number of at least 0 such as 0.01")
    max_grad_norm: float = Field(
        1.0, ge=0, allow_inf_nan=False, description="a number such as 1.0, or 0 for no clipping"
    )
    gradient_checkpointing: bool | Literal["auto"] = Field("auto", description='true, false or "auto"')
    memory_budget: str | Positive = Field("auto", description='"auto", or a size such as "2GB" or "900MB"')
    seed: NonNegative = Field(42, description="a whole number of at least 0 such as 42")


class EvalSection(Section):
    """Validation during training."""

    eval_steps: Positive | None = Field(None, description="a positive whole number of steps such as 50")
    early_stopping_patience: Positive | None = Field(None, description="a positive whole number of evaluations")
    sample_prompts: list[str] = Field([], description='a list of texts such as ["Tell me a joke."]')
    max_new_tokens: Positive = Field(64, description="a positive whole number of tokens such as 64")


class OutputSection(Section):
    """Where a run is written."""

    output_dir: str = Field(min_length=1, description='a folder such as "runs/first"')
    save_steps: Positive | None = Field(None, description="a positive whole number of steps such as 100")
    save_total_limit: Positive | None = Field(2, description="a positive whole number of checkpoints such as 2")


class LogSection(Section):
    """What is printed while training."""

    logging_steps: Positive = Field(10, description="a positive whole number of steps such as 10")


class RunConfig(Section):
    """Everything a run depends on.  Each part of the program is handed its own section, none the whole."""

    model: ModelSection
    lora: LoraSection
    data: DataSection
    train: TrainSection
    eval: EvalSection
    output: OutputSection
    log: LogSection

    def to_dict(self) -> dict[str, dict[str, Any]]:
        """Sections of plain values; what is None is left out, because TOML has no null."""
        return self.model_dump(exclude_none=True)


SECTIONS: dict[str, type[Section]] = {
    "model": ModelSection,
    "lora": LoraSection,
    "data": DataSection,
    "train": TrainSection,
    "eval": EvalSection,
    "output": OutputSection,
    "log": LogSection,
}
