"""LoRA on GPT-2's Conv1D against peft: adapters, gradients and merged directories, in both directions."""

import json
import warnings

import numpy as np
import pytest

from adapters import LoraConfig, PeftModel, export_canonical, get_peft_model, lora_layers, merge_directory
from support.adapter_models import randomize
from support.gpt2_models import write_gpt2
from support.llama_reference import batch, distance, our_logits, peft_model, torch_logits

pytestmark = [
    pytest.mark.reference,
    pytest.mark.filterwarnings("default::FutureWarning:transformers"),
    pytest.mark.filterwarnings("ignore:.*buffers that follow from the config"),
    pytest.mark.filterwarnings("ignore:.*differ from the model's by a prefix; 'transformer.' was removed"),
]
torch = pytest.importorskip("torch")
peft = pytest.importorskip("peft")

TOLERANCE = 1e-4
CONFIGS = {
    "attention": {"r": 4, "lora_alpha": 8, "target_modules": ["c_attn"]},
    "every": {"r": 4, "lora_alpha": 8, "target_modules": ["c_attn", "c_proj", "c_fc"]},
    "all-linear": {"r": 2, "lora_alpha": 8, "target_modules": "all-linear"},
    "square": {"r": 3, "target_modules": r"transformer\.h\.\d+\.attn\.c_proj"},
    "patterns": {
        "r": 4, "lora_alpha": 8, "use_rslora": True, "target_modules": ["c_attn", "c_fc"],
        "rank_pattern": {r".*\.1\.attn\.c_attn": 2, "c_attn": 6},
        "alpha_pattern": {r"transformer\.h\.\d\.mlp\.c_fc": 3},
    },
    "layers": {"r": 3, "lora_alpha": 2.5, "target_modules": ["c_attn"], "layers_to_transform": [0, 2]},
}  # fmt: skip


@pytest.fixture(scope="module", params=["named in full", "as on the Hub"])
def base(tmp_path_factory, request):
    return write_gpt2(tmp_path_factory.mktemp("base"), hub=request.param == "as on the Hub")


def torch_base(directory):
    from transformers import GPT2LMHeadModel

    return GPT2LMHeadModel.from_pretrained(directory).eval()


def ours(directory):
    from transformer.load import from_pretrained

    return from_pretrained(directory).eval()


def theirs_with(base, name):
    return peft_model(torch_base(base), fan_in_fan_out=True, **CONFIGS[name])


@pytest.mark.parametrize("name", CONFIGS)
def test_an_adapter_saved_by_peft_loads_here(base, tmp_path, name):
    ids, mask, _ = batch()
    theirs = theirs_with(base, name)
    want = torch_logits(theirs, ids, mask)
    theirs.save_pretrained(tmp_path / "a")
    model = PeftModel.from_pretrained(ours(base), tmp_path / "a")
    assert want.std() > 1 and distance(our_logits(model, ids, mask), want) < TOLERANCE
    assert distance(our_logits(ours(base), ids, mask), want) > 0.05  # the adapter matters
    assert model.get_nb_trainable_parameters()[1] == theirs.get_nb_trainable_parameters()[1]


@pytest.mark.parametrize("name", CONFIGS)
@pytest.mark.parametrize("canonical", [False, True])
def test_an_adapter_saved_here_loads_in_peft(base, tmp_path, name, canonical):
    ids, mask, _ = batch()
    model = randomize(get_peft_model(ours(base), LoraConfig(task_type="CAUSAL_LM", **CONFIGS[name])))
    want = our_logits(model, ids, mask)
    path = tmp_path / "a"
    model.save_pretrained(path)
    if canonical:
        path = tmp_path / "b"
        export_canonical(tmp_path / "a", path)
    assert json.loads((path / "adapter_config.json").read_text())["fan_in_fan_out"] is True
    with warnings.catch_warnings():
        warnings.simplefilter("error", UserWarning)  # peft warns where fan_in_fan_out is wrong
        theirs = peft.PeftModel.from_pretrained(torch_base(base), path).eval()
    assert distance(torch_logits(theirs, ids, mask), want) < TOLERANCE
    assert distance(torch_logits(torch_base(base), ids, mask), want) > 0.05


@pytest.mark.parametrize("name", CONFIGS)
def test_our_file_is_pefts_file(base, tmp_path, name):
    """Load what peft saved, save it here: same keys, shapes, bits and, where peft says something, same settings."""
    from safetensors.numpy import load_file

    theirs_with(base, name).save_pretrained(tmp_path / "a")
    PeftModel.from_pretrained(ours(base), tmp_path / "a").save_pretrained(tmp_path / "b")
    first, second = (load_file(tmp_path / d / "adapter_model.safetensors") for d in "ab")
    assert set(first) == set(second) and all(np.array_equal(first[k], second[k]) for k in first)
    theirs, own = (json.loads((tmp_path / d / "adapter_config.json").read_text()) for d in "ab")
    for key, value in own.items():
        if key != "target_modules":
            assert value == theirs[key], (key, value, theirs[key])


@pytest.mark.parametrize("name", CONFIGS)
@pytest.mark.parametrize("shard", ["5GB", "40KB"])
def test_a_merged_directory_loads_in_transformers(base, tmp_path, name, shard):
    ids, mask, _ = batch()
    model = randomize(get_peft_model(ours(base), LoraConfig(**CONFIGS[name])))
    want = our_logits(model, ids, mask)
    model.save_pretrained(tmp_path / "a")
    report = merge_directory(base, tmp_path / "a", tmp_path / "out", max_shard_size=shard)
    assert report.n_changed == len(lora_layers(model)) and report.lost < 1e-3
    assert distance(torch_logits(torch_base(tmp_path / "out"), ids, mask), want) < TOLERANCE
    assert distance(our_logits(ours(tmp_path / "out"), ids, mask), want) < TOLERANCE
    merged = model.merge_and_unload()
    assert distance(our_logits(merged, ids, mask), want) < TOLERANCE
    merged.save_pretrained(tmp_path / "saved")
    assert distance(torch_logits(torch_base(tmp_path / "saved"), ids, mask), want) < TOLERANCE


def test_a_directory_merged_by_peft_loads_here(base, tmp_path):
    ids, mask, _ = batch()
    theirs = theirs_with(base, "every")
    want = torch_logits(theirs, ids, mask)
    theirs.save_pretrained(tmp_path / "a")
    merged = theirs.merge_and_unload()
    merged.save_pretrained(tmp_path / "out")
    assert distance(our_logits(ours(tmp_path / "out"), ids, mask), want) < TOLERANCE
    model = PeftModel.from_pretrained(ours(base), tmp_path / "a").merge_and_unload()
    own = {n: p.data for n, p in model.named_parameters()}
    reference = {n: p.detach().numpy() for n, p in merged.named_parameters()}
    assert set(own) == set(reference) and all(np.abs(own[n] - reference[n]).max() <= 1e-5 for n in own)


# ------------------------------------------------------------------------------------------------ gradients


@pytest.fixture
def pair(base, tmp_path):
    """(ours, theirs): the same base and the same random adapter on every linear layer, both trainable."""
    theirs = theirs_with(base, "every")
    theirs.save_pretrained(tmp_path / "a")
    return PeftModel.from_pretrained(ours(base), tmp_path / "a", is_trainable=True), theirs


def both_gradients(model, theirs):
    """Under peft's names."""
    ids, mask, labels = batch()
    loss = model(ids, attention_mask=mask, labels=labels).loss
    loss.backward()
    given = {"input_ids": ids, "attention_mask": mask, "labels": labels}
    want = theirs(**{name: torch.tensor(value) for name, value in given.items()}).loss
    want.backward()
    mine = {f"base_model.model.{path}.lora_{half}.default.weight": getattr(layer.adapters["default"], half).grad.numpy()
            for path, layer in lora_layers(model.base_model).items() for half in "AB"}  # fmt: skip
    reference = {n: p.grad.numpy() for n, p in theirs.named_parameters() if "lora_" in n}
    return mine, reference, abs(loss.item() - want.item()) / want.item()


@pytest.mark.parametrize("checkpointing", [False, True])
def test_every_adapter_gradient_is_torchs(pair, checkpointing):
    model, theirs = pair
    model.base_model.gradient_checkpointing = checkpointing
    mine, reference, loss_error = both_gradients(model, theirs)
    assert loss_error < TOLERANCE and set(mine) == set(reference) and len(mine) == 3 * 4 * 2
    for name, gradient in reference.items():
        assert np.linalg.norm(gradient) > 0
        assert distance(mine[name], gradient) < TOLERANCE, name


@pytest.mark.parametrize("what", ["scaling", "orientation"])
def test_a_fault_is_seen(pair, what):
    model, theirs = pair
    layer = lora_layers(model.base_model)["transformer.h.0.attn.c_proj"]
    if what == "scaling":
        layer.adapters["default"].scaling *= 1.01
    else:
        layer.base_layer.weight.data = layer.base_layer.weight.data.T
    mine, reference, _ = both_gradients(model, theirs)
    assert max(distance(mine[n], reference[n]) for n in reference) > 10 * TOLERANCE
