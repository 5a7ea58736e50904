"""A model on the meta device is traced as on the CPU, if its inputs are there."""

import torch
from torch import Tensor, nn

import penstock


class OnDevices(nn.Module):
    """A model that computes differently on CPUs, as experts of transformers do."""

    def __init__(self) -> None:
        super().__init__()
        self.first = nn.Linear(4, 4)
        self.last = nn.Linear(4, 4)
        self.last.weight = self.first.weight
        self.register_buffer("scale", torch.tensor(2.0))

    def forward(self, x: Tensor) -> Tensor:
        x = self.first(x)
        places = torch.arange(4, device=x.device)
        return self.last(x * places) * (self.scale if x.device.type == "cpu" else -1)


def test_branch_on_the_device_is_that_of_the_inputs() -> None:
    torch.manual_seed(0)
    whole, x = OnDevices(), torch.randn(2, 4)
    with torch.device("meta"):
        empty = OnDevices()
    tensors = [*empty.parameters(), *empty.buffers()]
    pieces = penstock.cut(empty, (x,), split_policy=penstock.Balanced(2))
    assert [*map(id, tensors)] == [*map(id, (*empty.parameters(), *empty.buffers()))]
    held = [t for module in pieces.modules for t in (*module.parameters(), *module.buffers())]
    assert all(tensor.is_meta for tensor in held)
    for stage, module in enumerate(pieces.modules):
        module.to_empty(device="cpu")
        own = {name: whole.state_dict()[name] for name in module.state_dict()}
        module.load_state_dict(own)
        penstock.local_ranks(1, lambda group, i=stage: pieces.build_stage(i, "cpu", group))
    assert torch.equal(whole(x), pieces(x))


def test_costs_are_those_of_a_model_with_values() -> None:
    x = torch.randn(2, 4)
    with torch.device("meta"):
        empty = OnDevices()
    assert penstock.count_layers(OnDevices(), (x,)) == penstock.count_layers(empty, (x,))


def test_inputs_on_the_meta_device_leave_the_model_there() -> None:
    with torch.device("meta"):
        empty, x = OnDevices(), torch.randn(2, 4)
    spec = {"last": penstock.SplitPoint.BEGINNING}
    assert "receives mul float32[2, 4]" in str(penstock.cut(empty, (x,), split_spec=spec).info())
