"""Which tokens are trained, judged by an independent rule: the trained ids are those of the answer tokenized alone."""

from __future__ import annotations

import pytest

from peft_core.errors import ConfigError, DataError
from support.tiny_tokenizer import CHATML, write_tokenizer
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
    assert trained(sample) == tok.encode("Two plus<|im_end|>\n") + tok.encode("four é🙂<|im_end|>\n")
    text = tok.render(chat(("system", "s"), *TALK).messages)
    assert sample.input_ids.tolist() == tok.encode(text)
    kept = sample.labels != -100
    assert (sample.labels[kept] == sample.input_ids[kept]).all()
    (everything,) = samples(tok, chat(*TALK), loss_on="all")
    assert trained(everything) == everything.input_ids.tolist()
    with pytest.raises(ConfigError, match=r"data.loss_on is 'x'; expected 'assistant' or 'all'"):
        samples(tok, chat(*TALK), loss_on="x")


def test_end_token_keeps_its_label_when_pad_is_the_same_token(tmp_path):
    tok = load(tmp_path, pad_token="<|im_end|>")
    (sample,) = samples(tok, chat(*TALK))
    assert tok.pad_token_id == tok.eos_token_id
    assert trained(sample).count(tok.eos_token_id) == 2


def test_markers_inside_the_contents_do_not_move_the_mask(tmp_path):
    tok = load(tmp_path)
    (sample,) = samples(tok, chat(("user", "say assistant\nfour"), ("assistant", "four")))
    assert trained(sample) == tok.encode("four<|im_end|>\n")


def test_template_that_rewrites_history_makes_one_sample_per_answer(tmp_path):
    tok = load(tmp_path, template=REWRITING)
    first, second = samples(tok, chat(*TALK))
    assert trained(first) == tok.encode("Two plus<|im_end|>\n")
    assert trained(second) == tok.encode("four é🙂<|im_end|>\n")
    assert first.source == second.source == 0
    assert "..." in tok.decode(second.input_ids)


def test_generation_prompt_that_differs_from_the_history(tmp_path):
    template = CHATML.replace("assistant\n{% endif", "assistant\n<think>\n{% endif")
    tok = load(tmp_path, template=template)
    (sample,) = samples(tok, chat(*TALK[:2]))
    assert trained(sample) == tok.encode("Two plus<|im_end|>\n")
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
    assert trained(sample) == tok.encode("four é🙂<|im_end|>\n")


def test_tool_call_that_the_template_does_not_write_is_not_trained_as_an_empty_answer(tmp_path):
    tok = load(tmp_path)
    row = chat(*TALK)
    row.messages[1].update(content="", tool_calls=[{"function": {"name": "search", "arguments": {}}}])
    (sample,) = samples(tok, row)
    assert trained(sample) == tok.encode("four é🙂<|im_end|>\n") and sample.n_unwritten == 1


def test_alpaca_without_a_template_uses_the_plain_form(tmp_path):
    tok = load(tmp_path, template=None)
    row = ChatRow("d:1", chat(*TALK[:2]).messages, [False, True], format="alpaca")
    (sample,) = samples(tok, row)
    assert tok.decode(sample.input_ids).startswith("### Instruction:\ntwo?\n\n### Response:\n")
    assert trained(sample) == [*tok.encode("Two plus"), tok.eos_token_id]
