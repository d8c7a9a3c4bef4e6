"""The stack against an independent formula in float64, and the rectangular face against flat rows."""

import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest

from peft_core import Tensor, autocast, no_grad
from peft_core.errors import DataError
from peft_core.nn import Linear, Module
from support.tiny_models import LLAMA3, padded, ragged_rows, tiny_tensors, write_tiny
from transformer import from_pretrained
from transformer.batch import Batch
from transformer.cache import KVCache
from transformer.config import ModelConfig
from transformer.model import CausalLM


def reference_logits(config: ModelConfig, w: dict[str, np.ndarray], ids: list[int]) -> np.ndarray:
    """One row, head by head and position by position, in float64."""
    w = {name: array.astype(np.float64) for name, array in w.items()}
    heads, groups, size = config.num_attention_heads, config.num_key_value_heads, config.head_dim
    f = config.rope.inverse_frequencies(size).astype(np.float64)

    def norm(x, name):
        return x / np.sqrt((x**2).mean(-1, keepdims=True) + config.norm_eps) * w[name]

    def linear(x, name):
        return x @ w[f"{name}.weight"].T + w.get(f"{name}.bias", 0.0)

    def rotate(x):  # (T, heads, K): pairs as complex numbers
        z = x[..., : size // 2] + 1j * x[..., size // 2 :]
        z = z * np.exp(1j * np.arange(len(x))[:, None, None] * f)
        return np.concatenate([z.real, z.imag], -1)

    x = w["model.embed_tokens.weight"][ids]
    for i in range(config.num_hidden_layers):
        at = f"model.layers.{i}."
        h = norm(x, at + "input_layernorm.weight")
        q = rotate(linear(h, at + "self_attn.q_proj").reshape(len(ids), heads, size))
        k = rotate(linear(h, at + "self_attn.k_proj").reshape(len(ids), groups, size))
        v = linear(h, at + "self_attn.v_proj").reshape(len(ids), groups, size)
        o = np.zeros_like(q)
        for t in range(len(ids)):
            first = 0 if config.sliding_window is None else max(0, t + 1 - config.sliding_window)
            for head in range(heads):
                g = head * groups // heads
                s = k[first : t + 1, g] @ q[t, head] / np.sqrt(size)
                p = np.exp(s - s.max())
                o[t, head] = p / p.sum() @ v[first : t + 1, g]
        x = x + linear(o.reshape(len(ids), -1), at + "self_attn.o_proj")
        h = norm(x, at + "post_attention_layernorm.weight")
        gate = linear(h, at + "mlp.gate_proj")
        x = x + linear(gate / (1 + np.exp(-gate)) * linear(h, at + "mlp.up_proj"), at + "mlp.down_proj")
    h = norm(x, "model.norm.weight")
    return h @ w.get("lm_head.weight", w["model.embed_tokens.weight"]).T


CASES = [
    {},
    {"tie_word_embeddings": True, "attention_bias": True, "mlp_bias": True},
    {"rope_scaling": LLAMA3, "head_dim": 16, "num_key_value_heads": 1},
    {"model_type": "mistral", "sliding_window": 6},
]


@pytest.mark.parametrize("changes", CASES)
def test_logits(tmp_path, changes):
    model = from_pretrained(write_tiny(tmp_path, **changes))
    weights = tiny_tensors(model.config.raw)
    rows = ragged_rows(lengths=(20, 1, 27))
    batch = Batch.from_rows([(row, row) for row in rows])
    logits = model.lm_head(model.hidden(batch)).data
    expected = np.concatenate([reference_logits(model.config, weights, row) for row in rows])
    assert expected.std() > 1
    assert np.abs(logits - expected).max() < 1e-4
    z = expected - expected.max(-1, keepdims=True)
    losses = np.log(np.exp(z).sum(-1)) - z[np.arange(len(z)), batch.targets % 97]
    loss, n = model.loss(batch)
    assert n == sum(len(row) - 1 for row in rows)
    assert abs(float(loss.item()) - losses[batch.targets != -100].sum()) < 1e-3


def test_float64_stays_float64(tmp_path):
    model = from_pretrained(write_tiny(tmp_path, dtype="float64"))
    rows = ragged_rows()
    logits = model.lm_head(model.hidden(Batch.from_rows([(row, row) for row in rows])))
    assert logits.dtype == np.float64
    weights = tiny_tensors(model.config.raw, 0, "float64")
    expected = np.concatenate([reference_logits(model.config, weights, row) for row in rows])
    assert np.abs(logits.data - expected).max() < 1e-4  # the angles are float32 as in the reference implementation


@pytest.mark.parametrize("dtype", ["bfloat16", "float16"])
def test_the_residual_stream_of_half_weights_is_float32(tmp_path, dtype):
    model = from_pretrained(write_tiny(tmp_path, dtype=dtype))
    rows = ragged_rows()
    batch = Batch.from_rows([(row, row) for row in rows])
    hidden = model.hidden(batch)
    assert hidden.dtype == np.float32
    with autocast("bfloat16"):
        assert model.hidden(batch).dtype == np.float32
    weights = tiny_tensors(model.config.raw, 0, dtype)
    expected = np.concatenate([reference_logits(model.config, weights, row) for row in rows])
    assert np.abs(model.lm_head(hidden).data - expected).max() < 1e-4  # weights are widened, nothing else is rounded


@pytest.mark.parametrize("side", ["left", "right"])
def test_a_padded_rectangle_equals_its_rows(tmp_path, side):
    model = from_pretrained(write_tiny(tmp_path))
    rows = ragged_rows(lengths=(9, 2, 14))
    ids, mask = padded(rows, side)
    out = model(ids, attention_mask=mask, labels=np.where(mask == 1, ids, -100))
    assert out.logits.shape == (3, 14, 97) and out.logits.dtype == np.float32
    loss, n = model.loss(Batch.from_rows([(row, row) for row in rows]))
    assert out.loss.item() == pytest.approx(loss.item() / n, rel=1e-6)
    for b, row in enumerate(rows):
        alone = model(np.array([row])).logits.data[0]
        np.testing.assert_allclose(out.logits.data[b][mask[b] == 1], alone, atol=1e-5)
    assert not out.logits.data[mask == 0].any()


def test_gradients_pass_through_the_rectangle(tmp_path):
    model = from_pretrained(write_tiny(tmp_path)).requires_grad_(True)
    rows = ragged_rows(lengths=(9, 2, 14))
    ids, mask = padded(rows)
    model(Tensor(ids), mask.tolist(), np.where(mask == 1, ids, -100)).loss.backward()
    through_face = {name: p._grad for name, p in model.named_parameters()}
    model.zero_grad()
    loss, n = model.loss(Batch.from_rows([(row, row) for row in rows]))
    (loss * (1 / n)).backward()
    for name, p in model.named_parameters():
        assert np.linalg.norm(p._grad - through_face[name]) <= 1e-5 * np.linalg.norm(p._grad), name


def test_position_ids(tmp_path):
    model = from_pretrained(write_tiny(tmp_path))
    ids = np.array(ragged_rows(lengths=(9,)))
    plain = model(ids).logits.data
    shifted = model(ids, position_ids=np.arange(9)[None] + 5).logits.data
    np.testing.assert_allclose(shifted, plain, atol=1e-4)  # rotary positions are relative
    assert np.abs(model(ids, position_ids=2 * np.arange(9)[None]).logits.data - plain).max() > 0.1


def test_no_label_gives_nan_as_in_pytorch(tmp_path):
    model = from_pretrained(write_tiny(tmp_path))
    assert np.isnan(model([[5, 6]], labels=[[-100, -100]]).loss.item())
    assert model([[5, 6]]).loss is None


class _Wrapped(Module):
    """What an adapter does to a head: another type around a Linear."""

    def __init__(self, inner: Linear) -> None:
        self.inner = inner

    def forward(self, x: Tensor) -> Tensor:
        return self.inner(x)


def test_a_wrapped_head_has_the_same_loss(tmp_path):
    model = from_pretrained(write_tiny(tmp_path)).requires_grad_(True)
    batch = Batch.from_rows([(row, [-100, *row[1:]]) for row in ragged_rows()])
    loss, n = model.loss(batch)
    loss.backward()
    expected = {id(p): p._grad for p in model.parameters()}
    model.zero_grad()
    model.set_submodule("lm_head", _Wrapped(model.lm_head))
    other, m = model.loss(batch)
    other.backward()
    assert n == m and other.item() == pytest.approx(loss.item(), rel=1e-6)
    for p in model.parameters():
        assert np.linalg.norm(p._grad - expected[id(p)]) <= 1e-5 * np.linalg.norm(p._grad)


def test_recompute_gives_the_same_gradients(tmp_path):
    model = from_pretrained(write_tiny(tmp_path))
    model.model.layers[0].self_attn.q_proj.weight.requires_grad = True  # over a frozen embedding
    batch = Batch.from_rows([(row, row) for row in ragged_rows()])
    found = []
    for enable in (model.gradient_checkpointing_disable, model.gradient_checkpointing_enable):
        enable()
        model.loss(batch)[0].backward()
        found.append(model.model.layers[0].self_attn.q_proj.weight._grad)
        model.zero_grad()
    assert found[0] is not None and np.array_equal(found[0], found[1])


def test_the_cache_continues_rows(tmp_path):
    model = from_pretrained(write_tiny(tmp_path, model_type="mistral", sliding_window=6))
    rows = [np.array(row) for row in ragged_rows(lengths=(12, 3, 9))]
    whole = model.hidden(Batch.flat(rows))
    cache = KVCache(model.config, 3, 12)
    parts = [[row[:4] for row in rows], [row[4:5] for row in rows], [row[5:] for row in rows]]
    seen, found = np.zeros(3, np.int64), [[], [], []]
    with no_grad():
        for part in parts:
            batch = Batch.flat(part, starts=seen)
            h = np.split(model.hidden(batch, cache).data, batch.cu_seqlens[1:-1])
            seen = seen + np.diff(batch.cu_seqlens)
            for b in range(3):
                found[b].append(h[b])
    np.testing.assert_allclose(np.concatenate([h for row in found for h in row]), whole.data, atol=1e-5)
    text = r"3 rows x 12 tokens, filled to \[12, 3, 9\], got \[1, 0, 0\] more; expected as many rows and room for all"
    with no_grad(), pytest.raises(ValueError, match=text):
        model.hidden(Batch.flat([rows[0][:1], rows[0][:0], rows[0][:0]]), cache)


def test_the_cache_is_refused_while_recording(tmp_path):
    model = from_pretrained(write_tiny(tmp_path))
    with pytest.raises(RuntimeError, match=r"a KVCache is used while gradients are recorded; expected no_grad\(\)"):
        model.hidden(Batch.flat([np.array([3])]), KVCache(model.config, 1, 4))


def test_names_people_know(tmp_path):
    model = from_pretrained(write_tiny(tmp_path, tie_word_embeddings=True))
    assert model.get_input_embeddings() is model.model.embed_tokens
    assert model.get_output_embeddings() is model.lm_head
    assert model.num_parameters() == sum(a.size for a in tiny_tensors(model.config.raw).values())
    assert model.num_parameters(only_trainable=True) == 0
    assert repr(model).startswith("LlamaForCausalLM(")


def test_a_model_of_shapes_holds_no_memory(tmp_path):
    config = ModelConfig.from_dict({**from_pretrained(write_tiny(tmp_path)).config.raw, "vocab_size": 10**15})
    model = CausalLM(config)
    assert model.lm_head.weight.shape == (10**15, 32)
    assert all(p.data.base is not None and p.data.base.size == 1 for p in model.parameters())


@pytest.mark.parametrize(("arguments", "text"), [
    ({"input_ids": [5, 6]}, r"input_ids has shape \(2,\) and dtype int64; expected integers of shape"),
    ({"input_ids": [[5.0]]}, "input_ids has shape .* and dtype float64"),
    ({"input_ids": [[5, 6]], "labels": [[5]]}, r"labels has shape \(1, 1\); expected that of input_ids, \(1, 2\)"),
    ({"input_ids": [[5, 6, 7]], "attention_mask": [[1, 0, 1]]}, "attention_mask row 0 keeps 2 of 3 tokens, not one"),
    ({"input_ids": [[5, 6]], "position_ids": [[0]]}, r"position_ids has shape \(1, 1\); expected that of input_ids"),
    ({"input_ids": [[5, 6]], "attention_mask": [[0, 0]]}, "attention_mask row 0 keeps 0 of 2 tokens"),
])  # fmt: skip
def test_refused(tmp_path, arguments, text):
    with pytest.raises(DataError, match=text):
        from_pretrained(write_tiny(tmp_path))(**arguments)


def test_importing_the_package_is_quick():
    """No compiler, no tokenizer library; and the function `generate` is not hidden by the module of its name."""
    code = (
        "import sys, transformer, transformer.generate; from transformer import generate; assert callable(generate);"
        "print([m for m in ('numba', 'cupy', 'tokenizers', 'jinja2', 'torch') if m in sys.modules])"
    )
    root = str(Path(__file__).parents[2])
    out = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True, cwd=root)
    assert out.stdout.strip() == "[]"
