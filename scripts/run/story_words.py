"""The words that the quick start's stories are made of: who, what, where, why, and how they look.

Nouns come with what agreement needs: names with their pronouns, things with their number, places with a preposition.
"""

from __future__ import annotations


def _words(text: str) -> list[str]:
    return text.split()


SHE = _words(
    """
    Ada Alma Amina Anja Bella Carla Clara Dora Edda Elena Elsa Emma Eva Fatima Flora Freya Gerda Greta Hanna Hilda
    Ida Ines Iris Jana Jette Kira Lena Lotte Lucy Mara Maya Mila Nadia Nora Olga Pia Rosa Ruth Sara Selma Tara Thea
    Tilda Uma Vera Wanda Yara Zoe
    """
)
HE = _words(
    """
    Adam Ali Anton Arno Ben Boris Carl Cyril David Dario Edgar Emil Enzo Felix Finn Georg Gustav Hamid Henri Hugo
    Ivan Jakob Jonas Karim Kurt Leo Linus Luca Mark Milo Nico Nils Omar Oscar Otto Paul Pedro Ravi Rolf Sami Simon
    Theo Timo Tom Udo Viktor Walter Yusuf
    """
)

THINGS = _words(
    """
    anchor apple axe bag ball basket bell blanket boat book bottle bowl box bucket button cake camera candle carpet
    chair clock coat coin compass cup drum feather flag flute fork guitar hammer hat helmet horn jar jug kettle key
    kite knife ladder lamp lantern letter map mask medal melon mirror mug net orange paddle parcel pear pencil
    picture pillow pipe plate pot pumpkin puppet puzzle ring robot rope ruler sack saw scarf shell shovel sled spoon
    stamp stone stool sword ticket torch toy trumpet tulip umbrella vase violin wagon watch wheel whistle
    """
)
PAIRS = _words(
    """
    beads boots cards cherries gloves marbles mittens nuts paints pearls plums ribbons sandals scissors seeds shoes
    skates slippers socks stockings
    """
)
LOOKS = _words(
    """
    ancient big black blue bright broken brown clean dusty empty fine golden green grey heavy huge large light
    little long new odd old orange painted pale pink plain purple red round shiny short silver small soft striped
    strange tiny warm white wide wooden yellow
    """
)

PLACES = {
    "at": "airport bakery bazaar castle fair farm ferry gate harbour inn lighthouse market mill museum port pump "
    "school shop station theatre well",
    "in": "attic barn cave cellar church city courtyard forest garden hall kitchen library meadow orchard palace park "
    "shed stable tower tunnel valley village workshop yard",
    "on": "beach bridge cliff hill island mountain pier roof stairs terrace",
    "by": "brook fence fountain lake pond river road sea shore wall",
}

TIMES = """one [cold|warm|grey|bright|windy|quiet|foggy|rainy|sunny] [morning|evening|afternoon|day|night]
on a [cold|warm|grey|bright|windy|quiet|foggy|rainy|sunny] [morning|evening|day|night]
[early|late] [on Monday|on Tuesday|on Friday|on Sunday|in spring|in summer|in autumn|in winter]
[last|that] [week|spring|summer|autumn|winter]
[a week|two days|a month|an hour] [before the feast|after the storm|after the harvest|before winter]""".splitlines()

CAUSES = """it had [rained|snowed|stormed] [all night|since dawn|for three days|without a break]
the [old|north|narrow|wooden] [road|gate|bridge|door|path] was [closed|broken|blocked|locked|flooded]
the [church|town|kitchen|station] clock had [stopped|struck too late|lost an hour]
the [wind|storm|river|tide] had [carried the fence away|broken a window|covered the path|torn the rope]
the [baker|miller|teacher|farmer|captain|doctor|gardener|tailor] was [ill|away|asleep|late|in a hurry]
a [fox|goat|dog|cat|crow|mouse|horse] had [run off with the bag|eaten the bread|jumped over the wall|hidden a key]
the [feast|race|concert|wedding|fair|parade] [was about to begin|had been moved|would last all week|was very near]
the [train|ferry|bus|boat] [had left early|was full|came too late|did not come]
nobody had [swept the floor|locked the door|lit the fire|fed the hens|read the sign]
there was [no light|too much noise|a lot of smoke|hardly any room|ice on the ground]""".splitlines()

TRAITS = _words(
    """
    brave calm careful cheerful clever curious friendly gentle honest hungry kind lazy lonely loud nervous patient
    polite proud quick shy silly stubborn thoughtful tired wise young
    """
)
UNHAPPY = _words(
    """
    afraid angry bored lonely nervous sad sorry tired upset worried
    """
)
HAPPY = _words(
    """
    cheerful excited glad grateful happy hopeful merry proud relieved surprised
    """
)
JOBS = _words(
    """
    baker captain carpenter cook doctor farmer fisher gardener miller nurse painter sailor singer tailor teacher
    """
)
KIN = _words(
    """
    aunt brother cousin father friend grandfather grandmother mother neighbour sister uncle
    """
)
