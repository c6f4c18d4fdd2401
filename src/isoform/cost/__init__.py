"""What a network costs, in closed form, and the counters the forms are held against (R25, R26, R28, R10)."""

from isoform.cost.budget import GatedWidth, equal_budget_width
from isoform.cost.counters import MemoryUse, count_flops, count_parameters, measure_memory
from isoform.cost.fit import Fit, fit
from isoform.cost.flops import Flops, flops
from isoform.cost.memory import Memory, kv_cache, memory
from isoform.cost.parameters import Parameters, layer_formula, parameters
from isoform.cost.report import CostReport, cost
from isoform.cost.roofline import Machine, Roofline, measure_machine, roofline
from isoform.cost.shapes import Row, shapes
from isoform.cost.workload import Workload

__all__ = [
    "CostReport",
    "Fit",
    "Flops",
    "GatedWidth",
    "Machine",
    "Memory",
    "MemoryUse",
    "Parameters",
    "Roofline",
    "Row",
    "Workload",
    "cost",
    "count_flops",
    "count_parameters",
    "equal_budget_width",
    "fit",
    "flops",
    "kv_cache",
    "layer_formula",
    "measure_machine",
    "measure_memory",
    "memory",
    "parameters",
    "roofline",
    "shapes",
]
