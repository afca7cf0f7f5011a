"""The kernel IR: what `verify` refuses, what the parser refuses, and that the walk writes every non-zero once."""

import random
from dataclasses import replace

import numpy as np
import pytest

from convoy.engines.sparse_weights.codegen.kernel_ir import Group, Load, MaskKernel, Segment, verify
from convoy.engines.sparse_weights.codegen.kernel_text import parse_kernel, print_kernel
from convoy.engines.sparse_weights.codegen.lower_mask import Cut, partition, used_channels, used_taps, walk
from convoy.engines.sparse_weights.codegen.plane_layout import lay_out
from convoy.errors import InputError
from tests.unit.engines.conv_cases import SHAPES
from tests.unit.engines.pruned_cases import PATTERNS, pattern

SMALL = MaskKernel(
    lanes=2,
    vectors=2,
    positions=8,
    plane=16,
    planes=2,
    span=8,
    values=4,
    groups=(
        Group(
            (2, 0),
            (Segment(True, (Load(0, ((0, 0), (1, 1))), Load(20, ((1, 2),)))), Segment(False, (Load(3, ((0, 3),)),))),
        ),
        Group((1,), (Segment(True, ()),)),
    ),
)


def made(problem, nonzero, cut, vectors=1, lanes=4, images=3, rows=4, align=1):
    layout = lay_out(
        problem,
        used_taps(nonzero),
        used_channels(nonzero, problem.groups),
        tile=lanes * vectors,
        images=images,
        rows=rows,
        align=align,
    )
    return layout, *walk(nonzero, layout, lanes, cut)


def test_a_kernel_is_printed_as_it_is_read():
    verify(SMALL, 3)
    text = print_kernel(SMALL)
    assert parse_kernel(text) == SMALL
    assert text.splitlines()[8:12] == ["group 2 0", "segment zero", "load 0", "fma 0 0"]


def with_piece(segment, at=0):
    segments = list(SMALL.groups[0].segments)
    segments[at] = segment
    return replace(SMALL, groups=(replace(SMALL.groups[0], segments=tuple(segments)), SMALL.groups[1]))


FIRST = SMALL.groups[0].segments[0]


@pytest.mark.parametrize(
    "kernel",
    [
        replace(SMALL, lanes=0),
        replace(SMALL, positions=9),
        replace(SMALL, values=5),
        replace(SMALL, planes=1),
        replace(SMALL, groups=SMALL.groups[:1]),
        replace(SMALL, groups=(*SMALL.groups, Group((2,), (Segment(True, ()),)))),
        replace(SMALL, groups=(*SMALL.groups[:1], Group((1,), ()))),
        with_piece(replace(FIRST, begins=False)),
        with_piece(replace(FIRST, loads=(Load(0, ((0, 0), (2, 1))), *FIRST.loads[1:]))),
        with_piece(replace(FIRST, loads=(Load(0, ((0, 1), (1, 0))), *FIRST.loads[1:]))),
        with_piece(replace(FIRST, loads=(Load(-1, ((0, 0), (1, 1))), *FIRST.loads[1:]))),
        with_piece(replace(FIRST, loads=(FIRST.loads[0], Load(25, ((1, 2),))))),
        with_piece(replace(FIRST, loads=(FIRST.loads[0], Load(0, ((1, 2),))))),
        with_piece(replace(FIRST, loads=(FIRST.loads[0], FIRST.loads[1], Load(1, ())))),
        with_piece(replace(FIRST, stage=(0,))),
        with_piece(replace(FIRST, stage=(0, 2))),
        with_piece(replace(FIRST, stage=(0, 1, 0))),
        with_piece(replace(SMALL.groups[0].segments[1], split=1), at=1),
    ],
)
def test_every_rule_is_held(kernel):
    with pytest.raises(InputError):
        verify(kernel, 3)


def test_offsets_of_a_staged_piece_are_in_the_stage():
    staged = with_piece(replace(FIRST, stage=(1, 0), loads=(Load(0, ((0, 0), (1, 1))), Load(12, ((1, 2),)))))
    verify(staged, 3)
    assert parse_kernel(print_kernel(staged)) == staged


def test_each_split_begins_its_own_sums():
    split = with_piece(replace(SMALL.groups[0].segments[1], split=1, begins=True), at=1)
    verify(split, 3)
    assert (SMALL.splits, split.splits) == (1, 2)
    assert "segment zero 1" in print_kernel(split)
    assert parse_kernel(print_kernel(split)) == split


@pytest.mark.parametrize(
    ("old", "new"),
    [
        ("kernel 1", "kernel 2"),
        ("lanes 2", "lanes -2"),
        ("lanes 2", "lanes 2 2"),
        ("vectors 2", "vector 2"),
        ("plane 16", "plane 1e1"),
        ("plane 16", "plane ٣"),
        ("plane 16", "plane 0x10"),
        ("span 8", "span 1234567890123"),
        ("segment keep", "segment"),
        ("segment keep", "segment maybe"),
        ("segment keep", "segment keep 0"),
        ("segment keep", "segment keep 01"),
        ("segment keep", "segment keep 1 2"),
        ("load 20", "load"),
        ("load 20", "load 20 1"),
        ("fma 1 2", "fma 1"),
        ("fma 1 2", "fma  1 2"),
        ("fma 1 2", "system rm"),
        ("group 2 0\nsegment zero\n", "group 2 0\n"),
        ("segment zero\nload 0\n", "segment zero\n"),
        ("load 20\n", "load 20\nstage 0\n"),
        ("end\n", "end"),
        ("end\n", ""),
    ],
)
def test_hostile_texts_are_refused(old, new):
    text = print_kernel(SMALL)
    assert old in text
    with pytest.raises(InputError):
        parse_kernel(text.replace(old, new, 1))


def test_random_texts_are_read_or_refused():
    rng = random.Random(5)
    lines = print_kernel(SMALL).split("\n")
    for _ in range(300):
        chosen = list(lines)
        for _ in range(rng.randint(1, 4)):
            at = rng.randrange(len(chosen))
            action = rng.randrange(3)
            if action == 0:
                del chosen[at]
            elif action == 1:
                chosen.insert(at, rng.choice(lines))
            else:
                chosen[at] = chosen[at][: rng.randrange(len(chosen[at]) + 1)]
        text = "\n".join(chosen)
        try:
            kernel = parse_kernel(text)
        except InputError:
            continue
        assert print_kernel(kernel) == text


@pytest.mark.parametrize("name", [name for name, shape in SHAPES.items() if shape.n])
def test_the_walk_says_the_convolution(name):
    """The IR, run by numpy on the planes of the template, gives what the definition gives."""
    problem = SHAPES[name]
    turn = list(SHAPES).index(name)
    nonzero = pattern(PATTERNS[turn % len(PATTERNS)], problem.weight_spec.shape)
    splits = 1 + turn // 2 % 3
    cut = Cut(filters=1 + turn % 5, channels=1 + turn % 3, code_bytes=10_000, staged=turn % 2 == 1, splits=splits)
    align = 1 + turn % 4
    layout, kernel, places = made(problem, nonzero, cut, 1 + turn % 2, images=problem.n, rows=problem.p, align=align)
    verify(kernel, problem.k)
    assert kernel.splits <= splits
    assert layout.pitch % align == 0
    assert parse_kernel(print_kernel(kernel)) == kernel
    assert sorted(places) == list(np.flatnonzero(nonzero))
    rng = np.random.default_rng(turn)
    x, weight = rng.integers(-4, 5, problem.x_spec.shape), np.where(nonzero, rng.integers(1, 5, nonzero.shape), 0)
    sums = interpret(kernel, planes_of(layout, x), weight.ravel()[places])
    found = np.stack(
        [
            [
                [sums[k, (i * layout.image_rows + p) * layout.pitch :][: problem.q] for p in range(problem.p)]
                for k in range(problem.k)
            ]
            for i in range(problem.n)
        ]
    )
    assert np.array_equal(found, convolution(problem, x, weight))


def planes_of(layout, x):
    """The planes of one block that holds the whole batch, as the definition in `layout` says."""
    problem = layout.problem
    wide = np.zeros((problem.n, problem.c, problem.h + 2000, problem.w + 2000), x.dtype)
    wide[:, :, problem.pad_h :, problem.pad_w :][:, :, : problem.h, : problem.w] = x
    planes = np.zeros((layout.planes, layout.plane), x.dtype)
    for slot, c in enumerate(layout.channels):
        for at, phase in enumerate(layout.phases):
            image = wide[:, c, phase.row :: problem.stride_h, phase.column :: problem.stride_w]
            for i in range(problem.n):
                for j in range(layout.image_rows if i + 1 < problem.n else problem.p + layout.reach_h):
                    start = (i * layout.image_rows + j) * layout.pitch
                    planes[slot * len(layout.phases) + at, start : start + layout.pitch] = image[i, j, : layout.pitch]
    return planes


def interpret(kernel, planes, values):
    """Run the IR, tile by tile."""
    flat = planes.ravel()
    filters = sum(len(group.filters) for group in kernel.groups)
    sums = np.zeros((filters, kernel.positions), planes.dtype)
    for group in kernel.groups:
        for segment in group.segments:
            for base in range(0, kernel.positions, kernel.tile):
                source, start = flat, base
                if segment.stage:
                    source, start = np.concatenate([planes[p, base : base + kernel.span] for p in segment.stage]), 0
                for load in segment.loads:
                    loaded = source[start + load.offset :][: kernel.tile]
                    for total, value in load.uses:
                        sums[group.filters[total], base : base + kernel.tile] += loaded * values[value]
    return sums


def convolution(problem, x, weight):
    """conv2d by its definition, in integers."""
    y = np.zeros((problem.n, problem.k, problem.p, problem.q), x.dtype)
    wide = np.zeros((problem.n, problem.c, problem.h + 2 * problem.pad_h, problem.w + 2 * problem.pad_w), x.dtype)
    wide[:, :, problem.pad_h :, problem.pad_w :][:, :, : problem.h, : problem.w] = x
    outputs, per_group = problem.k // problem.groups, problem.c // problem.groups
    for k, c, r, s in np.argwhere(weight):
        seen = wide[:, k // outputs * per_group + c, r * problem.dilation_h :, s * problem.dilation_w :]
        y[:, k] += weight[k, c, r, s] * seen[:, :: problem.stride_h, :: problem.stride_w][:, : problem.p, : problem.q]
    return y


def test_groups_of_filters_are_few_and_even():
    nonzero = np.ones((23, 2, 1, 1), bool)
    nonzero[[3, 7]] = False
    found = partition(nonzero, 8)
    assert [len(group) for group in found] == [7, 7, 7, 2]
    assert found[-1] == [3, 7]
    assert sorted(k for group in found for k in group) == list(range(23))


def test_code_is_dealt_out_to_splits_evenly_and_by_rows():
    problem = SHAPES["3x3 padded"]
    nonzero = pattern("half", problem.weight_spec.shape)
    cut = Cut(filters=problem.k, channels=99, code_bytes=10**6, staged=True, splits=3)
    layout, kernel, _ = made(problem, nonzero, cut, images=problem.n, rows=problem.p)
    (group,) = kernel.groups
    assert [segment.split for segment in group.segments] == [0, 1, 2]
    assert max(p.uses for p in group.segments) <= 1.3 * min(p.uses for p in group.segments)
    rows = [
        {load.offset // layout.span * 1000 + load.offset % layout.span // layout.pitch for load in p.loads}
        for p in group.segments
    ]
    assert not rows[0] & rows[1]
    assert not rows[1] & rows[2]


def test_neighbouring_rows_share_their_zeros():
    problem = SHAPES["3x3 padded"]
    layout = lay_out(problem, [(0, 0), (2, 2)], (0,), tile=4, images=2, rows=9)
    assert (layout.pitch, layout.image_rows) == (problem.q + 1, problem.p + 1)
    assert (layout.plane // 16) % 2 == 1
