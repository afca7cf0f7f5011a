"""A call that was run before takes the short way, and the long one as soon as anything differs."""

from __future__ import annotations

import copy
import pickle
from collections.abc import Callable

import pytest
import torch
from torch import nn

import convoy
from convoy.capture import Captured
from convoy.program import Program, known_calls
from convoy.program.known_calls import KnownCalls
from convoy.program.optimized_module import OptimizedModule
from tests.unit.program.fast_net import X, always_kept, classifier


@pytest.fixture(scope="module")
def tuned(tmp_path_factory: pytest.TempPathFactory) -> OptimizedModule:
    settings = convoy.Settings(effort="none", db=tmp_path_factory.mktemp("known") / "perf.db")
    with always_kept():
        return convoy.optimize(classifier(), (X,), settings=settings)


@pytest.fixture
def long_way(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """Grows with every call that is looked up in full."""
    seen: list[int] = []
    run = OptimizedModule._run_unknown

    def counted(self: OptimizedModule, *args: object) -> object:
        seen.append(1)
        return run(self, *args)  # type: ignore[arg-type]

    monkeypatch.setattr(OptimizedModule, "_run_unknown", counted)
    return seen


@pytest.fixture
def fast(tuned: OptimizedModule, long_way: list[int]) -> OptimizedModule:
    """One that has run a call."""
    made = copy.deepcopy(tuned)
    made(X)
    made(X)
    assert len(long_way) == 1
    long_way.clear()
    return made


def same(fast: OptimizedModule, x: torch.Tensor) -> torch.Tensor:
    made = fast(x)
    with torch.no_grad():
        torch.testing.assert_close(made, fast.model(x), rtol=1e-4, atol=1e-5)
    return made


def test_values_are_those_of_each_call(fast: OptimizedModule, long_way: list[int]):
    for x in (X, X * 2, nn.Parameter(X, requires_grad=False)):
        assert not same(fast, x).requires_grad
    assert torch.is_grad_enabled()
    with torch.no_grad():
        same(fast, X.clone().requires_grad_())
        assert not torch.is_grad_enabled()
    with torch.inference_mode():
        same(fast, X)
    assert not long_way


OTHERS: dict[str, Callable[[], torch.Tensor]] = {
    "channels_last": lambda: X.contiguous(memory_format=torch.channels_last),
    "another batch": lambda: X[:1],
    "a lazy negative": lambda: torch.complex(X, X).conj().imag,
    "a gradient": lambda: X.clone().requires_grad_(),
    "a subclass": lambda: X.clone().as_subclass(type("Own", (torch.Tensor,), {})),
}


@pytest.mark.filterwarnings("ignore:convoy")
@pytest.mark.parametrize("name", OTHERS)
def test_another_kind_of_tensor_is_looked_up(name: str, fast: OptimizedModule, long_way: list[int]):
    x = OTHERS[name]()
    found = fast(x)
    assert len(long_way) == 1
    wanted = fast.model(x)
    torch.testing.assert_close(found, wanted, rtol=1e-4, atol=1e-5)
    assert found.requires_grad or name != "a gradient"
    assert type(found) is type(wanted)


@pytest.mark.filterwarnings("ignore:convoy")
def test_modes_around_the_call_are_looked_at(fast: OptimizedModule, long_way: list[int]):
    with torch.no_grad():
        with torch.autocast("cpu", torch.bfloat16):
            assert fast(X).dtype is fast.model(X).dtype is torch.bfloat16
        torch.testing.assert_close(torch.func.vmap(fast, randomness="same")(X[None]), fast.model(X)[None])
    fast.train()
    assert fast(X).requires_grad
    assert len(long_way) == 3
    fast.eval()
    same(fast, X)
    assert len(long_way) == 3


def test_exchanged_programs_are_found_anew(fast: OptimizedModule, long_way: list[int]):
    with torch.no_grad():
        fast.model.conv.weight.mul_(3)
    with pytest.warns(UserWarning, match="changed in place"):
        same(fast, X)
    assert not long_way  # it is stale whichever way it took
    fast.refresh()
    same(fast, X)
    assert len(long_way) == 1
    cache = fast.program_cache
    cached = next(iter(cache.tuned.values()))
    ran: list[object] = []
    program = (
        copy.replace(cached.program) if hasattr(copy, "replace") else cached.program.with_plan(cached.program.plan)
    )
    object.__setattr__(program, "runnable", lambda inputs: ran.append(1) or cached.program.runnable(inputs))
    cache.swap(cached, program)
    same(fast, X)
    assert ran
    cache.add((X,), {}, cached.program)
    same(fast, X)
    assert len(long_way) == 3
    assert len(ran) == 1


def test_a_call_that_runs_while_programs_are_exchanged_leaves_nothing(
    fast: OptimizedModule, monkeypatch: pytest.MonkeyPatch
):
    """Else the former program, with the former weights, would run from then on."""
    cache, run = fast.program_cache, known_calls.run_checked
    cache.known = KnownCalls()
    with torch.no_grad():
        fast.model.conv.weight.mul_(3)

    def meanwhile(*args: object) -> object:
        made = run(*args[:5], lambda: None)  # type: ignore[arg-type]
        fast.refresh()
        return made

    with monkeypatch.context() as patch:
        patch.setattr("convoy.program.optimized_module.run_checked", meanwhile)
        fast(X)
    same(fast, X)


def test_copies_and_pickles_know_nothing(fast: OptimizedModule, long_way: list[int]):
    for twin in (copy.deepcopy(fast), pickle.loads(pickle.dumps(fast))):
        with torch.no_grad():
            twin.model.head.bias.add_(1)
        twin.refresh()
        same(twin, X)
        same(fast, X)
    assert len(long_way) == 2


def test_inputs_in_another_order_than_the_arguments_are_flattened(
    monkeypatch: pytest.MonkeyPatch, tuned: OptimizedModule
):
    """Arguments that are the graph's inputs go to the program as they are."""
    program, known = tuned.programs[0], KnownCalls()
    known.keep((X,), program, "as made")
    found = known.find((X,))
    assert found is not None
    assert found.flat
    monkeypatch.setattr(Captured, "flatten_inputs", lambda self, args, kwargs=None: [args[0].clone()])
    assert not program.is_flat((X,))
    monkeypatch.setattr(Captured, "flatten_inputs", lambda self, args, kwargs=None: [*args, *args])
    assert not program.is_flat((X,))
    assert not Program(program.plan, None, None).is_flat((X,))


def test_their_number_is_bounded(monkeypatch: pytest.MonkeyPatch, tuned: OptimizedModule):
    monkeypatch.setattr(known_calls, "MOST_CALLS", 3)
    known = KnownCalls()
    calls = [(torch.empty_strided(X.shape, (gap * X.stride(0), *X.stride()[1:])),) for gap in range(1, 6)]
    for call in calls:
        known.keep(call, tuned.programs[0], "as made")
    assert [known.find(call) is not None for call in calls] == [True] * 3 + [False] * 2
    assert known.find((1,)) is None
    known.keep((1,), tuned.programs[0], "as made")
    assert len(known._calls) == 3
