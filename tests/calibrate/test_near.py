"""Chunks that a GPU keeps beside those in host memory are of these states, or are not used."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch

from calibrate import states
from calibrate.shares import Share
from calibrate.states import Near, States

BOUNDS = (0, 2, 5, 6, 8)
HIDDEN = torch.arange(8.0).view(8, 1, 1).expand(8, 4, 3).clone()


def drawn() -> States:
    return States(HIDDEN, share=Share(range(5), range(5, 8), BOUNDS))


def test_the_first_chunk_and_those_held_out_are_kept(monkeypatch: pytest.MonkeyPatch) -> None:
    assert states._near(drawn()) == {(0, 2), (5, 6), (6, 8)}
    monkeypatch.setattr(states, "NEAR_BYTES", 3 * HIDDEN[0].nbytes)
    assert states._near(drawn()) == {(0, 2), (5, 6)}
    monkeypatch.setattr(states, "NEAR_BYTES", HIDDEN[0].nbytes)
    assert states._near(drawn()) == set()


def test_they_are_used_for_the_same_windows_of_the_same_states() -> None:
    chunk = torch.full((2, 4, 3), 7.0)
    found = replace(drawn(), near=Near(HIDDEN, {(0, 2): chunk}))
    device = torch.device("cpu")
    assert found.on(device, slice(0, 2)) is chunk
    assert torch.equal(found.on(device, slice(0, 1)), HIDDEN[:1])
    assert torch.equal(found.on(device, slice(2, 5)), HIDDEN[2:5])
    other = replace(found, hidden=HIDDEN.clone())
    assert torch.equal(other.on(device, slice(0, 2)), HIDDEN[:2])
    assert found.like(HIDDEN.clone()).kept(slice(0, 2)) is None
    assert found.halved().kept(slice(0, 1)) is None
