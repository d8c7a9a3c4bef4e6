"""Other tools' names for our settings, and settings that are named in advance but not built yet."""

from __future__ import annotations

from typing import Any

# What people type who come from the Trainer of transformers, TRL, axolotl, LLaMA-Factory, mlx-lm, torchtune or litgpt.
ALIASES = {
    "model_name_or_path": "model.path", "base_model": "model.path", "base_model_name_or_path": "model.path",
    "model_name": "model.path", "checkpoint_dir": "model.path", "torch_dtype": "model.dtype",
    "precision": "model.dtype", "rank": "lora.r", "lora_r": "lora.r", "lora_rank": "lora.r",
    "alpha": "lora.lora_alpha", "dropout": "lora.lora_dropout", "lora_target_modules": "lora.target_modules",
    "lora_target": "lora.target_modules", "lora_modules": "lora.target_modules", "modules": "lora.target_modules",
    "rslora": "lora.use_rslora", "dataset": "data.path", "train_file": "data.path", "datasets": "data.path",
    "data_path": "data.path", "train_path": "data.path", "validation_file": "data.val_path",
    "val_file": "data.val_path", "eval_path": "data.val_path", "val_set_size": "data.val_size",
    "val_split": "data.val_size", "test_size": "data.val_size", "max_length": "data.max_seq_length",
    "max_seq_len": "data.max_seq_length", "sequence_len": "data.max_seq_length", "cutoff_len": "data.max_seq_length",
    "model_max_length": "data.max_seq_length", "epochs": "train.num_train_epochs",
    "num_epochs": "train.num_train_epochs", "iters": "train.max_steps", "steps": "train.max_steps",
    "max_iters": "train.max_steps", "per_device_train_batch_size": "train.batch_size",
    "micro_batch_size": "train.batch_size", "train_batch_size": "train.batch_size",
    "grad_accumulation_steps": "train.gradient_accumulation_steps", "grad_accum": "train.gradient_accumulation_steps",
    "lr": "train.learning_rate", "lr_scheduler": "train.lr_scheduler_type", "scheduler": "train.lr_scheduler_type",
    "warmup": "train.warmup_steps", "lr_warmup_steps": "train.warmup_steps", "clip_grad_norm": "train.max_grad_norm",
    "gradient_clipping": "train.max_grad_norm", "grad_checkpoint": "train.gradient_checkpointing",
    "enable_activation_checkpointing": "train.gradient_checkpointing", "random_seed": "train.seed",
    "steps_per_eval": "eval.eval_steps", "patience": "eval.early_stopping_patience",
    "adapter_path": "output.output_dir", "out_dir": "output.output_dir", "save_every": "output.save_steps",
    "steps_per_save": "output.save_steps", "steps_per_report": "log.logging_steps",
    "log_every_n_steps": "log.logging_steps",
}  # fmt: skip

# Accepted in [data] and dropped with a note: rows are always packed without padding, whatever these say.
PACKING = ("packing", "sample_packing", "pad_to_sequence_len", "group_by_length")

# Named by the plan, not built: refused by name unless the value means "off", so that nothing is silently ignored.
NOT_YET = {
    "model.init_adapter", "lora.fan_in_fan_out", "lora.use_dora",
    "train.loraplus_lr_ratio", "train.neftune_noise_alpha", "output.export", "log.report_to",
    "log.plot_loss",
}  # fmt: skip


def means_unused(value: Any) -> bool:
    """Whether a value switches a setting off: null, false, "none", or empty."""
    return value is None or value is False or value in ("", "none", [], {}, ["none"])
