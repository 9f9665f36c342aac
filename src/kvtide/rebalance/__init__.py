"""Capacity between pools: decide (pure functions) and act on this rank."""

from kvtide.rebalance.allowance import Allowance
from kvtide.rebalance.backlog import Backlog
from kvtide.rebalance.decide import Move, Plan
from kvtide.rebalance.ground import Ground
from kvtide.rebalance.journal import Journal
from kvtide.rebalance.mover import Mover

__all__ = ["Allowance", "Backlog", "Ground", "Journal", "Move", "Mover", "Plan"]
