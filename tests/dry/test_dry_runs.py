"""Dry runs: what a rank holds and sends, and what cannot be run dry.

`tests/dist/test_dry_runs_on_processes.py` compares them with real ranks.
"""

import math
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import penstock
from fuzzing import only_in_fuzz
from penstock.dry import DryRun
from penstock.dry.message_match import match_ranks, match_transfers
from penstock.dry.stage_forms import StageForms, find_forms
from penstock.errors import AgreementError, StageError
from penstock.ir import Message, Schedule, Send
from penstock.ir.message import Channel
from penstock.passes import add_sends
from penstock.schedules import get
from penstock.torch_private import FakeTensorMode

WIDTH, M = 16, 8
ROW = 4 * WIDTH  # Bytes of one sample.
BATCH = 2 * M


def chain(num_layers: int) -> nn.Module:
    with torch.device("meta"):
        return nn.Sequential(*(nn.Linear(WIDTH, WIDTH) for _ in range(num_layers)))


def run(model: nn.Module, num_ranks: int, **options: Any) -> DryRun:
    x = torch.empty(BATCH, WIDTH, device="meta")
    settings: dict[str, Any] = {
        "example_target": x,
        "loss_fn": nn.functional.mse_loss,
        "num_microbatches": M,
    }
    return penstock.dry_run(model, x, num_ranks=num_ranks, **settings | options)


def test_memory_and_messages_of_a_rank() -> None:
    found = run(chain(8), 4, schedule="1F1B", ranks=1).ranks[0]
    weights = 2 * (WIDTH * WIDTH + WIDTH)
    assert (1, (1,), weights, 2 * M) == (
        found.rank,
        found.stages,
        found.num_parameters,
        found.num_actions,
    )
    assert (4 * weights, 4 * weights) == (found.parameter_bytes, found.gradient_bytes)
    moments, counts = 2 * 4 * weights, 4 * 4  # AdamW counts the steps of each parameter.
    assert moments + counts == found.optimizer_bytes
    traffic = (M, M * 2 * ROW)
    assert {0: traffic, 2: traffic} == found.sent == found.received
    assert found.peak_bytes == found.parameter_bytes + found.optimizer_bytes + found.step_bytes
    assert found.activation_bytes <= found.step_bytes
    assert found.step_bytes <= found.activation_bytes + found.gradient_bytes


def test_more_microbatches_in_flight_hold_more() -> None:
    three, two = run(chain(4), 4, schedule="1F1B", ranks=[1, 2]).ranks
    assert three.activation_bytes == two.activation_bytes + 2 * 2 * ROW  # An input and an output.
    gpipe = run(chain(4), 4, schedule="GPipe", ranks=1).ranks[0]
    assert gpipe.activation_bytes > three.activation_bytes


def test_weight_halves_hold_inputs_until_they_run() -> None:
    """A dry run splits backwards as a real one does, although its tensors are a subclass."""
    order = "\n".join(
        f"{','.join(f'{rank}F{mb}' for mb in range(M))},"
        f"{','.join(f'{rank}I{mb}' for mb in range(M))},"
        f"{','.join(f'{rank}W{mb}' for mb in range(M))}"
        for rank in range(2)
    )
    late = run(chain(2), 2, schedule=Schedule.from_csv(order), ranks=1).ranks[0]
    early = run(chain(2), 2, schedule="GPipe", ranks=1).ranks[0]
    # Each weight backward still needs the input and the gradient of its layer.
    assert late.activation_bytes >= M * 2 * 2 * ROW
    assert late.activation_bytes > early.activation_bytes


@pytest.mark.parametrize("p", [64, pytest.param(512, marks=only_in_fuzz)])
def test_some_of_many_ranks_are_run_and_all_are_matched(p: int) -> None:
    found = run(chain(p), p, schedule="1F1B", num_microbatches=4)
    assert (p, 2 * (p - 1) * 4) == (found.num_ranks, found.num_messages)
    assert found.message_bytes == 2 * (p - 1) * BATCH * ROW
    assert f"All {p} ranks match: {found.num_messages} messages" in found.proven
    assert 0 in [rank.rank for rank in found.ranks]  # It holds the most microbatches.


@pytest.mark.parametrize("ranks", [None, 0, 3])
def test_step_that_trains_nothing_is_refused_whichever_ranks_are_run(ranks: int | None) -> None:
    """Only the rank with the last stage sees it, and it need not be among those that are run."""
    frozen = chain(4).requires_grad_(False)
    with pytest.raises(StageError, match="nothing would be trained"):
        run(frozen, 4, schedule="1F1B", ranks=ranks)
    assert run(chain(4), 4, schedule="1F1B", ranks=0).ranks[0].rank == 0


def test_heaviest_ranks_come_first() -> None:
    found = run(chain(4), 4, schedule="1F1B")
    assert [0, 1, 2, 3] == [rank.rank for rank in found.ranks]
    assert found.fullest is max(found.ranks, key=lambda rank: rank.peak_bytes)
    assert str(found).endswith(found.proven)
    assert str(found).startswith("rank 0: ")


@pytest.mark.parametrize("on_meta", [True, False])
def test_model_is_left_as_it_was(on_meta: bool) -> None:
    model = chain(4) if on_meta else nn.Sequential(*(nn.Linear(WIDTH, WIDTH) for _ in range(4)))
    before = dict(model.named_parameters())
    run(model, 2, schedule="ZB-V")
    after = dict(model.named_parameters())
    assert before.keys() == after.keys()
    assert all(before[name] is after[name] for name in before)
    assert all(parameter.grad is None for parameter in model.parameters())


class Tied(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.embed = nn.Embedding(50, WIDTH)
        self.layers = nn.Sequential(*(nn.Linear(WIDTH, WIDTH) for _ in range(4)))
        self.head = nn.Linear(WIDTH, 50, bias=False)
        self.head.weight = self.embed.weight

    def forward(self, tokens: Tensor) -> Tensor:
        logits: Tensor = self.head(self.layers(self.embed(tokens)))
        return logits


@pytest.mark.parametrize("is_frozen", [False, True])
def test_gradients_of_tied_parameters_are_exchanged(is_frozen: bool) -> None:
    tokens = torch.zeros(BATCH, dtype=torch.long)
    model = Tied()
    model.embed.requires_grad_(not is_frozen)
    found = penstock.dry_run(
        model,
        tokens,
        num_ranks=3,
        example_target=tokens,
        loss_fn=nn.functional.cross_entropy,
        schedule="1F1B",
        num_microbatches=M,
        ranks=range(3),
    )
    first, middle, last = found.ranks
    num_bytes = 1 if is_frozen else 1 + 4 * 50 * WIDTH  # Whether there are gradients, and these.
    assert (0, num_bytes) == first.sent[2] == last.received[0] == last.sent[0]
    assert {0, 2} == middle.sent.keys()


class Skipping(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        with torch.device("meta"):
            self.a, self.b, self.c, self.d = (nn.Linear(WIDTH, WIDTH) for _ in range(4))

    def forward(self, x: Tensor) -> Tensor:
        first = self.a(x)
        y: Tensor = self.d(self.c(self.b(first))) + first
        return y


def test_values_that_skip_stages_are_matched() -> None:
    found = run(Skipping(), 4, schedule="1F1B", cut=["b", "c", "d"], ranks=[1, 3])
    traffic = (M, M * 2 * ROW)
    assert {0: traffic, 2: traffic, 3: traffic} == found.ranks[0].sent  # It used `first` too.
    assert {1: traffic, 2: traffic} == found.ranks[1].sent
    assert 2 * 4 * M == found.num_messages


def looks_at_values(outputs: Tensor, target: Tensor) -> Tensor:
    return outputs.sum() if outputs.sum().item() > 0 else outputs.mean()


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"loss_fn": None}, "loss_fn is None, but a dry run is of a training step"),
        (
            {"example_target": None},
            "example_target, the target of the batch, is missing: the last stage needs",
        ),
        ({"schedule": "auto"}, "schedule is 'auto', which is found in real steps"),
        ({"ranks": 4}, "ranks has 4. Expected ranks of the pipeline: 0 to 3"),
        ({"ranks": [0, "1"]}, "ranks has '1'. Expected ranks of the pipeline"),
        ({"ranks": True}, "ranks has True. Expected ranks of the pipeline"),
        ({"ranks": 3.5}, "ranks has 3.5. Expected ranks of the pipeline"),
        ({"ranks": []}, "ranks is empty. Give at least one rank to run"),
        ({"memory": math.nan}, "memory is nan. Expected a number of bytes above 0"),
        ({"memory": "8GiB"}, "memory is '8GiB'. Expected a number of bytes above 0"),
        ({"optimizer": "AdamW"}, "optimizer is 'AdamW'. Expected what makes one"),
        ({"memory": 1000}, r"the training does not fit: rank 0: .* but memory is 1000 B"),
    ],
)
def test_what_cannot_be_run_is_refused(options: dict[str, Any], message: str) -> None:
    with pytest.raises(StageError, match=message):
        run(chain(8), 4, **options)


def test_loss_that_looks_at_values_is_refused() -> None:
    message = "the model cannot run without values: the result of .* depends on the values"
    with pytest.raises(StageError, match=message):
        run(chain(8), 4, schedule="1F1B", loss_fn=looks_at_values, cut=["2", "4", "6"])


def forms_of(num_stages: int) -> StageForms:
    pieces = penstock.cut_between_modules(
        chain(num_stages), [str(stage) for stage in range(1, num_stages)]
    )
    with FakeTensorMode():
        return find_forms(pieces, (torch.empty(2, WIDTH),), {})


def repeat_send(schedule: Schedule) -> Schedule:
    twice = Send(Message(1, 2, 3))
    return schedule.with_orders(
        [each for action in order for each in [action] * (1 + (action == twice))]
        for order in schedule.orders
    )


def test_message_that_is_sent_twice_is_named() -> None:
    schedule = get("1F1B")(num_ranks=4, num_microbatches=M)
    message = (
        "rank 2 waits for the activation of stage 1 for stage 2, microbatch 3 less often than rank "
        "1 sends it"
    )
    with pytest.raises(AgreementError, match=message):
        match_ranks(repeat_send(add_sends(schedule)), forms_of(4))


@pytest.mark.parametrize(
    ("channel", "change", "message"),
    [
        (
            Channel(1, 2),
            lambda found: [*found[:3], 7, *found[4:]],
            "rank 1 sends 7 bytes to rank 2 where rank 2 expects the activation of stage 1 for "
            "stage 2, microbatch 3, of 128 bytes",
        ),
        (
            Channel(0, 1),
            lambda found: found[:-1],
            "rank 1 takes nothing from rank 0 where rank 0 expects the activation of stage 0 for "
            "stage 1, microbatch 7, of 128 bytes",
        ),
        (
            Channel(1, 0),
            lambda found: [*found, 5],
            "rank 1 sends 5 bytes to rank 0 where rank 0 expects nothing more",
        ),
        (
            Channel(1, 3),
            lambda found: [64],
            "rank 1 sends 64 bytes to rank 3 where rank 3 expects nothing more",
        ),
    ],
    ids=["another size", "one less", "one more", "to another rank"],
)
def test_transfer_that_another_rank_does_not_expect_is_named(
    channel: Channel, change: Callable[[list[int]], list[int]], message: str
) -> None:
    schedule = get("1F1B")(num_ranks=4, num_microbatches=M)
    forms = forms_of(4)
    sent = match_ranks(schedule, forms)
    found = {
        own: [size for each in messages for size in forms.tensor_bytes(each)]
        for own, messages in sent.items()
        if 1 in own
    }
    match_transfers(1, found, sent, forms, {})
    found[channel] = change(found.get(channel, []))
    with pytest.raises(AgreementError, match=message):
        match_transfers(1, found, sent, forms, {})


def test_gradient_that_is_not_needed_is_not_sent() -> None:
    model = chain(4)
    for parameter in model[:2].parameters():
        parameter.requires_grad_(False)
    found = run(model, 4, schedule="1F1B", cut=["1", "2", "3"], ranks=range(4))
    assert (M, 0) == found.ranks[2].sent.get(1, (M, 0))
    assert (M, M * 2 * ROW) == found.ranks[3].sent[2]
    assert 0 == found.ranks[0].gradient_bytes == found.ranks[0].optimizer_bytes


def test_forms_are_those_of_the_first_forward() -> None:
    forms = forms_of(4)
    assert [2 * ROW] == forms.tensor_bytes(Message(1, 2, 0)) == forms.tensor_bytes(Message(2, 1, 0))
    assert frozenset() == forms.skips
