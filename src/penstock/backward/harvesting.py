"""Find the weight gradients that can be deferred, from the pattern of a finished autograd graph.

The *input side* of the graph is every node from which a stage input can be reached: the
nodes that an input backward runs. If such a node also has an edge to a part of the
graph that leads to parameters only, it *uses* those parameters:

    loss ── ... ── Addmm ── ... ── x          input side
                     ├── bias                 off it: parameters only
                     └── T ── weight

If we have a source for every node that uses a parameter, autograd need not compute its
gradient: a pre-hook takes the gradient that arrives at the node in the single engine pass
of I, and W does the rest. The gradient of any other parameter is computed in that same
pass, and only added in W. Parameters that share a node, or a part off the input side,
form a cluster and are treated alike, so that no gradient is lost or counted twice.

All this knows nodes by their places and weights by their indices. It takes nothing but the
pattern, so the result holds for every graph of that pattern, and is kept for the next one.
"""

from collections.abc import Iterable, Sequence
from functools import lru_cache
from typing import NamedTuple

from penstock.backward.graph_pattern import (
    INPUT,
    LEAF,
    NO_WEIGHT,
    PER_EDGE,
    PER_GRADIENT,
    PRODUCT,
    TRANSPOSE,
    Pattern,
)
from penstock.backward.sources import Use


class Place(NamedTuple):
    """The end of an edge: the place of a node, and the number of its gradient."""

    place: int
    number: int


class User(NamedTuple):
    """A node of the input side that uses weights.

    `targets`, one for each use: the index of a weight, or a part of the graph that leads to some.
    `is_direct`: all are weights.
    """

    place: int
    uses: tuple[Use, ...]
    targets: tuple[int | Place, ...]
    is_direct: bool


class Cluster(NamedTuple):
    """Weights that are deferred together or not at all, and everything that leads to them.

    `users`: nodes of the input side. `tails`: the indices of roots off the input side.
    """

    weights: tuple[int, ...]
    users: tuple[User, ...]
    tails: tuple[int, ...]


class Harvest(NamedTuple):
    """The clusters that can wait if all their users have sources, and the weights that cannot."""

    clusters: tuple[Cluster, ...]
    urgent: tuple[int, ...]


@lru_cache(maxsize=32)
def harvest(pattern: Pattern) -> Harvest:
    """Return all weights that the roots lead to, in time linear in the graph."""
    graph = _Graph(pattern)
    found = _Clusters()
    for place in graph.users():
        user, weights, is_passed = _user(place, graph)
        if weights:
            group = found.of(weights)
            group.users.append(user)
            group.may_wait &= is_passed and graph.kinds[place] == PRODUCT
    for number, root in enumerate(graph.roots):
        below = () if root in graph.input_side else graph.weights_below(root)
        if below:
            found.of(below).tails.append(number)
    groups = found.all()
    clusters = [
        Cluster(tuple(group.weights), tuple(group.users), tuple(group.tails))
        for group in groups
        if group.may_wait
    ]
    urgent = [weight for group in groups if not group.may_wait for weight in group.weights]
    return Harvest(tuple(clusters), tuple(urgent))


class _Graph:
    """A graph, read from its pattern: the kinds of nodes, their edges, and the input side."""

    __slots__ = ("_below", "_leaves", "_parents", "edges", "input_side", "kinds", "roots")

    def __init__(self, pattern: Pattern) -> None:
        self.roots = pattern.roots
        self.kinds: list[int] = []
        self.edges: list[list[Place]] = []
        self._leaves: dict[int, int] = {}
        self._below: dict[int, Sequence[int]] = {}
        self._parents: dict[int, list[int]] = {}
        self._read(pattern.numbers)
        for place, edges in enumerate(self.edges):
            for child, _ in edges:
                self._parents.setdefault(child, []).append(place)
        inputs = [leaf for leaf, weight in self._leaves.items() if weight == INPUT]
        self.input_side = {*pattern.halts, *inputs}
        self._complete(self.input_side)

    def _read(self, numbers: Iterable[int]) -> None:
        numbers = iter(numbers)
        for place, number in enumerate(numbers):
            num_edges, kind = divmod(number, PER_EDGE)
            self.kinds.append(kind)
            if kind == LEAF:
                self._leaves[place] = next(numbers)
            ends = [divmod(next(numbers), PER_GRADIENT) for _ in range(num_edges)]
            self.edges.append([Place(child, gradient) for gradient, child in ends])

    def _complete(self, places: set[int]) -> None:
        """Add all nodes that lead to those in `places`."""
        stack = list(places)
        while stack:
            for parent in self._parents.get(stack.pop(), ()):
                if parent not in places:
                    places.add(parent)
                    stack.append(parent)

    def users(self) -> Iterable[int]:
        """Return nodes of the input side that may use weights, directly or through others."""
        found: dict[int, None] = {}
        stack = [leaf for leaf, weight in self._leaves.items() if weight >= 0]
        seen = set(stack)
        while stack:
            for parent in self._parents.get(stack.pop(), ()):
                if parent in self.input_side:
                    found[parent] = None
                elif parent not in seen:
                    seen.add(parent)
                    stack.append(parent)
        return found

    def weight_of(self, place: int) -> int:
        """Return the index of the weight that this node accumulates into, or a negative number."""
        return self._leaves.get(place, NO_WEIGHT)

    def weight_of_transpose(self, place: int) -> int:
        """Return the index of the weight whose transpose this node made, or a negative number."""
        if self.kinds[place] != TRANSPOSE:
            return NO_WEIGHT
        return self.weight_of(self.edges[place][0].place)

    def weights_below(self, place: int) -> Sequence[int]:
        """Return all weights that can be reached from a node off the input side."""
        known = self._below.get(place)
        if known is not None:
            return known
        found: dict[int, None] = {}
        seen = {place}
        stack = [place]
        while stack:
            current = stack.pop()
            if (weight := self.weight_of(current)) >= 0:
                found[weight] = None
            for child, _ in self.edges[current]:
                if child not in seen:
                    seen.add(child)
                    stack.append(child)
        self._below[place] = weights = tuple(found)
        return weights


def _user(place: int, graph: _Graph) -> tuple[User, list[int], bool]:
    """Return a node as a user, all weights it leads to, and whether a pass goes on to an input.

    The pass stops at an input that does not lead to another input.
    """
    uses: list[Use] = []
    targets: list[int | Place] = []
    weights: list[int] = []
    is_passed = False
    for number, end in enumerate(graph.edges[place]):
        child = end.place
        if child in graph.input_side:
            is_passed = True
        elif (weight := graph.weight_of(child)) >= 0:
            uses.append(Use(number, False))
            targets.append(weight)
            weights.append(weight)
        elif (weight := graph.weight_of_transpose(child)) >= 0:
            uses.append(Use(number, True))
            targets.append(weight)
            weights.append(weight)
        elif below := graph.weights_below(child):
            uses.append(Use(number, False))
            targets.append(end)
            weights.extend(below)
    is_direct = not any(isinstance(target, Place) for target in targets)
    return User(place, tuple(uses), tuple(targets), is_direct), weights, is_passed


class _Group:
    """A cluster in the making."""

    __slots__ = ("may_wait", "tails", "users", "weights")

    def __init__(self) -> None:
        self.weights: dict[int, None] = {}
        self.users: list[User] = []
        self.tails: list[int] = []
        self.may_wait = True

    def absorb(self, other: "_Group") -> None:
        self.weights.update(other.weights)
        self.users += other.users
        self.tails += other.tails
        self.may_wait &= other.may_wait


class _Clusters:
    """The clusters found so far, by weight."""

    __slots__ = ("_of_weight",)

    def __init__(self) -> None:
        self._of_weight: dict[int, _Group] = {}

    def of(self, weights: Sequence[int]) -> _Group:
        """Return one cluster of all these weights: a new one, or their clusters joined."""
        host: _Group | None = None
        for weight in weights:
            other = self._of_weight.get(weight)
            if host is None:
                host = other
            elif other is not None and other is not host:
                host.absorb(other)
                self._of_weight.update(dict.fromkeys(other.weights, host))
        if host is None:
            host = _Group()
        host.weights.update(dict.fromkeys(weights))
        self._of_weight.update(dict.fromkeys(weights, host))
        return host

    def all(self) -> list[_Group]:
        return list({id(group): group for group in self._of_weight.values()}.values())
