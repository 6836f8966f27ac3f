"""CUDAGraphWrapper on a GPU: right where torch.cuda.graph with unchecked weak refs goes wrong.

Tests named after a public report do both, so that they are known to see the fault.
"""

import gc

import pytest
import torch
from raw_graphs import N, capture, equal, full, strong

from weakref_ext import is_weak_ref
from weakref_ext._demo import segments_of
from weakref_ext.cudagraph import CUDAGraphWrapper

pytestmark = pytest.mark.cuda


@pytest.fixture
def pool():
    return torch.cuda.graph_pool_handle()


def pool_bytes(handle):
    return sum(s["total_size"] for s in segments_of(handle))


def model(x):
    h = x * 2
    return h + 1, [h * 3, (h - 1, 7)]


def same(out, expected):
    (h, (a, (b, n))), (eh, (ea, (eb, en))) = out, expected
    return torch.equal(h, eh) and torch.equal(a, ea) and torch.equal(b, eb) and n == en


@pytest.mark.parametrize("outputs", ["weak", "strong", "copy"])
def test_every_call_equals_eager(outputs):
    wrapped = CUDAGraphWrapper(model, outputs=outputs)
    for n in (N, 1000, N, 1000, 7):
        x = torch.randn(n, device="cuda")
        assert same(wrapped(x), model(x))


def test_outputs_are_weak_and_pin_nothing(pool):
    wrapped = CUDAGraphWrapper(model, pool=pool)
    h, (a, (b, _)) = wrapped(full(1))
    assert all(is_weak_ref(t) for t in (h, a, b))
    assert wrapped.report()[0].pinned_bytes == 0
    assert wrapped.report()[0].output_bytes == 3 * 4 * N
    assert wrapped.report()[0].pool_bytes == pool_bytes(pool) > 0


def test_an_output_outside_the_pool_stays_strong(pool):
    weights = [full(3)]
    wrapped = CUDAGraphWrapper(lambda x: (x * 2, weights[0]), pool=pool)
    product, returned = wrapped(full(1))
    assert is_weak_ref(product)
    assert returned is weights[0]
    assert wrapped.report()[0].pinned_bytes == 4 * N


def test_tensorrt_llm_17010_an_output_is_read_after_another_graph_replayed(pool):
    x, y = full(1), full(2)
    first, out = capture(lambda: x * 10, pool)
    second, _ = capture(lambda: y * 10, pool)
    first.replay()
    assert equal(out, 10)
    second.replay()
    assert equal(out, 20)  # the corruption: the second graph was given the first one's block

    for outputs in ("strong", "copy"):
        wrapped = CUDAGraphWrapper(lambda t: t * 10, outputs=outputs)
        one, other = wrapped(full(1)), wrapped(full(2, N - 64))
        assert equal(one, 10)
        assert equal(other, 20)


def test_tensorrt_llm_17010_an_earlier_graphs_temporary_overwrites_a_strong_output(pool):
    x = full(1)
    first, _ = capture(lambda: (x + 4).sum(), pool)
    second, out = capture(lambda: x * 10, pool, strong)
    second.replay()
    assert equal(out, 10)
    first.replay()
    assert equal(out, 5)  # the corruption: strong only protects from what is captured later

    shared = torch.cuda.graph_pool_handle()
    sums = CUDAGraphWrapper(lambda t: (t + 4).sum(), pool=shared)
    wrapped = CUDAGraphWrapper(lambda t: t * 10, pool=shared, outputs="strong")
    sums(full(1))
    out = wrapped(full(1))
    sums(full(1))
    assert equal(out, 10)


def test_pytorch_176295_an_output_is_the_next_calls_input(pool):
    x = full(5)
    first, state = capture(lambda: x * 2, pool)
    second, out = capture(lambda: x * 3 + state, pool)
    first.replay()
    second.replay()
    assert equal(out, 30)  # the corruption: x * 3 took the block of the state, 15 + 15 for 15 + 10

    shared = torch.cuda.graph_pool_handle()
    one = CUDAGraphWrapper(lambda x: x * 2, pool=shared)
    two = CUDAGraphWrapper(lambda x, state: x * 3 + state, pool=shared)
    for _ in range(3):
        assert equal(two(full(5), one(full(5))), 25)

    wrapped, state, expected = CUDAGraphWrapper(model), full(1), full(1)
    for _ in range(4):
        state, expected = wrapped(state)[1][0], model(expected)[1][0]
        assert torch.equal(state, expected)


def test_vllm_9724_the_pool_costs_the_largest_size_not_the_sum():
    row = 16 * N  # 64 MiB
    inputs = {rows: full(rows, row * rows) for rows in (4, 3, 2, 1)}

    def raw(keep):
        pool = torch.cuda.graph_pool_handle()
        made = [capture(lambda x=x: x + 1, pool, keep) for x in inputs.values()]
        return pool_bytes(pool), made

    total, made = raw(strong)
    assert total >= 10 * row * 4  # the report: the sum over the sizes
    del made

    wrapped = CUDAGraphWrapper(lambda x: x + 1, copy_inputs=False)
    wrapped.capture([1, 2, 3, 4], lambda rows: [inputs[rows]], progress=False)
    assert pool_bytes(wrapped.pool) <= 4 * row * 4 + 2 * 2**20
    for rows in (1, 4, 2, 3):
        assert equal(wrapped(inputs[rows]), rows + 1)


def test_smaller_sizes_fit_into_the_pool_of_the_largest():
    wrapped = CUDAGraphWrapper(model, capture_sizes=[N // 2, N, N - 64], make_inputs=lambda n: [full(0, n)])
    wrapped.capture(progress=False)
    grown = [row.pool_bytes for row in wrapped.report()]
    assert grown[0] > 0
    assert grown[1:] == [0, 0]


def test_a_given_pool_can_be_captured_into_again_when_its_graphs_are_gone(pool):
    wrapped = CUDAGraphWrapper(model, pool=pool)
    wrapped(full(1))
    wrapped.clear()
    assert same(wrapped(full(2)), model(full(2)))
    del wrapped
    gc.collect()
    assert same(CUDAGraphWrapper(model, pool=pool)(full(3)), model(full(3)))


def test_a_given_up_pool_that_holds_a_tensor_is_refused_with_the_way_out(pool):
    graph, out = capture(lambda: full(1) * 2, pool, strong)
    del graph
    with pytest.raises(RuntimeError, match="drop every tensor that it still holds first, or take a new pool"):
        CUDAGraphWrapper(model, pool=pool)(full(1))
    del out
    assert same(CUDAGraphWrapper(model, pool=pool)(full(1)), model(full(1)))


def test_clear_gives_the_memory_back():
    torch.cuda.empty_cache()
    before = torch.cuda.memory_reserved()
    wrapped = CUDAGraphWrapper(lambda x: x + 1, outputs="strong")
    wrapped(full(1, 64 * N))
    wrapped.clear()
    torch.cuda.empty_cache()
    assert torch.cuda.memory_reserved() <= before + 4 * 2**20
    assert equal(wrapped(full(1)), 2)


def test_random_numbers_differ_between_replays():
    wrapped = CUDAGraphWrapper(lambda x: x + torch.rand_like(x), outputs="copy")
    assert not torch.equal(wrapped(full(0)), wrapped(full(0)))


def sync():
    torch.cuda.current_stream().synchronize()


def refuse():
    raise KeyError("mine")


@pytest.mark.parametrize("fail", [sync, refuse], ids=["cuda", "python"])
@pytest.mark.parametrize("point", range(3))
@pytest.mark.parametrize("entries", [0, 1])
def test_a_failed_capture_leaves_the_device_usable(fail, point, entries):
    armed = [False]

    def fragile(x):
        for step in range(3):
            if armed[0] and step == point and torch.cuda.is_current_stream_capturing():
                fail()
            x = x * 2
        return x + torch.rand_like(x) * 0

    stream = torch.cuda.current_stream()
    wrapped = CUDAGraphWrapper(fragile)
    for n in range(entries):
        wrapped(full(1, N + 64 * n))
    armed[0] = True
    with pytest.raises((RuntimeError, KeyError)):
        wrapped(full(1, 500))
    armed[0] = False
    assert len(wrapped.report()) == entries
    assert torch.cuda.current_stream() == stream
    assert torch.rand(4, device="cuda").shape == (4,)  # the generator left the capture
    held = full(1, 64 * N)
    reserved = torch.cuda.memory_reserved()
    del held
    torch.cuda.empty_cache()
    assert torch.cuda.memory_reserved() < reserved  # the allocator left the capture
    for value, n in ((1, 500), (3, N), (5, 500)):
        assert equal(wrapped(full(value, n)), 8 * value)


def test_a_pool_is_reusable_after_a_failure_that_still_holds_its_tensors(pool):
    held = []

    def leaks(x):
        held.append(x * 2)
        raise KeyError("mine")

    failed = CUDAGraphWrapper(leaks, pool=pool, warmup=0)
    with pytest.raises(KeyError):
        failed(full(1))
    wrapped = CUDAGraphWrapper(lambda x: x * 3, pool=pool)
    assert equal(wrapped(full(2)), 6)


def test_a_capture_inside_torchs_own_is_refused(pool):
    wrapped = CUDAGraphWrapper(lambda x: x * 2)
    x, graph = full(1), torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph, pool=pool):
        y = x + 1
        with pytest.raises(RuntimeError, match="Nested captures are not supported"):
            wrapped(x)
    graph.replay()
    assert equal(y, 2)


def test_a_cpu_argument_is_refused():
    with pytest.raises(ValueError, match=r"args\[1\] is a cpu tensor"):
        CUDAGraphWrapper(lambda x, y: x * y)(full(1), torch.tensor(2.0))
