"""Adapters and merged models cross between this library and peft/transformers in both directions, with equal logits."""

import json
import warnings

import numpy as np
import pytest

from adapters import LoraConfig, PeftModel, export_canonical, get_peft_model, lora_layers, merge_directory
from peft_core.random import Generator
from support.llama_reference import batch, distance, make_llama, our_logits, peft_model, torch_logits

pytestmark = [pytest.mark.reference, pytest.mark.filterwarnings("default::FutureWarning:transformers")]
pytest.importorskip("torch")
pytest.importorskip("peft")

TOLERANCE = 1e-4
CONFIGS = {
    "plain": {"r": 4, "lora_alpha": 8, "target_modules": ["q_proj", "v_proj"]},
    "rslora": {"r": 4, "lora_alpha": 3, "use_rslora": True, "target_modules": ["o_proj", "down_proj"]},
    "patterns": {
        "r": 4, "lora_alpha": 8, "target_modules": ["q_proj", "k_proj", "up_proj"],
        "rank_pattern": {"layers.1.self_attn.q_proj": 2, "q_proj": 6},
        "alpha_pattern": {"k_proj": 5, r"^model\..*up_proj": 1},
    },
    "layers": {"r": 3, "lora_alpha": 2.5, "target_modules": ["gate_proj"], "layers_to_transform": [1]},
    "all-linear": {"r": 2, "lora_alpha": 8, "target_modules": "all-linear", "exclude_modules": ["up_proj"]},
    "regex": {"r": 2, "target_modules": r"model\.layers\.0\.(self_attn|mlp)\.(q|gate)_proj"},
    "head": {"r": 2, "lora_alpha": 4, "target_modules": ["lm_head", "q_proj"]},
}  # fmt: skip


@pytest.fixture(scope="module")
def base(tmp_path_factory):
    directory = tmp_path_factory.mktemp("base")
    make_llama(directory)
    return directory


def torch_base(base):
    from transformers import LlamaForCausalLM

    return LlamaForCausalLM.from_pretrained(base).eval()


def ours(base):
    from transformer.load import from_pretrained

    return from_pretrained(base).eval()


def randomized(model, seed=1):
    g = Generator(seed)
    for layer in lora_layers(model).values():
        for m in layer.adapters.values():
            m.A.data, m.B.data = g.normal(m.A.shape, 0.0, 0.2), g.normal(m.B.shape, 0.0, 0.2)
    return model


def test_the_bases_agree_and_their_logits_are_large_enough_to_tell(base):
    ids, mask, _ = batch()
    want = torch_logits(torch_base(base), ids, mask)
    assert want.std() >= 1 and distance(our_logits(ours(base), ids, mask), want) < TOLERANCE


@pytest.mark.parametrize("name", CONFIGS)
def test_an_adapter_saved_by_peft_loads_here(base, tmp_path, name):
    ids, mask, _ = batch()
    theirs = peft_model(torch_base(base), **CONFIGS[name])
    want = torch_logits(theirs, ids, mask)
    theirs.save_pretrained(tmp_path / "a")
    with warnings.catch_warnings():
        warnings.simplefilter("error", UserWarning)
        model = PeftModel.from_pretrained(ours(base), tmp_path / "a")
    assert distance(our_logits(model, ids, mask), want) < TOLERANCE
    assert distance(our_logits(ours(base), ids, mask), want) > 0.05  # the adapter matters
    n_theirs = sum(p.numel() for n, p in theirs.named_parameters() if "lora_" in n)
    assert sum(p.numel() for n, p in model.named_parameters() if ".adapters." in n) == n_theirs


@pytest.mark.parametrize("name", CONFIGS)
@pytest.mark.parametrize("canonical", [False, True])
def test_an_adapter_saved_here_loads_in_peft(base, tmp_path, name, canonical):
    import peft

    ids, mask, _ = batch()
    model = randomized(get_peft_model(ours(base), LoraConfig(task_type="CAUSAL_LM", **CONFIGS[name])))
    want = our_logits(model, ids, mask)
    model.save_pretrained(tmp_path / "a")
    path = tmp_path / "a"
    if canonical:
        path = tmp_path / "b"
        export_canonical(tmp_path / "a", path)
    with warnings.catch_warnings():
        warnings.simplefilter("error", UserWarning)
        theirs = peft.PeftModel.from_pretrained(torch_base(base), path).eval()
    assert distance(torch_logits(theirs, ids, mask), want) < TOLERANCE
    assert distance(torch_logits(torch_base(base), ids, mask), want) > 0.05
    assert {n.replace(".default", "") for n, _ in theirs.named_parameters() if "lora_" in n} == {
        k for k in _keys(path)
    }  # every tensor was used: peft ignores the others silently


def _keys(path):
    from safetensors import safe_open

    with safe_open(path / "adapter_model.safetensors", "np") as file:
        assert file.metadata() == {"format": "pt"}
        return list(file.keys())


@pytest.mark.parametrize("name", CONFIGS)
def test_our_file_is_pefts_file(base, tmp_path, name):
    """Load what peft saved, save it here: same keys, bits and, where peft says something, same settings."""
    from safetensors.numpy import load_file

    peft_model(torch_base(base), **CONFIGS[name]).save_pretrained(tmp_path / "a")
    PeftModel.from_pretrained(ours(base), tmp_path / "a").save_pretrained(tmp_path / "b")
    first, second = (load_file(tmp_path / d / "adapter_model.safetensors") for d in "ab")
    first = {k: a for k, a in first.items() if ".base_layer." not in k}  # never written here: the base has it
    assert set(first) == set(second) and all(np.array_equal(first[k], second[k]) for k in first)
    theirs, own = (json.loads((tmp_path / d / "adapter_config.json").read_text()) for d in "ab")
    resolved = {"target_modules"} if name in ("regex", "all-linear") else set()
    for key, value in own.items():
        if key not in resolved:
            same = sorted(value) == sorted(theirs[key]) if isinstance(value, list) else value == theirs[key]
            assert same, (key, value, theirs[key])


@pytest.mark.parametrize("what", ["alpha", "alpha_pattern", "rank_pattern", "use_rslora", "b"])
def test_switching_one_thing_off_makes_the_comparison_fail(base, tmp_path, what):
    ids, mask, _ = batch()
    values = {**CONFIGS["patterns"], "use_rslora": True}
    theirs = peft_model(torch_base(base), **values)
    want = torch_logits(theirs, ids, mask)
    theirs.save_pretrained(tmp_path / "a")
    path = tmp_path / "a" / "adapter_config.json"
    config = json.loads(path.read_text())
    if what == "alpha":
        config["lora_alpha"] = config["r"]
    elif what == "alpha_pattern":
        config["alpha_pattern"] = {}
    elif what == "use_rslora":
        config["use_rslora"] = False
    path.write_text(json.dumps(config))
    model = PeftModel.from_pretrained(ours(base), tmp_path / "a")
    for layer in lora_layers(model).values():
        m = layer.adapters["default"]
        if what == "b":
            m.B.data = np.zeros_like(m.B.data)
        elif what == "rank_pattern":  # the scale of the general rank instead of the layer's own
            m.scaling *= (m.A.shape[0] / config["r"]) ** 0.5
    assert distance(our_logits(model, ids, mask), want) > 10 * TOLERANCE


@pytest.mark.parametrize("name", CONFIGS)
@pytest.mark.parametrize("shard", ["5GB", "20KB"])
def test_a_merged_directory_loads_in_transformers(base, tmp_path, name, shard):
    ids, mask, _ = batch()
    model = randomized(get_peft_model(ours(base), LoraConfig(**CONFIGS[name])))
    want = our_logits(model, ids, mask)
    model.save_pretrained(tmp_path / "a")
    report = merge_directory(base, tmp_path / "a", tmp_path / "out", max_shard_size=shard)
    assert distance(torch_logits(torch_base(tmp_path / "out"), ids, mask), want) < TOLERANCE
    assert report.n_changed == len(lora_layers(model)) and report.lost < 1e-3
    assert distance(our_logits(model.merge_and_unload(), ids, mask), want) < TOLERANCE


def test_merging_agrees_with_pefts_merge(base, tmp_path):
    theirs = peft_model(torch_base(base), **CONFIGS["patterns"])
    theirs.save_pretrained(tmp_path / "a")
    merged = {n: p.detach().numpy() for n, p in theirs.merge_and_unload().named_parameters()}
    model = PeftModel.from_pretrained(ours(base), tmp_path / "a").merge_and_unload()
    own = {n: p.data for n, p in model.named_parameters()}
    assert set(own) == set(merged)
    assert all(np.abs(own[n] - merged[n]).max() <= 1e-5 for n in own)


def test_trainable_parameters_are_counted_as_peft_does(base, capsys):
    theirs = peft_model(torch_base(base), **CONFIGS["patterns"])
    model = get_peft_model(ours(base), LoraConfig(**CONFIGS["patterns"]))
    assert model.get_nb_trainable_parameters() == theirs.get_nb_trainable_parameters()
    theirs.print_trainable_parameters()
    model.print_trainable_parameters()
    lines = capsys.readouterr().out.splitlines()
    assert lines[0] == lines[1]
