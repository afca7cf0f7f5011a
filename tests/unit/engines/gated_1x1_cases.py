"""Squeeze-and-excitation blocks with the 1x1 convolution behind them, as pieces of a graph. Not a test module."""

from convoy.problem import SubgraphProblem
from tests.unit.engines import squeeze_excitation_cases

CASES = {
    # case of squeeze_excitation_cases by its sizes, filters, bias, nodes behind the convolution
    "efficientnet": ((2, 48, 12, 7, 9, "fp16", "silu", "sigmoid", (True, True)), 24, True, ""),
    "mobilenet": ((1, 72, 24, 5, 4, "fp16", "relu", "hardsigmoid", (True, True)), 40, True, "add"),
    "regnet": ((2, 96, 16, 6, 6, "bf16", "relu", "sigmoid", (True, True)), 56, True, "add relu"),
    "no biases": ((3, 24, 6, 5, 5, "bf16", "silu", "sigmoid", (False, False)), 16, False, "relu"),
    "no inner activation": ((1, 16, 4, 8, 8, "fp16", "none", "sigmoid", (True, False)), 8, True, ""),
    "many hidden": ((2, 24, 160, 2, 3, "fp16", "silu", "sigmoid", (True, True)), 88, True, ""),
    "one pixel": ((3, 32, 8, 1, 1, "fp16", "hardswish", "hardsigmoid", (False, True)), 16, True, ""),
    "many pixels": ((1, 16, 4, 40, 41, "fp16", "silu", "sigmoid", (True, True)), 16, True, "add"),
    "many channels": ((1, 344, 10, 3, 3, "bf16", "silu", "sigmoid", (True, True)), 72, True, ""),
    "most gates": ((1, 480, 20, 4, 4, "fp16", "silu", "sigmoid", (True, True)), 80, True, "add"),
    "one hidden": ((1, 8, 1, 3, 3, "fp16", "relu", "sigmoid", (True, True)), 8, True, ""),
}


def piece(name, dtype="", layout="nhwc", mean="mean"):
    """The piece of a case."""
    sizes, filters, bias, behind = CASES[name]
    text = squeeze_excitation_cases.block_of((*sizes, ""), dtype, mean)
    n, c, _, h, w, own = sizes[:6]
    dtype = dtype or own
    image = f"{dtype}[{n},{filters},{h},{w}]"
    lines = text.rstrip().split("\n")[:-1]
    if "add" in behind:
        lines.insert(2, f"input %r: {image}")
    places = [place for place, line in enumerate(lines) if line.startswith("constant")]
    constants = [f"constant %wp: {dtype}[{filters},{c},1,1]", *([f"constant %bp: {dtype}[{filters}]"] if bias else [])]
    lines[places[-1] + 1 : places[-1] + 1] = constants
    lines.append(f"%p: {image} = conv2d(%y, %wp, {'%bp' if bias else 'None'}, (1, 1), (0, 0), (1, 1), 1)")
    result = "%p"
    if "add" in behind:
        lines.append(f"%t: {image} = aten.add.Tensor(%p, %r)")
        result = "%t"
    if "relu" in behind:
        lines.append(f"%z: {image} = aten.relu.default({result})")
        result = "%z"
    return SubgraphProblem("\n".join([*lines, f"return {result}"]) + "\n", layout)
