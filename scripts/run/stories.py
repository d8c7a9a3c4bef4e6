"""Stories from a grammar, each a function of a seed and its number: the quick start's pretraining text.

A story has a hero, a friend, a thing, a place and a cause, chosen once and named again and again, so that a model which
predicts the text well has to look back at what was said. Three kinds of documents come out: a plain story that may
announce what it is about, a story told on request, and a story with questions about it.
"""

from __future__ import annotations

import random
import re
from collections.abc import Sequence
from dataclasses import dataclass
from typing import TypeVar

from run import story_plots as plots
from run import story_words as words

Messages = list[dict[str, str]]
T = TypeVar("T")
PLACES = [(preposition, place) for preposition, places in words.PLACES.items() for place in places.split()]
_CHOICE = re.compile(r"\[([^\[\]]*)\]")
_START = re.compile(r'(^"?|[.?!] "?|[.!]" "?)([a-z])')  # not after ?", where "asked ..." goes on


@dataclass(frozen=True)
class Facts:
    """What a story is about; ``slots`` fills the templates' braces."""

    hero: str
    friend: str
    thing: str
    place: str
    slots: dict[str, str]


def pick(rng: random.Random, options: Sequence[T]) -> T:
    """One of the options.  Nothing but ``random()`` is used: it alone gives the same numbers in every Python."""
    return options[int(rng.random() * len(options))]


def expand(rng: random.Random, template: str) -> str:
    """``template`` with every [a|b] replaced by one of its options."""
    while "[" in template:
        template = _CHOICE.sub(lambda found: pick(rng, found[1].split("|")), template)
    return template


def make_facts(rng: random.Random, names: Sequence[str] | None = None) -> Facts:
    """Choose hero (from ``names`` if given), friend, thing, place and cause."""
    she, he = words.SHE, words.HE
    hero = pick(rng, names if names is not None else she + he)
    friend = pick(rng, [n for n in (names if names is not None else she + he) if n != hero])
    plural = rng.random() < 0.2
    thing, look = pick(rng, words.PAIRS if plural else words.THINGS), pick(rng, words.LOOKS)
    preposition, place = pick(rng, PLACES)
    some = "some" if plural else "an" if look[0] in "aeiou" else "a"
    h, f = (("she", "her", "her") if name in she else ("he", "his", "him") for name in (hero, friend))
    it = ("them", "they", "were", "are", "these") if plural else ("it", "it", "was", "is", "this")
    slots = {"H": hero, "F": friend, "T": thing, "aT": f"{some} {look} {thing}", "tT": f"the {look} {thing}",
             "thT": f"{it[4]} {look} {thing}", "P": f"the {place}", "pP": f"{preposition} the {place}",
             "C": expand(rng, pick(rng, words.CAUSES))}  # fmt: skip
    slots |= dict(zip(("h", "hs", "ho"), h, strict=True)) | dict(zip(("f", "fs", "fo"), f, strict=True))
    slots |= dict(zip(("it", "itS", "was", "is", "ItS"), (*it[:4], it[1]), strict=True))
    return Facts(hero, friend, thing, place, slots)


def sentence(rng: random.Random, template: str, facts: Facts) -> str:
    """One filled template, its sentences starting with capitals."""
    template = expand(rng, template)
    if template.startswith("{talk_"):
        template = expand(rng, pick(rng, plots.TALK[template[1:-1]]))
    fresh = {"trait": pick(rng, words.TRAITS), "feel": pick(rng, words.UNHAPPY), "glad": pick(rng, words.HAPPY),
             "job": pick(rng, words.JOBS), "kin": pick(rng, words.KIN),
             "when": expand(rng, pick(rng, words.TIMES))}  # fmt: skip
    text = template.format(**facts.slots, **fresh)
    text = re.sub(r"\b([Aa]) (?=[aeiou]|ho(?:nest|ur))", r"\1n ", text)
    return _START.sub(lambda found: found[1] + found[2].upper(), text)


def tell(rng: random.Random, facts: Facts, ending: bool = True) -> list[str]:
    """The sentences of a story: an opening, the beats of a plot, an ending; some beats are left out."""
    plot = plots.PLOTS[int(rng.random() * len(plots.PLOTS))]
    beats = [beat for i, beat in enumerate(plot) if i < 2 or rng.random() < 0.85]
    chosen = [pick(rng, plots.OPENINGS), *(pick(rng, beat) for beat in beats)]
    chosen += [pick(rng, plots.ENDINGS)] if ending else []
    return [sentence(rng, template, facts) for template in chosen]


def document(seed: int, index: int) -> str | Messages:
    """Document ``index`` of a seed's endless text: a plain text, or the messages of a chat."""
    rng = random.Random(f"{seed}/{index}")
    facts = make_facts(rng)
    kind = rng.random()
    if kind < 0.45:
        start = [sentence(rng, pick(rng, plots.ANNOUNCEMENTS), facts)] if rng.random() < 0.75 else []
        return " ".join([*start, *tell(rng, facts)])
    if kind < 0.72:
        ask = sentence(rng, pick(rng, plots.REQUESTS), facts)
        return chat(ask, " ".join(tell(rng, facts)))
    shuffled = sorted(plots.QUESTIONS, key=lambda _: rng.random())
    questions = shuffled[: pick(rng, (1, 2, 2, 3))]
    asked = [(sentence(rng, q, facts), sentence(rng, pick(rng, a), facts)) for q, a in questions]
    first, *later = asked
    messages = chat(" ".join(tell(rng, facts, rng.random() < 0.5)) + " " + first[0], first[1])
    for question, answer in later:
        messages += chat(question, answer)
    return messages


def chat(question: str, answer: str) -> Messages:
    """One turn each."""
    return [{"role": "user", "content": question}, {"role": "assistant", "content": answer}]
