"""The exception tree. Shortage is an answer, not an exception; these are misuse and broken
promises.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Sequence


class KvError(Exception):
    """Base of every error kvtide raises on purpose."""


class ConfigError(KvError, ValueError):
    """A setting is impossible or contradicts another; the message names field, value and remedy."""


class CapacityError(KvError):
    """Something can never fit, however long one waits; the message names pool, need and limit."""


class UsageError(KvError):
    """A verb was called on something in the wrong state, or with arguments that make no sense."""


class StaleGraphError(UsageError):
    """A captured graph must not be replayed: what it baked in holds no more; capture it again."""


class DeviceError(KvError, OSError):
    """The operating system or the device refused to reserve, map or unmap memory."""


class InvariantError(KvError, AssertionError):
    """Our own books do not balance. Always a bug in kvtide."""


class RanksError(KvError):
    """A group of ranks has stopped for good: nothing more is agreed, start the group again."""


class RankLostError(RanksError):
    """Ranks said nothing before the deadline: they died, stall, or cannot be reached."""

    @classmethod
    def silent(cls, ranks: Sequence[int], tick: int, seconds: float | None = None) -> RankLostError:
        """Of these ranks nothing came at `tick` (within so many seconds)."""
        who = (
            f"ranks {', '.join(map(str, ranks))} were"
            if len(ranks) > 1
            else (f"rank {ranks[0]} was" if ranks else "a rank was")
        )
        within = "" if seconds is None else f" within {seconds:g} s"
        return cls(
            f"{who} not heard at tick {tick}{within}; the group has stopped, start it again "
            "(raise the deadline if ranks may be that slow)"
        )


class RankFailedError(RanksError):
    """A rank could not do what all had agreed on, or broke the protocol."""


class DivergenceError(RanksError):
    """Ranks that must be equal are not; the message has what each says."""
