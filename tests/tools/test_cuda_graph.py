"""Pools of CUDA graphs, with a double for torch's, and their end."""

import subprocess
import sys
from types import SimpleNamespace

import pytest

from duotone.tools import cuda_graph

SCRIPT = """
import sys
import types
from duotone.tools.cuda_graph import CudaGraph

def held():
    graph = CudaGraph.__new__(CudaGraph)
    graph._held = types.SimpleNamespace()  # what takes it would ask for more
    return graph

graph = held()
del graph
print("the end", file=sys.stderr)
graph = held()
"""


class PoolDouble:
    """A pool that notes how many there are, and how many went back."""

    made = released = 0

    def __init__(self, device: str) -> None:
        type(self).made += 1
        self.device = device

    def release(self) -> None:
        type(self).released += 1


@pytest.fixture
def doubles(monkeypatch: pytest.MonkeyPatch) -> type[PoolDouble]:
    kind = type("PoolDouble", (PoolDouble,), {})
    monkeypatch.setattr(cuda_graph, "_Pool", kind)
    monkeypatch.setattr(cuda_graph, "_POOLS", cuda_graph._Pools())
    return kind


def capture() -> SimpleNamespace:
    """A graph as `CudaGraph` makes one."""
    with cuda_graph._LOCK:
        cuda_graph._POOLS.take_back(release=False)
        return SimpleNamespace(pool=cuda_graph._POOLS.take("cuda:0"), destroy=lambda: None)


def test_captures_after_a_change_take_the_pools_of_those_before(doubles: type[PoolDouble]) -> None:
    for _ in range(30):
        graphs = [capture() for _ in range(8)]
        with cuda_graph.before_captures():
            for graph in graphs:
                cuda_graph._POOLS.give(graph)
    assert (doubles.made, doubles.released) == (8, 0)


def test_pools_go_back_once_no_graph_lives(doubles: type[PoolDouble]) -> None:
    graphs = [capture() for _ in range(8)]
    for graph in graphs[:-1]:
        cuda_graph._POOLS.give(graph)
    assert doubles.released == 0
    cuda_graph._POOLS.give(graphs[-1])
    assert doubles.released == 8 - cuda_graph.MOST_FREE


def test_the_end_of_the_process_destroys_no_graph():
    """One that dies before is destroyed, which these lack the means for."""
    done = subprocess.run([sys.executable, "-c", SCRIPT], capture_output=True, text=True)
    before, at_the_end = done.stderr.split("the end\n")
    assert "destroy" in before
    assert at_the_end == ""
