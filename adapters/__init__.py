"""Small trainable parts inside any ``nn.Module``: LoRA under the names that PEFT users know."""

from adapters.config import LoraConfig, TaskType
from adapters.inject import InjectReport, count_parameters, lora_layers, set_active
from adapters.inject import inject as inject_adapter
from adapters.io import export_canonical, load_adapter, read_adapter, save_adapter
from adapters.lora import LoraLinear, LowRank
from adapters.match import Match, match_modules
from adapters.merge import MergeReport
from adapters.merge_stream import merge_directory
from adapters.model import PeftModel, get_peft_model

__all__ = [
    "InjectReport",
    "LoraConfig",
    "LoraLinear",
    "LowRank",
    "Match",
    "MergeReport",
    "PeftModel",
    "TaskType",
    "count_parameters",
    "export_canonical",
    "get_peft_model",
    "inject_adapter",
    "load_adapter",
    "lora_layers",
    "match_modules",
    "merge_directory",
    "read_adapter",
    "save_adapter",
    "set_active",
]
