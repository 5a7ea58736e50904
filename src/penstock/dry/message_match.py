"""Match the messages of all ranks: what each sends with what the others need."""

from collections import Counter, defaultdict
from collections.abc import Iterable, Mapping, Sequence

from penstock.dry.stage_forms import StageForms
from penstock.errors import AgreementError
from penstock.ir import Message, Rank, Schedule, Send
from penstock.ir.dataflow import Dataflow
from penstock.ir.message import Channel
from penstock.passes.sends_and_skips import flow_of_sends, with_sends


def match_ranks(schedule: Schedule, forms: StageForms) -> dict[Channel, list[Message]]:
    """Return what all ranks send on each channel, in order.

    Raise an error unless it is what the actions of the receiver wait for, each message once.
    """
    sends, flow = flow_of_sends(schedule, forms.skips), Dataflow(schedule, forms.skips)
    sent: defaultdict[Channel, list[Message]] = defaultdict(list)
    needed: defaultdict[Channel, list[Message]] = defaultdict(list)
    for order in schedule.orders:
        for action in with_sends(order, sends):
            if isinstance(action, Send):
                sent[flow.channel(action.message)].append(action.message)
                continue
            for message in flow.needed(action):
                if flow.is_sent(message):
                    needed[flow.channel(message)].append(message)
    for channel in sent.keys() | needed.keys():
        _check_same(channel, sent[channel], needed[channel])
    return dict(sent)


def _check_same(channel: Channel, sent: list[Message], needed: list[Message]) -> None:
    if len(sent) == len(needed) and set(sent) == set(needed) and len(set(sent)) == len(sent):
        return
    lacking = Counter(needed)
    lacking.subtract(Counter(sent))
    message, count = next((message, count) for message, count in lacking.items() if count)
    times = "more often" if count > 0 else "less often"
    raise AgreementError(
        f"rank {channel.receiver} waits for {describe(message)} {times} than rank "
        f"{channel.sender} sends it. Expected each message once at both ends: check the schedule "
        "with `penstock verify`."
    )


def match_transfers(
    rank: Rank,
    found: Mapping[Channel, Sequence[int]],
    sent: Mapping[Channel, Sequence[Message]],
    forms: StageForms,
    tied_bytes: Mapping[Rank, Sequence[int]],
) -> None:
    """Raise an error unless a rank transferred, tensor by tensor, what the others expect.

    `tied_bytes` are what it exchanges with each rank at the end, both ways.
    """
    own = {channel for channel in sent if rank in channel}
    own |= {
        channel for other in tied_bytes for channel in (Channel(rank, other), Channel(other, rank))
    }
    for channel in sorted(own | found.keys()):
        other = channel.receiver if channel.sender == rank else channel.sender
        expected = list(_expected(channel, sent.get(channel, ()), forms, tied_bytes.get(other, ())))
        actual = found.get(channel, ())
        for number, (num_bytes, what) in enumerate(expected):
            if number >= len(actual) or actual[number] != num_bytes:
                raise _mismatch(rank, channel, what, num_bytes, actual, number)
        if len(actual) > len(expected):
            raise _mismatch(rank, channel, "nothing more", 0, actual, len(expected))


def _expected(
    channel: Channel, sent: Iterable[Message], forms: StageForms, tied: Iterable[int]
) -> Iterable[tuple[int, str]]:
    for message in sent:
        for num_bytes in forms.tensor_bytes(message):
            yield num_bytes, describe(message)
    for num_bytes in tied:
        yield num_bytes, "gradients of tied parameters"


def _mismatch(
    rank: Rank, channel: Channel, what: str, num_bytes: int, actual: Sequence[int], number: int
) -> AgreementError:
    verb, other = (
        ("sends", channel.receiver) if channel.sender == rank else ("takes", channel.sender)
    )
    preposition = "to" if channel.sender == rank else "from"
    got = f"{actual[number]} bytes" if number < len(actual) else "nothing"
    return AgreementError(
        f"rank {rank} {verb} {got} {preposition} rank {other} where rank {other} expects {what}, "
        f"of {num_bytes} bytes (tensor {number} of their channel). Expected the same on both "
        "ranks: let each stage return the same for every microbatch, in training as in its first "
        "forward."
    )


def describe(message: Message) -> str:
    """Return a message in words."""
    return (
        f"the {message.kind} of stage {message.maker} for stage {message.taker}, microbatch "
        f"{message.mb}"
    )
