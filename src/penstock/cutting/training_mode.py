"""Let a traced stage follow train() and eval(), although tracing fixes the mode in the graph.

eval() switches off only operations that were traced in training mode; the others stay off.
"""

import operator

import torch
from torch import fx
from torch.fx import Node

_aten = torch.ops.aten

# Operations with an argument that says whether the mode is training, and its position.
_TRAINING_ARGUMENT: dict[object, int] = {
    _aten.dropout.default: 2,
    _aten.dropout_.default: 2,
    _aten.feature_dropout.default: 2,
    _aten.feature_dropout_.default: 2,
    _aten.alpha_dropout.default: 2,
    _aten.alpha_dropout_.default: 2,
    _aten.feature_alpha_dropout.default: 2,
    _aten.rrelu.default: 3,
    _aten.rrelu_.default: 3,
    _aten.batch_norm.default: 5,
    _aten.instance_norm.default: 5,
    _aten.lstm.input: 6,
    _aten.lstm.data: 7,
    _aten.gru.input: 6,
    _aten.gru.data: 7,
    _aten.rnn_tanh.input: 6,
    _aten.rnn_relu.input: 6,
}
# Norms, and the position of their running statistics; without those they always use the batch's.
_STATISTICS = {_aten.batch_norm.default: 3, _aten.instance_norm.default: 3}
_ATTENTION_DROPOUT = 4


def follow_training_mode(graph: fx.Graph) -> None:
    """Let operations that depend on the mode read the module's `training` at each call."""
    training: Node | None = None
    for node in list(graph.nodes):
        place = _switched(node)
        if place is None:
            continue
        if training is None:
            with graph.inserting_before(node):
                training = graph.create_node("get_attr", "training")
        value: object = training
        if node.target is _aten.scaled_dot_product_attention.default:
            with graph.inserting_before(node):
                value = graph.call_function(operator.mul, (node.args[place], training))
        node.update_arg(place, value)


def _switched(node: Node) -> int | None:
    """Return the position of the argument that depends on training, if traced in training."""
    place = _TRAINING_ARGUMENT.get(node.target)
    if node.target in _STATISTICS and node.args[_STATISTICS[node.target]] is None:
        return None
    if place is not None:
        return place if len(node.args) > place and node.args[place] is True else None
    if node.target is _aten.scaled_dot_product_attention.default:
        has_dropout = len(node.args) > _ATTENTION_DROPOUT and node.args[_ATTENTION_DROPOUT] != 0.0
        return _ATTENTION_DROPOUT if has_dropout else None
    if node.target is _aten.add_.Tensor and _counts_batches(node):
        return 1  # One more, or none.
    return None


def _counts_batches(node: Node) -> bool:
    """Return whether this is the addition with which a batch norm counts its batches."""
    counter = node.args[0]
    if isinstance(counter, Node) and str(counter.target).endswith("num_batches_tracked"):
        return True
    stack = node.meta.get("nn_module_stack") or {}
    module = str(list(stack.values())[-1][1]) if stack else ""
    return module.startswith("torch.nn.modules.batchnorm.")
