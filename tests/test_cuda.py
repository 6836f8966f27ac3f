"""On a GPU: inside captures, through replays, in the allocator, on two devices."""

import os
import subprocess
import sys
import warnings

import pytest
import torch
from helpers import geometry
from test_alias import DTYPES, VIEWS

import weakref_ext
from weakref_ext._demo import segments_of

pytestmark = pytest.mark.cuda
MIB = 2**20


@pytest.fixture
def no_sync():
    with warnings.catch_warnings(action="ignore"):  # it is a prototype, says torch
        torch.cuda.set_sync_debug_mode("error")
    yield
    torch.cuda.set_sync_debug_mode("default")


@pytest.mark.parametrize("name", [n for n in VIEWS if n not in ("meta", "numpy")])
def test_geometry_on_cuda(name, weaken):
    with torch.device("cuda"):
        source = VIEWS[name]()
    assert source.is_cuda
    alias = weaken([source])[0]
    assert geometry(alias) == geometry(source)
    assert torch.equal(alias, source)


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_every_dtype_on_cuda(dtype, weaken):
    source = torch.arange(64, dtype=torch.uint8, device="cuda").view(dtype)[1:]
    alias = weaken(source)
    assert geometry(alias) == geometry(source)


def test_no_synchronization(no_sync, weaken):
    source = torch.zeros(1000, device="cuda")
    torch.cuda._sleep(10_000_000)
    source.add_(1)
    weak = weaken((source, [source[1:], source.new_empty(0)]))
    assert weakref_ext.owner_alive(weak[0])


def test_two_originals_of_4_mib_one_nested_free_8_mib(weaken):
    """One-level copies free 4: the nested one stays strong."""
    torch.cuda.empty_cache()
    before = torch.cuda.memory_allocated()
    out = (torch.zeros(MIB, device="cuda"), [torch.zeros(MIB, device="cuda")])
    assert torch.cuda.memory_allocated() - before == 8 * MIB
    weak = weaken(out)
    del out
    assert torch.cuda.memory_allocated() == before
    assert len(weak[1]) == 1


def test_a_freed_nested_block_is_handed_out_again(weaken):
    torch.cuda.empty_cache()
    out = (torch.zeros(MIB, device="cuda"), [torch.zeros(MIB, device="cuda")])
    weak = weaken(out)
    addresses = {weak[0].data_ptr(), weak[1][0].data_ptr()}
    del out
    again = [torch.empty(MIB, device="cuda") for _ in range(2)]
    assert {tensor.data_ptr() for tensor in again} == addresses


def test_inside_a_capture_and_read_through_replays(weaken):
    x = torch.zeros(1024, device="cuda")
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        hidden = x + 1
        aux = [hidden * 2, (hidden * 3)[::2]]
        weak = weaken((hidden, aux))
        del hidden, aux
    assert not any(map(weakref_ext.owner_alive, [weak[0], *weak[1]]))
    for value in (5.0, -2.0):
        x.fill_(value)
        graph.replay()
        assert torch.equal(weak[0], x + 1)
        assert torch.equal(weak[1][0], (x + 1) * 2)
        assert torch.equal(weak[1][1], ((x + 1) * 3)[::2])


def test_an_error_inside_a_capture_leaves_it_valid(weaken):
    x = torch.zeros(16, device="cuda")
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        y = x + 1
        with pytest.raises(ValueError, match=r"NoneType'> at out\[1\]"):
            weaken((y, None))
        weak = weaken([y])
    graph.replay()
    assert torch.equal(weak[0], x + 1)


def test_captures_of_many_sizes_cost_the_largest_only(weaken):
    """SUM over sizes becomes MAX: vllm-project/vllm#9724's point, for nested outputs."""

    def pool_bytes(keep):
        torch.cuda.empty_cache()
        pool, kept, graphs = torch.cuda.graph_pool_handle(), [], []
        x = torch.zeros(8 * MIB, device="cuda")
        for rows in (8, 6, 4, 2):
            graphs.append(torch.cuda.CUDAGraph())
            with torch.cuda.graph(graphs[-1], pool=pool):
                y = x[: rows * MIB] + 1
                kept.append(keep((y, [y * 2])))
                del y
        return sum(s["total_size"] for s in segments_of(pool))

    floor, weak, strong = pool_bytes(lambda out: None), pool_bytes(weaken), pool_bytes(lambda out: out)
    assert weak == floor
    assert strong - floor >= 2 * (6 + 4 + 2) * 4 * MIB


def test_the_current_device_and_stream_do_not_matter(weaken):
    with torch.cuda.stream(torch.cuda.Stream()):
        source = torch.ones(8, device="cuda")
        torch.cuda.current_stream().synchronize()
    assert weaken(source).device == source.device


@pytest.mark.skipif(torch.cuda.device_count() < 2, reason="needs two GPUs")
def test_two_devices_keep_their_index(weaken):
    sources = [torch.full((4,), float(i), device=f"cuda:{i}") for i in (1, 0, 1)] + [torch.ones(2)]
    for current in (0, 1):
        with torch.cuda.device(current):
            weak = weaken((sources[0], sources[1:]))
            flat = [weak[0], *weak[1]]
            assert [t.device for t in flat] == [t.device for t in sources]
            assert all(torch.equal(a, b) for a, b in zip(flat, sources, strict=True))


class TestPool:
    """weak_ref_tensors(pool=...): weak only what the graph pool owns, by the allocator's own books."""

    @staticmethod
    def capture(body):
        pool = torch.cuda.graph_pool_handle()
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph, pool=pool):
            result = body(pool)
        return graph, result

    def test_only_the_pool_s_memory_becomes_weak(self):
        static = torch.ones(1024, device="cuda")
        host = torch.ones(2)
        eager = torch.ones(MIB, device="cuda")

        def body(pool):
            made = static * 2
            out = (made, [static, host, eager[5:]], {"view": made[3:], "empty": made.new_empty(0)})
            return made.data_ptr(), weakref_ext.weak_ref_tensors(out, pool=pool)

        graph, (address, weak) = self.capture(body)
        assert [weakref_ext.is_weak_ref(t) for t in (weak[0], weak[2]["view"], weak[2]["empty"])] == [True] * 3
        assert weak[0].data_ptr() == address
        assert weak[1][0] is static
        assert weak[1][1] is host
        assert not weakref_ext.is_weak_ref(weak[1][2])
        graph.replay()
        assert torch.equal(weak[2]["view"], (static * 2)[3:])

    def test_another_pool_s_memory_stays_strong(self):
        x = torch.ones(64, device="cuda")
        other, theirs = self.capture(lambda pool: x * 3)
        graph, weak = self.capture(lambda pool: weakref_ext.weak_ref_tensors((x * 2, theirs), pool=pool))
        assert weakref_ext.is_weak_ref(weak[0])
        assert weak[1] is theirs
        del other, graph

    def test_outside_can_be_refused_with_path_and_reason(self):
        x = torch.ones(64, device="cuda")

        def body(pool):
            with pytest.raises(ValueError, match=r"^out\[1\]\[0\] is outside the graph pool: its memory, on cpu,"):
                weakref_ext.weak_ref_tensors((x * 2, [torch.ones(1)]), pool=pool, outside="raise")
            with pytest.raises(ValueError, match=r"^out is outside the graph pool: its memory, on cuda:0"):
                weakref_ext.weak_ref_tensors(x, pool=pool, outside="raise")
            return weakref_ext.weak_ref_tensors(x * 5, pool=pool, outside="raise")

        graph, weak = self.capture(body)
        graph.replay()
        assert torch.equal(weak, x * 5)

    def test_a_freed_block_of_the_pool_is_still_the_pool_s(self):
        x = torch.ones(64, device="cuda")

        def body(pool):
            weak = weakref_ext.weak_ref_tensors(x * 2)
            return weakref_ext.weak_ref_tensors(weak, pool=pool, outside="raise")

        graph, weak = self.capture(body)
        graph.replay()
        assert torch.equal(weak, x * 2)

    def test_an_unknown_pool_owns_nothing(self):
        x = torch.ones(4, device="cuda")
        assert weakref_ext.weak_ref_tensors(x, pool=torch.cuda.graph_pool_handle()) is x

    @pytest.mark.parametrize("pool", [3, (1,), ("a", "b"), "pool"])
    def test_something_else_is_no_pool(self, pool):
        with pytest.raises(TypeError, match="must be a graph pool handle"):
            weakref_ext.weak_ref_tensors(torch.ones(1), pool=pool)

    @pytest.mark.parametrize(
        ("config", "expected"),
        [("expandable_segments:True", "weak"), ("backend:cudaMallocAsync", "NotImplementedError")],
    )
    def test_other_allocators_work_or_are_refused(self, config, expected):
        code = """
import torch, weakref_ext
x = torch.ones(4096, device="cuda")
pool = torch.cuda.graph_pool_handle()
graph = torch.cuda.CUDAGraph()
with torch.cuda.graph(graph, pool=pool):
    y = x * 2
    try:
        kept = weakref_ext.weak_ref_tensors([y, x], pool=pool)
        print("weak" if weakref_ext.is_weak_ref(kept[0]) and kept[1] is x else "wrong")
    except NotImplementedError as error:
        assert "cudaMallocAsync" in str(error)
        print("NotImplementedError")
"""
        env = {**os.environ, "PYTORCH_CUDA_ALLOC_CONF": config}
        done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, env=env)
        assert done.stdout.strip() == expected, done.stderr
