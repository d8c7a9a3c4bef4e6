import dataclasses
import json
import random

import pytest

from adapters import LoraConfig, TaskType
from peft_core.errors import AdapterError, ConfigError

SUPPORTED = {
    "r": [1, 8, 64], "lora_alpha": [1, 16, 2.5], "lora_dropout": [0.0, 0.1],
    "target_modules": [["q_proj", "v_proj"], "all-linear", r".*\.q_proj", None],
    "exclude_modules": [None, ["lm_head"], ".*head"],
    "rank_pattern": [{}, {"q_proj": 4, "^model.layers.0": 2}], "alpha_pattern": [{}, {"v_proj": 2.5}],
    "use_rslora": [True, False], "init_lora_weights": [True, False, "gaussian"], "fan_in_fan_out": [True, False],
    "task_type": [None, "CAUSAL_LM"], "base_model_name_or_path": [None, "some/dir"], "revision": [None, "main"],
    "bias": ["none", "all", "lora_only"], "modules_to_save": [None, ["lm_head", "norm"]], "lora_bias": [True, False],
    "inference_mode": [True, False], "peft_version": [None, "0.21.2"],
    "auto_mapping": [None, {"base_model_class": "X"}],
}  # fmt: skip


@pytest.mark.parametrize("seed", range(40))
def test_load_of_save_is_the_same_config(tmp_path, seed):
    choose = random.Random(seed).choice
    values = {key: choose(options) for key, options in SUPPORTED.items()}
    if isinstance(values["target_modules"], list):
        values["layers_to_transform"] = choose([None, 1, [0, 2]])
        values["layers_pattern"] = choose([None, "layers", ["layers", "h"]]) if values["layers_to_transform"] else None
    config = LoraConfig(**values)
    config.save_pretrained(tmp_path / "a")
    assert LoraConfig.from_pretrained(tmp_path / "a") == config
    for key, value in values.items():
        assert getattr(config, key) == value


def test_the_property_test_names_every_written_field():
    written = set(LoraConfig().to_dict())
    elsewhere = {"peft_type", "layers_to_transform", "layers_pattern"}  # one value; given beside some targets only
    assert written - elsewhere == set(SUPPORTED)


def test_defaults_are_pefts():
    c = LoraConfig()
    assert (c.r, c.lora_alpha, c.lora_dropout, c.bias, c.peft_type) == (8, 8, 0.0, "none", "LORA")
    assert c.init_lora_weights is True and c.target_modules is None and c.rank_pattern == {}


def test_sets_tuples_and_enumerations_become_what_json_gives_back():
    c = LoraConfig(target_modules={"v_proj", "q_proj"}, exclude_modules=("x",), task_type=TaskType.CAUSAL_LM)
    assert c.target_modules == ["q_proj", "v_proj"] and c.exclude_modules == ["x"]
    assert c.task_type == "CAUSAL_LM" and type(c.task_type) is str


@pytest.mark.parametrize(
    ("values", "text"),
    [
        ({"r": 0}, "r is 0; expected a positive whole number"),
        ({"r": 8.0}, "r is 8.0; expected a positive whole number"),
        ({"r": True}, "r is True"),
        ({"lora_alpha": -1}, "lora_alpha is -1; expected a positive number"),
        ({"lora_alpha": float("nan")}, "lora_alpha is nan"),
        ({"lora_dropout": 1.0}, "lora_dropout is 1.0; expected a number from 0"),
        ({"target_modules": [1]}, "target_modules is [1]; expected a list of module names"),
        ({"target_modules": "("}, "target_modules '(' is not a regular expression"),
        ({"target_modules": ".*", "layers_to_transform": [0]}, "layers_to_transform is set and target_modules"),
        ({"layers_to_transform": [-1]}, "layers_to_transform is [-1]"),
        ({"layers_pattern": "layers"}, "layers_to_transform is not set"),
        ({"rank_pattern": {"q": 0}}, "rank_pattern['q'] is 0"),
        ({"rank_pattern": ["q"]}, "rank_pattern is ['q']; expected a table"),
        ({"rank_pattern": {"": 1}}, "rank_pattern has the key ''"),
        ({"alpha_pattern": {"q": "x"}}, "alpha_pattern['q'] is 'x'"),
        ({"alpha_pattern": {"(": 1}}, "alpha_pattern key '(' is not a regular expression"),
        ({"bias": "some"}, "bias is 'some'; expected 'none', 'all' or 'lora_only'"),
        ({"modules_to_save": "lm_head"}, "modules_to_save is 'lm_head'; expected a list of module names, or null"),
        ({"lora_bias": 1}, "lora_bias is 1; expected true or false"),
        ({"init_lora_weights": "pissa"}, "init_lora_weights is 'pissa', which is not supported yet"),
        ({"use_rslora": 1}, "use_rslora is 1; expected true or false"),
        ({"peft_type": "IA3"}, "peft_type is 'IA3'; expected 'LORA'"),
        ({"task_type": "SEQ_CLS"}, "task_type is 'SEQ_CLS', which trains a new head"),
        ({"revision": 3}, "revision is 3; expected a text or null"),
        ({"auto_mapping": []}, "auto_mapping is []; expected a table or null"),
        ({"use_dora": True}, "use_dora is True, which is not supported; expected plain LoRA. Remove use_dora."),
        ({"loftq_config": {"loftq_bits": 4}}, "loftq_config is {'loftq_bits': 4}"),
        ({"layer_replication": [[0, 1]]}, "layer_replication is [[0, 1]]"),
        ({"target_parameters": ["x"]}, "target_parameters is ['x']"),
        ({"trainable_token_indices": [1]}, "trainable_token_indices is [1]"),
        ({"corda_config": {"a": 1}}, "corda_config is"),
        ({"eva_config": {"rho": 2.0}}, "eva_config is"),
        ({"lora_alfa": 3}, "unknown key 'lora_alfa' = 3 (did you mean 'lora_alpha'?)"),
    ],
)
def test_a_wrong_value_is_refused_by_name(values, text):
    with pytest.raises(ConfigError) as error:
        LoraConfig.from_dict(values)
    assert text in str(error.value)


def test_other_methods_at_their_empty_value_are_accepted_and_not_written():
    empty = {
        "use_dora": False, "loftq_config": {}, "corda_config": None, "layer_replication": [], "eva_config": None,
        "megatron_core": "megatron.core", "qalora_group_size": 16, "some_future_key": None, "another": {},
    }  # fmt: skip
    config = LoraConfig.from_dict({"r": 4, **empty})
    assert config == LoraConfig(r=4)
    assert not set(empty) & set(config.to_dict())


def test_scaling():
    assert LoraConfig().scaling(4, 16) == 4.0
    assert LoraConfig(use_rslora=True).scaling(4, 16) == 8.0
    assert type(LoraConfig(use_rslora=True).scaling(3, 1)) is float


@pytest.mark.parametrize(
    ("content", "text"),
    [
        ("{", "is not valid JSON"),
        ("[]", "holds list; expected a JSON object"),
        ('{"r": 1, "r": 2}', "key 'r' appears twice"),
        ('{"use_dora": true}', "adapter_config.json: use_dora is True"),
        (None, "does not exist"),
    ],
)
def test_a_damaged_file_is_an_adapter_error(tmp_path, content, text):
    if content is not None:
        (tmp_path / "adapter_config.json").write_text(content)
    with pytest.raises(AdapterError) as error:
        LoraConfig.from_pretrained(tmp_path)
    assert text in str(error.value)


def test_the_file_is_plain_sorted_json(tmp_path):
    LoraConfig(r=4).save_pretrained(tmp_path)
    text = (tmp_path / "adapter_config.json").read_text()
    assert list(json.loads(text)) == sorted(json.loads(text)) and text.endswith("}\n")
    assert dataclasses.replace(LoraConfig(), r=4) == LoraConfig.from_pretrained(tmp_path)


def test_patterns_keep_their_order_in_the_file(tmp_path):
    """The first key that matches counts: sorted, the general one would come before the special one."""
    tables = {"rank_pattern": {"h.1.c_attn": 2, "c_attn": 6}, "alpha_pattern": {"z": 1.0, "a": 2.0}}
    LoraConfig(target_modules=["c_attn"], **tables).save_pretrained(tmp_path)
    again = LoraConfig.from_pretrained(tmp_path)
    for name, table in tables.items():
        assert list(getattr(again, name).items()) == list(table.items())
