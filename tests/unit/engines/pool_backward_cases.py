"""Backward poolings that the tests of triton.pool_backward share, as pieces of a graph. Not a test module."""

from convoy.problem import SubgraphProblem

CASES = {
    # n, c, h, w, window, stride, padding, ceil mode, dtype
    "3x3 stride 1": (2, 40, 7, 6, (3, 3), (1, 1), (1, 1), False, "fp32"),
    "3x3 stride 2, ceil": (2, 24, 13, 12, (3, 3), (2, 2), (0, 0), True, "fp16"),
    "3x3 stride 2, padded": (1, 64, 12, 9, (3, 3), (2, 2), (1, 1), False, "fp32"),
    "2x2": (3, 7, 8, 8, (2, 2), (2, 2), (0, 0), False, "fp32"),
    "stride over window": (1, 33, 11, 11, (2, 2), (3, 3), (0, 0), False, "fp32"),
    "5x3 stride 2x1": (1, 16, 9, 10, (5, 3), (2, 1), (2, 1), False, "fp32"),
    "one window": (2, 130, 4, 4, (4, 4), (4, 4), (0, 0), False, "fp32"),
}


def _side(size, window, stride, padding, ceil_mode):
    whole = size + 2 * padding - window
    side = (whole + (stride - 1 if ceil_mode else 0)) // stride + 1
    return side - (ceil_mode and (side - 1) * stride >= size + padding)


def piece(name, dtype="", indices="i64"):
    """The piece of a case, in NHWC; indices of another dtype are widened in it."""
    n, c, h, w, window, stride, padding, ceil_mode, own = CASES[name]
    p, q = (_side(*along, ceil_mode) for along in zip((h, w), window, stride, padding, strict=True))
    dtype = dtype or own
    wide = "%v2" if indices == "i64" else "%v3"
    arguments = f"%v0, %v1, {window}, {stride}, {padding}, (1, 1), {ceil_mode}, {wide}"
    cast = [f"%v3: i64[{n},{c},{p},{q}] = aten._to_copy.default(%v2, dtype=dtype.i64)"] if indices != "i64" else []
    lines = [
        "graph 1",
        f"input %v0: {dtype}[{n},{c},{p},{q}]",
        f"input %v1: {dtype}[{n},{c},{h},{w}]",
        f"input %v2: {indices}[{n},{c},{p},{q}]",
        *cast,
        f"%v4: {dtype}[{n},{c},{h},{w}] = aten.max_pool2d_with_indices_backward.default({arguments})",
        "return %v4",
    ]
    return SubgraphProblem("\n".join(lines) + "\n", "nhwc")


AVERAGES = {
    # n, c, h, w, window, stride, padding, ceil mode, whether the padding counts, divisor
    "inception's": (2, 40, 7, 6, (3, 3), (1, 1), (1, 1), False, True, None),
    "without the padding": (1, 24, 6, 9, (3, 3), (1, 1), (1, 1), False, False, None),
    "densenet's": (2, 33, 8, 6, (2, 2), (2, 2), (0, 0), False, True, None),
    "last windows stand out": (1, 16, 8, 11, (3, 3), (2, 2), (1, 1), True, True, None),
    "the same, without the padding": (1, 16, 8, 11, (3, 3), (2, 2), (1, 1), True, False, None),
    "a divisor": (1, 8, 9, 9, (3, 2), (2, 3), (1, 0), False, True, 5),
}


def average_piece(name, dtype="fp32"):
    """The piece of an average's case, in NHWC."""
    n, c, h, w, window, stride, padding, ceil_mode, counts, divisor = AVERAGES[name]
    p, q = (_side(*along, ceil_mode) for along in zip((h, w), window, stride, padding, strict=True))
    arguments = f"%v0, %v1, {window}, {stride}, {padding}, {ceil_mode}, {counts}, {divisor}"
    lines = [
        "graph 1",
        f"input %v0: {dtype}[{n},{c},{p},{q}]",
        f"input %v1: {dtype}[{n},{c},{h},{w}]",
        f"%v2: {dtype}[{n},{c},{h},{w}] = aten.avg_pool2d_backward.default({arguments})",
        "return %v2",
    ]
    return SubgraphProblem("\n".join(lines) + "\n", "nhwc")
