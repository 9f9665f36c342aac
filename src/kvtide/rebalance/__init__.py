"""Capacity between pools: decide (pure functions) and act on this rank."""

from kvtide.rebalance.decide import Move, Plan
from kvtide.rebalance.ground import Ground

__all__ = ["Ground", "Move", "Plan"]
