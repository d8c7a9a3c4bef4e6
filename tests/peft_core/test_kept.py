"""What is kept for arrays: found by identity, gone with any of them, and never another array's."""

import gc
import weakref

import numpy as np

from peft_core.kept import Kept


def frozen(value=0.0):
    x = np.full(3, value)
    x.flags.writeable = False
    return x


def test_found_for_the_same_arrays_and_key_alone():
    kept, a, b = Kept(), frozen(), frozen()
    kept.keep(("k",), (a, b), "value")
    assert kept.find(("k",), [a, b]) == "value"
    for key, arrays in [(("k",), (b, a)), (("k",), (a,)), (("l",), (a, b)), (("k",), (a, frozen()))]:
        assert kept.find(key, arrays) is None


def test_another_array_with_the_id_of_a_dead_one_finds_nothing():
    kept, a, b = Kept(), frozen(), frozen()
    kept.keep((), (a,), "a's")
    ((refs, value),) = kept._entries.values()
    kept._entries = {((), id(b)): (refs, value)}  # as if b had been given a's id before the entry went
    assert kept.find((), (b,)) is None


def test_an_entry_goes_with_any_of_its_arrays_and_leaves_nothing_on_the_others():
    kept, stays = Kept(), frozen()
    for _ in range(5):
        kept.keep((), (stays, other := frozen()), "value")
        assert weakref.getweakrefcount(stays) == 1
        del other
        gc.collect()
        assert not len(kept) and not weakref.getweakrefcount(stays)


def test_an_array_seen_writable_is_forgotten_and_the_others_are_not():
    kept, a, b, c = Kept(), frozen(), frozen(), frozen()
    for arrays in ((a, b), (b,), (c,)):
        kept.keep((), arrays, "value")
    b.flags.writeable = True
    assert kept.find((), (b,)) is None
    kept.forget(b)
    b.flags.writeable = False
    assert kept.find((), (a, b)) is None and kept.find((), (b,)) is None and kept.find((), (c,)) == "value"
