"""Engines that are right, slow, wrong, or break in every way that an engine can: the tests' extra engines (`id=module:Class`)."""

import ctypes
import os
import time
from pathlib import Path

import torch

from convoy.engines.base import Engine, Executable
from convoy.errors import CompileError
from convoy.problem import Knobs, LinearProblem
from convoy.support import Support


class _Run(Executable):
    def __init__(self, problem, body, workspace_bytes=0):
        self.problem, self.body, self.workspace_bytes = problem, body, workspace_bytes
        self.launches = 0

    def launch(self, buffers, workspace):
        self.launches += 1
        self.body(self, buffers, workspace)


def compute(run, buffers, workspace):
    torch.addmm(buffers.constants[1], buffers.args[0], buffers.constants[0].t(), out=buffers.results[0])


class Right(Engine):
    """y = x weight^T + bias, as it should be."""

    id = "right"
    family = "gemm"

    def supports(self, problem, target):
        fits = isinstance(problem, LinearProblem) and problem.epilogue.bias and not problem.epilogue.residual
        return Support.yes() if fits else Support.no("does linear layers with a bias only")

    def build(self, problem, knobs, target):
        return _Run(problem, self.body)

    @staticmethod
    def body(run, buffers, workspace):
        compute(run, buffers, workspace)


class Knobbed(Right):
    """Right, with six settings; the larger `delay_us`, the slower."""

    id = "knobbed"

    def space(self, problem, target):
        return [Knobs.of(delay_us=delay) for delay in (4000, 0, 1000, 2000, 3000, 5000)]

    def build(self, problem, knobs, target):
        def body(run, buffers, workspace):
            compute(run, buffers, workspace)
            time.sleep(knobs.integer("delay_us") * 1e-6)

        return _Run(problem, body)


class Slow(Right):
    id = "slow"

    @staticmethod
    def body(run, buffers, workspace):
        compute(run, buffers, workspace)
        time.sleep(0.02)


class Scratch(Right):
    """Right, with a workspace that it uses."""

    id = "scratch"

    def build(self, problem, knobs, target):
        def body(run, buffers, workspace):
            assert workspace.data_ptr() % 256 == 0
            workspace.fill_(7)
            compute(run, buffers, workspace)

        return _Run(problem, body, workspace_bytes=1000)


class Chatty(Right):
    """Prints what looks like answers of the worker."""

    id = "chatty"

    @staticmethod
    def body(run, buffers, workspace):
        print('{"done": true}', flush=True)
        os.write(1, b'{"row": {}}\n')
        compute(run, buffers, workspace)


class Random(Right):
    id = "random"

    def build(self, problem, knobs, target):
        run = _Run(problem, compute)
        run.deterministic = False
        return run


class Hang(Right):
    id = "hang"

    def build(self, problem, knobs, target):
        while True:
            time.sleep(60)


class HangWhenTimed(Right):
    """Right at first; hangs once it is timed in rounds."""

    id = "hang_when_timed"

    @staticmethod
    def body(run, buffers, workspace):
        compute(run, buffers, workspace)
        if run.launches > 5:
            time.sleep(600)


class Exit(Right):
    id = "exit"

    @staticmethod
    def body(run, buffers, workspace):
        os._exit(5)


class Segfault(Right):
    id = "segfault"

    @staticmethod
    def body(run, buffers, workspace):
        ctypes.string_at(16)


class CrashInCompany(Right):
    """Ends the process, but only where another engine of this module has run before: what spoilt memory looks like."""

    id = "crash_in_company"

    @staticmethod
    def body(run, buffers, workspace):
        if Spoiler.ran:
            os._exit(6)
        compute(run, buffers, workspace)


class Spoiler(Right):
    id = "spoiler"
    ran = False

    @staticmethod
    def body(run, buffers, workspace):
        Spoiler.ran = True
        compute(run, buffers, workspace)


class Overrun(Right):
    id = "overrun"

    @staticmethod
    def body(run, buffers, workspace):
        compute(run, buffers, workspace)
        y = buffers.results[0]
        ctypes.memset(y.data_ptr() + y.numel() * y.element_size(), 0, 4)


class OverrunScratch(Right):
    id = "overrun_scratch"

    def build(self, problem, knobs, target):
        def body(run, buffers, workspace):
            compute(run, buffers, workspace)
            ctypes.memset(workspace.data_ptr() - 8, 0, 8)

        return _Run(problem, body, workspace_bytes=64)


class Wrong(Right):
    """Forgets the bias."""

    id = "wrong"

    @staticmethod
    def body(run, buffers, workspace):
        torch.mm(buffers.args[0], buffers.constants[0].t(), out=buffers.results[0])


class Untouched(Right):
    id = "untouched"

    @staticmethod
    def body(run, buffers, workspace):
        """Writes nothing."""


class Scribbles(Right):
    id = "scribbles"

    @staticmethod
    def body(run, buffers, workspace):
        compute(run, buffers, workspace)
        buffers.args[0].mul_(2)


class SpoilsWeights(Right):
    id = "spoils_weights"

    @staticmethod
    def body(run, buffers, workspace):
        compute(run, buffers, workspace)
        buffers.constants[0].neg_()


class SpoilsLater(Right):
    """Right while it is watched; writes to its input from the third launch on."""

    id = "spoils_later"

    @staticmethod
    def body(run, buffers, workspace):
        compute(run, buffers, workspace)
        if run.launches > 2:
            buffers.args[0].mul_(2)


class NoCompiler(Right):
    id = "no_compiler"

    def build(self, problem, knobs, target):
        log = "\n".join(f"error line {i}" for i in range(100))
        raise CompileError(self.id, "the compiler said no", log)


class BadBuild(Right):
    id = "bad_build"

    def build(self, problem, knobs, target):
        raise KeyError("block_m")


class Greedy(Right):
    id = "greedy"

    def build(self, problem, knobs, target):
        raise MemoryError("a terabyte")


class GreedyTorch(Right):
    """Asks torch for more memory than any machine has."""

    id = "greedy_torch"

    @staticmethod
    def body(run, buffers, workspace):
        torch.empty(1 << 60, dtype=torch.uint8)


class Raises(Right):
    id = "raises"

    @staticmethod
    def body(run, buffers, workspace):
        raise ZeroDivisionError("by nought")


class RaisesWhenTimed(Right):
    id = "raises_when_timed"

    @staticmethod
    def body(run, buffers, workspace):
        if run.launches > 5:
            raise ValueError("tired")
        compute(run, buffers, workspace)


class RaisesWhenAsked(Right):
    id = "raises_when_asked"

    def supports(self, problem, target):
        raise AttributeError("no such field")


class Oracle(Right):
    id = "oracle"
    family = "reference"


class Builder(Right):
    """Leaves a file for each build, named after the process, in the folder that the environment names; knob 13 crashes."""

    id = "builder"
    trusted = False

    def space(self, problem, target):
        return [Knobs.of(tile=tile) for tile in (1, 2, 3, 13, 4, 5)]

    def build(self, problem, knobs, target):
        tile = knobs.integer("tile")
        folder = os.environ.get("CONVOY_TEST_BUILDS")
        if folder:
            (Path(folder) / f"{os.getpid()}-{tile}").touch()
        if tile == 13:
            os._exit(9)
        return super().build(problem, knobs, target)


class DeviceBuilder(Builder):
    """The same with builds that need the device; its files end with the devices that the process sees."""

    id = "device-builder"
    builds_on_device = True

    def build(self, problem, knobs, target):
        seen = os.environ.get("CUDA_VISIBLE_DEVICES", "all")
        (Path(os.environ["CONVOY_TEST_BUILDS"]) / f"{os.getpid()}-{knobs.integer('tile')}-{seen}").touch()
        return Right.build(self, problem, knobs, target)


def extra(*classes):
    """`Settings.engines` entries of these classes."""
    return tuple(f"{cls.id}={__name__}:{cls.__name__}" for cls in classes)
