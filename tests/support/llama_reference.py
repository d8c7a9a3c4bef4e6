"""A tiny random Llama made by transformers, its adapters made by peft, and the same batches for both sides."""

import numpy as np

RAGGED = (11, 7, 16)  # row lengths; what follows a row's end is padding
VOCAB = 64


def make_llama(directory, seed=0, tied=False, **values):
    """Save a random Llama (GQA 4/2, 2 layers) whose logits have a deviation above 1; returns the torch model."""
    import torch
    from transformers import LlamaConfig, LlamaForCausalLM

    torch.manual_seed(seed)
    config = LlamaConfig(**{**dict(
        vocab_size=VOCAB, hidden_size=32, intermediate_size=48, num_hidden_layers=2, num_attention_heads=4,
        num_key_value_heads=2, max_position_embeddings=64, tie_word_embeddings=tied, bos_token_id=1, eos_token_id=2),
        **values},
    )  # fmt: skip
    model = LlamaForCausalLM(config).eval()
    with torch.no_grad():
        for name, p in model.named_parameters():
            p.copy_(torch.randn_like(p) * (0.2 if p.ndim == 2 else 0.1) + (0.0 if p.ndim == 2 else 1.0))
            if "embed" in name:
                p.mul_(5)
    model.save_pretrained(directory)
    return model


def batch(seed=0):
    """(input_ids, attention_mask, labels): right-padded ragged rows, the first third of each without loss."""
    rng = np.random.default_rng(seed)
    ids = rng.integers(3, VOCAB, (len(RAGGED), max(RAGGED)))
    mask = np.array([[int(j < n) for j in range(max(RAGGED))] for n in RAGGED])
    labels = np.where(mask, ids, -100)
    for row, n in enumerate(RAGGED):
        labels[row, : n // 3] = -100
    return np.where(mask, ids, 0), mask, labels


def peft_model(base, seed=3, scale=0.2, **values):
    """The torch model with a peft adapter; what trains, A and B both, has random numbers added."""
    import torch
    from peft import LoraConfig, get_peft_model

    model = get_peft_model(base, LoraConfig(task_type="CAUSAL_LM", **values))
    generator = torch.Generator().manual_seed(seed)
    with torch.no_grad():
        for name, p in model.named_parameters():
            if "lora_" in name:
                p.copy_(torch.randn(p.shape, generator=generator) * scale)
            elif p.requires_grad:  # a copy of a module, a bias
                p.add_(torch.randn(p.shape, generator=generator) * scale)
    return model.eval()


def torch_logits(model, ids, mask):
    """Logits of a torch model at the rows' real tokens, (N, V) float64."""
    import torch

    with torch.no_grad():
        out = model(input_ids=torch.tensor(ids), attention_mask=torch.tensor(mask)).logits
    return out[torch.tensor(mask).bool()].double().numpy()


def our_logits(model, ids, mask):
    """Logits of our model at the rows' real tokens, (N, V) float64."""
    from peft_core import no_grad

    with no_grad():
        out = model(ids, attention_mask=mask).logits
    return np.asarray(out.data)[mask.astype(bool)].astype(np.float64)


def distance(x, y):
    """||x - y|| / ||y||."""
    x, y = np.asarray(x, np.float64), np.asarray(y, np.float64)
    return float(np.linalg.norm(x - y) / np.linalg.norm(y))
