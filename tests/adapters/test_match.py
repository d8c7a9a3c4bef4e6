import pytest

from adapters import LoraConfig, match_modules
from adapters.inject import inject
from adapters.match import layer_index
from peft_core.errors import ConfigError
from peft_core.nn import RMSNorm
from support.adapter_models import TinyModel

Q = ["model.layers.0.self_attn.q_proj", "model.layers.1.self_attn.q_proj"]
ALL = [f"model.layers.{i}.{name}" for i in range(2) for name in ("self_attn.q_proj", "self_attn.k_proj", "down_proj")]


def paths(**values):
    return list(match_modules(TinyModel(), LoraConfig(**values)).targets)


def test_the_ways_to_name_layers():
    assert paths(target_modules=["q_proj"]) == Q
    assert paths(target_modules=["layers.1.self_attn.q_proj", "lm_head"]) == [Q[1], "lm_head"]
    assert paths(target_modules=r".*\.1\.self_attn\.q_proj") == [Q[1]]
    assert paths(target_modules="all-linear") == ALL  # no lm_head
    assert paths(target_modules="all-linear", exclude_modules=["q_proj"]) == [p for p in ALL if p not in Q]
    assert paths(target_modules=["q_proj"], exclude_modules=".*0.*") == [Q[1]]
    assert paths(target_modules=["q_proj"], layers_to_transform=[1]) == [Q[1]]
    assert paths(target_modules="all-linear", layers_to_transform=0) == ALL[:3]
    assert paths(target_modules=["q_proj"], layers_to_transform=0, layers_pattern="layers") == [Q[0]]


def test_a_name_is_a_whole_component():
    with pytest.raises(ConfigError):
        paths(target_modules=["proj"])


def test_a_model_without_output_embeddings_has_no_head():
    model = TinyModel()
    model.get_output_embeddings = lambda: None
    assert list(match_modules(model, LoraConfig(target_modules="all-linear")).targets) == [*ALL, "lm_head"]


def test_counts_per_entry():
    assert match_modules(TinyModel(), LoraConfig(target_modules=["q_proj", "lm_head"])).counts == {
        "q_proj": 2, "lm_head": 1}  # fmt: skip


def test_injected_layers_keep_their_names():
    model = TinyModel()
    inject(model, LoraConfig(target_modules="all-linear"))
    assert list(match_modules(model, LoraConfig(target_modules="all-linear")).targets) == ALL


def test_patterns_take_the_first_match_in_order():
    match = match_modules(
        TinyModel(),
        LoraConfig(
            target_modules=["q_proj", "k_proj"],
            rank_pattern={"layers.0.self_attn.q_proj": 2, "q_proj": 4},
            alpha_pattern={r"^model\.layers\.1\..*k_proj": 5.5},
        ),
    )
    assert match.targets == {
        Q[0]: (2, 8), Q[0].replace("q_", "k_"): (8, 8), Q[1]: (4, 8), Q[1].replace("q_", "k_"): (8, 5.5)}  # fmt: skip


@pytest.mark.parametrize(
    ("values", "text"),
    [
        ({"target_modules": None}, "target_modules is None; expected the layers to adapt. Name some of: q_proj k_proj"),
        ({"target_modules": ["query_key_value"]},
         "target_modules ['query_key_value'] matches no linear layer of TinyModel. "
         'Available: q_proj k_proj down_proj lm_head (or "all-linear").'),
        ({"target_modules": ["q_proj", "FAKE"]}, "target_modules ['FAKE'] matches no linear layer"),
        ({"target_modules": "nothing"}, "target_modules ['nothing'] matches no linear layer"),
        ({"target_modules": ["self_attn"]}, "target_modules ['self_attn'] matches no linear layer"),
        ({"target_modules": ["q_proj"], "modules_to_save": ["lm_haed"]},
         "modules_to_save 'lm_haed' matches no module of TinyModel; expected names such as embed_tokens q_proj k_proj"),
        ({"target_modules": ["q_proj"], "modules_to_save": ["self_attn"]},
         "model.layers.0.self_attn is in modules_to_save and ['model.layers.0.self_attn.q_proj'] is a target of LoRA"),
        ({"target_modules": ["q_proj", "lm_head"], "modules_to_save": ["lm_head"]},
         "lm_head is in modules_to_save and ['lm_head'] is a target of LoRA; expected one of the two"),
        ({"target_modules": ["q_proj", "embed_tokens"], "lora_bias": True},
         "lora_bias is true and ['model.embed_tokens'] are embeddings; expected linear targets only"),
        ({"target_modules": ["q_proj"], "exclude_modules": ["q_proj"]}, "of TinyModel outside exclude_modules."),
        ({"target_modules": ["q_proj"], "exclude_modules": ["x_proj"]}, "exclude_modules ['x_proj'] matches no layer"),
        ({"target_modules": ["q_proj"], "layers_to_transform": [1, 99]},
         "layers_to_transform [99] matches no layer; expected numbers among 0, 1"),
        ({"target_modules": ["q_proj", "lm_head"], "layers_to_transform": [1]},
         "target_modules ['lm_head'] matches no linear layer inside layers [1]"),
        ({"target_modules": ["q_proj"], "layers_to_transform": [1], "layers_pattern": ["blocks"]},
         "layers_pattern 'blocks' matches no path"),
        ({"target_modules": ["q_proj"], "rank_pattern": {"^q_proj": 100}}, "rank_pattern key '^q_proj' matches none"),
        ({"target_modules": ["q_proj"], "rank_pattern": {"proj": 2}}, "rank_pattern key 'proj' matches none"),
        ({"target_modules": ["q_proj"], "rank_pattern": {"k_proj": 2}}, "rank_pattern key 'k_proj' matches none"),
        ({"target_modules": ["q_proj"], "alpha_pattern": {"q_proj": 2, "layers.1.self_attn.q_proj": 4}},
         "alpha_pattern key 'layers.1.self_attn.q_proj' is never used: 'q_proj' comes first"),
    ],
)  # fmt: skip
def test_an_entry_that_means_nothing_is_an_error(values, text):
    with pytest.raises(ConfigError) as error:
        paths(**values)
    assert text in str(error.value)


def test_a_layer_that_lacks_a_module_is_counted_not_hidden():
    model = TinyModel()
    del model.model.layers[1].self_attn.k_proj
    assert match_modules(model, LoraConfig(target_modules=["q_proj", "k_proj"])).counts == {"q_proj": 2, "k_proj": 1}
    with pytest.raises(ConfigError, match="k_proj"):
        match_modules(model, LoraConfig(target_modules=["q_proj", "k_proj"], layers_to_transform=[1]))


def test_a_target_that_is_neither_linear_nor_an_embedding_is_refused():
    model = TinyModel()
    model.model.norm = RMSNorm(16)
    with pytest.raises(ConfigError, match=r"'norm' matches model.norm, which is a RMSNorm; expected linear layers and"):
        match_modules(model, LoraConfig(target_modules=["q_proj", "norm"]))


@pytest.mark.parametrize("tied", [False, True])
def test_embedding_and_head_are_both_honoured(tied):
    match = match_modules(TinyModel(tied=tied), LoraConfig(target_modules=["embed_tokens", "lm_head"]))
    assert list(match.targets) == ["model.embed_tokens", "lm_head"]


def test_which_parameters_train_as_they_are():
    def whole(**values):
        return match_modules(TinyModel(), LoraConfig(target_modules=["k_proj"], **values)).whole()

    biases = [path + ".bias" for path in Q]
    assert whole() == whole(bias="lora_only") == []  # k_proj has no bias
    assert whole(bias="all") == biases
    assert whole(modules_to_save=["lm_head"], bias="all") == ["lm_head.weight", *biases]
    assert whole(modules_to_save=["q_proj"], bias="all") == [f"{p}.{n}" for p in Q for n in ("weight", "bias")]
    both = match_modules(TinyModel(), LoraConfig(target_modules=["q_proj"], bias="lora_only"))
    assert both.whole() == biases and not both.copies


def test_two_kinds_of_adapter_on_one_module_are_refused():
    model = TinyModel()
    inject(model, LoraConfig(target_modules=["q_proj"], modules_to_save=["lm_head"]), "a")
    with pytest.raises(ConfigError, match=r"'lm_head' matches lm_head, which adapters \['a'\] train as a whole"):
        match_modules(model, LoraConfig(target_modules=["lm_head"]))
    with pytest.raises(ConfigError, match=r"q_proj is to be trained as it is, and .* adapt it already"):
        match_modules(model, LoraConfig(target_modules=["k_proj"], modules_to_save=["q_proj"]))


def test_loose_matching_ignores_entries_without_a_layer():
    config = LoraConfig(target_modules=["q_proj", "FAKE"], rank_pattern={"x": 1}, exclude_modules=["y"])
    assert list(match_modules(TinyModel(), config, strict=False).targets) == Q


def test_the_first_number_is_the_layer():
    assert layer_index("model.layers.3.mlp.experts.1.up", None) == 3
    assert layer_index("h.3.mlp", "h") == 3
    assert layer_index("lm_head", None) is None


def test_the_name_shown_is_the_checkpoints_architecture():
    model = TinyModel()
    model.config = type("C", (), {"architectures": ["LlamaForCausalLM"]})()
    with pytest.raises(ConfigError, match="of LlamaForCausalLM"):
        match_modules(model, LoraConfig(target_modules=["x"]))
