"""The llama family against transformers, on random tiny models whose logits are large enough to differ."""

import json
import warnings

import numpy as np
import pytest

import transformer.attention
from peft_core import Tensor, no_grad
from peft_core.dtypes import as_dtype
from support.tiny_models import LLAMA3, padded, ragged_rows, write_tiny
from transformer import from_pretrained, generate, save_pretrained
from transformer.batch import Batch
from transformer.config import RopeConfig
from transformer.generate import probabilities

torch = pytest.importorskip("torch")
transformers = pytest.importorskip("transformers")
pytestmark = pytest.mark.reference

CASES = {
    "plain": {},
    "tied": {"tie_word_embeddings": True},
    "biases": {"attention_bias": True, "mlp_bias": True},
    "one group": {"num_key_value_heads": 1},
    "no groups": {"num_key_value_heads": 4},
    "wide heads": {"head_dim": 16},
    "linear": {"rope_scaling": {"type": "linear", "factor": 4.0}},
    "llama3": {"rope_scaling": LLAMA3},
    "transformers 5": {"rope_theta": ..., "rope_parameters": {**LLAMA3, "rope_theta": 500.0}},
    "mistral": {"model_type": "mistral", "sliding_window": 7},
    "mistral without window": {"model_type": "mistral", "sliding_window": None},
}


def theirs(directory, dtype=torch.float32):
    """The reference model.  Warnings of its own are not ours."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        model = transformers.AutoModelForCausalLM.from_pretrained(directory, dtype=dtype, attn_implementation="eager")
    return model.eval()


def their_logits(model, rows):
    with torch.no_grad():
        return [model(torch.tensor([row])).logits[0].float().numpy() for row in rows]


def our_logits(model, rows):
    batch = Batch.from_rows([(row, row) for row in rows])
    with no_grad():
        logits = model.lm_head(model.hidden(batch)).data
    return np.split(logits, batch.cu_seqlens[1:-1])


def difference(ours, reference):
    return max(float(np.abs(a - b).max()) for a, b in zip(ours, reference, strict=True))


@pytest.mark.parametrize("name", CASES)
def test_logits(tmp_path, name):
    directory, rows = write_tiny(tmp_path, **CASES[name]), ragged_rows()
    reference = their_logits(theirs(directory), rows)
    assert reference[0].std() > 1, "the comparison could not fail"
    assert difference(our_logits(from_pretrained(directory), rows), reference) < 1e-4


def _other_theta(self, head_dim):
    return (10000.0 ** (-np.arange(0, head_dim, 2) / head_dim)).astype(np.float32)


@pytest.mark.parametrize("fault", ["theta", "scaling", "grouping", "window", "eps"])
def test_a_fault_is_seen(tmp_path, monkeypatch, fault):
    """The test of the test: each deviation, switched off, makes the comparison fail by far."""
    directory = write_tiny(tmp_path, model_type="mistral", sliding_window=7, rope_scaling=LLAMA3, rms_norm_eps=1e-2)
    rows = ragged_rows()
    reference = their_logits(theirs(directory), rows)
    model = from_pretrained(directory)
    assert difference(our_logits(model, rows), reference) < 1e-4
    if fault == "theta":
        monkeypatch.setattr(RopeConfig, "inverse_frequencies", _other_theta)
    elif fault == "scaling":
        object.__setattr__(model.config.rope, "type", "default")
    elif fault == "window":
        for layer in model.model.layers:
            layer.self_attn.window = None
    elif fault == "eps":
        for layer in model.model.layers:
            layer.input_layernorm.eps = 1e-5
    else:  # the groups change places
        original = transformer.attention.ops.rotary_attention

        def swapped(qkv, **kw):
            heads, groups = kw["n_heads"], kw["n_kv_heads"]
            order = [*range(heads), *reversed(range(heads, heads + groups)),
                     *reversed(range(heads + groups, heads + 2 * groups))]  # fmt: skip
            x = qkv.data.reshape(len(qkv.data), len(order), -1)[:, order]
            return original(Tensor(x.reshape(qkv.shape)), **kw)

        monkeypatch.setattr(transformer.attention.ops, "rotary_attention", swapped)
    assert difference(our_logits(model, rows), reference) > 1e-2


@pytest.mark.parametrize("side", ["left", "right"])
def test_padded_batch(tmp_path, side):
    directory, rows = write_tiny(tmp_path), ragged_rows(lengths=(12, 30, 5))
    ids, mask = padded(rows, side)
    labels = np.where(mask == 1, ids, -100)
    labels[:, ::3] = -100
    for b in range(len(rows)):  # transformers predicts a row's first token from the padding before it: no label there
        labels[b, np.flatnonzero(mask[b])[0]] = -100
    reference = theirs(directory)
    with torch.no_grad():
        out = reference(torch.tensor(ids), attention_mask=torch.tensor(mask), labels=torch.tensor(labels))
    ours = from_pretrained(directory)(ids, attention_mask=mask, labels=labels)
    assert abs(float(ours.loss.item()) - float(out.loss)) < 1e-5
    logits = ours.logits.numpy()
    assert np.abs(logits - out.logits.numpy())[mask == 1].max() < 1e-4
    assert not logits[mask == 0].any()
    unshifted = np.roll(labels, -1, 1)  # the test of the test: labels one place off give another loss
    assert abs(float(from_pretrained(directory)(ids, mask, unshifted).loss.item()) - float(out.loss)) > 1e-2


def test_gradients(tmp_path):
    """Loss of a batch, backward: every weight's gradient, with and without recompute."""
    directory, rows = write_tiny(tmp_path, tie_word_embeddings=True, attention_bias=True), ragged_rows()
    reference = theirs(directory)
    total = sum(len(row) - 1 for row in rows)
    for row in rows:
        if len(row) > 1:
            (reference(torch.tensor([row]), labels=torch.tensor([row])).loss * (len(row) - 1)).backward()
    expected = {name: p.grad.numpy() for name, p in reference.named_parameters()}
    for checkpointing in (False, True):
        model = from_pretrained(directory).requires_grad_(True)
        model.gradient_checkpointing = checkpointing
        loss, n = model.loss(Batch.from_rows([(row, row) for row in rows]))
        assert n == total
        loss.backward()
        ours = {name: p._grad for name, p in model.named_parameters()}
        assert set(ours) == set(expected)
        for name, g in ours.items():
            assert np.linalg.norm(g - expected[name]) < 1e-4 * np.linalg.norm(expected[name]), name


@pytest.mark.parametrize("dtype", ["float32", "bfloat16", "float16"])
@pytest.mark.parametrize("shard", ["5GB", "20KB"])
def test_saved_by_us_loads_there(tmp_path, dtype, shard):
    model = from_pretrained(write_tiny(tmp_path / "base", dtype=dtype, rope_scaling=LLAMA3))
    save_pretrained(model, tmp_path / "saved", max_shard_size=shard)
    rows = ragged_rows()
    assert theirs(tmp_path / "saved", "auto").dtype == getattr(torch, dtype)
    assert difference(our_logits(model, rows), their_logits(theirs(tmp_path / "saved"), rows)) < 1e-4


@pytest.mark.parametrize("dtype", ["float32", "bfloat16", "float16"])
@pytest.mark.parametrize("shard", ["5GB", "20KB"])
def test_saved_there_loads_here(tmp_path, dtype, shard):
    reference = theirs(write_tiny(tmp_path / "base", tie_word_embeddings=True, rope_scaling=LLAMA3)).to(
        getattr(torch, dtype))  # fmt: skip
    reference.save_pretrained(tmp_path / "saved", max_shard_size=shard)
    assert "rope_parameters" in json.loads((tmp_path / "saved" / "config.json").read_text())
    model, rows = from_pretrained(tmp_path / "saved"), ragged_rows()
    assert {p.dtype for p in model.parameters()} == {as_dtype(dtype)}
    assert difference(our_logits(model, rows), their_logits(theirs(tmp_path / "saved"), rows)) < 1e-4


@pytest.mark.parametrize("name", ["plain", "mistral"])
def test_greedy_tokens(tmp_path, name):
    directory, prompts = write_tiny(tmp_path, **CASES[name]), ragged_rows(lengths=(9, 3, 14))
    reference = theirs(directory)
    ours = generate(from_pretrained(directory), prompts, max_new_tokens=12, eos_token_id=())
    for prompt, new in zip(prompts, ours, strict=True):
        ids = list(prompt)
        for token in new:  # not their generate(): its settings come from files
            assert token == int(their_logits(reference, [ids])[0][-1].argmax())
            ids.append(token)


@pytest.mark.parametrize("settings", [(0.7, None, None), (1.0, 5, None), (1.3, None, 0.8), (0.8, 20, 0.5)])
def test_sampling_distribution(settings):
    temperature, top_k, top_p = settings
    logits = np.random.default_rng(3).normal(0, 3, 97)
    scores = torch.tensor(logits)[None]
    ids = torch.zeros((1, 1), dtype=torch.long)
    scores = transformers.TemperatureLogitsWarper(temperature)(ids, scores)
    if top_k:
        scores = transformers.TopKLogitsWarper(top_k)(ids, scores)
    if top_p:
        scores = transformers.TopPLogitsWarper(top_p)(ids, scores)
    expected = torch.softmax(scores, -1)[0].numpy()
    ours = probabilities(logits, temperature, top_k, top_p)
    assert np.abs(ours - expected).max() < 1e-12
