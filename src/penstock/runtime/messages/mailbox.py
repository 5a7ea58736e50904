"""The messages of one step: receives are posted early, and sends are waited for late.

A sent tensor is kept until its receiver certainly has it, unless the link has copied it. A message
that comes back shows this, since its sender acts in order (`Program.received_before`); at the
latest, the end of the step does.
"""

from collections import deque
from functools import partial
from itertools import zip_longest
from typing import Any

import torch
from torch import Tensor

from penstock.comm import AbstractComm, Transfer
from penstock.comm.abstract_comm import copy_of
from penstock.comm.plain_values import of_bytes, to_bytes
from penstock.errors import StageError
from penstock.ir import Message, Rank
from penstock.runtime.measuring.observer import AbstractClock
from penstock.runtime.messages.forms import Form, TensorForm
from penstock.runtime.messages.letters import LETTER_BYTES, as_letters, open_letter
from penstock.runtime.messages.sendable import as_sent, check_mode
from penstock.runtime.program import Program
from penstock.stage.dtensors import local_part
from penstock.torch_private import pytree

# The number of messages of a channel that are posted while one is waited for, including that one:
# the next can arrive while the rank computes.
_POSTED_AHEAD = 2


class Mailbox:
    """The messages of one step. `forms` has the forms that both ends know; new ones are added.

    If not `is_dynamic`, the microbatches between two stages must be spread over meshes alike.
    """

    def __init__(
        self,
        comm: AbstractComm,
        program: Program,
        device: torch.device,
        forms: dict[Message, Form],
        clock: AbstractClock,
        *,
        is_dynamic: bool = False,
    ) -> None:
        if not comm.is_dry:
            check_mode(device)
        self._comm = comm
        self._flow = program.flow
        self._received_before = program.received_before
        self._device = device
        self._forms = forms
        self._clock = clock
        self._is_dynamic = is_dynamic
        self._inboxes = {
            sender: _Inbox(messages, comm.packs(sender), comm.needs_every_wait(sender))
            for sender, messages in program.arriving.items()
        }
        self._outboxes: dict[Rank, _Outbox] = {}
        for sender, inbox in self._inboxes.items():
            self._post_ahead(sender, inbox)

    def send(self, message: Message, leaves: list[Any], structure: pytree.TreeSpec) -> None:
        """Send a message; raise an error before any part is sent if the whole cannot be sent."""
        receiver = self._flow.receiver(message)
        outbox = self._outboxes.get(receiver)
        if outbox is None:
            outbox = self._outboxes[receiver] = _Outbox(self._comm, receiver)
        outbox.num_sent += 1
        form = self._forms.get(message)
        ready = None if form is None else form.values_of(leaves, structure, self._device)
        if form is None or ready is None:
            form, ready = self._look_closely(message, leaves, structure, outbox, receiver)
        if not outbox.copies and not form.need_grads and not message.is_gradient:
            # Tensors that need no gradient may be buffers, which the stage's next forward changes.
            graphs = [leaf.requires_grad for leaf in leaves if isinstance(leaf, Tensor)]
            ready = [x if has else copy_of(x) for x, has in zip(ready, graphs, strict=True)]
        if outbox.packs and form.packing is not None:
            ready = form.packing.pack(ready)
        for tensor in ready:
            transfer = self._comm.send(tensor, receiver)
            outbox.sent.append((outbox.num_sent, message, outbox.kept(tensor), transfer))

    def receive(self, message: Message) -> tuple[Form, list[Tensor]]:
        """Wait for a message; return its form and its tensors."""
        sender, num_received = self._received_before[message]
        inbox = self._inboxes[sender]
        while message not in inbox.posted:
            self._post_next(sender, inbox)
        # Post before waiting: posting takes time, which a waiting rank has.
        if inbox.num_posted < len(inbox.messages):
            self._post_ahead(sender, inbox)
        form, tensors, transfers = inbox.posted.pop(message)
        awaited = transfers if inbox.needs_every_wait else transfers[-1:]
        self._clock.wait_for(awaited, partial(self._describe_receive, message))
        outbox = self._outboxes.get(sender)
        if outbox is not None and outbox.sent:
            # A message without tensors never travelled, so it shows nothing.
            waits = outbox.needs_every_wait or not transfers
            self._release(outbox, num_received, waits=waits)
        return form, tensors

    def finish(self) -> None:
        """Wait until everything that was sent may be changed."""
        for outbox in self._outboxes.values():
            self._release(outbox, outbox.num_sent, waits=True)

    def _look_closely(
        self,
        message: Message,
        leaves: list[Any],
        structure: pytree.TreeSpec,
        outbox: "_Outbox",
        receiver: Rank,
    ) -> tuple[Form, list[Tensor]]:
        """Return the form of a message and the tensors to send; send the form if it is new."""
        # Prepare all before sending any: the receiver must not be left with part of a message.
        place = self._place(message)
        form = self._forms.get(message)
        ready = self._prepare(leaves, form, place)
        if form is not None:
            form.check(place, leaves, structure, is_gradient=message.is_gradient)
            return form, ready
        form = Form.of(leaves, structure)
        if not self._is_dynamic and (first := self._known_of(message)) is not None:
            first.check_alike(place, form)
        if not self._is_void(message):
            form = self._send_form(message, form, outbox, receiver)
        self._forms[message] = form
        return form, ready

    def _prepare(self, leaves: list[Any], form: Form | None, place: str) -> list[Tensor]:
        """Return the tensors to send, with zeros for expected gradients that are missing."""
        ready = []
        known = form.leaves if form is not None else ()
        for number, (leaf, like) in enumerate(zip_longest(leaves, known)):
            if isinstance(leaf, Tensor):
                part = local_part(leaf)
                ready.append(as_sent(part, self._device, place, number, is_dry=self._comm.is_dry))
            elif leaf is None and isinstance(like, TensorForm):
                ready.append(like.zeros(self._device))
        return ready

    def _shared(self, message: Message, form: Form) -> Form:
        """Return the same object for plain messages of the same form between two stages."""
        known = self._known_of(message) if form.are_plain else None
        return known if known is not None and known == form else form

    def _known_of(self, message: Message) -> Form | None:
        """Return the form of another microbatch between the same stages, if one is known."""
        ends = message.maker, message.taker
        known = (form for other, form in self._forms.items() if (other.maker, other.taker) == ends)
        return next(known, None)

    def _release(self, outbox: "_Outbox", num_received: int, *, waits: bool) -> None:
        """Release messages that have been received; wait for them first if `waits`."""
        sent = outbox.sent
        while sent and sent[0][0] <= num_received:
            _, message, _, transfer = sent.popleft()
            if waits:
                transfer.wait(partial(self._describe_send, message))

    def _send_form(self, message: Message, form: Form, outbox: "_Outbox", receiver: Rank) -> Form:
        """Send a form; return it as the receiver has it: the stage may change its own values."""
        try:
            content = to_bytes(form.as_tree())
        except Exception as exc:
            raise StageError(
                f"{self._place(message)} cannot be sent to rank {receiver}: {exc}. Expected tensors"
                ", and values that are data. Let the stage return only what the next one needs."
            ) from exc
        for part in as_letters(content):
            letter = torch.frombuffer(part, dtype=torch.uint8).to(self._device)
            transfer = self._comm.send(letter, receiver)
            outbox.sent.append((outbox.num_sent, message, outbox.kept(letter), transfer))
        return Form.of_tree(of_bytes(content))

    def _post_ahead(self, sender: Rank, inbox: "_Inbox") -> None:
        while (
            len(inbox.posted) < _POSTED_AHEAD
            and inbox.num_posted < len(inbox.messages)
            and inbox.messages[inbox.num_posted] in self._forms
        ):
            self._post_next(sender, inbox)

    def _post_next(self, sender: Rank, inbox: "_Inbox") -> None:
        """Post the channel's next message, once its form is known."""
        message = inbox.messages[inbox.num_posted]
        inbox.num_posted += 1
        form = self._forms.get(message)
        if form is None:
            form = self._forms[message] = self._shared(message, self._receive_form(message, sender))
        if form.packing is not None and inbox.packs:
            buffers = form.packing.empties(self._device)
            tensors = form.packing.unpack(buffers)
        elif inbox.posted and (last := next(reversed(inbox.posted.values())))[0] is form:
            # Half the time of a tensor from its shape, dtype and device, which torch must parse.
            buffers = tensors = list(map(torch.empty_like, last[1]))
        else:
            buffers = tensors = [tensor.empty(self._device) for tensor in form.tensors]
        transfers = [self._comm.recv(buffer, sender) for buffer in buffers]
        inbox.posted[message] = form, tensors, transfers

    def _receive_form(self, message: Message, sender: Rank) -> Form:
        if self._is_void(message):
            return Form.of_tree(())
        letter = self._receive_bytes(LETTER_BYTES, message, sender)
        content, num_left = open_letter(letter)
        if num_left > 0:
            content += self._receive_bytes(num_left, message, sender)
        return Form.of_tree(of_bytes(content))

    def _receive_bytes(self, count: int, message: Message, sender: Rank) -> bytes:
        buffer = torch.empty(count, dtype=torch.uint8, device=self._device)
        transfer = self._comm.recv(buffer, sender)
        self._clock.wait_for([transfer], partial(self._describe_receive, message))
        return buffer.cpu().numpy().tobytes()

    def _is_void(self, message: Message) -> bool:
        """Return whether nothing is ever sent: a gradient of an activation that needs none."""
        if not message.is_gradient:
            return False
        return not any(tensor.requires_grad for tensor in self._forms[message.answer].tensors)

    def _place(self, message: Message) -> str:
        what = "input gradient" if message.is_gradient else "output"
        return f"stage {message.maker}, microbatch {message.mb}: {what}"

    def _describe_receive(self, message: Message) -> str:
        sender = self._flow.sender(message)
        return (
            f"the {message.kind} of microbatch {message.mb} for stage {message.taker} "
            f"from stage {message.maker} on rank {sender}"
        )

    def _describe_send(self, message: Message) -> str:
        receiver = self._flow.receiver(message)
        return (
            f"stage {message.taker} on rank {receiver} to take the {message.kind} of microbatch "
            f"{message.mb} from stage {message.maker}"
        )


class _Inbox:
    """The messages from one rank: all of them in order, and those that are posted."""

    def __init__(self, messages: tuple[Message, ...], packs: bool, needs_every_wait: bool) -> None:
        self.messages = messages
        self.packs = packs
        self.needs_every_wait = needs_every_wait
        self.num_posted = 0
        self.posted: dict[Message, tuple[Form, list[Tensor], list[Transfer]]] = {}


class _Outbox:
    """The messages to one rank: how many, and the tensors that are being sent."""

    def __init__(self, comm: AbstractComm, receiver: Rank) -> None:
        self.copies = comm.copies(receiver)
        self.packs = comm.packs(receiver)
        self.needs_every_wait = comm.needs_every_wait(receiver)
        self.num_sent = 0
        self.sent: deque[tuple[int, Message, Tensor | None, Transfer]] = deque()

    def kept(self, tensor: Tensor) -> Tensor | None:
        """Return what must stay alive of a tensor that is being sent."""
        return None if self.copies else tensor
