"""The highest point of a concave function, roughly: the ellipsoid method."""

from collections.abc import Callable
from math import sqrt
from operator import mul
from typing import TypeAlias

Vector: TypeAlias = tuple[float, ...]


def highest(
    function: Callable[[Vector], tuple[float, Vector]], limits: Vector, num_steps: int
) -> float:
    """Return the highest value found of a concave function from 0 to `limits` in each dimension.

    `function` returns its value at a point, and a slope there. Towards where the slope goes down,
    nothing is higher than that point. So an ellipsoid around the highest point is cut in half at
    its centre, and the smallest ellipsoid around the better half takes its place. Where the centre
    is outside of the limits, the half towards them is kept.
    """
    n = len(limits)
    size = range(n)
    centre = [limit / 2 for limit in limits]
    # The points x with (x - centre) * inverse(matrix) * (x - centre) <= 1: all within the limits.
    matrix = [[n * limits[i] ** 2 / 4 if i == j else 0.0 for j in size] for i in size]
    best = 0.0
    for _ in range(num_steps):
        outside = next((i for i in size if not 0 <= centre[i] <= limits[i]), None)
        if outside is None:
            value, direction = function(tuple(centre))
            best = max(best, value)
        else:
            inward = 1.0 if centre[outside] < 0 else -1.0
            direction = tuple(inward * (i == outside) for i in size)
        step = [sum(map(mul, row, direction)) for row in matrix]
        length = sqrt(max(0.0, sum(map(mul, direction, step))))
        if length == 0:
            break
        step = [x / length for x in step]
        centre = [x + y / (n + 1) for x, y in zip(centre, step, strict=True)]
        matrix = [
            [n * n / (n * n - 1) * (matrix[i][j] - 2 / (n + 1) * step[i] * step[j]) for j in size]
            for i in size
        ]
    return best
