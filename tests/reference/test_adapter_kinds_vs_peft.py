"""Embeddings, saved modules, biases and tied weights cross between this library and peft with equal logits."""

import json
import warnings

import numpy as np
import pytest

from adapters import LoraConfig, PeftModel, adapter_layers, get_peft_model, merge_directory
from peft_core.random import Generator
from support.llama_reference import batch, distance, make_llama, our_logits, peft_model, torch_logits

pytestmark = [
    pytest.mark.reference,
    pytest.mark.filterwarnings("default::FutureWarning:transformers"),
    pytest.mark.filterwarnings("ignore:.*tie.*:UserWarning"),
]
pytest.importorskip("torch")
pytest.importorskip("peft")

TOLERANCE = 1e-4
Q = {"r": 4, "lora_alpha": 8, "target_modules": ["q_proj"]}
CONFIGS = {  # name -> (tied, settings)
    "embedding": (False, {**Q, "target_modules": ["embed_tokens", "v_proj"], "use_rslora": True}),
    "embedding-and-head": (False, {**Q, "target_modules": ["embed_tokens", "lm_head"], "rank_pattern": {"lm_head": 2}}),
    "tied-head": (True, {**Q, "target_modules": ["lm_head", "q_proj"]}),
    "tied-embedding": (True, {**Q, "target_modules": ["embed_tokens"]}),
    "tied-both": (True, {**Q, "target_modules": ["embed_tokens", "lm_head"]}),
    "save-head": (False, {**Q, "modules_to_save": ["lm_head"]}),
    "save-tied-head": (True, {**Q, "modules_to_save": ["lm_head"]}),
    "save-both": (False, {**Q, "modules_to_save": ["embed_tokens", "lm_head"]}),
    "save-norms": (False, {**Q, "modules_to_save": ["input_layernorm"], "layers_to_transform": [1]}),
    "save-block": (False, {**Q, "modules_to_save": ["mlp"]}),
    "bias-all": (False, {**Q, "bias": "all"}),
    "bias-lora-only": (False, {**Q, "bias": "lora_only", "alpha_pattern": {"layers.1.self_attn.q_proj": 3}}),
    "lora-bias": (False, {**Q, "lora_bias": True, "use_rslora": True}),
    "everything": (False, {**Q, "lora_bias": True, "bias": "all", "modules_to_save": ["lm_head", "norm"]}),
}  # fmt: skip


@pytest.fixture(scope="module")
def bases(tmp_path_factory):
    root = tmp_path_factory.mktemp("bases")
    for tied in (False, True):
        make_llama(root / str(tied), tied=tied, attention_bias=True)
    return root


def torch_base(path):
    from transformers import LlamaForCausalLM

    return LlamaForCausalLM.from_pretrained(path).eval()


def ours(path):
    from transformer.load import from_pretrained

    return from_pretrained(path).eval()


def randomized(model, seed=1):
    """Random numbers on all that an adapter trains."""
    g = Generator(seed)
    for layer in adapter_layers(model).values():
        for name in layer.adapters:
            whole = {id(p) for _, p in layer.trained(name)}
            for p in layer.own_parameters(name):
                p.data = g.normal(p.shape, 0.0, 0.2) + (p.data if id(p) in whole else 0)
    return model


@pytest.mark.parametrize("name", CONFIGS)
def test_what_peft_saved_loads_here_and_is_saved_the_same(bases, tmp_path, name):
    from safetensors.numpy import load_file

    tied, values = CONFIGS[name]
    base = bases / str(tied)
    ids, mask, _ = batch()
    theirs = peft_model(torch_base(base), **values)
    want = torch_logits(theirs, ids, mask)
    theirs.save_pretrained(tmp_path / "a")
    if values.get("bias"):  # peft trains the biases in place: what it calls the base changed with them
        assert distance(torch_logits(torch_base(base), ids, mask), want) > 0.05
    model = PeftModel.from_pretrained(ours(base), tmp_path / "a")
    assert distance(our_logits(model, ids, mask), want) < TOLERANCE
    with model.disable_adapter():
        plain = our_logits(model, ids, mask)
    assert np.array_equal(plain, our_logits(ours(base), ids, mask)) and distance(plain, want) > 0.05
    model.save_pretrained(tmp_path / "b")
    first, second = (load_file(tmp_path / d / "adapter_model.safetensors") for d in "ab")
    first = {k: a for k, a in first.items() if not k.endswith(".base_layer.weight")}  # never written here
    assert set(first) == set(second) and all(np.array_equal(first[k], second[k]) for k in first)
    their_json, our_json = (json.loads((tmp_path / d / "adapter_config.json").read_text()) for d in "ab")
    for key, value in our_json.items():
        same = sorted(value) == sorted(their_json[key]) if isinstance(value, list) else value == their_json[key]
        assert same, (key, value, their_json[key])


@pytest.mark.parametrize("name", CONFIGS)
def test_what_is_saved_here_loads_in_peft(bases, tmp_path, name):
    import peft
    from safetensors import safe_open

    tied, values = CONFIGS[name]
    base = bases / str(tied)
    ids, mask, _ = batch()
    model = randomized(get_peft_model(ours(base), LoraConfig(task_type="CAUSAL_LM", **values)))
    want = our_logits(model, ids, mask)
    model.save_pretrained(tmp_path / "a")
    with warnings.catch_warnings():
        warnings.filterwarnings("error", message=".*(missing|unexpected).*")
        theirs = peft.PeftModel.from_pretrained(torch_base(base), tmp_path / "a").eval()
    assert distance(torch_logits(theirs, ids, mask), want) < TOLERANCE
    assert distance(torch_logits(torch_base(base), ids, mask), want) > 0.05
    with safe_open(tmp_path / "a" / "adapter_model.safetensors", "np") as file:
        keys = set(file.keys())
    assert keys == {k for k in peft.get_peft_model_state_dict(theirs) if not k.endswith(".base_layer.weight")}


@pytest.mark.parametrize("name", CONFIGS)
def test_merging_in_memory_and_on_disk_gives_transformers_the_same_model(bases, tmp_path, name):
    tied, values = CONFIGS[name]
    base = bases / str(tied)
    ids, mask, _ = batch()
    model = randomized(get_peft_model(ours(base), LoraConfig(**values)))
    want = our_logits(model, ids, mask)
    model.save_pretrained(tmp_path / "a")
    report = merge_directory(base, tmp_path / "a", tmp_path / "disk")
    merged = model.merge_and_unload()
    assert distance(our_logits(merged, ids, mask), want) < TOLERANCE
    merged.save_pretrained(tmp_path / "memory")
    for directory in ("disk", "memory"):
        assert distance(torch_logits(torch_base(tmp_path / directory), ids, mask), want) < TOLERANCE
        assert distance(our_logits(ours(tmp_path / directory), ids, mask), want) < TOLERANCE
    assert report.changed and report.lost < 1e-3


@pytest.mark.parametrize("name", CONFIGS)
def test_as_many_numbers_train_as_in_peft(bases, name):
    tied, values = CONFIGS[name]
    theirs = peft_model(torch_base(bases / str(tied)), **values)
    model = get_peft_model(ours(bases / str(tied)), LoraConfig(**values))
    (trainable, total), (want, want_total) = (m.get_nb_trainable_parameters() for m in (model, theirs))
    assert trainable == want
    if "bias" not in values:  # peft trains the base's own biases, here they are copies: disabling is exact
        assert total == want_total


def test_a_choice_per_row_is_pefts(bases, tmp_path):
    import peft
    import torch

    base = bases / "False"
    rng = np.random.default_rng(5)
    ids = rng.integers(3, 64, (5, 9))
    names = ["a", "__base__", "b", "a", "b"]
    values = {**Q, "modules_to_save": ["lm_head"]}  # peft cannot mix rows where only one of the two has saved modules
    for seed, name in enumerate("ab"):
        peft_model(torch_base(base), seed=seed, **values).save_pretrained(tmp_path / name)
    theirs = peft.PeftModel.from_pretrained(torch_base(base), tmp_path / "a", "a").eval()
    theirs.load_adapter(tmp_path / "b", "b")
    model = PeftModel.from_pretrained(ours(base), tmp_path / "a", "a").eval()
    model.load_adapter(tmp_path / "b", "b")
    with torch.no_grad():
        want = theirs(input_ids=torch.tensor(ids), adapter_names=names).logits.numpy()
    got = model(input_ids=ids, adapter_names=names).logits.data
    assert distance(got, want) < TOLERANCE
    told = theirs.generate(input_ids=torch.tensor(ids), adapter_names=names, max_new_tokens=6, do_sample=False)
    assert np.array_equal(model.generate(input_ids=ids, adapter_names=names, max_new_tokens=6), told.numpy())
    assert model.active_adapters == ["a"]
