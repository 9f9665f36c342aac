"""What is reusable: prefixes by content, matched over several lifetimes, evicted by run tails."""

from kvtide.prefix.joint import MirrorRule, Rule, StateRule, WindowRule, longest_hit
from kvtide.prefix.node import Node
from kvtide.prefix.prefixes import Match, Prefixes
from kvtide.prefix.tree import PrefixTree

__all__ = [
    "Match",
    "MirrorRule",
    "Node",
    "PrefixTree",
    "Prefixes",
    "Rule",
    "StateRule",
    "WindowRule",
    "longest_hit",
]
