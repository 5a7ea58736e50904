"""Steps that only exchange messages: those of a schedule, with nothing computed in between."""

import torch

from penstock import Schedule
from penstock.comm import AbstractComm
from penstock.ir import SendActivation
from penstock.ir.action import SEND_TYPES
from penstock.runtime.messages.forms import Form, flatten
from penstock.runtime.messages.routes import Key
from penstock.runtime.messages.wire import Wire
from penstock.runtime.program import Program, forward_only, make_program

CPU = torch.device("cpu")


def run_bare_steps(comm: AbstractComm, schedule: Schedule) -> None:
    """Run two steps and two evaluations: the first of each sends forms ahead of its messages."""
    for orders in (schedule, forward_only(schedule)):
        program = make_program(orders, comm.rank)
        forms: dict[Key, Form] = {}
        for _ in range(2):
            _run_program(program, Wire(comm, program, CPU, forms))


def _run_program(program: Program, wire: Wire) -> None:
    """Send and receive as a Step does; a message has the number of its microbatch."""
    for entry in program.entries:
        for task in entry.tasks:
            if isinstance(task.action, SEND_TYPES):
                assert task.makes is not None
                is_activation = isinstance(task.action, SendActivation)
                tensor = torch.tensor([float(task.action.mb)], requires_grad=is_activation)
                wire.send(task.makes, *flatten((tensor,)))
            elif task.needs is not None and program.routes.is_message(task.needs):
                _, (tensor,) = wire.receive(task.needs)
                assert task.action.mb == tensor.item()
    wire.finish()
