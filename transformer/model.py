"""CausalLM: the decoder stack with its head, on flat batches, and the rectangular call people know."""

from __future__ import annotations

from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np

from peft_core import ops
from peft_core.backend import Array, Device, to_device, to_numpy
from peft_core.dtypes import promote
from peft_core.errors import DataError, expect
from peft_core.nn import Linear, Module, project
from peft_core.recompute import recompute
from peft_core.tape import is_grad_enabled
from peft_core.tensor import Tensor
from transformer.attention import Place
from transformer.batch import IGNORED, Batch
from transformer.block import DecoderLayer
from transformer.cache import KVCache
from transformer.config import ModelConfig
from transformer.layers import shaped_embedding, shaped_linear, shaped_norm


@dataclass
class CausalLMOutput:
    """What calling a model returns: ``loss`` (scalar, or None without labels) and ``logits`` (B, T, V)."""

    loss: Tensor | None
    logits: Tensor


@dataclass
class Source:
    """Where a model came from: its directory, and the tensors of its file that the stack has no use for.

    ``extra``: name -> array, written back when the model is saved.  ``tied_head``: the file spells out the tied head.
    ``cut``: the prefix that the decoder's names lack in the file.
    """

    directory: Path | None = None
    extra: dict[str, Array] = field(default_factory=dict)
    tied_head: bool = False
    cut: str = ""


class Decoder(Module):
    """Token embedding, learned positions if any, layers and final norm, all named as in the checkpoints."""

    def __init__(self, config: ModelConfig) -> None:
        self.stack = stack = config.family.stack
        setattr(self, stack.table, shaped_embedding(config.vocab_size, config.hidden_size))
        if stack.positions is not None:
            setattr(self, stack.positions, shaped_embedding(config.max_position_embeddings, config.hidden_size))
        setattr(self, stack.layers, [DecoderLayer(config, i) for i in range(config.num_hidden_layers)])
        setattr(self, stack.norm, shaped_norm(config.hidden_size, config.norm_eps, stack.layer_norm))

    def forward(self, ids: Any, place: Place, recomputed: bool = False) -> Tensor:
        """ids (N,) -> (N, D) float32 (float64 for float64 weights), after the final norm."""
        x = getattr(self, self.stack.table)(ids)  # (N, D)
        x = ops.astype(x, dtype=promote(x.dtype, np.float32))  # the residual stream: sums of many layers
        if self.stack.positions is not None:
            learned = getattr(self, self.stack.positions)(place.positions)  # (N, D)
            x = ops.add(x, ops.astype(learned, dtype=x.dtype))
        for layer in getattr(self, self.stack.layers):
            x = recompute(layer, x, place) if recomputed else layer(x, place)
        return getattr(self, self.stack.norm)(x)


class CausalLM(Module):
    """A decoder-only language model with the attribute paths of its Hugging Face checkpoint.

    Built from a config it knows its shapes only; ``transformer.from_pretrained`` gives it weights, frozen.
    ``gradient_checkpointing``: keep each layer's input only and run the layer again in backward.
    """

    def __init__(self, config: ModelConfig) -> None:
        self.config = config
        self.gradient_checkpointing = False
        self.source = Source()
        self.generation_config: dict[str, Any] = {}
        setattr(self, config.family.stack.decoder, Decoder(config))
        self.lm_head = shaped_linear(config.hidden_size, config.vocab_size, bias=False)
        if config.tie_word_embeddings:
            self.lm_head.weight = self.get_input_embeddings().weight

    # ------------------------------------------------------------------ on flat batches

    def hidden(self, batch: Batch, cache: KVCache | None = None) -> Tensor:
        """The stack's output (N, D) for every token of ``batch``.

        With a ``cache`` the batch holds the next tokens of each of its rows (none for a row that is done), their
        positions counting on from what the cache holds; only under no_grad.
        """
        device = self.get_input_embeddings().weight.device
        where = self._positions(batch.positions, device)
        slots, k_lengths = (None, None) if cache is None else cache.reserve(batch.cu_seqlens)
        seen = k_lengths[k_lengths > 0] if k_lengths is not None and batch.one_each else None
        place = Place(batch.cu_seqlens, **where, cache=cache, slots=slots, k_lengths=k_lengths, seen=seen)
        recomputed = self.gradient_checkpointing and is_grad_enabled() and cache is None
        return self.decoder(to_device(batch.ids, device), place, recomputed)

    def _positions(self, positions: np.ndarray, device: Any) -> dict[str, Array]:
        """positions (N,) as ``Place`` takes them: the angles' cos and sin, or themselves, checked against the table."""
        rope, longest = self.config.rope, self.config.max_position_embeddings
        if rope is not None:
            angles = positions.astype(np.float32)[:, None] * rope.inverse_frequencies(self.config.head_dim)  # (N, K/2)
            return {"cos": to_device(np.cos(angles), device), "sin": to_device(np.sin(angles), device)}
        last = int(positions.max(initial=0))
        expect(last < longest, DataError, f"a token stands at position {last} of its row",
               expected=f"rows of at most {longest} tokens ({self.config.family.key('max_position_embeddings')}): "
               f"{self.config.architectures[0]} has learned no other positions", fix="Cut the rows.")  # fmt: skip
        return {"positions": to_device(positions, device)}

    def loss(self, batch: Batch) -> tuple[Tensor, int]:
        """(sum of the losses at labelled tokens, how many there are); a plain head never holds N x V logits."""
        h, head = self.hidden(batch), self.lm_head
        if type(head) is Linear and head.bias is None:
            return ops.head_loss(h, head.weight, to_device(batch.targets, h.device)), batch.n_labelled
        rows = np.flatnonzero(batch.targets != IGNORED)  # (M,)
        targets = to_device(batch.targets[rows], h.device)
        logits = project(ops.getitem(h, index=to_device(rows, h.device)), head)  # (M, V)
        return ops.cross_entropy(logits, targets, reduction="sum"), len(rows)

    # ------------------------------------------------------------------ on rectangles

    def forward(
        self, input_ids: Any, attention_mask: Any = None, labels: Any = None, position_ids: Any = None
    ) -> CausalLMOutput:
        """Logits, and the mean loss over labelled tokens where ``labels`` are given.

        input_ids, attention_mask (1: a token, 0: padding, on either side), labels (unshifted, -100: no loss) and
        position_ids (default: from 0 in each row, padding not counted): (B, T).  Padding gets zero logits and no loss;
        the other numbers equal those of the unpadded rows.  No labelled token gives a NaN loss, as in PyTorch.
        Raises DataError for other shapes, dtypes or a mask with holes.
        """
        ids = _rectangle("input_ids", input_ids)
        shape = ids.shape
        mask = np.ones(shape, bool) if attention_mask is None else _mask(attention_mask, shape)
        given = None if labels is None else _rectangle("labels", labels, shape)
        targets = None
        if given is not None:
            targets = [np.append(row[kept][1:], IGNORED) for row, kept in zip(given, mask, strict=True)]
        batch = Batch.flat([row[kept] for row, kept in zip(ids, mask, strict=True)], targets)
        if position_ids is not None:
            positions = _rectangle("position_ids", position_ids)
            expect(positions.shape in (shape, (1, shape[1])), DataError, f"position_ids has shape {positions.shape}",
                   expected=f"that of input_ids, {shape}, or one row for all")  # fmt: skip
            positions = np.broadcast_to(positions, shape).astype(np.int64)
            batch = Batch(batch.ids, batch.targets, positions[mask], batch.cu_seqlens)
        logits = project(self.hidden(batch), self.lm_head)  # (N, V)
        loss = None
        if given is not None:
            total = ops.cross_entropy(logits, to_device(batch.targets, logits.device), reduction="sum")
            loss = total * (1 / batch.n_labelled if batch.n_labelled else float("nan"))
        return CausalLMOutput(loss, _restored(logits, mask))

    def generate(self, input_ids: Any, attention_mask: Any = None, **options: Any) -> np.ndarray:
        """The rows of ``input_ids`` (B, T) continued: (B, T + new) ids, filled up with the padding id on the right.

        ``options``: those of ``transformer.generate``; max_new_tokens is 20 unless given.
        """
        from transformer.generate import generate

        ids = _rectangle("input_ids", input_ids)
        mask = np.ones(ids.shape, bool) if attention_mask is None else _mask(attention_mask, ids.shape)
        rows = [row[kept].tolist() for row, kept in zip(ids, mask, strict=True)]
        new = generate(self, rows, **{"max_new_tokens": 20, **options})
        out = np.full((len(ids), ids.shape[1] + max(map(len, new), default=0)), self.padding_id, np.int64)
        out[:, : ids.shape[1]] = ids
        for b, tokens in enumerate(new):
            out[b, ids.shape[1] : ids.shape[1] + len(tokens)] = tokens
        return out

    @property
    def padding_id(self) -> int:
        """What short rows are filled up with: the padding id, else the first end-of-text id, else 0."""
        eos = self.config.eos_token_id
        first = next(iter(eos), 0) if isinstance(eos, list) else eos
        return int((first or 0) if self.config.pad_token_id is None else self.config.pad_token_id)

    # ------------------------------------------------------------------ names people know

    @property
    def decoder(self) -> Module:
        """The stack below the head, whatever its name."""
        return getattr(self, self.config.family.stack.decoder)

    def get_input_embeddings(self) -> Any:
        """The token embedding."""
        return getattr(self.decoder, self.config.family.stack.table)

    def get_output_embeddings(self) -> Module:
        """The head."""
        return self.lm_head

    def gradient_checkpointing_enable(self, **ignored: Any) -> None:
        """Recompute each layer in backward: less memory, one more forward."""
        self.gradient_checkpointing = True

    def gradient_checkpointing_disable(self) -> None:
        """Keep all activations."""
        self.gradient_checkpointing = False

    def enable_input_require_grads(self) -> None:
        """Nothing to do: recomputed layers give gradients to adapters above a frozen embedding as they are."""

    @property
    def device(self) -> Device:
        """Where the parameters are."""
        return next(self.parameters()).device

    @property
    def dtype(self) -> np.dtype:
        """The dtype of the embedding."""
        return next(self.parameters()).dtype

    def num_parameters(self, only_trainable: bool = False) -> int:
        """The number of parameters, a tied one counted once."""
        return sum(p.numel() for p in self.parameters() if p.requires_grad or not only_trainable)

    def save_pretrained(self, path: Any, max_shard_size: int | str = "5GB") -> None:
        """Write a model directory; see ``transformer.save_pretrained``."""
        from transformer.export import save_pretrained

        save_pretrained(self, path, max_shard_size)

    def __repr__(self) -> str:
        return super().__repr__().replace(type(self).__name__, self.config.architectures[0], 1)


# ------------------------------------------------------------------------------------------------ rectangles


def _rectangle(name: str, value: Any, shape: tuple[int, ...] | None = None) -> np.ndarray:
    array = np.asarray(to_numpy(value.data if isinstance(value, Tensor) else value))
    expect(array.ndim == 2 and array.dtype.kind in "iub" and 0 not in array.shape, DataError,
           f"{name} has shape {array.shape} and dtype {array.dtype}",
           expected="integers of shape (rows, tokens), both at least 1")  # fmt: skip
    expect(shape is None or array.shape == shape, DataError, f"{name} has shape {array.shape}",
           expected=f"that of input_ids, {shape}")  # fmt: skip
    return array


def _mask(value: Any, shape: tuple[int, ...]) -> np.ndarray:
    mask = _rectangle("attention_mask", value, shape) != 0
    for b, row in enumerate(mask):
        kept = np.flatnonzero(row)
        whole = len(kept) > 0 and kept[-1] - kept[0] + 1 == len(kept)
        expect(whole, DataError, f"attention_mask row {b} keeps {len(kept)} of {len(row)} tokens, not one block",
               expected="at least one token, padding only before or after", fix="Rows cannot have holes.")  # fmt: skip
    return mask


def _restored(logits: Tensor, mask: np.ndarray) -> Tensor:
    """(N, V) -> (B, T, V), zero where the mask is."""
    if mask.all():
        return ops.reshape(logits, shape=(*mask.shape, -1))  # (B, T, V)
    n = logits.shape[0]
    source = np.full(mask.shape, n, np.int64)
    source[mask] = np.arange(n)
    zero = Tensor(to_device(np.zeros((1, logits.shape[1]), logits.dtype), logits.device))
    return ops.getitem(ops.concatenate([logits, zero]), index=to_device(source, logits.device))  # (B, T, V)
