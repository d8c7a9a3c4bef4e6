"""The gpt2 family against transformers, on random tiny models whose logits are large enough to differ."""

import json
import warnings

import numpy as np
import pytest

from peft_core import no_grad
from peft_core.dtypes import as_dtype
from peft_core.safetensors_io import load_file
from support.gpt2_models import write_gpt2
from support.tiny_models import padded, ragged_rows
from transformer import attention, from_pretrained, generate, save_pretrained
from transformer.batch import Batch

torch = pytest.importorskip("torch")
transformers = pytest.importorskip("transformers")
pytestmark = [pytest.mark.reference, pytest.mark.filterwarnings("ignore:.*buffers that follow from the config")]

CASES = {
    "plain": {},
    "as on the Hub": {"hub": True},
    "gelu": {"activation_function": "gelu"},
    "relu": {"activation_function": "relu"},
    "inner width": {"n_inner": 40},
    "no scale": {"scale_attn_weights": False},
    "scaled by layer": {"scale_attn_by_inverse_layer_idx": True},
    "neither root nor one": {"scale_attn_weights": False, "scale_attn_by_inverse_layer_idx": True},
    "upcast": {"reorder_and_upcast_attn": True},
    "untied": {"tie_word_embeddings": False},
    "odd heads": {"n_embd": 36},
    "eps": {"layer_norm_epsilon": 1e-2},
    "no n_ctx": {"n_ctx": ...},
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


def some_rows(lengths=(40, 1, 23)):
    return ragged_rows(lengths=lengths, vocab_size=64)


@pytest.mark.parametrize("name", CASES)
def test_logits(tmp_path, name):
    directory, rows = write_gpt2(tmp_path, **CASES[name]), some_rows()
    reference = their_logits(theirs(directory), rows)
    assert reference[0].std() > 1, "the comparison could not fail"
    assert difference(our_logits(from_pretrained(directory), rows), reference) < 1e-4


def _put_fault(model, fault, monkeypatch):
    if fault == "positions":
        model.transformer.wpe.weight.data = np.roll(model.transformer.wpe.weight.data, 1, 0)
    elif fault == "head":
        model.lm_head.weight.data = np.roll(model.lm_head.weight.data, 1, 1)
    for layer in model.transformer.h:
        if fault == "gelu":
            layer.mlp.activation = "gelu"
        if fault == "scale":
            layer.attn.scale *= layer.attn.layer + 1
        elif fault == "root":
            layer.attn.scale *= layer.attn.head_dim**0.5
        elif fault == "eps":
            layer.ln_1.eps = 1e-5
        elif fault == "mean":
            layer.ln_2.bias.data = np.zeros_like(layer.ln_2.bias.data)
        elif fault == "orientation":  # square: no shape complains
            layer.attn.c_proj.weight.data = layer.attn.c_proj.weight.data.T
        elif fault == "order of q, k, v":
            layer.attn.c_attn.weight.data = np.roll(layer.attn.c_attn.weight.data, 32, 1)


FAULTS = ["positions", "gelu", "head", "scale", "root", "eps", "mean", "orientation", "order of q, k, v"]


@pytest.mark.parametrize("fault", FAULTS)
def test_a_fault_is_seen(tmp_path, monkeypatch, fault):
    """The test of the test: each deviation, switched off, makes the comparison fail by far."""
    directory = write_gpt2(tmp_path, scale_attn_by_inverse_layer_idx=True, layer_norm_epsilon=1e-2)
    rows = some_rows()
    reference, model = their_logits(theirs(directory), rows), from_pretrained(directory)
    assert difference(our_logits(model, rows), reference) < 1e-4
    _put_fault(model, fault, monkeypatch)
    far = 5e-4 if fault == "gelu" else 1e-2  # the two kinds of gelu are never further apart than 5e-4
    assert difference(our_logits(model, rows), reference) > far


def test_positions_count_from_the_start_of_each_row(tmp_path, monkeypatch):
    directory, rows = write_gpt2(tmp_path), some_rows()
    model, reference = from_pretrained(directory), their_logits(theirs(directory), rows)
    original = attention.Place

    def from_the_start_of_the_stream(cu_seqlens, positions, **rest):
        return original(cu_seqlens, positions=np.arange(len(positions)) % 64, **rest)

    monkeypatch.setattr("transformer.model.Place", from_the_start_of_the_stream)
    found = our_logits(model, rows)
    assert difference(found[:1], reference[:1]) < 1e-4 and difference(found[1:], reference[1:]) > 1e-2


@pytest.mark.parametrize("side", ["left", "right"])
def test_padded_batch(tmp_path, side):
    directory, rows = write_gpt2(tmp_path), some_rows((12, 30, 5))
    ids, mask = padded(rows, side)
    labels = np.where(mask == 1, ids, -100)
    labels[:, ::3] = -100
    for b in range(len(rows)):  # transformers predicts a row's first token from the padding before it: no label there
        labels[b, np.flatnonzero(mask[b])[0]] = -100
    positions = np.maximum(np.cumsum(mask, 1) - 1, 0)
    given = {"input_ids": ids, "attention_mask": mask, "labels": labels, "position_ids": positions}
    with torch.no_grad():
        out = theirs(directory)(**{name: torch.tensor(value) for name, value in given.items()})
    ours = from_pretrained(directory)(ids, attention_mask=mask, labels=labels)
    assert abs(float(ours.loss.item()) - float(out.loss)) < 1e-5
    assert np.abs(ours.logits.numpy() - out.logits.numpy())[mask == 1].max() < 1e-4


def test_gradients(tmp_path):
    """Loss of a batch, backward: every weight's gradient, with and without recompute."""
    directory, rows = write_gpt2(tmp_path), some_rows()
    reference = theirs(directory)
    for row in rows:
        if len(row) > 1:
            (reference(torch.tensor([row]), labels=torch.tensor([row])).loss * (len(row) - 1)).backward()
    expected = {name: p.grad.numpy() for name, p in reference.named_parameters()}
    for checkpointing in (False, True):
        model = from_pretrained(directory).requires_grad_(True)
        model.gradient_checkpointing = checkpointing
        model.loss(Batch.from_rows([(row, row) for row in rows]))[0].backward()
        ours = {name: p._grad for name, p in model.named_parameters()}
        assert set(ours) == set(expected)
        for name, g in ours.items():
            assert np.linalg.norm(g - expected[name]) < 1e-4 * np.linalg.norm(expected[name]), name


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
@pytest.mark.parametrize("hub", [False, True])
@pytest.mark.parametrize("shard", ["5GB", "40KB"])
def test_saved_by_us_loads_there(tmp_path, dtype, hub, shard):
    base = write_gpt2(tmp_path / "base", dtype=dtype, hub=hub)
    model, rows = from_pretrained(base), some_rows()
    save_pretrained(model, tmp_path / "saved", max_shard_size=shard)
    assert theirs(tmp_path / "saved", "auto").dtype == getattr(torch, dtype)
    assert difference(our_logits(model, rows), their_logits(theirs(tmp_path / "saved"), rows)) < 1e-4
    if shard == "5GB":
        before, after = (load_file(d / "model.safetensors") for d in (base, tmp_path / "saved"))
        assert {k: a.tobytes() for k, a in before.items()} == {k: a.tobytes() for k, a in after.items()}


@pytest.mark.parametrize("dtype", ["float32", "bfloat16", "float16"])
@pytest.mark.parametrize("hub", [False, True])
@pytest.mark.parametrize("shard", ["5GB", "40KB"])
def test_saved_there_loads_here(tmp_path, dtype, hub, shard):
    reference = theirs(write_gpt2(tmp_path / "base", hub=hub)).to(getattr(torch, dtype))
    reference.save_pretrained(tmp_path / "saved", max_shard_size=shard)
    model, rows = from_pretrained(tmp_path / "saved"), some_rows()
    assert {p.dtype for p in model.parameters()} == {as_dtype(dtype)}
    assert difference(our_logits(model, rows), their_logits(theirs(tmp_path / "saved"), rows)) < 1e-4


def test_a_decoder_saved_there_without_its_head_loads_here(tmp_path):
    reference = theirs(write_gpt2(tmp_path / "base"))
    reference.transformer.save_pretrained(tmp_path / "saved")
    config = json.loads((tmp_path / "saved/config.json").read_text())
    (tmp_path / "saved/config.json").write_text(json.dumps({**config, "architectures": ["GPT2LMHeadModel"]}))
    assert not any(name.startswith("transformer.") for name in load_file(tmp_path / "saved/model.safetensors"))
    rows = some_rows()
    assert difference(our_logits(from_pretrained(tmp_path / "saved"), rows), their_logits(reference, rows)) < 1e-4


@pytest.mark.parametrize("name", ["plain", "as on the Hub", "scaled by layer", "untied"])
def test_greedy_tokens(tmp_path, name):
    directory, prompts = write_gpt2(tmp_path, seed=5, **CASES[name]), some_rows((9, 3, 14))
    reference = theirs(directory)
    ours = generate(from_pretrained(directory), prompts, max_new_tokens=12, eos_token_id=())
    assert name != "untied" or min(len(set(new)) for new in ours) > 4  # a tied head mostly repeats the last token
    for prompt, new in zip(prompts, ours, strict=True):
        ids = list(prompt)
        for token in new:  # not their generate(): its settings come from files
            assert token == int(their_logits(reference, [ids])[0][-1].argmax())
            ids.append(token)
