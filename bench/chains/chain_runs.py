"""Blocks on the device: buffers, graphs, checks and replays of `chains.py`."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from bench.chains.blocks import Block
from bench.layers.layer_timing import captured

from convoy.engines.base import Buffers, Executable
from convoy.engines.hopper.chains.bottleneck import ENGINE
from convoy.engines.hopper.chains.bottleneck_problem import layers_of, subgraph_of
from convoy.engines.hopper.chains.bottleneck_tile_config import Bottleneck
from convoy.measurement.accuracy import judge, make_data
from convoy.measurement.oracle import oracle


class Launches:
    """Executables that run one after the other on rotating sets of buffers, in one graph."""

    def __init__(self, chain: Sequence[tuple[Executable, Sequence[Buffers]]]) -> None:
        self.chain = chain
        self.rooms = [
            torch.empty(one.workspace_bytes, dtype=torch.uint8, device="cuda") if one.workspace_bytes else None
            for one, _ in chain
        ]
        self.graph = captured(self.launch)

    def launch(self, index: int) -> None:
        """One block."""
        for (executable, sets), room in zip(self.chain, self.rooms, strict=True):
            executable.launch(sets[index % len(sets)], room)


def fused_buffers(block: Block, executable: Executable, sets: int) -> list[Buffers]:
    """Rotating buffers of a block."""
    problem = subgraph_of(block.sizes)
    made: list[Buffers] = []
    constants = executable.pack(make_data(problem, 1, "normal", "cuda").constants)
    for seed in range(sets):
        args = make_data(problem, seed, "normal", "cuda").args
        made.append(Buffers(args, [_result(block.sizes)], constants))
    return made


def layers_chain(block: Block, chosen: Sequence[Executable], sets: int) -> list[tuple[Executable, list[Buffers]]]:
    """The three layers on rotating buffers: each reads what the one before wrote, the last one adds the residual."""
    layers = layers_of(subgraph_of(block.sizes).text)
    whole = make_data(subgraph_of(block.sizes), 1, "normal", "cuda").constants
    found: list[tuple[Executable, list[Buffers]]] = [(executable, []) for executable in chosen]
    packed = [one.pack(whole[2 * i : 2 * i + 2]) for i, one in enumerate(chosen)]
    for seed in range(sets):
        args = make_data(subgraph_of(block.sizes), seed, "normal", "cuda").args
        value = args[0]
        for i, (layer, (_, own)) in enumerate(zip(layers, found, strict=True)):
            residual = (args[-1],) if layer.epilogue.residual else ()
            y = torch.empty(layer.y_spec.shape, dtype=value.dtype, device="cuda")
            y = y.contiguous(memory_format=torch.channels_last)
            own.append(Buffers((value, *residual), [y], packed[i]))
            value = y
    return found


def _result(sizes: Bottleneck) -> torch.Tensor:
    dtype = {"fp16": torch.float16, "bf16": torch.bfloat16}[sizes.dtype]
    y = torch.full((sizes.n, sizes.k, sizes.h, sizes.w), float("nan"), dtype=dtype, device="cuda")
    return y.contiguous(memory_format=torch.channels_last)


class Check:
    """Whether a setting's results are right: integers exactly, normal data within the bound."""

    def __init__(self, block: Block) -> None:
        self.block, self.problem = block, subgraph_of(block.sizes)
        self.integer, self.normal = (make_data(self.problem, 3, kind, "cuda") for kind in ("integer", "normal"))
        self.exact, self.near = oracle(self.problem, self.integer), oracle(self.problem, self.normal)

    def wrong(self, executable: Executable) -> str:
        """What is wrong; empty: nothing."""
        y = _result(self.block.sizes)
        executable.launch(Buffers(self.integer.args, [y], executable.pack(self.integer.constants)), None)
        differ = y.double() != self.exact[0].to(y.device)
        if bool(differ.any()):
            places = differ.nonzero()
            return f"integers differ at {len(places)} of {y.numel()} places, first (n, c, h, w) {places[0].tolist()}"
        return judge(executable, ENGINE.family, self.problem, self.normal, "normal", exact=self.near).reason


def same_bits(launches: Launches, replays: int) -> str:
    """Replay a graph beside other work; whether each set of buffers has the same bits at the end as at the beginning."""
    sets = launches.chain[0][1]
    launches.graph.replay()
    torch.cuda.synchronize()
    before = [buffers.results[0].clone() for buffers in sets if buffers.results[0] is not None]
    side, work = torch.cuda.Stream(), torch.randn(2048, 2048, device="cuda", dtype=torch.float16)
    for index in range(replays):
        launches.graph.replay()
        if index % 4 == 0:
            with torch.cuda.stream(side):
                torch.mm(work, work)
    torch.cuda.synchronize()
    same = all(
        torch.equal(old, new.results[0]) for old, new in zip(before, sets, strict=True) if new.results[0] is not None
    )
    return f"{replays}, the same bits" if same else "DIFFERENT BITS"
