"""What a step costs: hardware, what a model computes and reads, and a clock made of both."""

from kvtide.sim.costs.clock import Clock
from kvtide.sim.costs.hardware import Hardware, hardware
from kvtide.sim.costs.model import ModelCost
from kvtide.sim.costs.reads import Reads
from kvtide.sim.costs.weights import Experts, Weights

__all__ = ["Clock", "Experts", "Hardware", "ModelCost", "Reads", "Weights", "hardware"]
