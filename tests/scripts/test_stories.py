"""The generated text: repeatable, complete, grammatical where a rule can say so."""

import re

import pytest

from run import stories
from run import story_words as words
from run.story_check import sentences
from run.story_model import plain_texts

DOCUMENTS = [stories.document(7, i) for i in range(2000)]
TEXTS = list(plain_texts(7, 2000))


def test_a_document_follows_from_seed_and_number():
    assert stories.document(7, 1234) == DOCUMENTS[1234] != stories.document(8, 1234)
    assert len({str(d) for d in DOCUMENTS}) == len(DOCUMENTS)


def test_every_template_is_filled():
    assert not [t for t in TEXTS if re.search(r"[\[\]{}|]|  ", t)]


def test_all_kinds_of_documents_come():
    plain = sum(isinstance(d, str) for d in DOCUMENTS)
    asked = sum(not isinstance(d, str) and len(d[0]["content"]) < 90 for d in DOCUMENTS)
    assert 0.40 < plain / 2000 < 0.50 and 0.2 < asked / 2000 < 0.35
    assert any(d[0].startswith(("This is a story", "A story about")) for d in zip(TEXTS, strict=True))


def test_sentences_start_with_capitals_and_end_with_a_stop():
    for text in TEXTS:
        for part in sentences(text):
            assert re.match(r'"?[A-Z]', part) and re.search(r'[.?!]"?$', part), part


def test_articles_and_verbs_agree():
    for text in TEXTS:
        assert not re.search(r"\b[Aa] ([aeiou]|honest|hour)|\b[Aa]n (?!honest|hour)[^aeiou]", text), text
        for pair in words.PAIRS:
            assert not re.search(rf"\b{pair} (was|is)\b|\b(a|an|this) \w+ {pair}\b", text), text
        for thing in words.THINGS:
            assert not re.search(rf"\b(these|some) (?!bread|glue|oil)\w+ {thing}\b", text), text


@pytest.mark.parametrize(("names", "own", "other"), [(words.SHE, "her", "his"), (words.HE, "his", "her")])
def test_pronouns_fit_the_hero(names, own, other):
    for text in TEXTS:
        found = re.search(rf"\b({'|'.join(names)}) (lived|worked|stayed) with (\w+)", text)
        assert not found or found[3] == own


def test_a_story_names_its_facts_again_and_again():
    counts = []
    for i in range(200):
        rng = stories.random.Random(i)
        facts = stories.make_facts(rng)
        text = " ".join(stories.tell(rng, facts))
        assert facts.hero in text and facts.place in text and facts.thing in text
        counts.append(text.count(facts.thing))
    assert sum(counts) / len(counts) > 4


def test_names_and_words_are_given_once():
    for group in (words.SHE + words.HE, words.THINGS + words.PAIRS, words.LOOKS, words.TRAITS):
        assert len(set(group)) == len(group)


def test_sentences():
    text = 'Ida ran. "Who is it?" asked Ida. "Me," said Tom, "and I wait." Then she left.'
    assert sentences(text) == ["Ida ran.", '"Who is it?" asked Ida.', '"Me," said Tom, "and I wait."', "Then she left."]
