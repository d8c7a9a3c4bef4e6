"""The rows of the quick start: made by a rule, told apart by a rule, held-out names nowhere in the training rows."""

import json
import re

from run import cards


def test_no_name_of_a_held_out_row_is_in_a_training_row():
    told = " ".join(row["messages"][0]["content"] for row in cards.training_rows())
    assert not set(re.findall(r"\w+", told)) & set(cards.HELD_OUT_NAMES)
    asked = " ".join(row["messages"][0]["content"] for row in cards.held_out_rows())
    assert not set(re.findall(r"\w+", asked)) & set(cards.TRAIN_NAMES)


def test_an_answer_is_in_its_story_and_rows_repeat():
    rows = cards.held_out_rows()
    assert len(rows) == 60 and rows == cards.held_out_rows() and len({str(r) for r in rows}) == 60
    for row in rows:
        story, answer = (message["content"] for message in row["messages"])
        who, where, what = re.fullmatch(r"Who: (\w+)\. Where: (\w+)\. What: (\w+)\.", answer).groups()
        assert {who, where, what} <= set(re.findall(r"\w+", story)) and story.endswith(cards.REQUEST)


def test_the_rule_takes_the_whole_card_and_nothing_else():
    row = {"messages": [{}, {"role": "assistant", "content": "Who: Ida. Where: pier. What: key."}]}
    assert cards.is_right(" Who: Ida. Where: pier. What: key.\n", row)
    for wrong in ("", "Who: Ida.", "Who: Eva. Where: pier. What: key.", "Who: Ida. Where: pier. What: key. And"):
        assert not cards.is_right(wrong, row)


def test_rows_are_json_lines(tmp_path):
    cards.write_rows(tmp_path / "a" / "rows.jsonl", cards.training_rows(3))
    lines = (tmp_path / "a" / "rows.jsonl").read_text().splitlines()
    assert [json.loads(line) for line in lines] == cards.training_rows(3)
