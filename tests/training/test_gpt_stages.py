import pytest
import torch
from small_runs import MODEL, PLAIN, TEXT, losses
from torch import Tensor

from penstock.comm import LocalGroup, local_ranks
from penstock.cutting.cut_model import CutModel
from penstock.ir import Placement
from penstock.training.batches import Batches
from penstock.training.gpt import Gpt, build_stages, cut, initialise, loss_of

CPU = torch.device("cpu")
PLACEMENTS = [
    *(Placement.loop(1, stages_per_rank=count) for count in (1, 3, 6)),
    Placement.v(2),
    Placement.v(3),
    Placement.linear(6),
]


def whole_model(seed: int = 0) -> Gpt:
    model = Gpt(MODEL)
    initialise(model, MODEL, seed)
    return model


@pytest.mark.parametrize("placement", PLACEMENTS, ids=str)
def test_first_weights_do_not_depend_on_the_cut(placement: Placement) -> None:
    expected = dict(whole_model(seed=5).named_parameters())
    found: dict[str, Tensor] = {}
    pipe = cut(MODEL, placement, microbatch=2)
    assert all(p.is_meta for i in range(pipe.num_stages) for p in _parameters(pipe, i))
    for index in range(pipe.num_stages):
        stage = pipe.get_stage_module(index).to_empty(device=CPU)
        initialise(stage, MODEL, 5)
        found.update(stage.named_parameters())
    assert expected.keys() == found.keys()
    assert all(torch.equal(expected[name], found[name]) for name in expected)


def _parameters(pipe: CutModel, stage: int) -> list[Tensor]:
    return list(pipe.get_stage_module(stage).parameters())


def test_a_rank_makes_only_its_own_stages() -> None:
    placement = Placement.v(2)

    def main(group: LocalGroup) -> list[bool]:
        pipe = cut(MODEL, placement, microbatch=2)
        build_stages(pipe, MODEL, placement, rank=group.rank, seed=0, device=CPU, group=group)
        return [any(p.is_meta for p in _parameters(pipe, stage)) for stage in range(4)]

    assert [[False, True, True, False], [True, False, False, True]] == local_ranks(2, main)


def test_weights_depend_on_the_seed_and_are_small_in_what_is_added() -> None:
    first, other = whole_model(seed=0).state_dict(), whole_model(seed=1).state_dict()
    assert not torch.equal(first["blocks.0.qkv.weight"], other["blocks.0.qkv.weight"])
    assert not torch.equal(first["blocks.0.qkv.weight"], first["blocks.1.qkv.weight"])
    assert 0.02 == pytest.approx(first["blocks.0.mlp_in.weight"].std().item(), rel=0.1)
    small = 0.02 / (2 * MODEL.num_layers) ** 0.5
    assert small == pytest.approx(first["blocks.0.mlp_out.weight"].std().item(), rel=0.1)
    assert torch.equal(torch.ones(16), first["blocks.0.mlp_norm.weight"])
    assert torch.equal(torch.zeros(16), first["blocks.0.mlp_norm.bias"])


def test_no_token_sees_those_after_it() -> None:
    model = whole_model()
    tokens = torch.arange(8).reshape(1, 8)
    changed = tokens.clone()
    changed[0, 5] = 100
    before, after = model(tokens), model(changed)
    assert torch.equal(before[0, :5], after[0, :5])
    assert not torch.allclose(before[0, 5:], after[0, 5:])


def test_training_in_stages_is_training_the_whole_model() -> None:
    model = whole_model()
    optimizer = torch.optim.AdamW(model.parameters(), lr=PLAIN.lr)
    batches = Batches(TEXT, context=8, batch=PLAIN.batch, seed=0)
    expected = []
    for step in range(1, PLAIN.steps + 1):
        tokens, target = batches.of(step)
        optimizer.zero_grad()
        found = []
        for x, y in zip(tokens.chunk(4), target.chunk(4), strict=True):
            loss = loss_of(model(x), y)
            (loss / 4).backward()
            found.append(loss.detach())
        optimizer.step()
        expected.append(torch.stack(found).mean().item())
    # Microbatches add to each gradient in the same order, so not even the last bit differs.
    assert expected == losses()
