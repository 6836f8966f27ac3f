"""User code that runs during the walk, in flatten functions and finalizers, may change what is walked: no crash."""

import gc
from collections import OrderedDict, defaultdict, namedtuple

import pytest
import torch

import weakref_ext


@pytest.mark.parametrize("kind", [dict, OrderedDict, lambda **items: defaultdict(int, items)])
def test_a_dict_that_changes_during_the_walk_is_no_crash(kind):
    class Node:
        pass

    def flatten(node):
        out.clear() if node.clear else out.__setitem__(len(out), torch.ones(1))
        return [], None

    weakref_ext.register_container(Node, flatten, lambda children, context: Node())
    for clear in (True, False):
        out = kind(a=Node(), b=torch.ones(2), c=torch.ones(1))
        out["a"].clear = clear
        if kind is OrderedDict:
            weakref_ext.weak_ref_tensors(out)  # walks a copy of its items
        else:
            with pytest.raises(RuntimeError, match=r"^out changed size during the walk"):
                weakref_ext.weak_ref_tensors(out)


def test_a_list_that_changes_during_the_walk_is_no_crash(weaken):
    class Evil:
        pass

    weakref_ext.register_container(Evil, lambda node: (outer.clear() or [], None), lambda children, context: Evil())
    outer = [Evil(), torch.ones(1), [torch.ones(2)]]
    with pytest.raises(RuntimeError, match=r"^out changed size during the walk"):
        weaken(outer)


@pytest.mark.parametrize("fields", [("a",), 7], ids=["too few", "no tuple"])
def test_a_named_tuple_whose_fields_were_changed_is_an_error(fields, weaken):
    pair = namedtuple("Pair", "a b")
    out = [pair(1, torch.ones(1))]
    weaken(out)
    pair._fields = fields
    for refuses in (weaken, weakref_ext.describe, weakref_ext.nbytes):
        with pytest.raises(ValueError, match=r"Pair'> at out\[0\] has 2 elements, and its _fields are not their names"):
            refuses(out)


def test_a_type_that_is_registered_while_the_walk_finds_out_what_it_is_stays_registered():
    class Late(type):
        @property
        def _fields(cls):  # read by the look-up, which would otherwise say: a named tuple
            weakref_ext.register_container(cls, lambda box: (box[:1], None), lambda children, context: cls(children))
            return ("first", "second")

    class Box(tuple, metaclass=Late):
        __slots__ = ()

    for _ in range(2):
        assert weakref_ext.weak_ref_tensors(Box((1, 2))) == (1,)


@pytest.mark.parametrize("change", [lambda out: out.extend([3] * 50_000), list.clear], ids=["grows", "shrinks"])
def test_a_list_that_a_finalizer_changes_at_the_first_allocation_is_no_crash(change):
    """The walk makes room for the list as it saw it: making it may run the finalizer. Found by the fuzzer."""

    class Bomb:
        def __init__(self, target):
            self.target, self.me = target, self

        def __del__(self):
            change(self.target)

    weaken, out = weakref_ext.weak_ref_tensors, [1] * 40
    gc.collect()  # takes long enough for a thread that waits (tqdm's monitor) to free its lists right after
    gc.freeze()
    threshold = gc.get_threshold()
    gc.set_threshold(1)
    gc.disable()
    try:
        no_free_list = [[] for _ in range(200)]  # noqa: F841
        Bomb(out)
        due = [set() for _ in range(9)]  # noqa: F841 - a collection is, whatever was freed meanwhile
        gc.enable()
        result = weaken(out)  # the next allocation of a container collects the bomb
    except RuntimeError as error:
        result = str(error)
    finally:
        gc.set_threshold(*threshold)
        gc.enable()
        gc.unfreeze()
    assert len(out) in (0, 50_040), "the finalizer never ran"
    assert result in ("out changed size during the walk", [1] * 40)
