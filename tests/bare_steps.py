"""Steps that only exchange messages: those of a schedule, with nothing computed in between."""

import torch

from penstock import Schedule
from penstock.comm import AbstractComm
from penstock.ir import Message, Send
from penstock.passes.simpler_orders import keep_forwards
from penstock.runtime.measuring.observer import NoClock
from penstock.runtime.messages.forms import Form, flatten
from penstock.runtime.messages.mailbox import Mailbox
from penstock.runtime.program import Program, make_program

CPU = torch.device("cpu")


def run_bare_steps(comm: AbstractComm, schedule: Schedule) -> None:
    """Run two steps and two evaluations: the first of each sends forms ahead of its messages."""
    for orders in (schedule, keep_forwards(schedule)):
        program = make_program(orders, comm.rank)
        forms: dict[Message, Form] = {}
        for _ in range(2):
            _run_program(program, Mailbox(comm, program, CPU, forms, NoClock()))


def _run_program(program: Program, mailbox: Mailbox) -> None:
    """Send and receive as a Step does; a message has the number of its microbatch."""
    for entry in program.entries:
        if isinstance(entry.action, Send):
            message = entry.action.message
            tensor = torch.tensor([float(message.mb)], requires_grad=not message.is_gradient)
            mailbox.send(message, *flatten((tensor,)))
        for task in entry.tasks:
            for message in filter(program.flow.is_sent, task.needs):
                _, (tensor,) = mailbox.receive(message)
                assert message.mb == tensor.item()
    mailbox.finish()
