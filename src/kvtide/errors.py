"""The exception tree. Shortage is an answer, not an exception; these are misuse and broken
promises.
"""

from __future__ import annotations


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
