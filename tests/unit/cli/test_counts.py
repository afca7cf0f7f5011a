"""Numbers of things in options: plain digits from 1 on; all else is one error that names the option."""

from __future__ import annotations

import pytest

from convoy.cli.commands import scale
from convoy.cli.commands.export import batch_sizes
from convoy.cli.options.values import image_size, positive_integers
from convoy.compare.scaling.scaling_jobs import ScaleRequest
from convoy.errors import InputError
from convoy.zoo.sources import synthetic

LONG = "9" * 5000
"""More digits than Python reads."""


def test_counts_are_read_in_their_order() -> None:
    assert positive_integers("--batch", "32, 1,8", "sizes") == [32, 1, 8]
    assert batch_sizes("8,1", None, None) == [8, 1]


@pytest.mark.parametrize("text", ["", "1,", "0", "-1", "1.5", "eight", "²", "١", LONG, f"1,{LONG}"])
def test_anything_else_is_refused_by_the_options_name(text: str) -> None:
    with pytest.raises(InputError, match="--batches"):
        batch_sizes(text, None, None)
    with pytest.raises(InputError, match="--gpus"):
        scale._counts(text, "cpu")
    if "," not in text:
        with pytest.raises(InputError, match="--size"):
            image_size(text)
    if text:
        with pytest.raises(InputError, match="data"):
            synthetic(f"synthetic:{text}", text, "train", 8, 2)


@pytest.mark.parametrize("port", ["0", "65536", "²", LONG])
def test_an_endpoint_needs_a_port(port: str) -> None:
    with pytest.raises(InputError, match="--endpoint"):
        ScaleRequest(model="net", gpus=(1,), batch=1, nodes=2, endpoint=f"host:{port}")._check_hosts()
