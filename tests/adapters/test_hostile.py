"""Adapter files that are damaged, strange or made to do harm: one AdapterError that says what is wrong."""

import json

import numpy as np
import pytest

from adapters import LoraConfig, PeftModel, adapter_layers, get_peft_model
from adapters.match import pattern_matches, selects
from peft_core.errors import AdapterError, ConfigError
from peft_core.safetensors_io import load_file, save_file
from support.adapter_models import TinyModel, logits, randomize

WEIGHTS = "adapter_model.safetensors"
Q = "base_model.model.model.layers.0.self_attn.q_proj"


def saved(path, **values):
    model = randomize(get_peft_model(TinyModel(), LoraConfig(**{"r": 2, "target_modules": ["q_proj"], **values})))
    model.save_pretrained(path)
    return model


def rewrite(path, change):
    tensors = {name: np.array(a) for name, a in load_file(path / WEIGHTS).items()}
    new = change(tensors) or tensors
    save_file({name: np.ascontiguousarray(a) for name, a in new.items()}, path / WEIGHTS, metadata={"format": "pt"})


def reconfigure(path, **values):
    file = path / "adapter_config.json"
    file.write_text(json.dumps({**json.loads(file.read_text()), **values}))


@pytest.mark.parametrize(
    ("text", "said"),
    [
        ('{"r": %s}' % ("9" * 5000), "is not valid JSON"), ('{"lora_alpha": %s}' % ("9" * 400), "lora_alpha is 999"),
        ('{"lora_alpha": 1e308}', "a positive number that float32 can hold"), ("[" * 200_000, "is not valid JSON"),
        ('{"lora_alpha": NaN}', "lora_alpha is nan"), ('{"r": true}', "r is True"), ('{"r": 2.0}', "r is 2.0"),
        ("\xff", "is not valid JSON"), ('{"target_modules": {"a": 1}}', "target_modules is"), ("[]", "holds list"),
        ('{"rank_pattern": []}', "rank_pattern is"), ('{"modules_to_save": "lm_head"}', "modules_to_save is 'lm_head'"),
        ('{"rank_pattern": {"(?i)q_proj": 4}}', "is not a regular expression"),
        ('{"layers_to_transform": [0], "layers_pattern": "["}', "layers_pattern .\\[. is not a regular expression"),
    ],
)  # fmt: skip
def test_a_config_that_makes_no_sense_is_one_adapter_error(tmp_path, text, said):
    saved(tmp_path)
    (tmp_path / "adapter_config.json").write_bytes(text.encode("latin1"))
    model = TinyModel()
    with pytest.raises(AdapterError, match=said):
        PeftModel.from_pretrained(model, tmp_path)
    assert not adapter_layers(model)


def test_a_pattern_that_cannot_be_part_of_pefts_expression_is_refused():
    with pytest.raises(ConfigError, match=r"rank_pattern key '\(\?i\)q_proj' is not a regular expression"):
        LoraConfig(target_modules=["q_proj"], rank_pattern={"(?i)q_proj": 4})


BOMBS = (
    "(.+)+X", "((.*)*)*q", "([a-z]+)*X", "(a|a)*X", "(.?){50}X", "(.*){20}X", "(?:(?:.+)+|q)X", "(?=(.+)+X)q",
    ".*" * 12 + "X", "(.*[.])*X", "(?:[^.]+E?)*X", r"((a|b)?\w)*X", r"(?:\w+e)*X", "([^.]+([.]|l))*X",
    "(?:[a-z]+[A-Z]?)*X", "(?>(.+)+)X",
    r"(q)?(?(1)a|(\w*)*)X", "(?:(?:q|v|k|)+)*X",
    r"(?:(?:(?:(?:\b){999}){999}){999}){999}X",
)  # fmt: skip
SETTINGS = {
    "target_modules": lambda pattern: {"target_modules": pattern},
    "exclude_modules": lambda pattern: {"exclude_modules": pattern},
    "rank_pattern key": lambda pattern: {"rank_pattern": {pattern: 4}},
    "alpha_pattern key": lambda pattern: {"alpha_pattern": {pattern: 4}},
    "layers_pattern": lambda pattern: {"layers_pattern": pattern, "layers_to_transform": [0]},
}


@pytest.mark.parametrize("pattern", BOMBS)
def test_a_pattern_that_would_try_for_hours_is_refused_before_it_is_tried(pattern):
    for name, values in SETTINGS.items():
        with pytest.raises(ConfigError) as caught:
            LoraConfig(**{"target_modules": ["q_proj"], **values(pattern)})
        text = (
            f"{name} {pattern!r} may try for hours: its repetitions match in too many ways; expected no repetition of"
        )
        assert text in str(caught.value)
        assert str(caught.value).endswith("side by side. Write it without, or list the module names.")


@pytest.mark.parametrize("pattern", ["a{99999999999}", "(" * 5000 + "a" + ")" * 5000])
def test_a_pattern_beyond_the_limits_of_re_is_refused(pattern):
    with pytest.raises(ConfigError, match="is not a regular expression"):
        LoraConfig(target_modules=pattern)


LAYER = "model.layers.1.self_attn.q_proj"
UNSLOTH = (
    "(?:.*?(?:language|text|model).*?(?:self_attn|attention|attn|mlp|feed_forward|ffn|dense).*?(?:k_proj|v_proj|q_proj|"
    "out_proj|fc1|fc2|o_proj|up|down|gate|proj).*?)|(?:\\bmodel\\.layers\\.[\\d]{1,}\\.(?:self_attn|attention)\\.q_proj)"
)


@pytest.mark.parametrize("pattern", [
    r".*\.(q|v)_proj", r"model.layers.\d+.self_attn.*", r"^model\.layers\.(0|1)\..*(?:q_proj)$", r"(?:\w+\.)*q_proj",
    r"([^.]+\.)+(q|v)_proj", r"((\w+)\.)+q_proj", r"^(?!.*visual).*(?:q_proj|k_proj|v_proj|o_proj|gate_proj).*",
    r".*layers\.([0-9]|1[0-9]|2[0-3])\.self_attn\.(q|k|v|o)_proj", r".*[qkv]_proj", r"(?i).*Q_PROJ", UNSLOTH,
    r"(.*)(self_attn|mlp)\.(.*)_proj", r"model\..*layers\.\d{1,3}\..*", r"(?!.*lm_head).*", r".*.*.*q_proj",
])  # fmt: skip
def test_the_patterns_that_people_write_stay(pattern):
    assert selects(LoraConfig(target_modules=pattern).target_modules, LAYER)
    if not pattern.startswith(("^", "(?i)")):
        assert pattern_matches(
            next(iter(LoraConfig(target_modules=["q_proj"], rank_pattern={pattern: 4}).rank_pattern)), LAYER
        )


def test_a_rank_of_zero(tmp_path):
    saved(tmp_path)
    rewrite(tmp_path, lambda t: {k: a[:0] if "lora_A" in k else a[:, :0] for k, a in t.items()})
    with pytest.raises(AdapterError, match=r"wrong shape .*: rank 0 in lora_A, 0 in lora_B"):
        PeftModel.from_pretrained(TinyModel(), tmp_path)


@pytest.mark.parametrize(
    ("values", "first", "second"),
    [
        (
            {"target_modules": ["embed_tokens"]},
            "model.embed_tokens.lora_embedding_A",
            "model.embed_tokens.lora_A.weight",
        ),
        ({"bias": "all"}, "model.layers.0.self_attn.q_proj.base_layer.bias", "model.layers.0.self_attn.q_proj.bias"),
    ],
)
def test_two_keys_for_one_tensor_are_refused(tmp_path, values, first, second):
    saved(tmp_path, **values)
    one, other = f"base_model.model.{first}", f"base_model.model.{second}"
    rewrite(tmp_path, lambda t: t.update({other: 2 * t[one]}))
    with pytest.raises(AdapterError, match=f"extra key ({one}|{other}) "):
        PeftModel.from_pretrained(TinyModel(), tmp_path)


@pytest.mark.parametrize("excluded", [None, r"layers\.0\..*"])
def test_a_file_with_another_prefix_keeps_its_ranks_and_alphas(tmp_path, excluded):
    values = {"rank_pattern": {r"^model\.layers\.1\..*q_proj": 3}, "lora_alpha": 4,
              "alpha_pattern": {r"model\.layers\.1\..*q_proj": 64, "down_proj": 16}}  # fmt: skip
    values["exclude_modules"] = excluded and rf"model\.{excluded}"
    model = saved(tmp_path, target_modules=["q_proj", "down_proj"], **values)
    rewrite(tmp_path, lambda t: {k.replace("model.model.model.", "model.model."): a for k, a in t.items()})
    reconfigure(tmp_path, rank_pattern={r"^layers\.1\..*q_proj": 3}, exclude_modules=excluded,
                alpha_pattern={r"^layers\.1\..*q_proj": 64, "down_proj": 16})  # fmt: skip
    with pytest.warns(UserWarning, match="'model.' was added"):
        again = PeftModel.from_pretrained(TinyModel(), tmp_path)
    assert np.array_equal(logits(again), logits(model))
    again.save_pretrained(tmp_path / "b")
    assert np.array_equal(logits(PeftModel.from_pretrained(TinyModel(), tmp_path / "b")), logits(model))


@pytest.mark.parametrize("values", [{"target_modules": ["q_proj", "lm_head"]}, {"modules_to_save": ["lm_head"]}])
def test_a_prefix_that_the_head_has_not_either_leaves_the_head_its_name(tmp_path, values):
    model = saved(tmp_path, **values)
    rewrite(tmp_path, lambda t: {k.replace("model.model.model.", "model.model."): a for k, a in t.items()})
    with pytest.warns(UserWarning, match="'model.' was added"):
        again = PeftModel.from_pretrained(TinyModel(), tmp_path)
    assert np.array_equal(logits(again), logits(model))
