"""What a model needs of memory before it is launched: pools, splits and capacity, as arithmetic."""

from kvtide.planner.capacity import (
    CapacityPlan,
    LengthCapacity,
    Options,
    Settings,
    plan_capacity,
    plan_layouts,
)
from kvtide.planner.demand import cached_pages, running_pages
from kvtide.planner.lengths import LengthPlan
from kvtide.planner.padded import EqualPages, Padded
from kvtide.planner.split import PREFIX_TOKENS, Memory, Split, Verdict
from kvtide.planner.stage import (
    GRANULE_BYTES,
    FloorPlan,
    GroupPlan,
    PoolPlan,
    Question,
    StagePlan,
    plan_stage,
)
from kvtide.planner.workload import Request, Workload, read_workload

__all__ = [
    "GRANULE_BYTES",
    "PREFIX_TOKENS",
    "CapacityPlan",
    "EqualPages",
    "FloorPlan",
    "GroupPlan",
    "LengthCapacity",
    "LengthPlan",
    "Memory",
    "Options",
    "Padded",
    "PoolPlan",
    "Question",
    "Request",
    "Settings",
    "Split",
    "StagePlan",
    "Verdict",
    "Workload",
    "cached_pages",
    "plan_capacity",
    "plan_layouts",
    "plan_stage",
    "read_workload",
    "running_pages",
]
