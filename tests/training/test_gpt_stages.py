import pytest
import torch
from small_runs import MODEL, PLAIN, batches, losses
from torch import Tensor

from penstock.comm import LocalGroup, local_ranks
from penstock.cutting.cut_model import CutModel
from penstock.ir import Placement
from penstock.training.gpt import Gpt, cut, initialise
from penstock.training.models import Place, spread
from penstock.training.orders import choose_orders
from penstock.training.token_loss import next_token_loss

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
    def main(group: LocalGroup) -> set[str]:
        pipe = spread(PLAIN, choose_orders(PLAIN), Place.of(PLAIN, group, CPU))
        assert not any(parameter.is_meta for parameter in pipe.parameters())
        return {name.split(".")[0] for name, _ in pipe.named_parameters()}

    assert [{"embed", "blocks", "head"}, {"blocks"}] == local_ranks(2, main)


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


@pytest.mark.parametrize("accumulate", [1, 2])
def test_training_in_stages_is_training_the_whole_model(accumulate: int) -> None:
    model = whole_model()
    matrices = [p for p in model.parameters() if p.dim() >= 2]
    others = [p for p in model.parameters() if p.dim() < 2]
    groups = [{"params": matrices}, {"params": others, "weight_decay": 0.0}]
    optimizer = torch.optim.AdamW(groups, lr=PLAIN.lr)
    expected = []
    for step in range(PLAIN.steps):
        optimizer.zero_grad()
        means = []
        for part in range(accumulate):
            found = []
            tokens, target = batches().of(step * accumulate + part)
            for x, y in zip(tokens.chunk(4), target.chunk(4), strict=True):
                loss = next_token_loss(model(x), y)
                (loss / 4 / accumulate).backward()
                found.append(loss.detach())
            means.append(torch.stack(found).mean().item())
        optimizer.step()
        expected.append(sum(means) / accumulate)
    # Microbatches add to each gradient in the same order, so not even the last bit differs.
    assert expected == losses(accumulate=accumulate)
