"""Trained tokens of a chat, beside the assistant masks that transformers makes from {% generation %} marks."""

import numpy as np
import pytest

from support.tiny_tokenizer import CHATML, write_tokenizer
from transformer.masking import encode_rows
from transformer.rows import ChatRow
from transformer.tokenizer import AutoTokenizer

pytestmark = pytest.mark.reference

MARKED = (
    "{% for message in messages %}<|im_start|>{{ message['role'] }}\n{% if message['role'] == 'assistant' %}"
    "{% generation %}{{ message['content'] }}<|im_end|>{% endgeneration %}{% else %}{{ message['content'] }}<|im_end|>"
    "{% endif %}{{ '\n' }}{% endfor %}{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)
TURNS = [
    ("system", "Be brief."),
    ("user", "two?"),
    ("assistant", "Two plus"),
    ("user", "é 🙂\n"),
    ("assistant", "four\n"),
]


@pytest.mark.parametrize("template", [CHATML, MARKED])
def test_the_same_tokens_are_trained_with_and_without_marks(tmp_path, template):
    transformers = pytest.importorskip("transformers")
    theirs = transformers.AutoTokenizer.from_pretrained(str(write_tokenizer(tmp_path / "theirs", template=MARKED)))
    messages = [{"role": role, "content": content} for role, content in TURNS]
    found = theirs.apply_chat_template(messages, return_dict=True, return_assistant_tokens_mask=True)
    mask = np.array(found["assistant_masks"], bool)
    assert 5 < mask.sum() < len(mask)
    ours = AutoTokenizer.from_pretrained(write_tokenizer(tmp_path / "ours", template=template))
    (sample,) = encode_rows([ChatRow("d:1", messages, [role == "assistant" for role, _ in TURNS])], ours)
    assert sample.input_ids.tolist() == list(found["input_ids"])
    assert (sample.labels != -100).tolist() == mask.tolist()
