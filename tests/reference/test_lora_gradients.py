"""Gradients of every A and B, and 20 steps of training, beside torch + peft from the same files and batches."""

import numpy as np
import pytest

from adapters import PeftModel, lora_layers
from peft_core.optim import AdamW
from support.llama_reference import batch, distance, make_llama, peft_model

pytestmark = [pytest.mark.reference, pytest.mark.filterwarnings("default::FutureWarning:transformers")]
torch = pytest.importorskip("torch")
pytest.importorskip("peft")

TOLERANCE = 1e-4
CONFIG = {
    "r": 4, "lora_alpha": 8, "rank_pattern": {"v_proj": 2}, "alpha_pattern": {"down_proj": 3},
    "target_modules": ["q_proj", "k_proj", "v_proj", "o_proj", "gate_proj", "up_proj", "down_proj"],
}  # fmt: skip


@pytest.fixture
def pair(tmp_path):
    """(ours, theirs): the same base and the same random adapter, both trainable."""
    from transformer.load import from_pretrained

    theirs = peft_model(make_llama(tmp_path / "base"), **CONFIG)
    theirs.save_pretrained(tmp_path / "a")
    return PeftModel.from_pretrained(from_pretrained(tmp_path / "base"), tmp_path / "a", is_trainable=True), theirs


def torch_loss(model, ids, mask, labels):
    return model(input_ids=torch.tensor(ids), attention_mask=torch.tensor(mask), labels=torch.tensor(labels)).loss


def torch_gradients(model):
    return {n: p.grad.numpy() for n, p in model.named_parameters() if "lora_" in n}


def our_gradients(model):
    """Under peft's names."""
    found = {}
    for path, layer in lora_layers(model.base_model).items():
        for half in "AB":
            parameter = getattr(layer.adapters["default"], half)
            found[f"base_model.model.{path}.lora_{half}.default.weight"] = np.asarray(parameter.grad.data)
    return found


@pytest.mark.parametrize("checkpointing", [False, True])
def test_every_adapter_gradient_is_torchs(pair, checkpointing):
    model, theirs = pair
    ids, mask, labels = batch()
    if checkpointing:
        model.base_model.gradient_checkpointing = True
    loss = model(ids, attention_mask=mask, labels=labels).loss
    want = torch_loss(theirs, ids, mask, labels)
    assert abs(loss.item() - want.item()) < TOLERANCE * want.item()
    loss.backward()
    want.backward()
    mine, reference = our_gradients(model), torch_gradients(theirs)
    assert set(mine) == set(reference) and len(mine) == 2 * 7 * 2
    for name, gradient in reference.items():
        assert np.linalg.norm(gradient) > 0
        assert distance(mine[name], gradient) < TOLERANCE, name


def test_the_loss_on_flat_batches_sees_an_adapted_head(tmp_path):
    """The fused head and loss must not go past an adapter on the head."""
    from transformer.batch import Batch
    from transformer.load import from_pretrained

    theirs = peft_model(make_llama(tmp_path / "base"), r=2, target_modules=["lm_head", "q_proj"])
    theirs.save_pretrained(tmp_path / "a")
    model = PeftModel.from_pretrained(from_pretrained(tmp_path / "base"), tmp_path / "a", is_trainable=True)
    ids, mask, labels = batch()
    rows = [(i[m.astype(bool)], t[m.astype(bool)]) for i, m, t in zip(ids, mask, labels, strict=True)]
    total, n = model.loss(Batch.from_rows(rows))
    want = torch_loss(theirs, ids, mask, labels)
    (total * (1 / n)).backward()
    want.backward()
    assert abs(total.item() / n - want.item()) < TOLERANCE * want.item()
    mine, reference = our_gradients(model), torch_gradients(theirs)
    for name, gradient in reference.items():
        assert distance(mine[name], gradient) < TOLERANCE, name


def test_a_wrong_scale_is_seen(pair):
    model, theirs = pair
    ids, mask, labels = batch()
    next(iter(lora_layers(model.base_model).values())).adapters["default"].scaling *= 1.01
    model(ids, attention_mask=mask, labels=labels).loss.backward()
    torch_loss(theirs, ids, mask, labels).backward()
    mine, reference = our_gradients(model), torch_gradients(theirs)
    assert max(distance(mine[n], reference[n]) for n in reference) > 10 * TOLERANCE


def test_twenty_steps_give_the_same_losses(pair):
    model, theirs = pair
    settings = {"lr": 1e-2, "weight_decay": 0.01}
    mine = AdamW([p for p in model.parameters() if p.requires_grad], **settings)
    reference = torch.optim.AdamW([p for p in theirs.parameters() if p.requires_grad], **settings)
    batches = [batch(seed) for seed in range(2)]
    losses = []
    for step in range(20):
        ids, mask, labels = batches[step % 2]
        mine.zero_grad()
        reference.zero_grad()
        loss, want = model(ids, attention_mask=mask, labels=labels).loss, torch_loss(theirs, ids, mask, labels)
        loss.backward()
        want.backward()
        mine.step()
        reference.step()
        losses.append((loss.item(), want.item()))
    for ours, want in losses:
        assert abs(ours - want) <= TOLERANCE * want, losses
    assert losses[0][0] - losses[-2][0] >= 1.0  # the same batch, 18 steps later
