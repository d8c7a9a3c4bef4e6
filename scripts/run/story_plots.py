"""The plots of the quick start's stories: each is a list of beats, each beat a choice of templates.

Braces are slots that a story fills (see stories.py), square brackets are a choice: ``[a|b]``. The slots:

    H, F    hero and friend          h, hs, ho, f, fs, fo    she, her, her / he, his, him
    T       the thing's noun         aT, tT, thT             a red kite, the red kite, this red kite
    it, itS object and subject form  was, is, has, s         agree with the thing
    P, pP   the harbour, at the ...  C                       the cause, a clause in the past
    trait, feel, glad, job, kin, when                        words
"""

from __future__ import annotations

OPENINGS = [
    "{when}, {H} [went to|walked to|came to|set out for|ran to] {P}.",
    "{H} was a {trait} [person|soul] who [loved|liked|often thought of] {tT}.",
    "{when}, {H} [was sitting|was waiting|was standing|stood alone|sat quietly] {pP}.",
    "{H} [lived|worked|stayed] with {hs} {kin}, a {trait} {job}, [close to|not far from|right beside] {P}.",
    "there was once a {trait} {job} called {H}, who [spent every day|had a little house|knew everybody] {pP}.",
    "{when}, {H} [felt|was] {feel} and [walked|strolled|hurried|went] to {P} with {hs} {kin}.",
    "everybody {pP} knew {H}, because {h} was so {trait} and never [shouted|complained|lied|gave up].",
]

LOST = [
    [
        "{H} had [brought|carried|taken] {aT} [along|in {hs} bag|under {hs} arm|as a gift for {F}].",
        "{h} had {aT} with {ho}, [a present from|a gift of] {hs} {kin}.",
        "{hs} {kin} had given {ho} {aT} [for {hs} birthday|before the journey|and told {ho} to take care].",
    ],
    [
        "but {pP} {tT} {was} [suddenly gone|nowhere to be seen|missing], because {C}.",
        "because {C}, {h} [lost|dropped|forgot] {tT} {pP}.",
        "then {h} lost {tT} somewhere {pP}, and all because {C}.",
    ],
    [
        "{H} looked [under the bench|behind the door|between the stones|in every corner], but {tT} {was} not there.",
        "{h} [searched|looked] [for an hour|everywhere|until dark] and grew {feel}.",
        "{H} [asked the {job}|asked a {trait} {job}|called for help], but nobody had seen {tT}.",
    ],
    ["{talk_where}", "{talk_why}", "{talk_what}"],
    [
        "{F} [searched|looked] too, and soon {f} found {tT} {pP}[, wet but whole| in the grass| beside a barrel].",
        "together {H} and {F} found {tT} [again|at last] {pP}.",
        "in the end {F} saw {tT} {pP}, half hidden by [leaves|snow|straw|sand].",
    ],
]
GIFT = [
    [
        "{H} wanted to give {F} {aT}[| because {F} had been so {trait}| for {fs} birthday].",
        "{h} had [bought|made|wrapped|painted] {aT} for {F}, {hs} {trait} [friend|neighbour|cousin].",
        "{hs} plan was [simple|secret]: {F} should get {aT} {pP}.",
    ],
    [
        "{F} did not come to {P} [at first|for a long time], because {C}.",
        "but {F} was late, because {C}, and {H} waited {pP} with {tT}.",
        "because {C}, {H} had to [wait|stay] {pP} and hold {tT} [tightly|in both hands].",
    ],
    ["{talk_why}", "{talk_what}", "{talk_where}"],
    [
        "{F} [took|unwrapped|held] {tT} and was so {glad} that {f} [laughed|cried a little|danced|sang].",
        "when {F} saw {tT}, {f} [said nothing|smiled|clapped {fs} hands] and [hugged|thanked] {H}.",
        "{F} looked at {tT} and [turned red|whispered a thank you|jumped for joy].",
    ],
    [
        "from then on {tT} stood {pP}, where [both|the two] [met|played|talked] every week.",
        "{F} kept {tT} [for years|for ever|by the window], and {H} was {glad}.",
    ],
]
REPAIR = [
    [
        "{pP} {h} found {aT}, but {itS} {was} [damaged|cracked|bent|full of mud|in pieces].",
        "{H} [saw|noticed|discovered] {aT} {pP}, and {itS} {was} in a bad state, because {C}.",
        "{H} [owned|had] {aT}, and {itS} {was} no longer [any good|in order], because {C}.",
    ],
    [
        "{h} wanted to [mend|repair] {it} [alone|with glue|with a nail|before the evening], but it was too hard.",
        "{H} [tried|tried again] to repair {tT} [with a bit of wire|with {hs} bare hands], but {h} was too {trait}.",
        "{h} [sighed|frowned] and put {tT} on [a table|a bench|a flat stone] {pP}.",
    ],
    ["{talk_what}", "{talk_why}", "{talk_where}"],
    [
        "{F}, who was a {trait} {job}, [knew what to do|had the right tool|had patience].",
        "{F} [fetched|brought] [some glue|a brush|oil|thread] and [showed|taught] {H} how to mend {tT}.",
    ],
    [
        "after [an hour|a while|a long day] {tT} {was} as good as new, and {H} [was {glad}|beamed|whistled].",
        "then {tT} [shone|gleamed] again, and everybody {pP} [came to look|was {glad}|clapped].",
        "{H} and {F} carried {tT} home[| in the dark| with a song].",
    ],
]
SECRET = [
    [
        "{H} had a secret: {h} had hidden {aT} {pP}.",
        "nobody knew that {H} kept {aT} {pP}[, not even {hs} {kin}|, under a cloth|, behind a board].",
    ],
    [
        "{h} had hidden {it} [in spring|at night|long ago], because {C}.",
        "{hs} reason was [simple|strange]: {C}.",
        "{h} did it because {C}, and now {h} felt {feel}.",
    ],
    [
        "[one day|later|the next day] {F} came to {P} and [nearly fell over|stepped on|bumped into] {tT}.",
        "but {F} was {trait} and followed {H} to {P}.",
    ],
    ["{talk_what}", "{talk_where}", "{talk_why}"],
    [
        "{F} promised to [say nothing|keep quiet] about {tT}, and {H} was {glad}.",
        "since then {H} and {F} [share|guard] {tT}, and {P} is their [secret|favourite] place.",
        "then both of them [laughed|shook hands] and hid {tT} {pP} once more.",
    ],
]
TRADE = [
    [
        "{F} was selling {aT} {pP}, and {H} [wanted {it}|stopped at once|could not look away].",
        "{pP} {H} met {F}, who had {aT} to sell.",
    ],
    [
        "{H} had [no money|only two coins|an empty purse], because {C}.",
        "but {tT} cost too much, and {H} was {feel}, because {C}.",
        "it was a bad day for buying {tT}, because {C}.",
    ],
    [
        "{h} offered {F} [a song|a day of work|a pot of soup|two eggs|a good story] for {tT}.",
        "{H} [asked|begged] {F} to keep {tT} for {ho} until the evening.",
    ],
    ["{talk_why}", "{talk_what}", "{talk_where}"],
    [
        "{F} [thought|counted|hummed] for a moment and [agreed|nodded], and so {H} got {tT}.",
        "in the end {F} gave {tT} to {H}, because {h} had been so {trait}.",
        "they [laughed|shook hands], and {H} left {P} with {tT} [on {hs} back|in {hs} arms].",
    ],
]
TRIP = [
    [
        "{h} packed {aT} and [some bread|an apple|a blanket] and [waved to|kissed] {hs} {kin}.",
        "{hs} {kin} had asked {ho} to bring {aT} to {P}.",
    ],
    [
        "the way to {P} was [long|steep|muddy], because {C}, and {tT} {was} [hard to carry|in the way].",
        "halfway {h} had to [stop|rest], because {C}, and put {tT} on the ground.",
        "{H} [arrived|came] {feel}, because {C}, but {tT} {was} [safe|dry|still whole].",
    ],
    [
        "{pP} {h} met {F}, a {trait} {job}, who [looked at|pointed to|asked about] {tT}.",
        "there {pP} stood {F}, {trait} as ever, and [waved|grinned].",
    ],
    ["{talk_where}", "{talk_what}", "{talk_why}"],
    [
        "{H} [showed|gave|lent] {F} {tT}, and {f} was {glad}.",
        "so {tT} came to {P}, and {H} [slept well|rested|was {glad}] that night.",
        "{F} helped {H} to carry {tT}, and [the two|they] reached {P} before dark.",
    ],
]
PLOTS = [LOST, GIFT, REPAIR, SECRET, TRADE, TRIP]

TALK = {
    "talk_where": [
        '"where {is} {tT}?" asked {F}. "{ItS} {is} {pP}," [said|answered|replied] {H}.',
        '"have you seen {tT}?" {H} asked {F}. "yes, {pP}," [said|answered|whispered] {F}[|, and {f} smiled].',
        '{F} asked {H} about {tT}. "look {pP}," said {H}[| in a low voice| at once].',
    ],
    "talk_why": [
        '"why are you so {feel}, {H}?" asked {F}. "because {C}," said {H}.',
        '"what happened?" asked {F}, who was {trait}. "{C}," [answered|said|explained] {H}[| and pointed to {tT}].',
        '{F} wanted to know why {H} was {feel}. "{C}," {h} said, "and I need {tT}."',
    ],
    "talk_what": [
        '"what do you have there, {H}?" asked {F}. "{aT}," said {H}[| with a proud face| and blushed].',
        '"{thT} {is} [lovely|wonderful|quite odd]," said {F}. "I know," [said|replied] {H}, "{itS} {was} {pP}."',
        '"be careful with {tT}, {H}," said {F}. "I am always careful," said {H}, who was {trait}.',
    ],
}

ENDINGS = [
    "that is [the story of|how it went with] {H}, {tT} and {P}.",
    "so {H} learned {pP} that [a friend|patience|a kind word|a bit of luck] is worth more than {tT}.",
    "and whenever {H} saw {P} again, {h} thought of {F} and {tT}.",
    "in the evening {H} [told|wrote to] {hs} {kin} about {F}, {tT} and {P}.",
    "and why did it all happen? because {C}.",
    "{H} and {F} were {glad}, and {tT} {was} never [lost|forgotten] again.",
]

ANNOUNCEMENTS = [
    "this is a story about {H}, {aT} and {P}.",
    "a story about {H} and {F}, who [meet|find {aT}|talk] {pP}.",
    "here is what happened to {H} {pP}, all because {C}.",
    "a tale of {aT}, {P} and a {trait} {job} named {H}.",
]
REQUESTS = [
    "[tell me|write|make up] a story about {H}, {aT} and {P}.",
    "[tell me|write] a story that takes place {pP}, with {H} and {F}.",
    "please tell a [short|nice|little] story about {H} and {aT}.",
    "what happened to {H} {pP}?",
    "[I want|I would like] a story with {aT}, please. call the hero {H}.",
]
QUESTIONS = [
    ("who is the story about?", ["the story is about {H}.", "it is about {H} and {F}."]),
    ("where does it happen?", ["it happens {pP}.", "all of it happens {pP}."]),
    ("what thing is in the story?", ["the story has {aT} in it.", "there {is} {aT}."]),
    ("who is {H} with?", ["{H} is with {F}.", "with {F}."]),
    ("why did it happen?", ["it happened because {C}.", "because {C}."]),
]
