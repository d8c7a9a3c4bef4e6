"""A usual PEFT tutorial: one source text, run with PyTorch, transformers and peft, and with this library's imports."""

import contextlib
import io

import numpy as np
import pytest

from support.llama_reference import make_llama
from support.tiny_tokenizer import write_tokenizer

pytestmark = [pytest.mark.reference, pytest.mark.filterwarnings("default::FutureWarning:transformers")]
pytest.importorskip("torch")
pytest.importorskip("peft")

THEIR_IMPORTS = """
from torch import no_grad
from torch.optim import AdamW
from transformers import AutoModelForCausalLM, AutoTokenizer
from peft import LoraConfig, PeftConfig, PeftModel, TaskType, get_peft_model
"""
OUR_IMPORTS = """
from peft_core import no_grad
from peft_core.optim import AdamW
from transformer import AutoModelForCausalLM, AutoTokenizer
from adapters import LoraConfig, PeftConfig, PeftModel, TaskType, get_peft_model
"""
TUTORIAL = """
tokenizer = AutoTokenizer.from_pretrained(base_dir)
model = AutoModelForCausalLM.from_pretrained(base_dir, dtype="float32")

config = LoraConfig(task_type=TaskType.CAUSAL_LM, inference_mode=False, r=4, lora_alpha=16, lora_dropout=0.0,
                    target_modules=["q_proj", "v_proj", "embed_tokens"], modules_to_save=["lm_head"])
model = get_peft_model(model, peft_config=config)
model.print_trainable_parameters()
same_start(model)
model.gradient_checkpointing_enable()
model.enable_input_require_grads()
model.config.use_cache = False

optimizer = AdamW(model.parameters(), lr=5e-3)
model.train()
for epoch in range(3):
    for text in texts:
        batch = tokenizer(text, return_tensors="pt")
        loss = model(input_ids=batch["input_ids"], attention_mask=batch["attention_mask"],
                     labels=batch["input_ids"]).loss
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        result["losses"].append(loss.item())
model.save_pretrained(out_dir)
tokenizer.save_pretrained(out_dir)


def logits_of(model, text):
    batch = tokenizer(text, return_tensors="pt").to(model.device)
    with no_grad():
        return model(**batch).logits.tolist()


model.eval()
result["trained"] = logits_of(model, texts[0])
with model.disable_adapter():
    result["disabled"] = logits_of(model, texts[0])

saved = PeftConfig.from_pretrained(out_dir)
result["config"] = [saved.r, saved.lora_alpha, sorted(saved.target_modules), saved.task_type, saved.modules_to_save]
base = AutoModelForCausalLM.from_pretrained(saved.base_model_name_or_path, dtype="float32")
result["base"] = logits_of(base, texts[0])
model = PeftModel.from_pretrained(base, out_dir)
model.eval()
result["reloaded"] = logits_of(model, texts[0])
result["trainable"] = [p for p in model.parameters() if p.requires_grad]

model.load_adapter(out_dir, adapter_name="second")
model.save_pretrained(some_dir, safe_serialization=True, selected_adapters=["second"])
model.set_adapter("second")
result["active"] = [model.active_adapter, list(model.active_adapters), sorted(model.peft_config)]
result["second"] = logits_of(model, texts[1])
model.delete_adapter("second")
result["left"] = [model.active_adapter, list(model.active_adapters), sorted(model.peft_config)]
model.add_adapter("third", LoraConfig(r=2, target_modules=["k_proj"], task_type="CAUSAL_LM"))
result["third added"] = logits_of(model, texts[0])
model.delete_adapter("third")

prompt = tokenizer(texts[1], return_tensors="pt")
result["generated"] = model.generate(**prompt, max_new_tokens=12, do_sample=False).tolist()
result["text"] = tokenizer.decode(result["generated"][0], skip_special_tokens=True)

merged = model.merge_and_unload()
result["merged"] = logits_of(merged, texts[0])
result["merged generated"] = merged.generate(**prompt, max_new_tokens=12, do_sample=False).tolist()
merged.save_pretrained(merged_dir)
again = AutoModelForCausalLM.from_pretrained(merged_dir, dtype="float32")
result["merged again"] = logits_of(again, texts[0])
"""
TEXTS = ["What is two plus two? Two plus two is four.", "Hello, how are you today?", "The quick brown fox jumps."]


def random_like(shapes):
    rng = np.random.default_rng(0)
    return [rng.normal(0, 0.1, shape).astype(np.float32) for shape in shapes]


def their_start(model):
    import torch

    parameters = [p for n, p in model.named_parameters() if "lora_" in n]
    parameters.sort(key=lambda p: tuple(p.shape))
    with torch.no_grad():
        for p, value in zip(parameters, random_like([p.shape for p in parameters]), strict=True):
            p.copy_(torch.tensor(value))


def our_start(model):
    from adapters import lora_layers

    parameters = [p for m in lora_layers(model).values() for p in (m.adapters["default"].A, m.adapters["default"].B)]
    parameters.sort(key=lambda p: tuple(p.shape))
    for p, value in zip(parameters, random_like([p.shape for p in parameters]), strict=True):
        p.data = value


def run(imports, start, base_dir, root):
    result = {"losses": []}
    names = {
        "result": result, "same_start": start, "base_dir": str(base_dir), "out_dir": str(root / "adapter"),
        "merged_dir": str(root / "merged"), "some_dir": str(root / "some"), "texts": TEXTS,
    }  # fmt: skip
    printed = io.StringIO()
    with contextlib.redirect_stdout(printed):
        exec(compile(imports + TUTORIAL, "tutorial", "exec"), names)
    return {**result, "printed": printed.getvalue()}


@pytest.fixture(scope="module")
def both(tmp_path_factory):
    root = tmp_path_factory.mktemp("tutorial")
    make_llama(root / "base", vocab_size=400)
    write_tokenizer(root / "base")
    ours = run(OUR_IMPORTS, our_start, root / "base", root / "ours")
    return ours, run(THEIR_IMPORTS, their_start, root / "base", root / "theirs")


def far(x, y):
    x, y = np.asarray(x, np.float64), np.asarray(y, np.float64)
    assert x.shape == y.shape
    return float(np.linalg.norm(x - y) / np.linalg.norm(y))


def test_the_same_is_printed_and_the_losses_are_the_same_and_fall(both):
    ours, theirs = both
    assert ours["printed"] == theirs["printed"] != ""
    assert far(ours["losses"], theirs["losses"]) < 1e-4
    first, last = ours["losses"][: len(TEXTS)], ours["losses"][-len(TEXTS) :]
    assert all(late < 0.9 * early for early, late in zip(first, last, strict=True))


@pytest.mark.parametrize("step", ["trained", "disabled", "reloaded", "base", "second", "third added", "merged",
                                  "merged again"])  # fmt: skip
def test_each_step_gives_pefts_logits(both, step):
    ours, theirs = both
    assert far(ours[step], theirs[step]) < 1e-4


@pytest.mark.parametrize("step", ["config", "trainable", "active", "left", "generated", "text", "merged generated"])
def test_each_step_gives_pefts_answer(both, step):
    ours, theirs = both
    assert ours[step] == theirs[step]


def test_the_steps_agree_with_each_other(both):
    ours, _ = both
    assert ours["disabled"] == ours["base"] and ours["reloaded"] == ours["trained"]
    assert far(ours["merged"], ours["trained"]) < 1e-5 and far(ours["base"], ours["trained"]) > 0.05
    assert ours["merged again"] == ours["merged"] and ours["trainable"] == []


def test_only_import_lines_differ():
    for text in (OUR_IMPORTS, THEIR_IMPORTS):
        assert all(line.startswith("from ") for line in text.split("\n") if line)
    assert [line.split(" import ")[1] for line in OUR_IMPORTS.strip().split("\n")] == [
        line.split(" import ")[1] for line in THEIR_IMPORTS.strip().split("\n")
    ]
