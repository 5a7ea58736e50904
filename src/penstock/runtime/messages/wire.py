"""One step's messages: receives are posted early, and sends are waited for late."""

import pickle
from collections import deque
from functools import partial
from typing import Any

import torch
from torch import Tensor
from torch.utils import _pytree as pytree

from penstock.comm import AbstractComm, Transfer
from penstock.comm.abstract_comm import copy_of
from penstock.errors import StageError
from penstock.ir import Rank
from penstock.runtime.measuring.meter import Meter
from penstock.runtime.messages.forms import Form, as_sent, pickle_form
from penstock.runtime.messages.routes import Key
from penstock.runtime.messages.sendable import check_mode
from penstock.runtime.program import Program

# How many messages of a channel are posted while one is waited for, that one included: the next
# can come while the rank computes.
_POSTED_AHEAD = 2


class Wire:
    """The messages of one step. `forms` holds the forms that both ends know; it is added to."""

    def __init__(
        self,
        comm: AbstractComm,
        program: Program,
        device: torch.device,
        forms: dict[Key, Form],
        meter: Meter | None = None,
    ) -> None:
        check_mode(device)
        self._comm = comm
        self._program = program
        self._routes = program.routes
        self._device = device
        self._forms = forms
        self._meter = meter
        self._inboxes = {sender: _Inbox(keys) for sender, keys in program.arriving.items()}
        self._outboxes: dict[Rank, _Outbox] = {}
        for sender, inbox in self._inboxes.items():
            self._post_ahead(sender, inbox)

    def send(self, key: Key, leaves: list[Any], structure: pytree.TreeSpec) -> None:
        """Send a message; raises before anything of it is sent if it cannot be sent as it is."""
        receiver = self._routes.channel(key).receiver
        outbox = self._outboxes.setdefault(receiver, _Outbox())
        outbox.num_sent += 1
        form = self._forms.get(key)
        if form is not None and self._routes.answered(key) is not None:
            leaves = form.filled(leaves, self._device)
        place = self._place(key)
        # All of them before any is sent: the receiver is not left with a part of a message.
        ready = [
            as_sent(leaf, self._device, place, number)
            for number, leaf in enumerate(leaves)
            if isinstance(leaf, Tensor)
        ]
        if form is not None:
            form.check(place, leaves, structure)
        else:
            form = Form.of(leaves, structure)
            if not self._is_void(key):
                form = self._send_form(key, form, outbox, receiver)
            self._forms[key] = form
        if self._routes.answered(key) is None and not self._comm.copies(receiver):
            # What needs no gradient may be the stage's own: a buffer that its next forward changes.
            graphs = [leaf.requires_grad for leaf in leaves if isinstance(leaf, Tensor)]
            ready = [x if has else copy_of(x) for x, has in zip(ready, graphs, strict=True)]
        for tensor in ready:
            self._send_tensor(key, tensor, outbox, receiver)

    def receive(self, key: Key) -> tuple[Form, list[Tensor]]:
        """Wait for a message; returns its form and its tensors."""
        sender = self._routes.channel(key).sender
        inbox = self._inboxes[sender]
        while key not in inbox.posted:
            self._post_next(sender, inbox)
        # Before the wait, since posting takes time that a rank that waits has.
        self._post_ahead(sender, inbox)
        form, tensors, transfers = inbox.posted.pop(key)
        self._wait(key, transfers)
        self._release(*self._program.received_before[key])
        return form, tensors

    def finish(self) -> None:
        """Wait until all that was sent may be changed."""
        for receiver, outbox in self._outboxes.items():
            self._release(receiver, outbox.num_sent)

    def _release(self, receiver: Rank, num_received: int) -> None:
        """Let go of messages that have been received."""
        outbox = self._outboxes.get(receiver)
        while outbox and outbox.sent and outbox.sent[0][0] <= num_received:
            _, key, _, transfer = outbox.sent.popleft()
            transfer.wait(partial(self._describe_send, key))

    def _send_form(self, key: Key, form: Form, outbox: "_Outbox", receiver: Rank) -> Form:
        """Returns the form as the receiver has it: the stage may change values of its own."""
        try:
            pickled = bytearray(pickle_form(form))
        except Exception as exc:
            raise StageError(
                f"{self._place(key)} cannot be sent to rank {receiver}: {exc}. Expected tensors, "
                "and values that can be pickled. Let the stage return only what the next one needs."
            ) from exc
        body = torch.frombuffer(pickled, dtype=torch.uint8).to(self._device)
        size = torch.tensor([len(pickled)], device=self._device)
        self._send_tensor(key, size, outbox, receiver)
        self._send_tensor(key, body, outbox, receiver)
        return Form.of_tree(pickle.loads(pickled))

    def _send_tensor(self, key: Key, tensor: Tensor, outbox: "_Outbox", receiver: Rank) -> None:
        transfer = self._comm.send(tensor, receiver)
        outbox.sent.append((outbox.num_sent, key, tensor, transfer))

    def _post_ahead(self, sender: Rank, inbox: "_Inbox") -> None:
        while (
            inbox.num_posted < len(inbox.keys)
            and len(inbox.posted) < _POSTED_AHEAD
            and inbox.keys[inbox.num_posted] in self._forms
        ):
            self._post_next(sender, inbox)

    def _post_next(self, sender: Rank, inbox: "_Inbox") -> None:
        """Post the channel's next message, once its form is known."""
        key = inbox.keys[inbox.num_posted]
        inbox.num_posted += 1
        form = self._forms.get(key)
        if form is None:
            form = self._forms[key] = self._receive_form(key, sender)
        tensors = [tensor.empty(self._device) for tensor in form.tensors]
        transfers = [self._comm.recv(tensor, sender) for tensor in tensors]
        inbox.posted[key] = form, tensors, transfers

    def _receive_form(self, key: Key, sender: Rank) -> Form:
        if self._is_void(key):
            return Form.of_tree(())
        size = torch.empty(1, dtype=torch.int64, device=self._device)
        self._wait(key, [self._comm.recv(size, sender)])
        body = torch.empty(int(size.item()), dtype=torch.uint8, device=self._device)
        self._wait(key, [self._comm.recv(body, sender)])
        return Form.of_tree(pickle.loads(body.cpu().numpy().tobytes()))

    def _wait(self, key: Key, transfers: list[Transfer]) -> None:
        described = partial(self._describe_receive, key)
        if self._meter is not None:
            self._meter.wait_for(transfers, described)
            return
        for transfer in transfers:
            transfer.wait(described)

    def _is_void(self, key: Key) -> bool:
        """Whether nothing is ever sent: it is a gradient, of an activation that needs none."""
        activation = self._routes.answered(key)
        if activation is None:
            return False
        return not any(tensor.requires_grad for tensor in self._forms[activation].tensors)

    def _place(self, key: Key) -> str:
        is_gradient, maker, _, mb = self._routes.describe(key)
        return f"stage {maker}, microbatch {mb}: {'input gradient' if is_gradient else 'output'}"

    def _describe_receive(self, key: Key) -> str:
        is_gradient, maker, stage, mb = self._routes.describe(key)
        what = "gradient" if is_gradient else "activation"
        sender = self._routes.channel(key).sender
        return (
            f"the {what} of microbatch {mb} for stage {stage} from stage {maker} on rank {sender}"
        )

    def _describe_send(self, key: Key) -> str:
        is_gradient, maker, stage, mb = self._routes.describe(key)
        what = "gradient" if is_gradient else "activation"
        receiver = self._routes.channel(key).receiver
        return (
            f"stage {stage} on rank {receiver} to take the {what} of microbatch {mb} "
            f"from stage {maker}"
        )


class _Inbox:
    """What comes from one rank: all of it in order, and what is posted."""

    def __init__(self, keys: tuple[Key, ...]) -> None:
        self.keys = keys
        self.num_posted = 0
        self.posted: dict[Key, tuple[Form, list[Tensor], list[Transfer]]] = {}


class _Outbox:
    """What goes to one rank: how many messages, and the tensors that are on their way."""

    def __init__(self) -> None:
        self.num_sent = 0
        self.sent: deque[tuple[int, Key, Tensor, Transfer]] = deque()
