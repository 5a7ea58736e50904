"""Random networks: a list of pieces and the outputs it returns, as a stage."""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Literal

import torch
from pieces import WIDTH, Piece, Workshop
from torch import Tensor, nn


@dataclass(frozen=True)
class Output:
    """The value after `after` pieces, or what `kind` makes of it; its gradient may be None."""

    after: int = 99
    kind: Literal["whole", "split", "reshaped", "detached", "parameter", "number"] = "whole"
    has_grad: bool = True


@dataclass(frozen=True)
class Network:
    pieces: tuple[Piece, ...]
    outputs: tuple[Output, ...] = (Output(),)
    container: Literal["tuple", "list", "dict", "nested", "single"] = "tuple"

    def build(self) -> nn.Module:
        torch.manual_seed(0)
        workshop = Workshop()
        return Stage(self, [workshop.build(piece) for piece in self.pieces]).double()


class Stage(nn.Module):
    """The network as a stage: `forward(x, y, ids=...)` returns its outputs in their container."""

    def __init__(self, network: Network, modules: Sequence[nn.Module]) -> None:
        super().__init__()
        self.network = network
        self.links = nn.ModuleList(modules)
        self.extra = nn.Parameter(torch.randn(WIDTH))

    def forward(self, x: Tensor, y: Tensor, *, ids: Tensor) -> Any:
        others = {"x": x, "y": y, "ids": ids}
        values = [x]
        for link in self.links:
            values.append(link(values[-1], others))
        made = [
            self._output(output.kind, values[min(output.after, len(values) - 1)])
            for output in self.network.outputs
        ]
        match self.network.container:
            case "tuple":
                return tuple(made)
            case "list":
                return made
            case "dict":
                return {f"out{i}": value for i, value in enumerate(made)}
            case "nested":
                return (made[0], {"rest": made[1:]})
            case "single":
                return made[-1]

    def _output(self, kind: str, x: Tensor) -> Any:
        match kind:
            case "split":
                return x.split(2, -1)
            case "reshaped":
                return x.reshape(-1, WIDTH)
            case "detached":
                return x.detach()
            case "parameter":
                return self.extra * 2
            case "number":
                return 3
            case _:
                return x
