"""TOML and section.key=value to a RunConfig; every error text says where, what and how to fix it."""

import tomllib
from pathlib import Path

import pytest

from peft_core.errors import ConfigError
from run.config import SECTIONS, RunConfig
from run.config_file import build_config, load_config, parse_override, to_toml
from run.names import ALIASES, NOT_YET

BASE = '[model]\npath = "m"\n[data]\npath = "d"\n[output]\noutput_dir = "o"\n'


@pytest.fixture
def load(tmp_path):
    def load(extra="", *overrides, notes=None, base=BASE):
        file = tmp_path / "a.toml"
        file.write_text(base + extra)
        return load_config(file, overrides, (notes if notes is not None else []).append)

    return load


def error_of(load, *args, **options) -> str:
    with pytest.raises(ConfigError) as caught:
        load(*args, **options)
    return str(caught.value)


def test_defaults_and_sections(load):
    config = load()
    assert (config.lora.r, config.lora.lora_alpha, config.lora.target_modules) == (16, 32, "all-linear")
    assert config.train.learning_rate == 2e-4 and config.train.lr_scheduler_type == "cosine"
    assert config.data.loss_on == "assistant" and config.data.overlong == "drop"


def test_numbers_as_toml_reads_them(load):
    config = load("[train]\nlearning_rate = 1e-5\nnum_train_epochs = 2\n")
    assert config.train.learning_rate == 1e-5 and config.train.num_train_epochs == 2.0


@pytest.mark.parametrize(
    ("extra", "text"),
    [
        (
            "[train]\ngradient_accumulation_step = 4\n",
            "a.toml:8: unknown key 'train.gradient_accumulation_step'. Did you mean 'gradient_accumulation_steps'?",
        ),
        (
            "[train]\nlearning_rate = 'fast'\n",
            "a.toml:8: train.learning_rate is 'fast'; expected a positive number such as 2e-4.",
        ),
        (
            "[train]\nmax_seq_lenght = 3\n",
            "a.toml:8: unknown key 'train.max_seq_lenght'. Did you mean 'data.max_seq_length'?",
        ),
        ("[trian]\nx = 3\n", "a.toml:7: unknown key 'trian'. Did you mean 'train'?"),
        ("[eval]\nzzz = 3\n", "a.toml:8: unknown key 'eval.zzz'. Known in [eval]: eval_steps early_stopping_patience"),
        (
            "[train]\nbatch_size = true\n",
            "a.toml:8: train.batch_size is True; expected a positive whole number of rows",
        ),
        ("[train]\nlearning_rate = nan\n", "train.learning_rate is nan; expected a positive number such as 2e-4."),
        ("[lora]\ntarget_modules = ['a', 3]\n", "lora.target_modules is ['a', 3]; expected \"all-linear\" or a list"),
        (
            "[lora]\nrank_pattern = { a = 'b' }\n",
            "lora.rank_pattern is {'a': 'b'}; expected a table from pattern to rank",
        ),
        (
            "[train]\nbatch_size = 2\nmax_tokens_per_step = 9\n",
            "a.toml:9: train.batch_size and train.max_tokens_per_step are both set; expected one of them.",
        ),
        ("[train]\nwarmup_ratio = 0.1\nwarmup_steps = 9\n", "train.warmup_ratio and train.warmup_steps are both set"),
        (
            "[eval]\nearly_stopping_patience = 3\n",
            "a.toml:8: eval.early_stopping_patience is set without validation rows; expected data.val_path or",
        ),
        ("[train]\nlr = 1e-4\nlearning_rate = 1e-3\n", "a.toml:8: train.learning_rate is given twice (train.lr)"),
        ("x = \n", "a.toml: not valid TOML (Invalid value (at line 7, column 5)); expected lines such as"),
    ],
)
def test_error_texts(load, extra, text):
    assert text in error_of(load, extra)


def test_a_missing_key_names_its_section(load):
    assert "model.path is missing; expected a model directory" in error_of(load, base='[data]\npath = "d"\n')


def test_a_section_that_is_no_table(load):
    assert "train is 3; expected a section [train]." in error_of(load, base="train = 3\n" + BASE)


def test_a_file_that_cannot_be_read(tmp_path):
    with pytest.raises(ConfigError, match=r"nothing\.toml cannot be read \(No such file or directory\)"):
        load_config(tmp_path / "nothing.toml")
    (tmp_path / "latin.toml").write_bytes(b"# caf\xe9\n")
    with pytest.raises(ConfigError, match="is not UTF-8 text"):
        load_config(tmp_path / "latin.toml")


def test_overrides_are_toml_values_or_text(load):
    config = load("", "train.learning_rate=1e-4", "output.output_dir=runs/x", 'lora.target_modules=["q_proj"]')
    assert config.train.learning_rate == 1e-4
    assert config.output.output_dir == "runs/x" and config.lora.target_modules == ["q_proj"]
    assert parse_override("a.b=x=y") == ("a.b", "x=y")


def test_overrides_beat_the_file_under_any_name(load):
    assert load("[train]\nlr = 1e-4\n", "train.learning_rate=5e-4").train.learning_rate == 5e-4


def test_override_errors(load):
    assert "command line: lora.r is 'x'; expected a positive whole number" in error_of(load, "", "lora.r=x")
    assert "argument 'lora=3' is not section.key=value" in error_of(load, "", "lora=3")
    assert "unknown key 'foo.bar'. Sections: model lora" in error_of(load, "", "foo.bar=3")


def test_other_tools_names_are_accepted_with_a_note(load):
    notes = []
    assert load("[lora]\nrank = 8\n", notes=notes).lora.r == 8
    assert notes == ["note: lora.rank is called lora.r here."]
    notes.clear()
    load("[train]\npacking = true\n", notes=notes)
    assert notes == ["note: train.packing is not needed: rows are always computed side by side without padding."]


def test_every_alias_leads_to_a_field_and_hides_none():
    for alias, target in ALIASES.items():
        section, key = target.split(".")
        assert key in SECTIONS[section].model_fields, alias
        assert not any(alias in cls.model_fields for cls in SECTIONS.values()), alias


@pytest.mark.parametrize("full", sorted(NOT_YET))
def test_what_is_not_built_is_refused_by_name(load, full):
    section, key = full.split(".")

    base = BASE.replace(f"[{section}]\n", f"[{section}]\n{key} = 'yes'\n")
    text = error_of(load, base=base) if base != BASE else error_of(load, f"[{section}]\n{key} = 'yes'\n")
    assert f"{full} is 'yes', which is not supported yet. Remove it." in text
    assert "a.toml:" in text


def test_a_switched_off_setting_that_is_not_built_is_accepted(load):
    assert load("[lora]\nbias = 'none'\n[log]\nreport_to = []\n")


def test_resolved_text_reads_back_equal(load, tmp_path):
    config = load(
        "[lora]\nrank_pattern = { 'a.*\"b' = 3 }\n[eval]\nsample_prompts = ['a\\nb\"é', '\u2028']\n"
        "[data.columns]\nx = 'y'\n"
    )
    text = to_toml(config)
    assert build_config(tomllib.loads(text)) == config


def test_every_field_says_what_it_expects():
    for cls in SECTIONS.values():
        for name, field in cls.model_fields.items():
            assert field.description, name


def test_the_commented_config_is_valid_and_names_every_setting():
    file = Path(__file__).parents[2] / "configs" / "llama_lora.toml"
    assert isinstance(load_config(file, (), pytest.fail), RunConfig)
    text = file.read_text()
    for line in text.splitlines():
        assert not line.strip() or "#" in line or line.startswith("["), line
    unnamed = {"layers_pattern", "init_lora_weights", "warmup_steps"}
    missing = [k for cls in SECTIONS.values() for k in cls.model_fields if k not in text and k not in unnamed]
    assert not missing
