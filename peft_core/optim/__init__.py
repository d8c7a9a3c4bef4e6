"""Optimisers, gradient clipping and learning-rate schedules, with torch's and transformers' numbers."""

from . import lr_scheduler
from .adam import Adam, AdamW
from .clip import clip_grad_norm_
from .optimizer import Optimizer
from .schedule import schedule
from .sgd import SGD

__all__ = ["SGD", "Adam", "AdamW", "Optimizer", "clip_grad_norm_", "lr_scheduler", "schedule"]
