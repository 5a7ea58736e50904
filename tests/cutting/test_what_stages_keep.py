"""A stage keeps its own parameters alive, and nothing else of the model."""

import gc
import weakref

import pytest
import torch
from torch import Tensor, nn

import penstock


class Net(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList(nn.Linear(4, 4) for _ in range(4))

    def forward(self, x: Tensor, *, scale: Tensor) -> Tensor:
        for layer in self.layers:
            x = layer(x) * scale
        return x


@pytest.mark.parametrize("way", ["traced", "between modules"])
@pytest.mark.parametrize("held", [0, 1])
def test_other_stages_are_freed_with_the_pipe_and_the_model(way: str, held: int) -> None:
    def build(group: penstock.LocalGroup) -> list[weakref.ref[Tensor] | penstock.PipelineStage]:
        model = Net()
        x, scale = torch.ones(2, 4), torch.ones(4)
        if way == "traced":
            spec = {"layers.2": penstock.SplitPoint.BEGINNING}
            pipe = penstock.cut(model, (x,), {"scale": scale}, split_spec=spec)
        else:
            pipe = penstock.cut_between_modules(model, 2, layers=["layers"])
        own, other = (model.layers[index].weight for index in (2 * held, 2 - 2 * held))
        examples = [weakref.ref(x), weakref.ref(scale)]
        return [pipe.build_stage(held, "cpu", group), *map(weakref.ref, (own, other)), *examples]

    [(stage, own, other, *examples)] = penstock.local_ranks(1, build)
    gc.collect()
    assert own() is not None
    assert stage.submod.get_parameter(f"layers.{2 * held}.weight") is own()
    assert [None] * 3 == [reference() for reference in (other, *examples)]
