"""What a trace hooks, and that nothing stays hooked; the picture; churn."""

import re
import subprocess
import sys
import warnings
from types import SimpleNamespace
from typing import ClassVar

import pytest
import torch
from fake_graphs import FakeBackend
from made_up_pool import POOL
from sanitizer_fixtures import capture, kinds, pool, trace, traced

from weakref_ext import sanitizer, testing, weak_ref_tensors
from weakref_ext.cudagraph import BreakableCUDAGraphWrapper, CUDAGraphWrapper, _backend, _recording, eager_break
from weakref_ext.sanitizer import Kind, _report, _trace
from weakref_ext.sanitizer._hooks import switched_on
from weakref_ext.sanitizer._trace import Trace
from weakref_ext.sanitizer._verdict import Action, Event


class TestHooks:
    def test_everything_is_undone(self):
        names = ("capture_begin", "capture_end", "replay", "reset")
        methods = [torch.cuda.CUDAGraph.__dict__[name] for name in names]
        with pytest.raises(KeyError), sanitizer.guard() as trace:  # noqa: PT012
            assert trace is not None
            assert [torch.cuda.CUDAGraph.__dict__[name] for name in names] != methods
            with sanitizer.trace() as inner:
                assert inner is trace
            assert _recording.captured is not None
            raise KeyError
        assert [torch.cuda.CUDAGraph.__dict__[name] for name in names] == methods
        assert _recording.captured is None
        assert sanitizer.active() is None
        weak_ref_tensors(torch.ones(1))

    def test_torchs_graphs_tell_the_trace(self, monkeypatch, pool):
        class TorchGraph:  # the methods of torch.cuda.CUDAGraph that can be patched
            calls: ClassVar[list] = []

            def capture_begin(self, pool=None, capture_error_mode="global"):
                self.calls.append((pool, capture_error_mode))

            def capture_end(self):
                self.calls.append("end")

            def replay(self):
                self.calls.append("replay")

            def reset(self):
                self.calls.append("reset")

        monkeypatch.setattr(torch.cuda, "CUDAGraph", TorchGraph)
        monkeypatch.setattr(torch.cuda, "graph_pool_handle", lambda: POOL)
        with switched_on(Trace(1000, pool)) as trace:
            first, second = TorchGraph(), TorchGraph()
            first.capture_begin(capture_error_mode="relaxed")
            tensor = pool.alloc()
            out = weak_ref_tensors(tensor)
            sanitizer.capture("inside", first, out)
            pool.give_back(tensor)
            first.capture_end()
            assert kinds(trace) == [Kind.PINNED]
            second.capture_begin(POOL)
            pool.alloc()
            second.capture_end()
            sanitizer.capture("other", second)
            second.replay()
            assert trace.find_stale(out)[1].capture == "other"
            first.replay()
            assert trace.find_stale(out) is None
            second.reset()
            assert kinds(trace) == [Kind.PINNED]
        assert TorchGraph.calls == [(POOL, "relaxed"), "end", (POOL, "global"), "end", "replay", "replay", "reset"]
        TorchGraph.calls.clear()
        TorchGraph().capture_begin()
        assert TorchGraph.calls == [(None, "global")]

    def test_events_are_read_as_the_native_part_writes_them(self, monkeypatch):
        row = _trace._EVENT.pack(0x7F0000000200, 96, 5, 0, 1, 2, 6)
        assert len(row) == 48
        native = SimpleNamespace(trace_start=lambda n: None, trace_position=lambda: 8, trace_read=lambda n: (7, row))
        monkeypatch.setattr(_trace, "_C", native)
        source = _trace.Allocator()
        assert (source.position(), source.read(3)) == (0, _trace.Packed(3, b""))
        source.start(4)
        assert source.position() == 8
        event = Event(7, Action.SEGMENT_UNMAP, 2, 0x7F0000000200, 96, 5, (0, 1))
        events = source.read(3)
        assert (events.first, len(events), list(events)) == (7, 1, [event])

    def test_events_are_unpacked_only_when_somebody_asks(self, trace, pool):
        graphs = [capture(trace, pool, value) for value in range(3)]
        for graph, out in graphs:
            sanitizer.capture("same", graph, out)
            graph.replay()
        assert trace.history.end == len(pool.events)
        assert trace.history.events == []
        assert kinds(trace) == [Kind.SHARED] * 3
        assert trace.history.events == pool.events

    def test_a_trace_that_is_over_does_not_read_the_next_ones_events(self, monkeypatch):
        native = SimpleNamespace(trace_start=lambda n: None, trace_stop=lambda: None, trace_read=lambda n: (9, b""))
        monkeypatch.setattr(_trace, "_C", native)
        source = _trace.Allocator()
        source.start(4)
        source.stop()
        assert source.read(3) == _trace.Packed(3, b"")

    def test_a_build_without_cuda_says_so_at_the_first_capture(self, monkeypatch):
        monkeypatch.setattr(_trace, "_C", SimpleNamespace())
        with pytest.raises(RuntimeError, match="was built without its CUDA part"):
            _trace.Allocator().start(4)

    def test_weak_refs_come_out_the_same_while_someone_listens(self, weaken, trace):
        out = (torch.ones(2), [torch.ones(3), 7])
        weak = weaken(out)
        assert weak[0].data_ptr() == out[0].data_ptr()
        assert trace._born[weak[1][0]] == len(trace._source.events)
        with pytest.raises(ValueError, match="NoneType"):
            weaken((out[0], None))

    def test_wrappers_register_themselves(self, monkeypatch, trace):
        backend = FakeBackend()
        begin, end = backend.begin, backend.end

        def traced_begin(pool, mode):
            graph = begin(pool, mode)
            trace.begin(graph, pool, lambda: None)
            return graph

        backend.begin = traced_begin
        backend.end = lambda graph, **more: trace.end(graph, lambda: end(graph, **more))
        monkeypatch.setattr(_backend, "BACKEND", backend)

        def step(x):
            return x * 2, [x + 1]

        by_shape, by_key = CUDAGraphWrapper(step), CUDAGraphWrapper(step, key=len, outputs="strong")
        broken = BreakableCUDAGraphWrapper(lambda x: step(eager_break(step)(x)[0]))
        for wrapped in (by_shape, by_key, broken):
            wrapped(torch.ones(4))
            wrapped(torch.ones(2))
        names = [f"{step.__qualname__}({text})" for text in ("[4]", "[2]", "key=4", "key=2")]
        names += [f"{broken.fn.__qualname__}({text})" for text in ("[4]", "[2]")]
        assert [span.capture for span in trace.spans] == [*names[:5], names[4], *[names[5]] * 2]
        assert [(v.capture, v.path) for v in trace.report()] == [(n, p) for n in names for p in ("out[0]", "out[1][0]")]

    def test_the_environment_switches_it_on(self):
        code = "import weakref_ext; print(len(weakref_ext.sanitizer.report()))"
        run = [sys.executable, "-W", "error", "-c", code]
        done = subprocess.run(run, capture_output=True, text=True, env={"WEAKREF_EXT_SANITIZER": "1"})
        assert (done.stdout, done.stderr) == ("0\n", "")
        done = subprocess.run(run, capture_output=True, text=True, env={})
        assert "no attribute 'sanitizer'" in done.stderr


class TestPicture:
    def report(self, trace, pool):
        graphs = []
        for name, blocks in (("size 8", 6), ("size 4", 3), ("size 1", 1)):
            graph, out = capture(trace, pool, 1, blocks)
            sanitizer.capture(name, graph, out)
            graphs.append(graph)
        eager = torch.ones(4)
        sanitizer.capture("raw", graphs[0], weak_ref_tensors(eager))
        return trace.report()

    def test_every_capture_and_every_kind_is_named(self, trace, pool, tmp_path):
        pytest.importorskip("matplotlib")
        report = self.report(trace, pool)
        with warnings.catch_warnings(action="ignore"):  # of matplotlib's own
            report.picture(tmp_path / "pool.svg")
            report.picture(tmp_path / "pool.png")
        text = re.sub(r"\s+", " ", (tmp_path / "pool.svg").read_text())
        assert (tmp_path / "pool.png").stat().st_size > 10_000
        for shown in (
            "size 4",
            "size 1",
            "raw",
            "shared",
            "overwrites an output",
            "not in the pool",
            "block handed out",
        ):
            assert f"<!-- {shown} -->" in text

    def test_outputs_over_the_same_memory_are_drawn_side_by_side(self):
        assert _report._lanes([(0, 4), (0, 4), (4, 8), (2, 6), (8, 9)]) == [0, 1, 0, 2, 0]

    def test_nothing_to_draw_is_no_error(self, trace, tmp_path):
        pytest.importorskip("matplotlib")
        trace.report().picture(tmp_path / "pool.png")

    def test_without_matplotlib_it_says_what_to_install(self, trace, pool, monkeypatch, tmp_path):
        monkeypatch.setitem(sys.modules, "matplotlib.figure", None)
        with pytest.raises(ImportError, match=r"pip install 'weakref_ext\[bench\]'"):
            self.report(trace, pool).picture(tmp_path / "pool.png")


class TestChurn:
    @pytest.fixture(autouse=True)
    def backend(self, monkeypatch):
        monkeypatch.setattr(_backend, "BACKEND", FakeBackend())

    def test_what_stays_right_is_not_listed(self):
        x = torch.ones(64)
        assert testing.churn(lambda: (x * 2, [x + 1, 7])) == []
        assert testing.churn(lambda: x * float("nan")) == []

    def test_what_changes_is_listed_with_its_path_and_the_moment(self):
        x, calls = torch.ones(64), []

        def counts():
            calls.append(1)
            return x * 2, [x * len(calls)]

        assert testing.churn(counts) == [("out[1][0]", "replay")]

        def late():  # the second capture writes to what the first one keeps
            calls.append(1)
            return x * 2, y if len(calls) < 3 else y.add_(1)

        y = torch.ones(64)
        calls.clear()
        assert testing.churn(late) == [("out[1]", "churn")]

    def test_a_refused_output_leaves_the_capture(self):
        with pytest.raises(ValueError, match=r"NoneType.* at out\[1\]"):
            testing.churn(lambda: (torch.ones(1), None))
