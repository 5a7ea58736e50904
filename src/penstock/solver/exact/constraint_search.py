"""Run CP-SAT on a problem, and pass on what it finds while it runs."""

from ortools.sat.python import cp_model

from penstock.solver.exact.constraint_model import Model
from penstock.solver.exact.incumbent import Incumbent
from penstock.solver.exact.ticks import TickProblem

_SMALL = 10**4


def search(problem: TickProblem, incumbent: Incumbent, seconds: float) -> None:
    """Improve `incumbent` until it is proven to be the best, or for `seconds`."""
    model = Model(problem)
    model.hint(incumbent.schedule)
    solver = cp_model.CpSolver()
    solver.parameters.num_workers = 1  # Several would race, and differ from run to run.
    solver.parameters.random_seed = 0
    # Linear relaxations halve the time of a proof. With large numbers they only take time, and
    # OR-tools 9.15 has been seen to abort the process ("Check failed: threshold > 0").
    solver.parameters.linearization_level = 2 if _has_small_numbers(problem) else 0
    solver.parameters.max_time_in_seconds = seconds
    watch = _Watch(model, problem, incumbent, solver)
    solver.best_bound_callback = watch.on_bound
    status = solver.solve(model.cp, watch)
    if watch.failure is not None:
        raise watch.failure
    assert status not in (cp_model.INFEASIBLE, cp_model.MODEL_INVALID), solver.status_name(status)
    incumbent.raise_bound(problem.to_lower_bound(solver.best_objective_bound))


def _has_small_numbers(problem: TickProblem) -> bool:
    return max(problem.horizon(), *(memory.cap for memory in problem.memory), 0) <= _SMALL


class _Watch(cp_model.CpSolverSolutionCallback):
    """The callback for each solution and bound.

    An exception must not pass through the solver: it ends the search and is raised afterwards.
    """

    def __init__(
        self, model: Model, problem: TickProblem, incumbent: Incumbent, solver: cp_model.CpSolver
    ) -> None:
        super().__init__()
        self.failure: BaseException | None = None
        self._model = model
        self._problem = problem
        self._incumbent = incumbent
        self._solver = solver

    def on_solution_callback(self) -> None:
        try:
            self._incumbent.offer(self._model.read(self.value))
        except BaseException as exc:
            self._stop(exc)

    def on_bound(self, ticks: float) -> None:
        try:
            self._incumbent.raise_bound(self._problem.to_lower_bound(ticks))
        except BaseException as exc:
            self._stop(exc)

    def _stop(self, exc: BaseException) -> None:
        self.failure = self.failure or exc
        self._solver.stop_search()
