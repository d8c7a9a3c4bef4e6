"""A real pretrained Llama of 260,032 parameters: its greedy text and its logits."""

import json
import warnings
from pathlib import Path

import numpy as np
import pytest

from peft_core import no_grad
from transformer import from_pretrained, generate
from transformer.batch import Batch

pytestmark = pytest.mark.reference

MODELS = Path(__file__).parents[2].parent / "shared" / "models"
if not (MODELS / "stories260k").is_dir():
    pytest.skip("the model stories260k is not at ../shared/models", allow_module_level=True)


def _expected() -> list[int]:
    return json.loads((MODELS / "stories260k_expected_ids.json").read_text())


def test_greedy_ids():
    expected = _expected()
    model = from_pretrained(MODELS / "stories260k")
    new = generate(model, [expected[:1]], max_new_tokens=len(expected) - 1, eos_token_id=())
    assert expected[:1] + new[0] == expected


def test_logits():
    torch, transformers = pytest.importorskip("torch"), pytest.importorskip("transformers")
    ids = _expected()
    model = from_pretrained(MODELS / "stories260k")
    with no_grad():
        ours = model.lm_head(model.hidden(Batch.from_rows([(ids, ids)]))).data
    with warnings.catch_warnings(), torch.no_grad():
        warnings.simplefilter("ignore")
        reference = transformers.AutoModelForCausalLM.from_pretrained(MODELS / "stories260k")
        expected = reference(torch.tensor([ids])).logits[0].numpy()
    assert expected.std() > 1
    assert np.abs(ours - expected).max() < 1e-4
