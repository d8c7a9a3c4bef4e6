"""A tokenizer directory: ids, BOS, special tokens, templates, files, and errors that say what to do."""

from __future__ import annotations

import json
import random

import numpy as np
import pytest
import tokenizers

from peft_core.errors import ConfigError, DataError, FileError
from support.tiny_tokenizer import CHATML, write_tokenizer
from transformer.tokenizer import AutoTokenizer

TEXTS = ("Hello, how are you?", "", "  two  spaces ", "é 🙂 你好\n\n", "<|im_start|>user\nhi<|im_end|>", "a<s>b")


def load(path, **options):
    return AutoTokenizer.from_pretrained(write_tokenizer(path, **options))


@pytest.mark.parametrize("adds_bos", [False, True])
def test_ids_equal_those_of_the_tokenizers_package(tmp_path, adds_bos):
    tok = load(tmp_path, adds_bos=adds_bos)
    raw = tokenizers.Tokenizer.from_file(str(tmp_path / "tokenizer.json"))
    draw = random.Random(0)
    fuzz = ["".join(draw.choice("ab ,é🙂\n<s>|") for _ in range(30)) for _ in range(50)]
    for text in (*TEXTS, *fuzz):
        for special in (False, True):
            assert tok.encode(text, add_special_tokens=special) == raw.encode(text, add_special_tokens=special).ids
        assert tok.decode(tok.encode(text), skip_special_tokens=True) == raw.decode(raw.encode(text).ids)


def test_the_post_processor_alone_decides_about_bos_as_in_transformers(tmp_path):
    bos = load(tmp_path / "a", adds_bos=True, add_bos_token=False)
    assert bos.encode("hi") == [bos.bos_token_id, *bos.encode("hi", add_special_tokens=False)]
    assert load(tmp_path / "b", add_bos_token=True).encode("hi") == bos.encode("hi")[1:]


def test_offsets_cover_the_text_even_with_a_post_processor_that_trims_them(tmp_path):
    text = "Hello, how are you? é🙂"
    _, offsets = load(tmp_path, trim_offsets=True).encode_with_offsets(text)
    covered = {i for start, stop in offsets for i in range(start, stop)}
    assert covered == set(range(len(text)))


def test_special_tokens_are_read_as_string_or_object_with_a_fallback_file(tmp_path):
    path = write_tokenizer(tmp_path, eos_token={"content": "<|im_end|>"}, bos_token=None, pad_token="[none]")
    (path / "special_tokens_map.json").write_text('{"bos_token": {"content": "<s>"}, "eos_token": "<pad>"}')
    tok = AutoTokenizer.from_pretrained(path)
    assert (tok.bos_token, tok.eos_token, tok.pad_token, tok.pad_token_id) == ("<s>", "<|im_end|>", None, None)
    tok.pad_token = tok.eos_token
    assert tok.pad_token_id == tok.eos_token_id
    with pytest.raises(ConfigError, match="pad_token 'zzz' is not in the vocabulary"):
        tok.pad_token = "zzz"


def test_half_a_character_is_refused_by_name(tmp_path):
    tok = load(tmp_path)
    for ask in (tok.encode, tok, tok.tokenize, tok.encode_with_offsets):
        with pytest.raises(DataError, match=r"tokenize holds '\\udce9' after 'caf'; expected whole .*repair"):
            ask("caf\udce9")


def test_a_pattern_that_never_ends_is_a_fault_of_the_file(tmp_path):
    file = write_tokenizer(tmp_path) / "tokenizer.json"
    split = {"type": "Split", "pattern": {"Regex": "(.*a){30}$"}, "behavior": "Isolated", "invert": False}
    file.write_text(json.dumps({**json.loads(file.read_text()), "pre_tokenizer": split}))
    tok = AutoTokenizer.from_pretrained(tmp_path)
    for ask in (tok.encode, tok.tokenize, tok.encode_with_offsets):
        with pytest.raises(FileError) as caught:
            ask("aaaa aaaa aaab aaaa aaaa aaaa aaaa b")
        text = str(caught.value)
        assert (
            text.startswith(f"{file} fails on this text (")
            and "; expected rules that end for any text. Get the" in text
        )


def test_an_interruption_is_no_fault_of_the_file(tmp_path, monkeypatch):
    tok = load(tmp_path)
    for kind in (KeyboardInterrupt, MemoryError):
        tok.backend = type("Stopped", (), {"encode": staticmethod(lambda *args, kind=kind, **options: _raise(kind))})()
        with pytest.raises(kind):
            tok.encode("a")


def _raise(kind):
    raise kind


def test_length_is_the_number_of_embedding_rows_needed(tmp_path):
    tok = load(tmp_path, extra_tokens=("<x>", "<y>"))
    assert len(tok) == max(tok.get_vocab().values()) + 1 == tok.vocab_size + 2


def test_added_token_with_letters_beyond_ascii_decodes_to_itself(tmp_path):
    tok = load(tmp_path, extra_tokens=("ilÖveyou",))
    ids = tok.encode("hi ilÖveyou é!")
    assert tok.convert_tokens_to_ids("ilÖveyou") in ids
    assert tok.decode(ids) == "hi ilÖveyou é!"


def test_decode_takes_arrays_and_can_keep_special_tokens(tmp_path):
    tok = load(tmp_path)
    ids = tok.encode("hi<|im_end|>")
    assert tok.decode(np.array(ids)) == "hi"
    assert tok.decode(ids, skip_special_tokens=False) == "hi<|im_end|>"
    assert tok.decode(ids[-1], skip_special_tokens=False) == "<|im_end|>"
    assert tok.batch_decode([ids, ids[:1]]) == ["hi", tok.decode(ids[:1])]
    assert tok.convert_ids_to_tokens(ids) == tok.tokenize("hi<|im_end|>")


def test_call_returns_rows_and_pads_into_arrays(tmp_path):
    tok = load(tmp_path)
    one = tok("Hello")
    assert one.input_ids == one["input_ids"] == tok.encode("Hello")
    many = tok(["Hello", "Hello, you"], padding=True, return_tensors="np")
    assert many.input_ids.shape == many.attention_mask.shape
    assert many.attention_mask[0].sum() == len(tok.encode("Hello"))
    assert many.input_ids[0, -1] == tok.pad_token_id
    assert tok("Hello, you", truncation=True, max_length=2).input_ids == tok.encode("Hello, you")[:2]
    with pytest.raises(ConfigError, match=r"cannot form one array; expected rows of equal length. Pass padding=True"):
        tok(["a", "Hello, you"], return_tensors="np")
    moved = tok("Hello", return_tensors="pt").to("cpu")
    assert moved.input_ids.shape == (1, len(tok.encode("Hello"))) and str(moved.attention_mask.device) == "cpu"
    with pytest.raises(ConfigError, match="return_tensors is 'tf'; expected None, 'np' or 'pt'"):
        tok("a", return_tensors="tf")


@pytest.mark.parametrize("block", ["truncation", "padding"])
def test_truncation_and_padding_of_the_file_are_switched_off_with_a_notice(tmp_path, block):
    path = write_tokenizer(tmp_path)
    raw = tokenizers.Tokenizer.from_file(str(path / "tokenizer.json"))
    raw.enable_truncation(3) if block == "truncation" else raw.enable_padding(length=50)
    raw.save(str(path / "tokenizer.json"))
    with pytest.warns(UserWarning, match=f"switches {block} on; it is ignored"):
        tok = AutoTokenizer.from_pretrained(path)
    assert 3 < len(tok.encode("Hello, how are you? 12345")) < 50


def test_missing_and_damaged_files_are_named_with_a_fix(tmp_path):
    with pytest.raises(FileError, match="nowhere does not exist; expected a model directory"):
        AutoTokenizer.from_pretrained(tmp_path / "nowhere")
    with pytest.raises(FileError, match=r"has no tokenizer.json; expected one. Download"):
        AutoTokenizer.from_pretrained(tmp_path)
    (tmp_path / "tokenizer.model").write_bytes(b"x")
    with pytest.raises(FileError, match=r"It has tokenizer.model: load it once with transformers"):
        AutoTokenizer.from_pretrained(tmp_path)
    (tmp_path / "tokenizer.json").write_text("version https://git-lfs.github.com/spec/v1\noid")
    with pytest.raises(FileError, match=r"is a Git LFS pointer; expected the file itself. Run: git lfs pull"):
        AutoTokenizer.from_pretrained(tmp_path)
    (tmp_path / "tokenizer.json").write_text("{}")
    with pytest.raises(FileError, match=r"tokenizer.json cannot be read"):
        AutoTokenizer.from_pretrained(tmp_path)
    write_tokenizer(tmp_path, eos_token="</nope>")
    with pytest.raises(FileError, match=r"eos_token '</nope>' is not in the vocabulary of tokenizer.json"):
        AutoTokenizer.from_pretrained(tmp_path)
    (tmp_path / "tokenizer_config.json").write_text("{")
    with pytest.raises(FileError, match=r"tokenizer_config.json is not valid JSON"):
        AutoTokenizer.from_pretrained(tmp_path)


def test_template_comes_from_either_place_and_named_ones_are_known(tmp_path):
    named = [{"name": "default", "template": "D"}, {"name": "tool_use", "template": "T"}]
    tok = load(tmp_path, template=named)
    messages = [{"role": "user", "content": "hi"}]
    assert tok.apply_chat_template(messages, tokenize=False) == "D"
    assert tok.apply_chat_template(messages, tokenize=False, tools=[{"name": "f"}]) == "T"
    (tmp_path / "chat_template.jinja").write_text("J")
    assert AutoTokenizer.from_pretrained(tmp_path).chat_template == "J"
    with pytest.raises(FileError, match="chat_template is a list without name and template"):
        load(tmp_path / "x", template=[{"name": "a"}])
    with pytest.raises(DataError, match=r"rows are chat messages but .* has no chat template"):
        load(tmp_path / "y", template=None).apply_chat_template(messages)


@pytest.mark.parametrize("template", [CHATML, "{{ bos_token }}" + CHATML])
def test_exactly_one_bos_whether_or_not_the_template_writes_it(tmp_path, template):
    tok = load(tmp_path, template=template, adds_bos=True)
    ids = tok.apply_chat_template([{"role": "user", "content": "hi"}], add_generation_prompt=True)
    assert ids[0] == tok.bos_token_id and ids.count(tok.bos_token_id) == 1


def test_save_copies_bytes_and_writes_the_template_in_both_places(tmp_path):
    source = write_tokenizer(tmp_path / "a")
    (source / "added_tokens.json").write_text("{}")
    tok = AutoTokenizer.from_pretrained(source)
    tok.save_pretrained(tmp_path / "b")
    for name in ("tokenizer.json", "tokenizer_config.json"):
        assert (tmp_path / "b" / name).read_bytes() == (source / name).read_bytes()
    assert (tmp_path / "b" / "chat_template.jinja").read_text() == CHATML
    assert not (tmp_path / "b" / "added_tokens.json").exists()
    # A directory as transformers 5 writes it has the template in the file only.
    other = write_tokenizer(tmp_path / "c", template=None)
    (other / "chat_template.jinja").write_text(CHATML)
    AutoTokenizer.from_pretrained(other).save_pretrained(tmp_path / "d")
    assert json.loads((tmp_path / "d" / "tokenizer_config.json").read_text())["chat_template"] == CHATML
    tok.chat_template = "new"
    tok.save_pretrained(tmp_path / "e")
    assert (tmp_path / "e" / "chat_template.jinja").read_text() == "new"
    assert AutoTokenizer.from_pretrained(tmp_path / "e").chat_template == "new"
    (source / "tokenizer.json").unlink()
    with pytest.raises(FileError, match="no longer exists"):
        tok.save_pretrained(tmp_path / "f")


@pytest.mark.reference
@pytest.mark.parametrize(
    "options", [{}, {"adds_bos": True}, {"add_bos_token": True}, {"adds_bos": True, "add_bos_token": False}]
)
def test_ids_and_rendered_chats_equal_transformers(tmp_path, options):
    transformers = pytest.importorskip("transformers")
    tok = load(tmp_path, **options)
    reference = transformers.AutoTokenizer.from_pretrained(tmp_path)
    for text in TEXTS:
        assert tok.encode(text) == reference(text)["input_ids"]
    messages = [{"role": "user", "content": "hi é"}, {"role": "assistant", "content": "yes"}]
    assert tok.apply_chat_template(messages, tokenize=False) == reference.apply_chat_template(messages, tokenize=False)
    assert len(tok) == len(reference)
