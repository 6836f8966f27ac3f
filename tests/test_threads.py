"""Threads may walk, ask, drop and mutate at will: no crash, no lost reference, no alias of another tensor."""

import gc
import sys
import threading
import time
from collections import defaultdict
from collections.abc import Callable
from typing import Any

import pytest
import torch

import weakref_ext
from weakref_ext import owner_alive, weak_ref_tensors

THREADS = 32
ROUNDS = 200


@pytest.fixture(autouse=True)
def switch_often():
    """The GIL goes from thread to thread as often as it can."""
    interval = sys.getswitchinterval()
    sys.setswitchinterval(1e-6)
    yield
    sys.setswitchinterval(interval)


@pytest.fixture
def switch_inside_the_walk():
    """Leaves cyclic garbage. The next allocations in the walk collect it (up to CPython 3.11), one piece each, and its
    finalizer lets other threads run."""

    class Sleeper:
        def __init__(self, more=3):
            self.me, self.more = self, more

        def __del__(self):
            time.sleep(0)
            if self.more:
                Sleeper(self.more - 1)

    threshold = gc.get_threshold()
    gc.freeze()
    gc.set_threshold(1, 1000, 1000)
    yield Sleeper
    gc.set_threshold(*threshold)
    gc.unfreeze()


def in_threads(*bodies: Callable[[], None]) -> None:
    """Run 32 threads, body by body in turn, that start together; raise what the first one raised."""
    start = threading.Barrier(THREADS)
    errors: list[BaseException] = []

    def run(body: Callable[[], None]) -> None:
        start.wait()
        try:
            body()
        except BaseException as error:
            errors.append(error)

    threads = [threading.Thread(target=run, args=(bodies[i % len(bodies)],)) for i in range(THREADS)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(timeout=120)
        assert not thread.is_alive(), "a thread hangs"
    if errors:
        raise errors[0]


def leaves(out: Any) -> list[torch.Tensor]:
    if isinstance(out, torch.Tensor):
        return [out]
    return [leaf for item in out for leaf in leaves(item)] if isinstance(out, (list, tuple)) else []


def counts(tensors: list[torch.Tensor]) -> list[int]:
    return [sys.getrefcount(t) for t in tensors] + [
        torch._C._storage_Use_Count(t.untyped_storage()._cdata) for t in tensors
    ]


def test_threads_that_walk_one_structure_each_get_right_aliases_and_leave_no_reference(weaken):
    tensors = [torch.ones(4) for _ in range(20)]
    shared = (tensors[0], [*tensors, (tensors[1].view(2, 2), 3)], [tensors])
    before = counts(tensors)

    def body():
        addresses = [t.data_ptr() for t in leaves(shared)]
        for _ in range(ROUNDS):
            out = weaken(shared)
            assert [t.data_ptr() for t in leaves(out)] == addresses
            assert out[0] is out[1][0] is out[2][0][0]

    in_threads(body)
    assert counts(tensors) == before


def test_a_list_that_others_grow_and_shrink_gives_aliases_of_its_items_or_an_error(switch_inside_the_walk):
    tensors = [torch.full((2,), float(i)) for i in range(8)]
    addresses = {t.data_ptr() for t in tensors}
    shared: list[Any] = list(tensors)
    before = counts(tensors)
    walked, lost = [], []

    def walk():
        for _ in range(ROUNDS):
            switch_inside_the_walk()
            try:
                out = weak_ref_tensors([shared, (shared,)])
            except RuntimeError as error:
                lost.append(str(error))
                continue
            walked.append(len(out[0]))
            assert {t.data_ptr() for t in leaves(out)} <= addresses

    def mutate():
        for i in range(ROUNDS):
            shared.clear()
            shared.extend(tensors[: i % 9])
            shared[:] = tensors

    in_threads(walk, mutate)
    assert walked, "no walk ever finished"
    assert all("changed size during the walk" in text for text in lost)
    shared[:] = tensors
    assert counts(tensors) == before


def test_items_that_only_a_shrinking_list_holds_live_until_the_walk_is_past_them(weaken, switch_inside_the_walk):
    shared: list[Any] = []
    walked, lost = [], []

    def walk():
        for _ in range(ROUNDS):
            switch_inside_the_walk()
            try:
                out = weaken(shared)
            except RuntimeError as error:
                lost.append(str(error))
            else:
                walked.append([owner_alive(alias) for alias in leaves(out)])  # dead or not, its counts are readable

    def mutate():
        for _ in range(ROUNDS):
            shared[:] = [[torch.ones(2) for _ in range(4)] for _ in range(4)]
            time.sleep(0)
            del shared[1:]

    in_threads(walk, mutate)
    assert walked, "no walk ever finished"
    assert all("changed size during the walk" in text for text in lost)


@pytest.mark.parametrize("kind", [dict, lambda items: defaultdict(int, items)], ids=["dict", "defaultdict"])
def test_values_that_only_a_changing_dict_holds_live_until_the_walk_is_past_them(kind, switch_inside_the_walk):
    shared = kind({})
    walked, lost = [], []

    def walk():
        for _ in range(ROUNDS):
            switch_inside_the_walk()
            try:
                out = weak_ref_tensors(shared)
                weakref_ext.describe(shared)
            except RuntimeError as error:
                lost.append(str(error))
            else:
                walked.append([owner_alive(alias) for value in out.values() for alias in leaves(value)])

    def mutate():
        for i in range(ROUNDS):
            values = [[[torch.ones(2)] for _ in range(4)] for _ in range(3 + i % 2)]
            shared.clear()
            shared.update({(i, key): value for key, value in enumerate(values)})
            del values
            time.sleep(0)

    in_threads(walk, mutate)
    assert any(walked), "no walk ever met a tensor"
    assert all("changed size during the walk" in text for text in lost)


def test_the_owner_dies_once_while_other_threads_ask():
    for _ in range(20):
        box = [torch.ones(8)]
        alias = weak_ref_tensors(box[0])

        def ask(alias=alias):
            seen = [owner_alive(alias) for _ in range(50)]
            assert seen == sorted(seen, reverse=True), "a dead owner came back"

        in_threads(ask, ask, ask, box.clear)
        assert not owner_alive(alias)


def test_types_may_be_registered_while_others_walk():
    kinds = [type(f"Kind{i}", (), {}) for i in range(THREADS * 10)]
    names = iter(kinds)
    value = weakref_ext.LayerName("x")

    def register():
        for kind in [kind for _, kind in zip(range(10), names, strict=False)]:
            weakref_ext.register_passthrough(kind)
            instance = kind()
            assert weak_ref_tensors([instance])[0] is instance

    def walk():
        for _ in range(ROUNDS):
            assert weak_ref_tensors([value])[0] is value

    in_threads(register, walk)


def test_a_refusal_in_one_thread_is_not_seen_in_another():
    def fail():
        for _ in range(ROUNDS):
            with pytest.raises(ValueError, match=r"NoneType.* at out\[1\]\[0\]"):
                weak_ref_tensors([1, [None]])

    def succeed():
        for _ in range(ROUNDS):
            assert weak_ref_tensors([1, [True]]) == [1, [True]]

    in_threads(fail, succeed)
