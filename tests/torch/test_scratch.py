"""Scratch memory is used again, but never while somebody holds what was lent of it."""

from __future__ import annotations

import torch

from kvtide.torch.scratch import Scratch

F32 = torch.float32


def lend(scratch: Scratch, num_elements: int = 8) -> torch.Tensor:
    scratch.reclaim("key", F32)
    lent = scratch.take("key", F32, num_elements).view(2, -1)
    scratch.lend("key", F32, lent)
    return lent


def test_memory_is_used_again_once_nobody_holds_it() -> None:
    scratch = Scratch()
    address = lend(scratch).data_ptr()
    assert lend(scratch).data_ptr() == address
    assert scratch.epoch == 0


def test_what_is_held_keeps_its_memory() -> None:
    scratch = Scratch()
    held = lend(scratch).fill_(1)
    other = lend(scratch).fill_(2)
    assert held.unique().tolist() == [1]
    assert scratch.epoch == 1
    address = other.data_ptr()
    del other
    assert lend(scratch).data_ptr() == address


def test_growing_voids_what_was_taken() -> None:
    scratch = Scratch()
    small = scratch.take("key", F32, 8)
    large = scratch.take("key", F32, 80)
    assert scratch.epoch == 1
    assert large.data_ptr() != small.data_ptr()
    assert scratch.take("key", F32, 8).data_ptr() == large.data_ptr()
    assert scratch.take("value", F32, 8).data_ptr() != large.data_ptr()
    assert scratch.take("key", torch.float64, 8).dtype == torch.float64
    assert scratch.epoch == 1
