"""Which nets get a new last layer; batches and schedules that fit a small data set."""

from __future__ import annotations

from pathlib import Path

import pytest

from convoy.cli.command_parts.head import Classes, check_classes, must_fit
from convoy.cli.command_parts.labelled_data import fitting_batch
from convoy.cli.commands.prune import FittedOptions, fitted_schedule
from convoy.errors import InputError
from convoy.training.trainer.finetune import FinetuneSchedule

AB, ABC = ("a", "b"), ("a", "b", "c")


@pytest.mark.parametrize(
    ("head", "model", "data", "fit"),
    [
        (None, Classes(1000, ()), Classes(3, ABC), True),  # a folder of three classes, a net for ImageNet
        (None, Classes(3, ()), Classes(3, ABC), False),
        (None, Classes(3, ABC), Classes(2, AB), False),  # weights that know these classes already
        (None, Classes(2, AB), Classes(3, ABC), True),
        (None, Classes(2, AB), Classes(2, ("x", "y")), True),  # as many, but others
        (None, Classes(1000, ()), Classes(10, ()), False),  # labels are numbers: there may be more classes
        (None, Classes(5, ()), Classes(10, ()), True),
        ("keep", Classes(2, AB), Classes(3, ABC), False),
        ("fit", Classes(1000, ()), Classes(10, ()), True),
        ("fit", Classes(3, ABC), Classes(2, AB), True),
        ("fit", Classes(3, ABC), Classes(3, ABC), False),
        ("fit", Classes(3, ()), Classes(3, ABC), False),
    ],
)
def test_when_the_last_layer_is_replaced(head: str | None, model: Classes, data: Classes, fit: bool) -> None:
    assert must_fit(head, model, data, fixed=False) is fit


def test_the_folder_above_a_data_set_is_no_data_set(tmp_path: Path) -> None:
    check_classes(str(tmp_path), AB)
    check_classes("labels.npz", ())
    (tmp_path / "shapes" / "circle").mkdir(parents=True)
    with pytest.raises(InputError, match=r"two classes or more.*Did you mean .*shapes"):
        check_classes(str(tmp_path), ("shapes",))


def test_an_exported_program_keeps_its_layers() -> None:
    assert not must_fit(None, Classes(1000, ()), Classes(3, ABC), fixed=True)


@pytest.mark.parametrize(
    ("images", "batch"), [(1, 1), (3, 3), (40, 4), (166, 16), (1023, 64), (1024, 128), (50_000, 128)]
)
def test_a_batch_that_makes_eight_steps(images: int, batch: int) -> None:
    assert fitting_batch(images) == batch


@pytest.mark.parametrize(
    ("images", "fitted", "expected"),
    [
        (166, FittedOptions(epochs=True, batch=True), (5, 16)),
        (166, FittedOptions(epochs=False, batch=True), (1, 16)),
        (166, FittedOptions(epochs=True, batch=False), (50, 128)),
        (50_000, FittedOptions(epochs=True, batch=True), (1, 128)),
    ],
)
def test_a_fine_tuning_of_a_small_data_set_makes_fifty_steps(
    images: int, fitted: FittedOptions, expected: tuple[int, int]
) -> None:
    found = fitted_schedule(FinetuneSchedule(), fitted, images)
    assert (found.epochs, found.batch) == expected
