"""What the processes of one model send each other while they compute, over torch.distributed."""

from __future__ import annotations

import json
from contextlib import contextmanager
from datetime import timedelta
from typing import TYPE_CHECKING, Any

import numpy as np
import torch

from kvtide.errors import RankLostError, UsageError

if TYPE_CHECKING:
    from collections.abc import Callable, Generator, Sequence

    from kvtide.errors import RanksError
    from kvtide.types import IntArray

dist: Any = torch.distributed  # its stubs leave most of what is used here unknown


class Link:
    """All processes of the world, as this one reaches them; `seconds` bound every wait.

    Every method raises RanksError if another process does not answer in that time, or is gone:
    `failure` tells why, if one has said so.
    """

    def __init__(self, seconds: float, failure: Callable[[], RanksError | None]) -> None:
        if not dist.is_initialized():
            raise UsageError("call torch.distributed.init_process_group() first")
        self.rank: int = dist.get_rank()
        self.size: int = dist.get_world_size()
        self._seconds, self._failure = seconds, failure
        self._group: Any = dist.new_group(timeout=timedelta(seconds=seconds), backend="gloo")

    def add(self, tensor: torch.Tensor) -> None:
        """Replace `tensor` by the sum of those of all ranks, equal to the bit on all."""
        with self._heard():
            dist.all_reduce(tensor, group=self._group)

    def send(self, tensor: torch.Tensor, to: int) -> None:
        """Give `tensor` to one rank."""
        with self._heard():
            dist.send(tensor.contiguous(), dst=to, group=self._group)

    def receive(self, shape: Sequence[int], dtype: torch.dtype, source: int) -> torch.Tensor:
        """The tensor that one rank sends."""
        tensor = torch.empty(tuple(shape), dtype=dtype)
        with self._heard():
            dist.recv(tensor, src=source, group=self._group)
        return tensor

    def share(self, words: IntArray, source: int) -> Shared:
        """Begin to give all ranks the int64 `words` of one; theirs only have to be as many."""
        tensor = torch.tensor(words, dtype=torch.int64)
        with self._heard():
            work: Any = dist.broadcast(tensor, src=source, group=self._group, async_op=True)
        return Shared(self, tensor, work)

    def total(self, number: float) -> float:
        """The sum of every rank's number."""
        tensor = torch.tensor([number], dtype=torch.float64)
        self.add(tensor)
        return float(tensor)

    def gather(self, thing: object) -> list[Any]:
        """Every rank's `thing`, by rank. It travels as JSON: tuples become lists."""
        words = torch.frombuffer(bytearray(json.dumps(thing).encode()), dtype=torch.uint8)
        sizes = self._gather(torch.tensor([len(words)]))
        longest = max(int(size) for size in sizes)
        texts = self._gather(torch.nn.functional.pad(words, (0, longest - len(words))))
        return [
            json.loads(text[: int(size)].numpy().tobytes())
            for text, size in zip(texts, sizes, strict=True)
        ]

    def _gather(self, tensor: torch.Tensor) -> list[torch.Tensor]:
        found = [torch.empty_like(tensor) for _ in range(self.size)]
        with self._heard():
            dist.all_gather(found, tensor, group=self._group)
        return found

    def finish(self, work: Any) -> None:  # noqa: ANN401 (torch has no public name for it)
        """Wait for something begun."""
        with self._heard():
            work.wait()

    @contextmanager
    def _heard(self) -> Generator[None]:
        try:
            yield
        except RuntimeError as error:
            if (failure := self._failure()) is not None:
                raise failure from error
            others = [rank for rank in range(self.size) if rank != self.rank]
            who = f"rank {others[0]}" if len(others) == 1 else "another rank"
            raise RankLostError(
                f"{who} is gone, or did not take part in the model's step within "
                f"{self._seconds:g} s; the group has stopped, start it again"
            ) from error


class Shared:
    """Words on their way from one rank to all."""

    def __init__(self, link: Link, tensor: torch.Tensor, work: object) -> None:
        self._link, self._tensor, self._work = link, tensor, work

    def take(self) -> IntArray:
        """The words, once they are here."""
        self._link.finish(self._work)
        return self._tensor.numpy().astype(np.int64)
