"""Generation: the cache changes nothing, rows do not know each other."""

import re

import numpy as np
import pytest

from peft_core.errors import ConfigError, DataError, DivergedError
from peft_core.kernels import tiles_supported
from peft_core.nn import module
from peft_core.ops import decode, projection_few
from support.tiny_models import padded, ragged_rows, write_tiny
from transformer import from_pretrained, generate
from transformer.generate import probabilities

CASES = [{}, {"model_type": "mistral", "sliding_window": 5}, {"tie_word_embeddings": True, "num_key_value_heads": 1}]
PROMPTS = ragged_rows(lengths=(9, 1, 14))


@pytest.fixture(params=CASES)
def model(tmp_path, request):
    return from_pretrained(write_tiny(tmp_path, **request.param))


def test_greedy_is_the_likeliest_token_each_time(model):
    for prompt, new in zip(PROMPTS, generate(model, PROMPTS, max_new_tokens=10, eos_token_id=()), strict=True):
        assert len(new) == 10
        ids = list(prompt)
        for token in new:
            assert token == int(model([ids]).logits.data[0, -1].argmax())
            ids.append(token)


@pytest.mark.parametrize("prompts", [PROMPTS, [[5, 6]], [[5], [7]]], ids=["ragged", "two tokens", "one each"])
@pytest.mark.parametrize("settings", [{}, {"do_sample": True, "top_k": 20, "temperature": 1.5, "seed": 4}])
def test_the_cache_changes_nothing(model, settings, prompts):
    with_cache = generate(model, prompts, max_new_tokens=12, **settings)
    assert with_cache == generate(model, prompts, max_new_tokens=12, use_cache=False, **settings)


@pytest.mark.skipif(not tiles_supported(np.float32), reason="this CPU has no AVX-512")
def test_a_token_after_the_first_takes_one_kernel_a_product_and_one_a_layer_of_attention(tmp_path, monkeypatch):
    model, calls = from_pretrained(write_tiny(tmp_path), dtype="float32"), []
    for ops in (decode, projection_few):
        monkeypatch.setattr(ops, "run_team", lambda *args, run=ops.run_team: (calls.append(args[0]), run(*args)))
    layers, n = model.config.num_hidden_layers, 5
    generate(model, [[1] * 40, [2] * 40], max_new_tokens=1, eos_token_id=())
    assert len(calls) == 1  # the head for the last token of each row
    generate(model, [[1] * 40, [2] * 40], max_new_tokens=n, eos_token_id=())
    assert len(calls) == 1 + n + (n - 1) * 5 * layers


def test_no_step_asks_a_module_for_what_it_lacks(model, monkeypatch):
    asked = []
    monkeypatch.setattr(
        module, "missing_attribute", lambda kind, name, has: asked.append((kind, name)) or AttributeError()
    )
    generate(model, PROMPTS, max_new_tokens=2, eos_token_id=())
    assert not asked  # the answer, with names like it, takes longer than a small product


def test_rows_do_not_know_each_other(model):
    greedy = generate(model, PROMPTS, max_new_tokens=10)
    assert greedy == [generate(model, [prompt], max_new_tokens=10)[0] for prompt in PROMPTS]
    settings = {"max_new_tokens": 10, "do_sample": True, "seed": 9}
    sampled = generate(model, PROMPTS, **settings)
    assert sampled[:2] == generate(model, PROMPTS[:2], **settings)
    assert sampled[2] == generate(model, [[5], [6, 7], PROMPTS[2]], **settings)[2]
    twice = generate(model, [PROMPTS[0]] * 2, **settings)
    assert twice[0] != twice[1]  # each row its own stream
    assert sampled == generate(model, PROMPTS, **settings)
    assert sampled != generate(model, PROMPTS, **{**settings, "seed": 10})


@pytest.mark.parametrize("value", [np.nan, np.inf])
@pytest.mark.parametrize("settings", [{}, {"do_sample": True}, {"do_sample": True, "top_k": 3, "top_p": 0.5}])
def test_logits_that_are_not_finite_name_row_and_token(tmp_path, value, settings):
    model = from_pretrained(write_tiny(tmp_path), dtype="float32")
    free = generate(model, PROMPTS, max_new_tokens=6, eos_token_id=(), **settings)
    token = next(t for row in free for t in row if t not in {t for p in PROMPTS for t in p})
    step = min(row.index(token) for row in free if token in row)
    row = next(i for i, new in enumerate(free) if token in new[: step + 1])
    table = np.array(model.model.embed_tokens.weight.data)
    table[token] = value  # an adapter or a base that is fine until this token is read
    model.model.embed_tokens.weight.data = table
    if model.config.tie_word_embeddings:
        pytest.skip("the head would be damaged too")
    text = rf"logits of prompt {row} are NaN or infinite at new token {step + 2} \(the first is nan for token 0\)"
    with np.errstate(all="ignore"), pytest.raises(DivergedError, match=text):
        generate(model, PROMPTS, max_new_tokens=6, eos_token_id=(), **settings)


def test_a_tiny_temperature_takes_the_likeliest():
    logits = np.array([1.0, 3.0, -2.0, 2.9])
    assert probabilities(logits, temperature=1e-310).tolist() == [0, 1, 0, 0]
    assert probabilities(logits * 1e300, temperature=1e-300, top_k=2).tolist() == [0, 1, 0, 0]


def test_rows_that_end_leave(model):
    free = generate(model, PROMPTS, max_new_tokens=12, eos_token_id=())
    stop = free[0][3]
    heard = []
    new = generate(model, PROMPTS, max_new_tokens=12, eos_token_id=stop, on_token=lambda row, t: heard.append((row, t)))
    for row, full in zip(new, free, strict=True):
        assert row == (full[: full.index(stop) + 1] if stop in full else full)
    assert [[t for r, t in heard if r == b] for b in range(3)] == new
    assert generate(model, PROMPTS, max_new_tokens=12, eos_token_id=[stop, 96]) == [
        row[: next((i + 1 for i, t in enumerate(row) if t in (stop, 96)), 12)] for row in free]  # fmt: skip


def test_the_models_own_end_token(model):
    stop = generate(model, PROMPTS[:1], max_new_tokens=5, eos_token_id=())[0][2]
    model.config.eos_token_id = stop
    ended = generate(model, PROMPTS[:1], max_new_tokens=5)[0]
    assert ended[-1] == stop and len(ended) <= 3
    model.generation_config = {"eos_token_id": []}
    assert len(generate(model, PROMPTS[:1], max_new_tokens=5)[0]) == 5


def test_modes_are_put_back(model):
    model.train()
    model.lm_head.eval()
    assert generate(model, PROMPTS[:1], max_new_tokens=0) == [[]]
    generate(model, PROMPTS[:1], max_new_tokens=1)
    assert model.training and not model.lm_head.training and model.model.training


def test_the_rectangular_face(model):
    ids, mask = padded(PROMPTS, "left")
    new = generate(model, PROMPTS, max_new_tokens=6, eos_token_id=())
    out = model.generate(ids, attention_mask=mask, max_new_tokens=6, eos_token_id=())
    assert out.shape == (3, 20) and np.array_equal(out[:, :14], ids) and out[:, 14:].tolist() == new
    stop = new[0][0]
    ended = model.generate(ids, attention_mask=mask, max_new_tokens=6, eos_token_id=stop)
    assert ended[0, 14] == stop and set(ended[0, 15:].tolist()) <= {2}  # filled up with the end token


def test_probabilities():
    logits = np.log(np.array([0.1, 0.4, 0.2, 0.3]))
    np.testing.assert_allclose(probabilities(logits), [0.1, 0.4, 0.2, 0.3])
    np.testing.assert_allclose(probabilities(logits, top_k=2), [0, 4 / 7, 0, 3 / 7])
    np.testing.assert_allclose(probabilities(logits, top_p=0.6), [0, 4 / 7, 0, 3 / 7])
    np.testing.assert_allclose(probabilities(logits, top_p=0.01), [0, 1, 0, 0])
    np.testing.assert_allclose(probabilities(logits, temperature=0.5), np.array([1, 16, 4, 9]) / 30)
    np.testing.assert_allclose(probabilities(logits, top_k=3, top_p=0.5), [0, 4 / 7, 0, 3 / 7])


def test_samples_follow_the_probabilities(tmp_path):
    model = from_pretrained(write_tiny(tmp_path))
    first = generate(model, [PROMPTS[0]] * 2000, max_new_tokens=1, do_sample=True, temperature=1.5, top_k=4)
    counts = np.bincount([row[0] for row in first], minlength=97) / 2000
    expected = probabilities(model([PROMPTS[0]]).logits.data[0, -1], 1.5, 4)
    assert np.abs(counts - expected).max() < 0.05  # five standard deviations
    assert not counts[expected == 0].any()


@pytest.mark.parametrize(("settings", "text"), [
    ({"max_new_tokens": -1}, "max_new_tokens is -1; expected at least 0."),
    ({"temperature": 0.0, "do_sample": True}, "temperature is 0.0; expected a number above 0. For the likeliest"),
    ({"top_k": 0, "do_sample": True}, "top_k is 0; expected at least 1"),
    ({"top_p": 1.5, "do_sample": True}, "top_p is 1.5; expected a number in (0, 1]"),
    ({"top_p": 0.5}, "temperature, top_k or top_p is set without do_sample; expected do_sample=True."),
])  # fmt: skip
def test_settings_refused(tmp_path, settings, text):
    with pytest.raises(ConfigError, match=re.escape(text)):
        generate(from_pretrained(write_tiny(tmp_path)), PROMPTS, **{"max_new_tokens": 1, **settings})


@pytest.mark.parametrize("prompt", [[], [[1]], [0.5]])
def test_prompts_refused(tmp_path, prompt):
    with pytest.raises(DataError, match=r"prompt 1 has shape .* and dtype .*; expected a list of at least one token"):
        generate(from_pretrained(write_tiny(tmp_path)), [[5], prompt], max_new_tokens=1)
