"""Inputs come back last first, from wherever they were put."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest
import torch
from torch import Tensor

from calibrate.shelf import Shelf
from calibrate.states import Near, States
from calibrate.store import IN_MEMORY, Store

LAYERS, SHAPE = 5, (3, 4, 8)


def layer_input(number: int) -> Tensor:
    return torch.full(SHAPE, 1.0 + number / 8)  # exact in bfloat16


@pytest.mark.parametrize("in_files", [False, True])
def test_two_buffers_serve_all_layers(in_files: bool, tmp_path: Path) -> None:
    """As a GPU's in pinned memory: advancing writes over what lies two layers back."""
    shelf = Shelf(LAYERS, Store(1, tmp_path) if in_files else IN_MEMORY)
    states = States(layer_input(0), spare=torch.empty(SHAPE))
    for number in range(LAYERS):
        shelf.put(states)
        assert states.spare is not None
        states.spare.copy_(layer_input(number + 1))  # as advance() does
        states = states.like(states.spare)
    buffers = {states.hidden.data_ptr(), states.spare.data_ptr() if states.spare is not None else 0}
    for number in reversed(range(LAYERS)):
        taken = shelf.take()
        assert torch.equal(taken.hidden, layer_input(number))
        assert taken.hidden.dtype == torch.float32
        assert taken.hidden.data_ptr() in buffers
    with pytest.raises(IndexError):
        shelf.take()


def test_on_a_cpu_they_are_the_states_themselves(tmp_path: Path) -> None:
    shelf, states = Shelf(2, IN_MEMORY), States(layer_input(0))
    shelf.put(states)
    assert shelf.take() is states
    in_files = Shelf(2, Store(1, tmp_path))  # each layer's states have one of their own
    in_files.put(states)
    assert in_files.take() is states
    aside = Shelf(2, Store(2 * states.hidden.nbytes, tmp_path))  # two layers' take all there is
    aside.put(replace(states, near=Near(states.hidden, {})))
    states.hidden.zero_()
    taken = aside.take()
    assert torch.equal(taken.hidden, layer_input(0))
    assert taken.near is None  # which would hold every layer's states where they were
