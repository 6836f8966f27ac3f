"""What the sanitizer's tests share: a trace over a made-up pool."""

from contextlib import contextmanager

import pytest
from made_up_pool import Graph, Pool

from weakref_ext import weak_ref_tensors
from weakref_ext.sanitizer._hooks import switched_on
from weakref_ext.sanitizer._trace import Trace


@contextmanager
def traced(pool):
    with switched_on(Trace(1000, pool)) as trace:
        yield trace


@pytest.fixture
def pool():
    return Pool()


@pytest.fixture
def trace(pool):
    with traced(pool) as trace:
        yield trace


def capture(trace, pool, value, blocks=1, keep=weak_ref_tensors):
    """A graph that fills one block with ``value``, and what is kept of it, while its block goes back to the pool."""

    def body():
        tensor = pool.alloc(blocks)
        kept = keep(tensor)
        pool.give_back(tensor)
        return kept, pool.kernel(tensor, value)

    graph = Graph(trace, body)
    return graph, graph.out


def kinds(trace):
    return [verdict.kind for verdict in trace.report()]
