"""Steps on ranks: programs, messages, losses, ties, costs, recordings, and the schedule found."""

NUMERICS = "tests/runtime/test_numerics.py tests/runtime/test_gradient_flow.py"
OPTIONS = "tests/runtime/test_step_options.py"
TIED = "tests/runtime/test_tied_parameters.py tests/runtime/test_tied_messages.py"
ERRORS = "tests/runtime/test_step_errors.py tests/runtime/test_message_errors.py"
WEIGHTS = "tests/microbatches/test_loss_weights.py"
PACKING = "tests/runtime/test_packing.py"
WIRE = "tests/runtime/test_mailbox.py"
COSTS = "tests/runtime/test_stage_costs.py"
OVERLAPPED = "tests/dist/test_overlapped_collectives.py"
AUTO = "tests/runtime/test_auto.py tests/runtime/test_next_schedule.py"
SLOW = "tests/runtime/test_slow_watch.py"
TESTS = NUMERICS
AGAIN = "tests/runtime/test_recomputing.py"
MUTANTS = [
    # Forwards that run twice.
    (
        "runtime/in_flight.py",
        "leaf.data = other.data",
        "pass",
        "tests/runtime/test_recomputation_costs.py",
    ),
    (
        "runtime/measuring/held_bytes.py",
        "held = self._held[place] - self._copied + handed_over",
        "held = self._held[place]",
        "tests/runtime/test_recomputation_costs.py",
    ),
    (
        "runtime/messages/mailbox.py",
        "return None if self.copies else tensor",
        "return tensor",
        WIRE,
    ),
    (
        "runtime/step.py",
        "        with nothing_saved():\n",
        "        with without_autocast():\n",
        "tests/runtime/test_recomputation_costs.py",
    ),
    (
        "runtime/step.py",
        "            self.losses.let_go(mb)\n        self._dropping",
        "            pass\n        self._dropping",
        "tests/runtime/test_recomputation_costs.py",
    ),
    (
        "runtime/in_flight.py",
        "[copies.get(id(leaf), leaf) for leaf in leaves]",
        "list(leaves)",
        AGAIN,
    ),
    (
        "runtime/in_flight.py",
        "*(self._loss_modules if stage.is_last else ())",
        "*()",
        AGAIN,
    ),
    (
        "runtime/measuring/measuring_steps.py",
        "if kind is _Purpose.AGAIN and not isinstance(action, Recompute):",
        "if kind is _Purpose.AGAIN:",
        "tests/runtime/test_recomputation_costs.py",
    ),
    (
        "runtime/measuring/held_bytes.py",
        "copy_with_spread(tensor.detach()).requires_grad_(tensor.requires_grad)",
        "copy_with_spread(tensor)",
        "tests/runtime/test_recomputation_costs.py",
    ),
    # What a rank has to do.
    (
        "runtime/program.py",
        "isinstance(part, Backward | BackwardWeight)\n    }",
        "isinstance(part, Backward)\n    }",
        "tests/runtime/test_custom_parts.py",
    ),
    (
        "runtime/program.py",
        "received = max(received, place.get(message, 0))",
        "received = max(received, place.get(message, 0) + 1)",
        "tests/runtime/test_program.py",
    ),
    # The labels that count in a model's own loss.
    (
        "runtime/own_loss.py",
        "return labels[..., 1:] if labels.dim() > 1 else labels",
        "return labels",
        "tests/runtime/test_own_loss.py",
    ),
    (
        "runtime/losses.py",
        "return weights[loss_fn.counted]()\n\n    def settle",
        "return weights[Counted.ALL]()\n\n    def settle",
        "tests/parallel/test_labels.py",
    ),
    # The parts of ranks.
    (
        "runtime/rank_facts.py",
        "[*orders[other], *orders.stamps_of(other)]",
        "[*orders[other]]",
        "tests/runtime/test_parts_of_ranks.py",
    ),
    (
        "runtime/rank_facts.py",
        "digest == ranks[other].orders.get(other)",
        "True",
        "tests/runtime/test_parts_of_ranks.py",
    ),
    (
        "runtime/rank_facts.py",
        "flow_of_sends(schedule, skips).partners(rank)",
        "flow_of_sends(schedule, ()).partners(rank)",
        "tests/runtime/test_parts_of_ranks.py",
    ),
    # The step.
    ("runtime/step.py", "args = self.batch.args[mb]", "args = self.batch.args[0]"),
    ("runtime/step.py", "kwargs = self.batch.kwargs[mb]", "kwargs = self.batch.kwargs[0]", OPTIONS),
    (
        "runtime/step.py",
        "            self._outside.backward()\n",
        "",
        "tests/runtime/test_gradient_flow.py",
    ),
    (
        "runtime/step.py",
        "        pending()\n",
        "        if not (isinstance(task.action, Backward) and task.completes_grads):\n"
        "            pending()\n",
        "tests/runtime/test_custom_parts.py",
    ),
    (
        "runtime/messages/handing_over.py",
        "if (type(leaf) in PLAIN_TYPES or is_dtensor(leaf)) and not leaf.requires_grad:",
        "if False:",
        "tests/runtime/test_odd_models.py",
    ),
    (
        "runtime/step.py",
        "        if flight.loss is not None:\n            self.losses.let_go(mb)\n",
        "",
        "tests/runtime/test_skips.py -k dropped",
    ),
    (
        "runtime/step.py",
        "return flight.passage.backward_of_nothing()",
        "return flight.passage.backward(grads, flight.loss)",
        WEIGHTS,
    ),
    (
        "runtime/step.py",
        "        elif self.settings.on_grads_ready is not None:",
        "        if self.settings.on_grads_ready is not None:",
        TIED,
    ),
    (
        "runtime/step.py",
        "            stage.expect_last_grads()\n        self.observer.memory",
        "            pass\n        self.observer.memory",
        "tests/dist/test_ddp_in_pipeline.py",
    ),
    (
        "runtime/without_autocast.py",
        "        if torch.is_autocast_enabled(device_type):",
        "        if False and torch.is_autocast_enabled(device_type):",
        "tests/runtime/test_precision_and_recomputation.py",
    ),
    (
        "runtime/step.py",
        "        if self._left:\n            left = ",
        "        if not self._left:\n            left = ",
        "tests/runtime/test_custom_parts.py",
    ),
    (
        "runtime/step.py",
        "            self._left.remove(task)\n",
        "",
        "tests/runtime/test_custom_parts.py",
    ),
    # Losses.
    (
        "runtime/losses.py",
        "self.weights.seeds[mb], requires_grad=False",
        "self.weights.seeds[0], requires_grad=False",
        WEIGHTS,
    ),
    (
        "runtime/losses.py",
        "self.batch.targets[mb] if self.batch.targets else None",
        "self.batch.targets[-1 - mb] if self.batch.targets else None",
    ),
    (
        "runtime/losses.py",
        "self.weights.weigh(mb, self.values[mb])",
        "self.values[mb]",
        WEIGHTS,
    ),
    ("runtime/losses.py", "        elif shapes != self._shapes:", "        elif False:", WEIGHTS),
    (
        "runtime/losses.py",
        "if not loss.requires_grad and any(",
        "if False and any(",
        ERRORS,
    ),
    # Messages.
    (
        "runtime/messages/mailbox.py",
        "            self._release(outbox, num_received, waits=waits)\n",
        "",
        WIRE,
    ),
    (  # A gradient that never travels proves that an activation has arrived.
        "runtime/messages/mailbox.py",
        "waits = outbox.needs_every_wait or not transfers",
        "waits = outbox.needs_every_wait",
        PACKING,
    ),
    (
        "runtime/messages/mailbox.py",
        "transfers if inbox.needs_every_wait else transfers[-1:]",
        "transfers",
        PACKING,
    ),
    (  # Tensors are not aligned.
        "runtime/messages/packing.py",
        "start = -(-end // _ALIGNMENT) * _ALIGNMENT",
        "start = end",
        PACKING,
    ),
    (
        "runtime/messages/packing.py",
        "if num_bytes <= SMALL_BYTES:",
        "if True:",
        PACKING,
    ),
    (
        "runtime/messages/letters.py",
        "return content, length - len(content)",
        "return content, 0",
        PACKING,
    ),
    (
        "runtime/messages/forms.py",
        "or leaf.requires_grad is not form.requires_grad",
        "or False",
        ERRORS,
    ),
    ("runtime/messages/forms.py", "or leaf.shape != form.shape\n", "or False\n", ERRORS),
    (
        "runtime/messages/sendable.py",
        "            and not tensor.is_neg()\n",
        "",
        "tests/runtime/test_sendable.py",
    ),
    (
        "runtime/step_runner.py",
        "if self._programs is not None and changes == self._checked:",
        "if self._programs is not None and self._checked:",
        "tests/dist/test_sharded_refusals.py",
    ),
    (
        "runtime/replicas.py",
        "for group in stage.forward_groups",
        "for group in stage.peer_groups",
        "tests/dist/test_recomputing_on_processes.py -k different_parts",
    ),
    ("runtime/messages/mailbox.py", "_POSTED_AHEAD = 2", "_POSTED_AHEAD = 1", WIRE),
    (
        "runtime/messages/mailbox.py",
        "self._release(outbox, outbox.num_sent, waits=True)",
        "self._release(outbox, outbox.num_sent - 1, waits=True)",
        WIRE,
    ),
    (
        "runtime/messages/mailbox.py",
        "if not outbox.copies and not form.need_grads and not message.is_gradient:",
        "if False:",
        "tests/runtime/test_pipelines_on_nccl.py",
    ),
    (
        "runtime/messages/mailbox.py",
        "            form.check(place, leaves, structure, is_gradient=message.is_gradient)",
        "            pass",
        ERRORS,
    ),
    (
        "runtime/messages/mailbox.py",
        "        for tensor in ready:\n",
        "        for tensor in reversed(ready):\n",
        "tests/runtime/test_odd_models.py",
    ),
    (
        "runtime/messages/forms.py",
        "torch.zeros(self.shape, dtype=self.dtype, device=device)",
        "torch.ones(self.shape, dtype=self.dtype, device=device)",
        "tests/runtime/test_odd_models.py tests/runtime/test_gradient_flow.py",
    ),
    (
        "runtime/messages/forms.py",
        "            elif leaf.requires_grad != form.requires_grad:",
        "            elif False:",
        ERRORS,
    ),
    (
        "runtime/messages/sendable.py",
        "return values.resolve_conj().resolve_neg().contiguous()",
        "return values.resolve_conj().contiguous()",
        "tests/runtime/test_sendable.py",
    ),
    (
        "runtime/messages/sendable.py",
        "        end += offset * tensor.itemsize",
        "        pass",
        "tests/runtime/test_sendable.py",
    ),
    (
        "runtime/rank_facts.py",
        "        if sent != taken:",
        "        if sent < taken:",
        "tests/runtime/test_skip_errors.py",
    ),
    (
        "runtime/rank_facts.py",
        "for source, target in sorted(schedule.skips - found):",
        "for source, target in ():",
        "tests/runtime/test_skip_errors.py",
    ),
    # Ties.
    (
        "runtime/tied_parameters.py",
        "aside.to_dense() + total",
        "total",
        TIED,
    ),
    (
        "runtime/tied_parameters.py",
        "_sum(parts[rank].get(name) for rank in ranks)",
        "_sum(parts[rank].get(name) for rank in ranks[:2])",
        TIED,
    ),
    (
        "runtime/tied_parameters.py",
        "if name in self._copies and id(param) not in seen:",
        "if name in self._copies:",
        TIED,
    ),
    (
        "runtime/tied_parameters.py",
        "                copy.param.grad = copy.aside\n",
        "                pass\n",
        "tests/runtime/test_tied_errors.py tests/runtime/test_failing_together.py",
    ),
    (
        "runtime/tied_parameters.py",
        "        if held.described != first.described:",
        "        if False:",
        "tests/runtime/test_tied_errors.py",
    ),
    (
        "runtime/tied_parameters.py",
        "tuple(ranks[name]) for name in ranks",
        "tuple(sorted(ranks[name], key=lambda r: (r != rank, r))) for name in ranks",
        TIED,
    ),
    # How ranks fail together.
    (
        "runtime/connection.py",
        "            self._comm.fail(self._failure)\n",
        "",
        "tests/runtime/test_failing_together.py",
    ),
    (
        "runtime/connection.py",
        "        if self._failure:",
        "        if False:",
        "tests/runtime/test_step_errors.py",
    ),
    # What steps cost.
    (
        "runtime/measuring/action_times.py",
        "return self.ended_s - self.began_s - waited_s + self.sending_s",
        "return self.ended_s - self.began_s + self.sending_s",
        "tests/runtime/test_meter.py",
    ),
    (
        "runtime/measuring/action_times.py",
        "began_s, num_before = ended_s, num_waits",
        "began_s = ended_s",
        "tests/runtime/test_meter.py",
    ),
    (
        "runtime/measuring/action_times.py",
        "            began_s, num_before = ended_s, num_waits",
        "                began_s, num_before = ended_s, num_waits",
        "tests/runtime/test_meter.py",
    ),
    (
        "runtime/measuring/held_bytes.py",
        "max(0, self._held[place] - self._copied)",
        "self._held[place]",
        COSTS,
    ),
    (
        "runtime/measuring/held_bytes.py",
        "            leaves[:] = _copied(leaves)\n",
        "            pass\n",
        COSTS,
    ),
    (
        "runtime/measuring/measuring_steps.py",
        "edge = action.stage - 1 if isinstance(action, Forward) else action.stage",
        "edge = action.stage",
        COSTS + " tests/runtime/test_meter.py",
    ),
    (
        "runtime/measuring/message_times.py",
        "round_trip_s / 2 - sending_s - receipt_s",
        "round_trip_s - sending_s - receipt_s",
        COSTS + " tests/runtime/test_meter.py",
    ),
    (
        "runtime/measuring/stage_costs.py",
        "            changed.copy_(value)",
        "            pass",
        COSTS,
    ),
    # Recordings.
    (  # The gradients of weights, which stay, count as memory of the step.
        "runtime/measuring/action_bytes.py",
        "stays = self._before + max(0, made_grads)",
        "stays = self._before",
        "tests/runtime/test_action_bytes.py",
    ),
    (  # The memory of another schedule is taken for this one's.
        "runtime/recording/recorder.py",
        "schedule is not self._counted",
        "self._counted is None",
        "tests/runtime/test_action_bytes.py",
    ),
    (
        "runtime/recording/recorder.py",
        "timing.began_s + sum(timing.waits_s)))",
        "timing.began_s))",
        "tests/runtime/test_recorder.py",
    ),
    (
        "runtime/recording/recorder.py",
        "ran_until_s.get(place, end_s) - ahead_s)",
        "ran_until_s.get(place, end_s) + ahead_s)",
        "tests/runtime/test_recorder.py tests/runtime/test_clocks.py",
    ),
    (  # Reductions are drawn as if they ended when they were started.
        "runtime/recording/recorder.py",
        "ran_until_s.get(place, end_s) - ahead_s)",
        "end_s - ahead_s)",
        OVERLAPPED,
    ),
    (  # Collectives overlap each other.
        "runtime/recording/recorder.py",
        "        start_s = max([start_s, *ran_until_s.values()])\n",
        "",
        OVERLAPPED,
    ),
    (
        "runtime/recording/recorder.py",
        "        self._num_steps += 1\n",
        "        self._num_steps += isinstance(observer.clock, Meter)\n",
        "tests/runtime/test_recorder.py tests/runtime/test_auto.py",
    ),
    (
        "runtime/recording/clocks.py",
        "_, ahead_s = min(rounds)",
        "_, ahead_s = rounds[0]",
        "tests/runtime/test_clocks.py",
    ),
    (
        "runtime/recording/recorded_block.py",
        "            self._watched.remove(self._recorder)",
        "            pass",
        "tests/runtime/test_recorder.py",
    ),
    # The schedule that is found while training.
    (
        "runtime/auto/slow_watch.py",
        "        if len(self._window) < WINDOW:",
        "        if len(self._window) < 1:",
        SLOW,
    ),
    (
        "runtime/measuring/slowness.py",
        "statistics.median(found), planned_s[part]",
        "max(found), planned_s[part]",
        SLOW,
    ),
    (
        "runtime/auto/slow_watch.py",
        "asks = lost_s - explained_s >",
        "asks = lost_s >",
        SLOW,
    ),
    (
        "runtime/auto/auto_pilot.py",
        "min(options.seconds, timeout_s / 2)",
        "options.seconds",
        AUTO,
    ),
    (
        "runtime/auto/next_schedule.py",
        " or not can_run(current, costs, memory)",
        "",
        AUTO,
    ),
    (
        "runtime/auto/next_schedule.py",
        "memory=memory,\n            placements",
        "memory=None,\n            placements",
        AUTO,
    ),
    (
        "runtime/auto/next_schedule.py",
        "    tables = [costs, typical] if seen.differing else [costs]",
        "    tables = [costs]",
        AUTO,
    ),
    (
        "runtime/auto/slow_watch.py",
        "self.seen.apply(self.plan.costs, work)",
        "self.plan.costs",
        SLOW,
    ),
    (
        "runtime/auto/seen_work.py",
        "max(one / self.usual, _LEAST)",
        "one / self.usual",
        AUTO,
    ),
    (
        "runtime/auto/pilot.py",
        "        if len(ranks) != 1:",
        "        if not ranks:",
        "tests/runtime/test_pipeline_errors.py tests/runtime/test_auto.py",
    ),
    # Stages that are sharded.
    (
        "runtime/program.py",
        "        if stage not in reduced:",
        "        if True:",
        "tests/runtime/test_program.py -k sharded_stage",
    ),
    (
        "runtime/program.py",
        "after[last_use[stage]].append(Reshard(stage))",
        "after[last_grads[stage]].append(Reshard(stage))",
        "tests/runtime/test_program.py -k sharded_stage",
    ),
    (
        "runtime/program.py",
        "if stage not in gathered and last_use",
        "if last_use",
        "tests/runtime/test_program.py -k sharded_stage",
    ),
    (
        "runtime/program.py",
        "if isinstance(part, Backward | BackwardWeight):\n",
        "if isinstance(part, Backward):\n",
        "tests/runtime/test_program.py -k sharded_stage",
    ),
    # The norm of all gradients.
    (  # Each replica counts.
        "runtime/grad_norm.py",
        "_combine(torch.stack(parts), norm_type) if is_sharded else parts[0]",
        "_combine(torch.stack(parts), norm_type)",
        "tests/dist/test_clipping_on_processes.py -k any_placement",
    ),
    (
        "runtime/grad_norm.py",
        "not (kind.is_replicate() or kind.is_partial())",
        "not kind.is_replicate()",
        "tests/dist/test_clipping_on_processes.py -k any_placement",
    ),
    (  # Both copies of a rank count.
        "runtime/grad_norm.py",
        "if part.measured is not None and (part.name is None or not row):",
        "if part.measured is not None:",
        "tests/dist/test_clipping_on_processes.py -k whole_model",
    ),
    (  # The copies of each rank count.
        "runtime/grad_norm.py",
        "*(once[name] for name in sorted(once))",
        "*(norm for share in shares for norm in share.tied.values())",
        "tests/runtime/test_grad_norm.py -k tied",
    ),
    (
        "runtime/grad_norm.py",
        "            if id(weight) in seen:",
        "            if False:",
        "tests/runtime/test_grad_norm.py",
    ),
    # Ties of parameters that are spread over a mesh.
    (
        "runtime/tied_parameters.py",
        "placements=self.param.placements  #",
        "placements=grad.placements  #",
        "tests/dist/test_tied_on_processes.py -k over_a_mesh",
    ),
    # Bad values.
    (  # Values in between count as well.
        "runtime/bad_values/value_guard.py",
        "if any(is_bad for is_bad, _ in seen) else None",
        "",
        "tests/runtime/test_bad_values.py -k harm",
    ),
    (  # The lowest stage counts in the backward too.
        "runtime/bad_values/value_guard.py",
        "found.stage if is_forward else -found.stage",
        "found.stage",
        "tests/runtime/test_bad_values.py -k bad_backward",
    ),
    (  # Gradients of accumulated batches that are bad come back.
        "runtime/bad_values/value_guard.py",
        "        if self._before is None and self.bad_values",
        "        if self.bad_values",
        "tests/runtime/test_bad_values.py -k accumulated",
    ),
    (  # A microbatch without values spoils the step.
        "runtime/bad_values/value_guard.py",
        "            if not step.losses.counts(mb):",
        "            if False:",
        "tests/runtime/test_bad_values.py -k without_values",
    ),
    (  # Only the own pipeline's values count.
        "runtime/bad_values/value_guard.py",
        "self._peers.gather(found, _WHAT) if self._peers else [found]",
        "[found]",
        "tests/dist/test_bad_values_on_processes.py -k dp-one",
    ),
]
