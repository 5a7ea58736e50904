"""Channels between ranks."""

LOOPBACK = "tests/comm/test_loopback.py"
SHARED = "tests/comm/test_shared_memory.py"
TESTS = LOOPBACK
MUTANTS = [
    ("comm/loopback.py", ".put(copy_of(tensor))", ".put(tensor)"),
    ("comm/loopback.py", "self.failure = self.failure or report", "self.failure = report"),
    ("comm/loopback.py", "posted = self._posted.popleft()", "posted = self._posted.pop()"),
    (
        "comm/loopback.py",
        "if not isinstance(error, CommError)), failed[0])",
        "if isinstance(error, CommError)), failed[0])",
    ),
    ("comm/loopback.py", "        self._channels.check(sender, self.rank)\n", ""),
    ("comm/loopback.py", "        self._num_gathers += 1\n", ""),
    (
        "comm/channels.py",
        "return distance, low // distance % 2, channel.sender > channel.receiver, low",
        "return distance, 0, channel.sender > channel.receiver, low",
        "tests/comm/test_channels.py",
    ),
    (
        "comm/channels.py",
        "for channel in sorted(own, key=turn):",
        "for channel in sorted(own):",
        "tests/comm/test_channels.py",
    ),
    ("comm/channels.py", "            self._opened.add(channel)\n", "", "tests/comm"),
    (
        "comm/abstract_comm.py",
        "        if len(set(map(str, found))) > 1:",
        "        if False:",
        "tests/runtime/test_failing_together.py",
    ),
    (
        "comm/decisions.py",
        "choose([value, *found])",
        "choose([*found, value])",
        "tests/runtime/test_stage_costs.py tests/runtime/test_recorder.py",
    ),
    (
        "comm/shared_memory.py",
        "self._in_use[0][0] <= num_taken:",
        "self._in_use[0][0] <= num_taken + 1:",
        SHARED,
    ),
    (
        "comm/shared_memory.py",
        "        self._num_taken += 1\n",
        "",
        SHARED,
    ),
    (
        "comm/shared_memory.py",
        "            link.flush()\n",
        "            pass\n",
        SHARED,
    ),
    (
        "comm/shared_memory.py",
        "                self._backlogged.add(self)\n",
        "                self._unsent.popleft()\n",
        SHARED,
    ),
    (
        "comm/shared_memory.py",
        "                self._backlogged.add(self)\n",
        "",
        SHARED,
    ),
    (  # Links that have sent all would take time in every wait.
        "comm/shared_memory.py",
        "self._backlogged = backlogged\n",
        "self._backlogged = backlogged\n        backlogged.add(self)\n",
        SHARED,
    ),
    (
        "comm/shared_memory.py",
        "if packet.num_bytes != tensor.nbytes:",
        "if packet.num_bytes > tensor.nbytes:",
        SHARED,
    ),
    (
        "comm/shared_memory.py",
        "if platform.machine().lower() not in _ORDERED_PROCESSORS or",
        "if",
        SHARED,
    ),
    (
        "comm/links.py",
        "        return _NcclWork(self._send(as_bytes(tensor)))",
        "        return _NcclWork(self._send(tensor))",
        "tests/comm/test_links.py",
    ),
    (
        "comm/links.py",
        "            group.abort()",
        "            pass",
        "tests/comm/test_links.py",
    ),
    (
        "comm/links.py",
        "self._groups[self._back].recv",
        "self._groups[self._there].recv",
        "tests/comm/test_links.py",
    ),
    (
        "comm/failed_waits.py",
        'self._store.compare_set(_FAILURE, "", f"rank {self._rank} failed: {reason}")',
        'self._store.set(_FAILURE, f"rank {self._rank} failed: {reason}")',
        "tests/dist/test_messages_on_processes.py",
    ),
    (
        "comm/process_group.py",
        'or os.environ.get("PENSTOCK_SHARED_MEMORY") == "0"',
        "",
        "tests/dist/test_messages_on_processes.py",
    ),
    (
        "comm/process_group.py",
        "self._work.wait(self._comm._timeout_s)",
        "self._work.wait(10 * self._comm._timeout_s)",
        "tests/dist/test_failures.py",
    ),
]
