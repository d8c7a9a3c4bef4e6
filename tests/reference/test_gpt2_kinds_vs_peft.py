"""GPT-2, whose head is tied and whose weights lie (in, out): embeddings, saved modules and biases against peft."""

import numpy as np
import pytest

from adapters import LoraConfig, PeftModel, adapter_layers, get_peft_model, merge_directory
from peft_core.random import Generator
from support.gpt2_models import write_gpt2
from support.llama_reference import batch, distance, our_logits, peft_model, torch_logits

pytestmark = [
    pytest.mark.reference,
    pytest.mark.filterwarnings("default::FutureWarning:transformers"),
    pytest.mark.filterwarnings("ignore:.*(buffers that follow|differ from the model's by a prefix|tie)"),
]
torch = pytest.importorskip("torch")
peft = pytest.importorskip("peft")

TOLERANCE = 1e-4
Q = {"r": 4, "lora_alpha": 8, "target_modules": ["c_attn"]}
CONFIGS = {
    "table": {**Q, "target_modules": ["wte", "c_attn"]},
    "save-table": {**Q, "modules_to_save": ["wte"]},
    "save-norms": {**Q, "modules_to_save": ["ln_f", "ln_1"]},
    "save-block": {**Q, "modules_to_save": ["mlp"]},
    "bias-all": {**Q, "bias": "all"},
    "bias-lora-only": {**Q, "bias": "lora_only"},
    "lora-bias": {**Q, "lora_bias": True},
}
HEAD = {"head": {**Q, "target_modules": ["lm_head", "c_attn"]}, "save-head": {**Q, "modules_to_save": ["lm_head"]}}


@pytest.fixture(scope="module", params=["named in full", "as on the Hub"])
def base(tmp_path_factory, request):
    return write_gpt2(tmp_path_factory.mktemp("base"), hub=request.param == "as on the Hub")


def torch_base(directory):
    from transformers import GPT2LMHeadModel

    return GPT2LMHeadModel.from_pretrained(directory).eval()


def ours(directory):
    from transformer.load import from_pretrained

    return from_pretrained(directory).eval()


@pytest.mark.parametrize("name", [*CONFIGS, *HEAD])
def test_what_peft_saved_loads_here_and_back(base, tmp_path, name):
    ids, mask, _ = batch()
    theirs = peft_model(torch_base(base), fan_in_fan_out=True, **{**CONFIGS, **HEAD}[name])
    want = torch_logits(theirs, ids, mask)
    theirs.save_pretrained(tmp_path / "a")
    model = PeftModel.from_pretrained(ours(base), tmp_path / "a")
    assert distance(our_logits(model, ids, mask), want) < TOLERANCE
    assert distance(our_logits(ours(base), ids, mask), want) > 0.05
    model.save_pretrained(tmp_path / "b")
    again = peft.PeftModel.from_pretrained(torch_base(base), tmp_path / "b").eval()
    assert distance(torch_logits(again, ids, mask), want) < TOLERANCE


@pytest.mark.parametrize("name", [*CONFIGS, *HEAD])
def test_merging_gives_transformers_the_same_model(base, tmp_path, name):
    ids, mask, _ = batch()
    model, g = get_peft_model(ours(base), LoraConfig(**{**CONFIGS, **HEAD}[name])), Generator(1)
    for layer in adapter_layers(model).values():
        for adapter in layer.adapters:
            whole = {id(p) for _, p in layer.trained(adapter)}
            for p in layer.own_parameters(adapter):
                p.data = g.normal(p.shape, 0.0, 0.2) + (p.data if id(p) in whole else 0)
    want = our_logits(model, ids, mask)
    model.save_pretrained(tmp_path / "a")
    model.merge_and_unload().save_pretrained(tmp_path / "memory")
    merge_directory(base, tmp_path / "a", tmp_path / "disk")
    for directory in ("memory", "disk"):
        assert distance(torch_logits(torch_base(tmp_path / directory), ids, mask), want) < TOLERANCE
        assert distance(our_logits(ours(tmp_path / directory), ids, mask), want) < TOLERANCE
    assert np.isfinite(want).all() and want.std() > 1
