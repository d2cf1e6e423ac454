"""torch's optimizers as sides of a benchmark. The only place that needs torch."""

# pyright: reportMissingImports=false

import functools
import os
from collections.abc import Callable
from typing import Any

import jax
import numpy as np
import torch

from .kinds import LEARNING_RATE
from .libraries import Facts
from .loops import Loop

GRAPH_WARM_UP_STEPS = 3  # as torch asks for before a capture


def torch_sides(
    name: str, arguments: dict[str, Any], params: Any, gradients: Any
) -> dict[str, Callable[[], "TorchSide"]]:
    """By variant, what makes an optimizer of `torch.optim` on copies of the leaves.

    Args:
        name: such as "AdamW".
        arguments: beside the learning rate.
        params: a tree of JAX's arrays.
        gradients: likewise.
    """
    make = getattr(torch.optim, name)
    pairs = list(zip(jax.tree.leaves(params), jax.tree.leaves(gradients), strict=True))
    on_gpu = jax.default_backend() == "gpu"

    def side(capture: bool = False, **variant: Any) -> TorchSide:
        leaves = []
        for value, gradient in pairs:
            leaf = torch.nn.Parameter(_tensor(value, on_gpu))
            leaf.grad = _tensor(gradient, on_gpu)
            leaves.append(leaf)
        optimizer = make(leaves, lr=LEARNING_RATE, **arguments, **variant)
        return CapturedSide(optimizer) if capture else TorchSide(optimizer)

    variants: dict[str, dict[str, Any]] = {"fused": {"fused": True}, "foreach": {"foreach": True}}
    if on_gpu:
        # SGD has no counter, so it needs no such argument.
        capturable = {} if name == "SGD" else {"capturable": True}
        variants["fused, CUDA graph"] = {"capture": True, "fused": True, **capturable}
    else:
        variants["default"] = {}  # a loop over the leaves; on a GPU that is foreach
    return {variant: functools.partial(side, **options) for variant, options in variants.items()}


def use_all_cores() -> int:
    """Sets torch's threads to the cores that this process may run on; returns how many."""
    torch.set_num_threads(len(os.sched_getaffinity(0)))
    return torch.get_num_threads()


def _tensor(array: jax.Array, on_gpu: bool) -> torch.Tensor:
    tensor = torch.from_numpy(np.array(array))
    return tensor.cuda() if on_gpu else tensor


class _Pending:
    """What `jax.block_until_ready` waits for."""

    def __init__(self, on_gpu: bool) -> None:
        self.on_gpu = on_gpu

    def block_until_ready(self) -> None:
        if self.on_gpu:
            torch.cuda.synchronize()


class TorchSide:
    """An optimizer whose steps are started one by one; on a CPU they end before they return."""

    def __init__(self, optimizer: torch.optim.Optimizer) -> None:
        self.optimizer = optimizer
        self.on_gpu = self._leaves()[0].is_cuda

    def _leaves(self) -> list[torch.Tensor]:
        return self.optimizer.param_groups[0]["params"]

    def __call__(self) -> _Pending:
        """Starts a step."""
        self.optimizer.step()
        return _Pending(self.on_gpu)

    def loop(self, loop: Loop) -> Callable[[], Any] | None:
        """None: without a graph, each step is the host's to start."""
        return None

    def facts(self) -> Facts:
        """The memory of a step on a GPU; nothing else is known."""
        self.optimizer.step()  # makes the moments
        if not self.on_gpu:
            return Facts("cpu", None, None, None)
        torch.cuda.synchronize()
        torch.cuda.reset_peak_memory_stats()
        before = torch.cuda.memory_allocated()
        self.optimizer.step()
        torch.cuda.synchronize()
        more = torch.cuda.max_memory_allocated() - before
        own = [t for state in self.optimizer.state.values() for t in state.values()]
        own += [t for leaf in self._leaves() for t in (leaf, leaf.grad)]
        size = sum(t.nbytes for t in own if isinstance(t, torch.Tensor) and t.is_cuda)
        return Facts("cuda", None, None, (size + more) / 2**20)


class CapturedSide(TorchSide):
    """An optimizer whose step is captured into a CUDA graph, which a call replays."""

    def __init__(self, optimizer: torch.optim.Optimizer) -> None:
        super().__init__(optimizer)
        stream = torch.cuda.Stream()
        stream.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(stream):
            for _ in range(GRAPH_WARM_UP_STEPS):
                optimizer.step()
        torch.cuda.current_stream().wait_stream(stream)
        self.graph = self._capture(1)

    def _capture(self, steps: int) -> torch.cuda.CUDAGraph:
        graph = torch.cuda.CUDAGraph()
        # XLA's threads may allocate meanwhile, which the usual mode takes for an error of ours.
        with torch.cuda.graph(graph, capture_error_mode="thread_local"):
            for _ in range(steps):
                self.optimizer.step()
        return graph

    def __call__(self) -> _Pending:
        """Replays a step."""
        self.graph.replay()
        return _Pending(self.on_gpu)

    def loop(self, loop: Loop) -> Callable[[], Any]:
        """Replays a graph of several steps."""
        graph = self._capture(loop.steps)

        def replay() -> _Pending:
            graph.replay()
            return _Pending(self.on_gpu)

        return replay
