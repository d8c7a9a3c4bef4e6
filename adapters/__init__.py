"""Small trainable parts inside any ``nn.Module``: LoRA under the names that PEFT users know."""

from adapters.config import LoraConfig, TaskType
from adapters.inject import InjectReport, adapter_layers, count_parameters, lora_layers, set_active
from adapters.inject import inject as inject_adapter
from adapters.io import export_canonical, load_adapter, save_adapter
from adapters.layer import TrainedCopy
from adapters.lora import LoraEmbedding, LoraLinear, LowRank
from adapters.match import Match, match_modules
from adapters.merge import MergeReport
from adapters.merge_stream import merge_directory
from adapters.model import PeftConfig, PeftModel, get_peft_model
from adapters.stored import read_adapter

__all__ = [
    "InjectReport",
    "LoraConfig",
    "LoraEmbedding",
    "LoraLinear",
    "LowRank",
    "Match",
    "MergeReport",
    "PeftConfig",
    "PeftModel",
    "TaskType",
    "TrainedCopy",
    "adapter_layers",
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
