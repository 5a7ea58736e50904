"""Every model case: one per kind of stage on which the split backward must be right."""

from backward import cases_graphs, cases_layers, cases_products, cases_runs
from backward.case import Case

CASES: list[Case] = [
    *cases_products.CASES,
    *cases_layers.CASES,
    *cases_graphs.CASES,
    *cases_runs.CASES,
]
