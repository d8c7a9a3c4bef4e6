"""Which tokens are trained, judged by an independent rule: the trained ids are those of the answer tokenized alone."""

from __future__ import annotations

import json

import pytest

from peft_core.errors import ConfigError, DataError
from support.tiny_tokenizer import CHATML, write_tokenizer
from transformer.batch import Batch
from transformer.data import load_dataset
from transformer.masking import encode_rows
from transformer.rows import ChatRow, PromptRow, TextRow, TokenRow
from transformer.tokenizer import AutoTokenizer

# Like CHATML, but an earlier answer is written differently from the last one (as templates that drop reasoning do).
REWRITING = CHATML.replace(
    "{{ message['content'] }}", "{{ message['content'] if loop.last or message['role'] == 'user' else '...' }}"
)


def load(path, **options):
    return AutoTokenizer.from_pretrained(write_tokenizer(path, **options))


def chat(*turns, trained=None):
    messages = [{"role": role, "content": content} for role, content in turns]
    return ChatRow("d:1", messages, trained or [role == "assistant" for role, _ in turns])


def samples(tok, *rows, **options):
    return list(encode_rows(rows, tok, **options))


def trained(sample):
    return [int(label) for label in sample.labels if label != -100]


TALK = (("user", "two?"), ("assistant", "Two plus"), ("user", "more?"), ("assistant", "four é🙂"))


def test_only_answers_and_their_end_tokens_are_trained(tmp_path):
    tok = load(tmp_path)
    (sample,) = samples(tok, chat(("system", "s"), *TALK))
    assert trained(sample) == tok.encode("Two plus<|im_end|>") + tok.encode("four é🙂<|im_end|>")
    text = tok.render(chat(("system", "s"), *TALK).messages)
    assert sample.input_ids.tolist() == tok.encode(text)
    kept = sample.labels != -100
    assert (sample.labels[kept] == sample.input_ids[kept]).all()
    (everything,) = samples(tok, chat(*TALK), loss_on="all")
    assert trained(everything) == everything.input_ids.tolist()
    with pytest.raises(ConfigError, match=r"data.loss_on is 'x'; expected 'assistant' or 'all'"):
        samples(tok, chat(*TALK), loss_on="x")


ENDINGS = {  # template of one message -> what is trained of the answer "yes"
    "<|im_start|>{{ m.role }}\n{{ m.content }}<|im_end|>\n": "yes<|im_end|>",
    "<|im_start|>{{ m.role }}\n{{ m.content }} <|im_end|> \n\n": "yes <|im_end|>",
    "<|im_start|>{{ m.role }}\n{{ m.content }}<|im_end|>": "yes<|im_end|>",
    "{{ m.role }}: {{ m.content }}\n\n": "yes\n\n",
}


@pytest.mark.parametrize("template", ENDINGS)
def test_white_space_after_the_end_token_is_the_templates_and_not_the_models(tmp_path, template):
    opening = template.split("{{ m.content }}")[0].replace("{{ m.role }}", "assistant")
    whole = (
        "{% for m in messages %}" + template + "{% endfor %}{% if add_generation_prompt %}" + opening + "{% endif %}"
    )
    tok = load(tmp_path, template=whole)
    (sample,) = samples(tok, chat(("user", "u"), ("assistant", "yes")))
    assert tok.decode(trained(sample), skip_special_tokens=False) == ENDINGS[template]
    (sample,) = samples(tok, chat(("user", "u"), ("assistant", "yes")), loss_on="all")
    assert trained(sample) == sample.input_ids.tolist()


def read_apart(text):
    """(text, trained) pieces of a ChatML text, found by its markers alone: the reading of a person with a pencil."""
    pieces = []
    for turn in text.split("<|im_start|>")[1:]:
        role, content = turn.split("\n", 1)
        said, end, rest = content.partition("<|im_end|>")
        is_answer = role == "assistant"
        pieces += [("<|im_start|>" + role + "\n", False), (said, is_answer), (end, is_answer), (rest, False)]
    return [piece for piece in pieces if piece[0]]


@pytest.mark.parametrize("adds_bos", [False, True])
def test_a_chat_from_its_file_to_the_targets_of_a_batch(tmp_path, adds_bos):
    turns = [("system", "Be brief."), *TALK, ("user", "é?\n\nassistant"), ("assistant", "two  four\n")]
    file = tmp_path / "d.jsonl"
    talks = [turns, turns[1:3], turns[1:5]]
    file.write_text("\n".join(json.dumps({"messages": [dict(role=r, content=c) for r, c in talk]}) for talk in talks))
    tok = load(tmp_path / "tok", adds_bos=adds_bos)
    data = load_dataset(file, tok)
    batch = Batch.from_rows(data[0:3])
    for b, talk in enumerate(talks):
        text = "".join(f"<|im_start|>{role}\n{content}<|im_end|>\n" for role, content in talk)
        ids, wanted = ([tok.bos_token_id], [False]) if adds_bos else ([], [])
        for piece, is_trained in read_apart(text):  # no piece shares a token with the next: markers and "\n" cut there
            part = tok.encode(piece, add_special_tokens=False)
            ids, wanted = ids + part, wanted + [is_trained] * len(part)
        row = slice(batch.cu_seqlens[b], batch.cu_seqlens[b + 1])
        assert batch.ids[row].tolist() == ids
        following = [*zip(ids[1:], wanted[1:], strict=True), (None, False)]
        assert batch.targets[row].tolist() == [token if on else -100 for token, on in following]


@pytest.mark.parametrize("row", [chat(*TALK), PromptRow("d:1", "q", " a")])
@pytest.mark.parametrize("template", [CHATML, "{{ bos_token }}" + CHATML])
def test_bos_is_trained_only_where_everything_is(tmp_path, row, template):
    tok = load(tmp_path, template=template, adds_bos=True)
    (sample,) = samples(tok, row)
    assert sample.input_ids[0] == tok.bos_token_id and sample.labels[0] == -100
    assert tok.bos_token_id not in trained(sample)
    (sample,) = samples(tok, row, loss_on="all")
    assert sample.labels[0] == tok.bos_token_id
    (sample,) = samples(tok, TextRow("d:1", "text"))
    assert sample.labels[0] == tok.bos_token_id


def test_end_token_keeps_its_label_when_pad_is_the_same_token(tmp_path):
    tok = load(tmp_path, pad_token="<|im_end|>")
    (sample,) = samples(tok, chat(*TALK))
    assert tok.pad_token_id == tok.eos_token_id
    assert trained(sample).count(tok.eos_token_id) == 2


def test_markers_inside_the_contents_do_not_move_the_mask(tmp_path):
    tok = load(tmp_path)
    (sample,) = samples(tok, chat(("user", "say assistant\nfour"), ("assistant", "four")))
    assert trained(sample) == tok.encode("four<|im_end|>")


def test_template_that_rewrites_history_makes_one_sample_per_answer(tmp_path):
    tok = load(tmp_path, template=REWRITING)
    first, second = samples(tok, chat(*TALK))
    assert trained(first) == tok.encode("Two plus<|im_end|>")
    assert trained(second) == tok.encode("four é🙂<|im_end|>")
    assert first.source == second.source == 0
    assert "..." in tok.decode(second.input_ids)


def test_generation_prompt_that_differs_from_the_history(tmp_path):
    template = CHATML.replace("assistant\n{% endif", "assistant\n<think>\n{% endif")
    tok = load(tmp_path, template=template)
    (sample,) = samples(tok, chat(*TALK[:2]))
    assert trained(sample) == tok.encode("Two plus<|im_end|>")
    moving = "{{ messages | length }}" + CHATML
    with pytest.raises(DataError, match="d:1: message 1: the chat template rewrites the messages before an answer"):
        samples(load(tmp_path / "m", template=moving), chat(*TALK[:2]))


@pytest.mark.parametrize("template", [CHATML, "{{ bos_token }}" + CHATML])
def test_exactly_one_bos(tmp_path, template):
    tok = load(tmp_path, template=template, adds_bos=True)
    for row in (chat(*TALK), PromptRow("d:1", "q", " a"), TextRow("d:1", "t"), TextRow("d:1", "<s>t")):
        (sample,) = samples(tok, row)
        ids = sample.input_ids.tolist()
        assert ids[0] == tok.bos_token_id and ids.count(tok.bos_token_id) == 1 and sample.starts_with_bos


def test_completion_ids_are_those_of_the_whole_text(tmp_path):
    tok = load(tmp_path)
    for prompt, completion in (("What is two", " plus two?"), ("What is tw", "o plus"), ("hi ", "you"), ("é", "🙂")):
        (sample,) = samples(tok, PromptRow("d:1", prompt, completion))
        whole = tok.encode(prompt + completion)
        assert sample.input_ids.tolist() == [*whole, tok.eos_token_id]
        # Independent rule: drop trained tokens from the end until the rest no longer reaches into the completion.
        n = len(whole)
        while n and len(tok.decode(whole[: n - 1]).rstrip("\ufffd")) >= len(prompt):
            n -= 1
        first = int((sample.labels != -100).argmax())
        assert first == n - 1 if len(tok.decode(whole[:n])) > len(prompt) else first == n
    with pytest.raises(DataError, match=r"d:1: .* has no eos_token, so a completion cannot end"):
        samples(load(tmp_path / "n", eos_token=None), PromptRow("d:1", "a", "b"))


def test_eos_is_added_only_if_absent(tmp_path):
    tok = load(tmp_path)
    for text in ("hi", "hi<|im_end|>"):
        for row in (TextRow("d:1", text), PromptRow("d:1", "q", text)):
            (sample,) = samples(tok, row)
            assert trained(sample) == [*tok.encode("hi"), tok.eos_token_id]


def test_number_of_targets_is_one_less_than_the_tokens(tmp_path):
    tok = load(tmp_path)
    for n in (5, 8):
        (sample,) = samples(tok, TokenRow("d:1", list(range(n)), list(range(n))))
        assert sample.n_trained == n - 1
    with pytest.raises(DataError, match="d:1: input_ids go up to 99999"):
        samples(tok, TokenRow("d:1", [99999], [99999]))


def test_answers_switched_off_by_weight_are_context(tmp_path):
    tok = load(tmp_path)
    (sample,) = samples(tok, chat(*TALK, trained=[False, False, False, True]))
    assert trained(sample) == tok.encode("four é🙂<|im_end|>")


def test_tool_call_that_the_template_does_not_write_is_not_trained_as_an_empty_answer(tmp_path):
    tok = load(tmp_path)
    row = chat(*TALK)
    row.messages[1].update(content="", tool_calls=[{"function": {"name": "search", "arguments": {}}}])
    (sample,) = samples(tok, row)
    assert trained(sample) == tok.encode("four é🙂<|im_end|>") and sample.n_unwritten == 1


def test_alpaca_without_a_template_uses_the_plain_form(tmp_path):
    tok = load(tmp_path, template=None)
    row = ChatRow("d:1", chat(*TALK[:2]).messages, [False, True], format="alpaca")
    (sample,) = samples(tok, row)
    assert tok.decode(sample.input_ids).startswith("### Instruction:\ntwo?\n\n### Response:\n")
    assert trained(sample) == [*tok.encode("Two plus"), tok.eos_token_id]
