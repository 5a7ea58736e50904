"""The split backward: wrong gradients, hooks that run too often or not, memory that stays, checks.

Each mutant names the narrowest file that should notice it. That keeps apart what the models find
from what the random networks of tests/backward/test_fuzz.py would find anyway.
"""

TESTS = "tests/backward/test_models.py"
HOOKS = "tests/backward/test_hooks.py"
MEMORY = "tests/backward/test_memory.py"
ERRORS = "tests/backward/test_backward_errors.py"
ENGINE_ERRORS = "tests/backward/test_engine_errors.py"
ENGINE_LIMITS = "tests/backward/test_engine_limits.py"
FUNCTION_LIMITS = "tests/backward/test_function_limits.py"
SEED_CONTRACT = "tests/backward/test_seed_contract.py"
SETTLING = "tests/backward/test_settling.py"
CHANGING = "tests/backward/test_changing_graphs.py"

SETTLING_MUTANTS = [
    ("backward/terms.py", "for term in self._terms[1:]:", "for term in self._terms[2:]:"),
    (  # Sums are added in another order, and rounded differently.
        "backward/settling.py",
        "(param, []))[1].append(term)",
        "(param, []))[1].insert(0, term)",
    ),
    (
        "backward/terms.py",
        "total = total + value if is_dense else value + total",
        "total = total + value",
        SETTLING,
    ),
    ("backward/settling.py", "if not is_ours:", "if False:", MEMORY),
    ("backward/settling.py", "if not is_ours:", "if False:"),
    (
        "backward/settling.py",
        "if value.dtype == param.dtype and value.stride() == param.stride():",
        "if value.stride() == param.stride():",
    ),
    (
        "backward/settling.py",
        "if value.dtype == param.dtype and value.stride() == param.stride():",
        "if value.dtype == param.dtype:",
        SETTLING,
    ),
    ("backward/settling.py", "        foreach_add_(small, values)", "        pass"),
    (
        "backward/settling.py",
        "grad if so_far is None else _sum_for(param, so_far, grad)",
        "grad",
        HOOKS,
    ),
    (
        "backward/settling.py",
        "        delivery.run()  # [2]\n",
        "        _add_plainly(plain, grads, are_ours)\n        plain = []\n"
        "        delivery.run()  # [2]\n",
        FUNCTION_LIMITS,
    ),
    ("backward/settling.py", "    if signal_accumulators:", "    if False:", HOOKS),
    (
        "backward/settling.py",
        "signals.add(param, None)",
        "signals.add(param, param.grad)",
        HOOKS,
    ),
    ("backward/settling.py", "    with HooksPutOff(asked):", "    if True:", HOOKS),
    (
        "backward/settling.py",
        "            set_tensor_hooks(param, hooks)\n",
        "            set_tensor_hooks(param, dict(hooks))\n",
        HOOKS,
    ),
    (
        "backward/settling.py",
        "        for param, hooks in self._hooked:\n",
        "        for param, hooks in self._hooked if error[0] is None else ():\n",
        ENGINE_ERRORS,
    ),
    (
        "backward/settling.py",
        "if hooks or late_hooks or not (",
        "if hooks or not (",
        HOOKS,
    ),
    (
        "backward/settling.py",
        "if hooks or late_hooks or not (",
        "if late_hooks or not (",
        HOOKS,
    ),
    (
        "backward/settling.py",
        "and param.grad_dtype is not param.dtype:",
        "and False:",
        SETTLING,
    ),
    (
        "backward/settling.py",
        "asked = [param for param in params if param.requires_grad]",
        "asked = list(params)",
    ),
]

TERMS_MUTANTS = [
    ("backward/terms.py", "if self._alpha != 1:", "if False:"),
    (
        "backward/terms.py",
        "product.mul_(self._alpha)\n        return product.t() if self._is_transposed else product",
        "product.mul_(self._alpha)\n        return product",
    ),
    (  # The other of two equal formulas, which rounds long sums differently.
        "backward/terms.py",
        "return strides[0] == 1 and strides[1] == shape[0]",
        "return False",
    ),
    ("backward/terms.py", "if self._beta != 1:", "if False:"),
    (
        "backward/terms.py",
        "is_row_sum = grad.dim() == 2 and len(shape) == 1 and shape[0] == grad.size(1)",
        "is_row_sum = grad.dim() == 2 and len(shape) == 1",
    ),
    (  # Seen only if a later microbatch adds to the gradient that the caller gave.
        "backward/terms.py",
        "return total.clone() if total is self._grad else total",
        "return total",
    ),
    (
        "backward/terms.py",
        "            bias,\n            self.stride,\n            self.padding,",
        "            bias,\n            self.stride,\n            self.dilation,",
    ),
    (
        "backward/terms.py",
        "            [num_channels],\n            self.stride,",
        "            [num_channels],\n            self.dilation,",
    ),
    (
        "backward/terms.py",
        "            self.groups,\n            (False, *of_parameters),",
        "            1,\n            (False, *of_parameters),",
    ),
    ("backward/terms.py", "        if now != self._versions:", "        if False:", ERRORS),
    (
        "backward/terms.py",
        "    except RuntimeError:  # Inference",
        "    except ValueError:  # Inference",
        ENGINE_LIMITS,
    ),
]

HARVESTING_MUTANTS = [
    ("backward/graph_pattern.py", "(tensor.grad_fn, tensor.output_nr)", "(tensor.grad_fn, 0)"),
    (  # Weights whose gradient autograd must compute are deferred.
        "backward/harvesting.py",
        "group.may_wait &= is_passed and graph.kinds[place] == PRODUCT",
        "group.may_wait = is_passed and graph.kinds[place] == PRODUCT",
    ),
    (
        "backward/harvesting.py",
        "group.may_wait &= is_passed and graph.kinds[place] == PRODUCT",
        "group.may_wait &= graph.kinds[place] == PRODUCT",
    ),
    ("backward/harvesting.py", "        self.may_wait &= other.may_wait\n", "", CHANGING),
    ("backward/harvesting.py", "self.users += other.users", "self.users = other.users"),
    ("backward/harvesting.py", "        self.tails += other.tails\n", ""),
    (
        "backward/graph_pattern.py",
        "    NODES.TBackward0: TRANSPOSE,\n",
        "    NODES.TBackward0: TRANSPOSE,\n    NODES.TransposeBackward0: TRANSPOSE,\n",
    ),
    (
        "backward/harvesting.py",
        "uses.append(Use(number, True))",
        "uses.append(Use(number, False))",
    ),
    (
        "backward/harvesting.py",
        "                self._of_weight.update(dict.fromkeys(other.weights, host))\n",
        "",
    ),
    (
        "backward/graph_pattern.py",
        "add(leaf_of(id(accumulated_variable(node)), NO_WEIGHT))",
        "add(leaf_of(id(accumulated_variable(node)), 0))",
        FUNCTION_LIMITS,
    ),
    ("backward/graph_pattern.py", "leaves[id(x)] = INPUT", "pass", MEMORY),
    (
        "backward/graph_pattern.py",
        "add(place + PER_GRADIENT * gradient if gradient else place)",
        "add(place)",
    ),
    ("backward/harvesting.py", "weights.extend(below)", "weights.append(below[0])"),
    (
        "backward/graph_pattern.py",
        "            all_halts.append(x.grad_fn)\n",
        "            pass\n",
    ),
    (
        "backward/graph_pattern.py",
        "found_halts = {places[halt] for halt in all_halts if halt in places}",
        "found_halts: set[int] = set()",
        CHANGING,
    ),
    ("backward/harvesting.py", "@lru_cache(maxsize=32)", "@lru_cache(maxsize=None)", CHANGING),
]

INPUT_HALF_MUTANTS = [
    (
        "backward/input_half.py",
        "    with HooksPutOff(plan.urgent), _Watch",
        "    with _Watch",
        HOOKS,
    ),
    ("backward/input_half.py", "            handle.remove()", "            pass", MEMORY),
    ("backward/input_half.py", "(root_grads[number],)", "(root_grads[0],)"),
    (  # Sums are added in another order, and rounded differently.
        "backward/input_half.py",
        "-sequence_number(nodes[user.place])",
        "sequence_number(nodes[user.place])",
    ),
    (
        "backward/input_half.py",
        "-sequence_number(nodes[user.place])",
        "-user.place",
        CHANGING,
    ),
    (
        "backward/input_half.py",
        "GradientEdge(nodes[target.place], target.number)",
        "GradientEdge(nodes[target.place], 0)",
    ),
]

SOURCES_MUTANTS = [
    (
        "backward/sources.py",
        "SumTo(grad, _shape(target), self._beta)",
        "SumTo(grad, _shape(target))",
    ),
    (
        "backward/sources.py",
        "self._alpha, is_transposed != transposed)",
        "self._alpha, transposed)",
    ),
    ("backward/sources.py", "        elif transposed:\n            return None\n", ""),
    (
        "backward/sources.py",
        "    if type(scales[0]) is complex or type(scales[1]) is complex:\n        return None\n",
        "",
        FUNCTION_LIMITS,
    ),
    (
        "backward/sources.py",
        "if any(use.edge == 0 or use.transposed for use in uses):",
        "if any(use.transposed for use in uses):",
    ),
    (
        "backward/sources.py",
        "scale = self._alpha if use.edge == 1 else 1",
        "scale = self._alpha",
    ),
    ("backward/sources.py", "    if place.packed_by(node) is not None:", "    if False:"),
    ("backward/sources.py", "    if _MAT1.packed_by(node) is not None:", "    if False:", CHANGING),
    ("backward/sources.py", "or saved_scales(node) != (1, 1):", "or False:", CHANGING),
    ("backward/sources.py", "if type(bias) is GradientEdge or", "if", ENGINE_LIMITS),
    (  # The other of two equal formulas, which rounds long sums differently.
        "backward/sources.py",
        "is_transposed = not is_column_major(*_MAT2.layout(node))",
        "is_transposed = False",
    ),
    ("backward/sources.py", "return None if tensor.is_complex() else tensor", "return tensor"),
    (
        "backward/sources.py",
        "is_right_transposed = kind.is_2d and is_column_major(*kind.right.layout(node))",
        "is_right_transposed = kind.is_2d and is_column_major(*kind.left.layout(node))",
    ),
    (
        "backward/sources.py",
        "[factor for factor in (left, right) if factor is not None]",
        "[]",
        ERRORS,
    ),
    ("backward/sources.py", "        self.saved = [x]\n", "        self.saved = []\n", ERRORS),
]

GROUPS_MUTANTS = [
    ("backward/groups.py", "if not known.issuperset(map(id, self._params)):", "if False:", ERRORS),
    ("backward/groups.py", "        self.unmodified.check()\n", "", ERRORS),
    ("backward/groups.py", "        self._arrived = ()\n", "", MEMORY),
    (
        "backward/groups.py",
        "grad = given[0] if len(given) == 1 else _sum(given)",
        "grad = given[0]",
        SEED_CONTRACT,
    ),
    (
        "backward/groups.py",
        "total = grad if total is None else total + grad",
        "total = grad",
        SEED_CONTRACT,
    ),
    (
        "backward/groups.py",
        "for grad in _entries(given, f'group[\"grads\"][{position}] of {self!r}'):",
        "for grad in _entries(given, f'group[\"grads\"][{position}] of {self!r}')[:1]:",
        ERRORS,
    ),
    (
        "backward/groups.py",
        "if len(grads) != len(self._arrived):",
        "if len(grads) > len(self._arrived):",
        ERRORS,
    ),
]

FUNCTIONS_MUTANTS = [
    (
        "backward/functions.py",
        "        x.grad = None\n        if not x.is_leaf:",
        "        if not x.is_leaf:",
        FUNCTION_LIMITS,
    ),
    (  # Seen only by a full backward of a computed input.
        "backward/functions.py",
        "            x.retain_grad()",
        "            pass",
    ),
    (
        "backward/functions.py",
        "    for x in inputs:\n        x.grad = None\n    return",
        "    return",
        FUNCTION_LIMITS,
    ),
    (
        "backward/functions.py",
        "before = x.grad if x.is_leaf or x.retains_grad else None",
        "before = x.grad",
    ),
    (
        "backward/functions.py",
        "x.grad = grad if before is None else before + grad",
        "x.grad = grad",
        FUNCTION_LIMITS,
    ),
    (
        "backward/functions.py",
        "        if not retain_graph:\n",
        "        if True:\n",
        SEED_CONTRACT,
    ),
    (
        "backward/functions.py",
        "carry_on(tails, weights, retain_graph=retain_graph)",
        "carry_on(tails, weights)",
        ERRORS,
    ),
    (  # What was freed before a later group was refused is lost.
        "backward/functions.py",
        "        group.check(known)\n"
        "    unmodified = [group.unmodified for group in param_groups]\n"
        "    for group in param_groups:\n",
        "        group.check(known)\n        unmodified = [group.unmodified]\n",
        FUNCTION_LIMITS,
    ),
]

STRUCTURE_MUTANTS = [
    (
        "backward/structure.py",
        "grad is None and output.numel() == 1 for",
        "grad is None for",
        FUNCTION_LIMITS,
    ),
    (
        "backward/structure.py",
        "    are_losses = grads is None or all(\n"
        "        grad is None and output.numel() == 1 for _, output, grad in found\n    )\n",
        "    are_losses = grads is None\n",
        FUNCTION_LIMITS,
    ),
    (
        "backward/structure.py",
        "return found if len(found) < 2 else list(dict.fromkeys(found))",
        "return found",
        FUNCTION_LIMITS,
    ),
    (
        "backward/structure.py",
        "    if grad.shape != output.shape or is_other_kind:",
        "    if False:",
        ERRORS,
    ),
    ("backward/structure.py", "if grad.keys() != output.keys():", "if False:", ERRORS),
    ("backward/structure.py", 'f"{name}[{i}]")', 'f"{name}[{i + 1}]")', ERRORS),
    (
        "backward/structure.py",
        "    elif type(output) in pytree.SUPPORTED_NODES:",
        "    elif False:",
        FUNCTION_LIMITS,
    ),
]

ENGINE_MUTANTS = [
    (
        "backward/engine.py",
        "            self._sink.taps = self._sink.owner = None",
        "            self._sink.owner = None",
        ENGINE_ERRORS,
    ),
    (
        "backward/engine.py",
        "if output.grad_fn is not None and output.grad_fn not in outside:",
        "if output.grad_fn is not None:",
        ENGINE_LIMITS,
    ),
    (
        "backward/engine.py",
        "if output.grad_fn is not None and output.grad_fn not in outside:",
        "if False:",
        ENGINE_ERRORS,
    ),
    (  # What can wait does so in the first microbatch only.
        "backward/engine.py",
        "self._must_walk = bool(plan.waiting)",
        "self._must_walk = False",
        FUNCTION_LIMITS,
    ),
    (
        "backward/engine.py",
        "params, [tap[0] for tap in taps])",
        "params)",
    ),
    (  # Sums are added in another order, and rounded differently.
        "backward/engine.py",
        "zip(reversed(taps), reversed(tap_grads), strict=True)",
        "zip(taps, tap_grads, strict=True)",
    ),
    (
        "backward/engine.py",
        "needed = [grad for _, grad in arrived]",
        "needed: list[Tensor] = []",
        ENGINE_LIMITS,
    ),
    ("backward/engine.py", "        unmodified.check()\n", "", ERRORS),
    (
        "backward/engine.py",
        "return list({id(param): param for param in wanted}.values())",
        "return wanted",
    ),
    (
        "backward/engine.py",
        "                if param is not None and param.requires_grad\n",
        "                if param is not None\n",
    ),
    (
        "backward/engine.py",
        'if own.setdefault("forward", new) is new]',
        "if not own.update(forward=new)]",
        ENGINE_LIMITS,
    ),
    (
        "backward/engine.py",
        "        self._taps = self.outputs = None",
        "        self._taps = None",
        MEMORY,
    ),
    (
        "backward/engine.py",
        "if loss is not None and remainder.is_empty() and",
        "if False and",
        ENGINE_LIMITS,
    ),
    (
        "backward/engine.py",
        "        work, self._work = self._work, None",
        "        work = self._work",
        ERRORS,
    ),
    (
        "backward/engine.py",
        "        if not inputs:\n",
        "        if False:\n",
        ENGINE_LIMITS,
    ),
    (
        "backward/engine.py",
        "any(_is_held(param) for param in self._trainable())",
        "False",
        HOOKS,
    ),
    ("backward/engine.py", "            leaf.params.refresh()", "            pass", ENGINE_LIMITS),
    (
        "backward/engine.py",
        "            with self._gathered(), self._running(token):",
        "            with self._gathered():",
    ),
]

LEAF_MUTANTS = [
    (
        "backward/leaf_modules.py",
        "bias is not None and trains_bias and bias.requires_grad else None",
        "bias is not None and trains_bias else None",
        ENGINE_LIMITS,
    ),
    (
        "backward/leaf_modules.py",
        "            bias = None if bias is None else bias.to(x.dtype)\n",
        "",
    ),
    (  # The other of two equal formulas, which rounds long sums differently.
        "backward/leaf_modules.py",
        "is_by_rows = is_column_major(weight.shape[::-1], weight.stride()[::-1])",
        "is_by_rows = True",
    ),
    (
        "backward/leaf_modules.py",
        "bias is not None and trains_bias and bias.requires_grad else None",
        "bias is not None and bias.requires_grad else None",
        ENGINE_LIMITS,
    ),
    (
        "backward/leaf_modules.py",
        "trains_weight = weight.requires_grad  #",
        "trains_weight = True  #",
        ENGINE_LIMITS,
    ),
    ("backward/leaf_modules.py", "        and not is_in_forward_mode()\n", "", ENGINE_LIMITS),
    ("backward/settling.py", "# [2]\n        recheck()\n", "# [2]\n", SETTLING),
    (
        "backward/settling.py",
        "first + second if dtype is None else first.to(dtype) + second.to(dtype)",
        "first + second",
        SETTLING,
    ),
    (
        "backward/leaf_modules.py",
        "        if version_of(held) != version:",
        "        if False:",
        ERRORS,
    ),
    (
        "backward/leaf_modules.py",
        "    if held.version_of(x) != held.version:",
        "    if False:",
        "tests/dist/test_tensor_parallel.py",
    ),
    ("backward/leaf_modules.py", "        and not is_any_autocast_enabled()\n", ""),
    (
        "backward/leaf_modules.py",
        "        and top_saved_tensors_hooks(False) is None\n",
        "",
        MEMORY,
    ),
    ("backward/leaf_modules.py", "        and not sink.is_wary\n", "", ENGINE_LIMITS),
    (
        "backward/leaf_modules.py",
        "x, held.x = held.x, None  #",
        "x = held.x  #",
        MEMORY,
    ),
    (
        "backward/leaf_modules.py",
        "if type(module).forward is nn.Linear.forward:",
        "if isinstance(module, nn.Linear):",
    ),
    (
        "backward/leaf_modules.py",
        'module.padding_mode == "zeros" and not isinstance(module.padding, str)',
        'module.padding_mode == "zeros"',
    ),
    (
        "backward/leaf_modules.py",
        'module.padding_mode == "zeros" and not isinstance(module.padding, str)',
        "not isinstance(module.padding, str)",
    ),
    ("backward/leaf_modules.py", ' or "bias" not in self._params:', ":"),
    ("backward/leaf_modules.py", "p.is_leaf and is_known(p)", "is_known(p)", ENGINE_LIMITS),
    (
        "backward/leaf_modules.py",
        "is_known(p) and not p.is_complex() and",
        "is_known(p) and",
    ),
    (
        "backward/leaf_modules.py",
        "if call is None or not call.weight.requires_grad:",
        "if call is None:",
        ENGINE_LIMITS,
    ),
    (
        "backward/leaf_modules.py",
        "is_fused = bias is not None and x.is_contiguous()",
        "is_fused = bias is not None",
    ),
    (
        "backward/leaf_modules.py",
        "return out if _inner_product(out) is not None else _no_view(out, out.shape)",
        "return out",
    ),
    (
        "backward/leaf_modules.py",
        "x.dim() == call.weight.dim() and _is_zero_padded(module)",
        "_is_zero_padded(module)",
    ),
    (
        "backward/leaf_modules.py",
        "if not (x.requires_grad and torch.is_grad_enabled()):",
        "if not x.requires_grad:",
    ),
    (
        "backward/leaf_modules.py",
        "if peek_interpreter_stack() is not None or is_in_forward_mode():",
        "if is_in_forward_mode():",
        ENGINE_LIMITS,
    ),
    (
        "backward/leaf_modules.py",
        "return are_saves_hooked or sink.taps is not None",
        "return sink.taps is not None",
    ),
    (
        "backward/leaf_modules.py",
        "torch.is_autocast_enabled(kind) and x.dtype is not torch.float64:",
        "torch.is_autocast_enabled(kind):",
    ),
    (
        "backward/leaf_modules.py",
        "        self.is_wary = True",
        "        self.is_wary = False",
        ENGINE_LIMITS,
    ),
    (
        "backward/leaf_modules.py",
        "    if are_saves_hooked:\n",
        "    if False:\n",
        MEMORY,
    ),
    (
        "backward/leaf_modules.py",
        "and not torch.is_autocast_enabled(x.device.type):",
        "and False:",
    ),
]

OTHER_MUTANTS = [
    (
        "backward/translate.py",
        "            raise ours from error",
        "            raise ours from None",
        ERRORS,
    ),
    (
        "backward/translate.py",
        "text.startswith(_RELEASED)",
        '"a second time" in text',
        FUNCTION_LIMITS,
    ),
    (
        "backward/translate.py",
        "        if text.startswith(_REENTRANT):",
        "        if False:",
        ERRORS,
    ),
    (
        "backward/wrappers.py",
        "return is_optimized_module(module) or compiled_call(module) is not None",
        "return is_optimized_module(module)",
        "tests/runtime/test_changed_stages.py",
    ),
    (
        "backward/wrappers.py",
        "            type(module).forward,\n",
        "",
        "tests/runtime/test_changed_stages.py",
    ),
    (
        "backward/wrappers.py",
        "            type(module),\n",
        "",
        "tests/dist/test_sharded_stages.py -k after",  # fully_shard changes the class in place.
    ),
    (
        "backward/wrappers.py",
        "            bool(own_parameters(module)),\n",
        "",
        "tests/runtime/test_changed_stages.py",
    ),
]

SHARDED_STEPS = "tests/dist/test_sharded_stages.py -k train_as_one"
SHARDED_PRODUCTS = "tests/dist/test_tensor_parallel.py -k placements_of_products"
FAILED_STEPS = "tests/dist/test_around_a_step.py -k after_one_that_failed"
GATHERS = "tests/dist/test_gathers_in_meshes.py -k as_often"
KEPT_GRADS = "tests/dist/test_kept_gradients.py"

SHARDING_MUTANTS = [
    (  # The computation waits for reductions.
        "torch_private/fsdp2.py",
        "context.reduce_scatter_max_input_buffers = inf",
        "pass",
        "tests/dist/test_overlapped_collectives.py",
    ),
    (  # The user's settings are not restored.
        "backward/sharding.py",
        "            group.settings = settings\n",
        "            pass\n",
        SHARDED_STEPS,
    ),
    (
        "backward/sharding.py",
        "        self._put_settings_back()\n        held",
        "        held",
        FAILED_STEPS,
    ),
    ("backward/sharding.py", "group.drop_grads()", "pass", FAILED_STEPS),
    ("backward/sharding.py", "        if not is_final:", "        if False:", KEPT_GRADS),
    (  # The next step keeps its gradients too.
        "backward/sharding.py",
        "            if not self._is_final:",
        "            if False:",
        KEPT_GRADS,
    ),
    (
        "backward/sharding.py",
        "            group.accumulate()",
        "            pass",
        "tests/dist/test_sharded_stages.py -k add_up",
    ),
    (  # Each microbatch is reduced by itself.
        "backward/sharding.py",
        "group.settings = False, frees, mesh_between",
        "group.settings = True, frees, mesh_between",
        GATHERS,
    ),
    ("backward/sharding.py", "            if is_scheduled:", "            if False:", GATHERS),
    (  # Backwards free parameters.
        "backward/sharding.py",
        "frees = frees and frees_after_backward and mesh_between",
        "frees = frees and mesh_between",
        "tests/dist/test_gathers_in_meshes.py -k stays_gathered",
    ),
    (
        "backward/sharding.py",
        "yield gathered.get((id(own), name), param)",
        "yield param",
        GATHERS,
    ),
    (
        "backward/sharding.py",
        "if len(meshes) == 1 else []",
        "if meshes else []",
        "tests/dist/test_sharded_stages.py -k on_several_meshes",
    ),
    (
        "backward/sharded_products.py",
        "            return Partial()\n",
        "            return Replicate()\n",
        SHARDED_PRODUCTS,
    ),
    (
        "backward/sharded_products.py",
        "(left, rows) if kinds[1] is Replicate else (right, rows + 1)",
        "(left, rows + 1) if kinds[1] is Replicate else (right, rows)",
        SHARDED_PRODUCTS,
    ),
    (
        "backward/sharded_products.py",
        "left_dim == right_dim < rows",
        "left_dim == right_dim <= rows",
        SHARDED_PRODUCTS,
    ),
    (
        "backward/sharded_products.py",
        'return other if other.reduce_op in ("sum", "avg") else None',
        "return other",
        SHARDED_PRODUCTS,
    ),
    (
        "backward/terms.py",
        "        )\n        return product.t() if self._is_transposed else product",
        "        )\n        return product",
        SHARDED_PRODUCTS,
    ),
]

MUTANTS = [
    *SETTLING_MUTANTS,
    *TERMS_MUTANTS,
    *HARVESTING_MUTANTS,
    *INPUT_HALF_MUTANTS,
    *SOURCES_MUTANTS,
    *GROUPS_MUTANTS,
    *FUNCTIONS_MUTANTS,
    *STRUCTURE_MUTANTS,
    *ENGINE_MUTANTS,
    *LEAF_MUTANTS,
    *OTHER_MUTANTS,
    *SHARDING_MUTANTS,
]
