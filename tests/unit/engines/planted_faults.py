"""Right convolutions with one fault planted each: what the checks of every engine must catch. Not a test module."""

import torch
from torch.nn.functional import conv2d, pad

from convoy.engines.activations import activate, finish
from convoy.engines.base import Executable
from convoy.measurement.oracle import conv_sizes


class Right(Executable):
    """A right convolution in the given buffers, in steps that a fault can replace one by one."""

    workspace_bytes = 4096

    def __init__(self, problem):
        self.problem = problem

    def launch(self, buffers, workspace):
        problem, y = self.problem, buffers.results[0]
        bias = buffers.constants[1] if problem.epilogue.bias else None
        residual = buffers.args[1] if problem.epilogue.residual else None
        workspace.fill_(7)
        self.write(y, self.sum(buffers.args[0], buffers.constants[0]), buffers, workspace)
        self.finish(y, bias, residual)

    def sum(self, x, weight):
        return conv2d(x, weight, None, *conv_sizes(self.problem))

    def write(self, y, found, buffers, workspace):
        y.copy_(found)

    def finish(self, y, bias, residual):
        finish(y, bias, residual, self.problem.epilogue.activation)


class PadsOnOneSide(Right):
    def sum(self, x, weight):
        problem = self.problem
        stride, (pad_h, pad_w), dilation, groups = conv_sizes(problem)
        return conv2d(pad(x, (0, 2 * pad_w, 0, 2 * pad_h)), weight, None, stride, 0, dilation, groups)


class PadsWithTheEdge(Right):
    def sum(self, x, weight):
        stride, (pad_h, pad_w), dilation, groups = conv_sizes(self.problem)
        padded = pad(x.float(), (pad_w, pad_w, pad_h, pad_h), mode="replicate").to(x.dtype)
        return conv2d(padded, weight, None, stride, 0, dilation, groups)


class SwapsPadding(Right):
    def sum(self, x, weight):
        stride, (pad_h, pad_w), dilation, groups = conv_sizes(self.problem)
        padded = pad(x, (pad_h, pad_h + 9, pad_w, pad_w + 9))
        found = conv2d(padded, weight, None, stride, 0, dilation, groups)
        return found[:, :, : self.problem.p, : self.problem.q]


class SwapsStrides(Right):
    def sum(self, x, weight):
        (stride_h, stride_w), padding, dilation, groups = conv_sizes(self.problem)
        far = pad(x, (0, 20 * stride_h, 0, 20 * stride_w))
        found = conv2d(far, weight, None, (stride_w, stride_h), padding, dilation, groups)
        return found[:, :, : self.problem.p, : self.problem.q]


class IgnoresDilation(Right):
    def sum(self, x, weight):
        stride, padding, _, groups = conv_sizes(self.problem)
        return conv2d(x, weight, None, stride, padding, 1, groups)[:, :, : self.problem.p, : self.problem.q]


class ShiftsGroups(Right):
    def sum(self, x, weight):
        return super().sum(x.roll(self.problem.c // self.problem.groups, 1), weight)


class MirrorsTheFilter(Right):
    def sum(self, x, weight):
        return super().sum(x, weight.flip(2, 3))


class TransposesTheFilter(Right):
    def sum(self, x, weight):
        return super().sum(x, weight.transpose(2, 3).contiguous())


class DropsTheLastChannel(Right):
    def sum(self, x, weight):
        x = x.clone()
        x[:, -1] = 0
        return super().sum(x, weight)


class DropsTheLastTap(Right):
    def sum(self, x, weight):
        weight = weight.clone()
        weight[:, :, -1, -1] = 0
        return super().sum(x, weight)


class SwapsImages(Right):
    def sum(self, x, weight):
        return super().sum(x.flip(0), weight)


class AccumulatesInHalf(Right):
    """Sums in fp16, as a kernel does whose accumulator is of the storage type."""

    def sum(self, x, weight):
        problem = self.problem
        unfolded = torch.nn.functional.unfold(
            x.float(),
            (problem.r, problem.s),
            (problem.dilation_h, problem.dilation_w),
            (problem.pad_h, problem.pad_w),
            (problem.stride_h, problem.stride_w),
        )
        rows = weight.float().flatten(1)
        total = torch.zeros(problem.n, problem.k, unfolded.shape[2], dtype=torch.float16)
        for index in range(rows.shape[1]):
            total += (rows[:, index, None] * unfolded[:, index, None, :]).half()
        return total.view(problem.y_spec.shape).to(x.dtype)


class RoundsProductsToTf32(Right):
    def sum(self, x, weight):
        return super().sum(_cut(x, 13), _cut(weight, 13))


class RoundsProductsToBf16(Right):
    def sum(self, x, weight):
        return super().sum(x.bfloat16().to(x.dtype), weight.bfloat16().to(x.dtype))


def _cut(x, bits):
    """fp32 with its last bits cut off; other dtypes as they are."""
    return (x.view(torch.int32) >> bits << bits).view(x.dtype) if x.dtype == torch.float32 else x


class MissesTheTail(Right):
    def write(self, y, found, buffers, workspace):
        y[:, :, : y.shape[2] // 4 * 4] = found[:, :, : y.shape[2] // 4 * 4]


class ZeroesTheTail(MissesTheTail):
    def write(self, y, found, buffers, workspace):
        y.zero_()
        super().write(y, found, buffers, workspace)


class LeavesOneUnwritten(Right):
    def write(self, y, found, buffers, workspace):
        kept = y[-1, -1, -1, -1].clone()
        y.copy_(found)
        y[-1, -1, -1, -1] = kept


class LeavesZerosUnwritten(Right):
    """Stores only where something is left after the activation."""

    def finish(self, y, bias, residual):
        super().finish(y, bias, residual)
        y.masked_fill_(y == 0, torch.nan)


class AddsToTheResult(Right):
    def write(self, y, found, buffers, workspace):
        y.add_(found)


class ReadsTheWorkspaceFirst(Right):
    def launch(self, buffers, workspace):
        stale = workspace[:4].view(torch.float32).clone()
        super().launch(buffers, workspace)
        buffers.results[0].add_(stale[0])


class WritesPastTheEnd(Right):
    def write(self, y, found, buffers, workspace):
        y.copy_(found)
        y.as_strided((1,), (1,), y.storage_offset() + y.numel()).fill_(1)


class WritesBeforeTheStart(Right):
    def write(self, y, found, buffers, workspace):
        y.copy_(found)
        y.as_strided((1,), (1,), y.storage_offset() - 1).fill_(1)


class OverrunsTheWorkspace(Right):
    def write(self, y, found, buffers, workspace):
        y.copy_(found)
        workspace.as_strided((1,), (1,), workspace.storage_offset() + workspace.numel()).fill_(1)


class WritesToItsInput(Right):
    def write(self, y, found, buffers, workspace):
        y.copy_(found)
        buffers.args[0].relu_()


class SwapsTwoOfItsInputs(Right):
    def write(self, y, found, buffers, workspace):
        y.copy_(found)
        row = buffers.args[0][0, 0, 0]
        row[:2] = row[:2].flip(0)


class WritesToTheWeight(Right):
    def write(self, y, found, buffers, workspace):
        y.copy_(found)
        buffers.constants[0].mul_(2)


class ReplacesTheBuffer(Right):
    def launch(self, buffers, workspace):
        super().launch(buffers, workspace)
        buffers.results[0] = buffers.results[0].clone()


class IgnoresTheBias(Right):
    def finish(self, y, bias, residual):
        super().finish(y, None, residual)


class BroadcastsTheBiasAlongWidth(Right):
    def finish(self, y, bias, residual):
        y.add_(bias[: y.shape[3]].repeat(y.shape[3])[: y.shape[3]])
        super().finish(y, None, residual)


class IgnoresTheResidual(Right):
    def finish(self, y, bias, residual):
        super().finish(y, bias, None)


class AddsTheResidualLast(Right):
    def finish(self, y, bias, residual):
        super().finish(y, bias, None)
        y.add_(residual)


class ForgetsTheActivation(Right):
    def finish(self, y, bias, residual):
        finish(y, bias, residual, "none")


class ActivatesTwice(Right):
    def finish(self, y, bias, residual):
        super().finish(y, bias, residual)
        y.copy_(activate(y - 0.5, self.problem.epilogue.activation))


FAULTS = [found for found in globals().values() if isinstance(found, type) and issubclass(found, Right)]
FAULTS.remove(Right)
