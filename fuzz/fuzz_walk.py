"""Coverage-guided fuzzing of the walk over Python objects: run by scripts/fuzz.sh.

The bytes are a program for a small stack machine that builds a structure: tensors, views, shared and self-containing
containers, values to refuse. It may also leave cyclic garbage whose finalizer changes a list of the structure while the
walk is in it. Without such a finalizer the result must be what the reference walker says; with one, a result or one of
the documented errors. No reference may be left behind in either case.
"""

import ctypes
import gc
import sys
from collections import OrderedDict
from collections.abc import Callable
from typing import Any, NamedTuple

import atheris
import torch
from atheris import core_with_libfuzzer

import weakref_ext
from weakref_ext import _C, LayerName

BASE = torch.arange(24.0)
TENSORS = [
    BASE,
    BASE[4:],
    BASE.view(4, 6).t(),
    BASE.as_strided((2, 2), (7, 3), 5),
    torch.ones(1).expand(5, 5),
    torch.tensor(3),
    torch.empty(0, 3),
    torch.ones(2, dtype=torch.complex64).conj(),
    torch.ones(3, dtype=torch.float8_e4m3fn),
    torch.ones(2, requires_grad=True),
    torch.empty(2, 2, device="meta"),
    torch.nn.Parameter(torch.ones(2)),
]


class ListSubclass(list):  # type: ignore[type-arg]
    pass


REFUSED = [None, 1.5, "s", b"b", object(), {1}, ListSubclass(), torch.eye(2).to_sparse(), object]
LAYER = LayerName("layer")
MAX_LEVELS = 1000  # of containers
MAX_SIZE = 300  # leaves: shared containers grow exponentially
SHOWN = 20  # levels that a path in an error shows


class Pair(NamedTuple):
    a: Any
    b: Any


CONTAINERS = (list, tuple, dict, OrderedDict, Pair)


def children(value: Any) -> list[tuple[str, Any]]:
    """(how an error writes the step, the child) of a container."""
    if isinstance(value, dict):
        return [(f"[{key!r}]", item) for key, item in value.items()]
    names = [".a", ".b"] if type(value) is Pair else [f"[{i}]" for i in range(len(value))]
    return list(zip(names, value, strict=True))


def like(value: Any, items: list[Any]) -> Any:
    """A container of the type and keys of `value` that holds `items`."""
    if isinstance(value, dict):
        return type(value)(zip(value, items, strict=True))
    return Pair(*items) if type(value) is Pair else type(value)(items)


class Refused(Exception):
    pass


def reference(value: Any, path: Any = None, depth: int = 0) -> Any:
    """The walk in ten lines: the structure rebuilt with the tensors themselves, or the path of what is refused."""
    if isinstance(value, torch.Tensor) and value.layout is torch.strided:
        return value
    if isinstance(value, int) or type(value) is LayerName:
        return value
    if type(value) not in CONTAINERS:
        raise Refused(path)
    if depth >= MAX_LEVELS:
        raise RecursionError
    mapped = [reference(item, (path, step), depth + 1) for step, item in children(value)]
    return like(value, mapped)


def written(path: Any) -> str:
    """The end of `path`, as errors show it."""
    text = ""
    for _ in range(SHOWN):
        if path is None:
            return "out" + text
        path, step = path
        text = step + text
    return ("out" if path is None else "out[...]") + text


def check(out: Any, expected: Any, aliases: dict[int, torch.Tensor]) -> None:
    if not isinstance(expected, torch.Tensor):
        assert type(out) is type(expected)
        if type(expected) not in CONTAINERS:
            assert out is expected
            return
        for (step, item), (expected_step, source) in zip(children(out), children(expected), strict=True):
            assert step == expected_step
            check(item, source, aliases)
        return
    assert type(out) is torch.Tensor
    assert weakref_ext.is_weak_ref(out)
    assert aliases.setdefault(id(expected), out) is out, "one tensor gave two aliases"
    assert out.data_ptr() == expected.data_ptr()
    assert (out.shape, out.stride()) == (expected.shape, expected.stride())
    assert out.storage_offset() == expected.storage_offset()
    assert (out.dtype, out.is_conj()) == (expected.dtype, expected.is_conj())
    assert not out.requires_grad


class Bomb:
    """Cyclic garbage that changes `target` when the garbage collector, run by an allocation of the walk, frees it."""

    def __init__(self, target: Any, action: int) -> None:
        self.target, self.action, self.me = target, action, self

    def __del__(self) -> None:
        actions = DICT_ACTIONS if isinstance(self.target, dict) else ACTIONS
        actions[self.action % len(actions)](self.target)


ACTIONS: list[Callable[[list[Any]], Any]] = [
    lambda target: target.clear(),
    lambda target: target.pop() if target else None,
    lambda target: target.append(BASE.view(2, 12)),  # freed by nobody but the list
    lambda target: target.__setitem__(slice(None), [torch.ones(1)] * len(target)),
    lambda target: target.insert(0, None),
    lambda target: target.append(weakref_ext.weak_ref_tensors([BASE, [BASE]])),  # the walk within the walk
    lambda target: target.reverse(),
]


DICT_ACTIONS: list[Callable[[dict[Any, Any]], Any]] = [
    lambda target: target.clear(),
    lambda target: target.popitem() if target else None,
    lambda target: target.__setitem__(len(target), BASE.view(2, 12)),
    lambda target: target.update({key: torch.ones(1) for key in target}),
]


def build(data: bytes) -> tuple[Any, list[Any], bool]:
    """(the structure, every list and dict in it, whether a finalizer is armed)"""
    stack: list[tuple[Any, int]] = []  # value and size
    lists: list[Any] = []  # and dicts: what a finalizer can change
    made: list[tuple[Any, int]] = []  # containers, to be shared
    armed = False

    def push(value: Any, size: int) -> None:
        if isinstance(value, list | dict):
            lists.append(value)
        made.append((value, size))
        stack.append((value, size))

    for byte in data:
        op, arg = byte & 7, byte >> 3
        if op == 0:
            stack.append((TENSORS[arg % len(TENSORS)], 1))
        elif op == 1:  # a tensor that only the structure holds
            stack.append((BASE[arg % 24 :], 1))
        elif op == 2 and arg < 20:
            stack.append(((arg, arg % 2 == 0, LAYER)[arg % 3], 1))
        elif op == 2:
            taken = [stack.pop() for _ in range(min(arg - 19, len(stack)))]
            size = 1 + sum(size for _, size in taken)
            values = [value for value, _ in taken]
            if size > MAX_SIZE:
                continue
            if arg % 3 == 0 and len(values) == 2:
                push(Pair(*values), size)
            else:
                keys = [f"k{i}" if i % 2 else i for i in range(len(values))]
                push((dict if arg % 3 == 1 else OrderedDict)(zip(keys, values, strict=True)), size)
        elif op in (3, 4):
            taken = [stack.pop() for _ in range(min(arg, len(stack)))]
            size = 1 + sum(size for _, size in taken)
            if size <= MAX_SIZE:
                push((list if op == 3 else tuple)(value for value, _ in taken), size)
        elif op == 5 and made:
            stack.append(made[arg % len(made)])
        elif op == 6:
            if arg < 24:
                stack.append((REFUSED[arg % len(REFUSED)], 1))
            elif arg < 30 and stack:  # deep, up to beyond the limit
                value, size = stack.pop()
                levels = MAX_LEVELS + 1 if arg == 29 else arg
                for level in range(levels):
                    value = [value] if level % 2 else (value,)
                stack.append((value, size + levels))
            elif lists:  # contains itself, in front: the walk must not go through all the rest at every level
                target = lists[arg % len(lists)]
                target.update(me=target) if isinstance(target, dict) else target.insert(0, target)
        elif op == 7 and lists:
            Bomb(lists[arg % len(lists)], arg // 4)
            armed = True
    return ([value for value, _ in stack] if len(stack) != 1 else stack[0][0]), lists, armed


def references() -> list[int]:
    return [sys.getrefcount(tensor) for tensor in TENSORS] + [
        torch._C._storage_Use_Count(tensor.untyped_storage()._cdata) for tensor in TENSORS
    ]


@atheris.instrument_func  # type: ignore[untyped-decorator]
def test_one(data: bytes) -> None:
    run(data)
    gc.collect(0)
    now = references()
    assert now == BEFORE, f"references left behind: {now}, before: {BEFORE}"


def run(data: bytes) -> None:
    walk = torch.ops.weakref_ext.weak_ref_tensors if data[:1] > b"\x7f" else weakref_ext.weak_ref_tensors
    structure, lists, armed = build(data[1:])
    expected: Any = None
    if not armed:
        try:
            expected = reference(structure)
        except (Refused, RecursionError) as error:
            expected = error.with_traceback(None)
    gc.set_threshold(1)  # an allocation in the walk collects the garbage
    try:
        out, failure = walk(structure), None
    except (ValueError, RuntimeError) as error:  # RecursionError is a RuntimeError
        out, failure = None, error.with_traceback(None)
    gc.set_threshold(0)
    if isinstance(expected, Refused):
        where = written(expected.args[0])
        assert isinstance(failure, ValueError), failure
        assert f" at {where}" in str(failure), (where, failure)
    elif isinstance(expected, RecursionError):
        assert isinstance(failure, RecursionError), failure
    elif not armed:
        assert failure is None, failure
        check(out, expected, {})
    for made in lists:
        made.clear()  # one that contains itself


def add_native_coverage() -> None:
    """Hand the counters of fuzz/coverage.cpp to libFuzzer; without them it sees the Python code only."""
    native = ctypes.CDLL(_C.__file__)
    count = ctypes.c_size_t.in_dll(native, "weakref_ext_counter_count").value
    counters = (ctypes.c_uint8 * count).in_dll(native, "weakref_ext_counters")
    pcs = (ctypes.c_size_t * (2 * count)).in_dll(native, "weakref_ext_pcs")
    for i in range(count):
        pcs[2 * i] = i + 1
    fuzzer = ctypes.CDLL(core_with_libfuzzer.__file__)
    for table, register in (
        (counters, fuzzer.__sanitizer_cov_8bit_counters_init),
        (pcs, fuzzer.__sanitizer_cov_pcs_init),
    ):
        start = ctypes.addressof(table)
        register(ctypes.c_void_p(start), ctypes.c_void_p(start + ctypes.sizeof(table)))


if __name__ == "__main__":
    sys.setrecursionlimit(10 * MAX_LEVELS)
    gc.freeze()
    gc.set_threshold(0)
    add_native_coverage()
    for _ in range(2):  # the first call imports and caches
        BEFORE = references()
        run(b"\x80" + bytes(range(0, 96, 8)))
        run(b"\x00" + bytes(range(0, 96, 8)))
    BEFORE = references()
    atheris.Setup(sys.argv, test_one)
    atheris.Fuzz()
