"""Several ranks, one capacity: what changes, changes on all at the same step, or on none."""

from kvtide.ranks.agreement import Agreement, RankFacts, Terms, Turn
from kvtide.ranks.ballot import Reason
from kvtide.ranks.change import Change
from kvtide.ranks.member import Axis, Mode
from kvtide.ranks.startup import (
    Quota,
    Share,
    agree_pages,
    agree_quotas,
    agree_whether,
    fingerprint_of,
    free_host_bytes,
    node_id,
)
from kvtide.ranks.transport import LocalHub, LocalTransport, Transport, side_by_side

__all__ = [
    "Agreement",
    "Axis",
    "Change",
    "LocalHub",
    "LocalTransport",
    "Mode",
    "Quota",
    "RankFacts",
    "Reason",
    "Share",
    "Terms",
    "Transport",
    "Turn",
    "agree_pages",
    "agree_quotas",
    "agree_whether",
    "fingerprint_of",
    "free_host_bytes",
    "node_id",
    "side_by_side",
]
