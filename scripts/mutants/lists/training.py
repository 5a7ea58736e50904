"""`penstock train`: its data, steps, evaluations and checkpoints."""

DATA = "tests/training/test_training_data.py"
SETTINGS = "tests/training/test_training_settings.py"
STEPS = "tests/training/test_trainer_on_local_ranks.py -k "
TESTS = DATA
MUTANTS = [
    # Tokens and batches.
    (
        "training/loader.py",
        "(len(self._tokens) - 1) // self._context",
        "len(self._tokens) // self._context",
    ),
    (
        "training/loader.py",
        "Sequences(self._tokens[edge:], ",
        "Sequences(self._tokens[edge + 1 :], ",
    ),
    ("training/loader.py", 'f"epoch {epoch}"', '"epoch"'),
    ("training/tokens.py", "            row.append(tokens.end)\n", "            pass\n"),
    ("training/tokens.py", "max(row) < (vocabulary or math.inf)", "max(row) < math.inf"),
    # Steps.
    (
        "training/trainer.py",
        "(number - 1) * config.accumulate + part",
        "number - 1 + part",
        STEPS + "accumulated",
    ),
    (
        "training/trainer.py",
        "grad_scale=1 / config.accumulate",
        "grad_scale=1.0",
        STEPS + "accumulated",
    ),
    (
        "training/trainer.py",
        "self._optimizer if is_trained else None",
        "None",
        STEPS + "resumed_in_any_way",
    ),
    (
        "training/optimisation.py",
        "config.lr * step / config.warmup",
        "config.lr * (step - 1) / config.warmup",
        SETTINGS,
    ),
    (
        "training/optimisation.py",
        "[p for p in trained if p.dim() >= 2]",
        "[p for p in trained if p.dim() >= 1]",
        SETTINGS,
    ),
    # Evaluations and samples.
    ("training/held_out.py", "[: most or None]", ""),
    ("training/sampling.py", "[0, len(seen) - 1]", "[0, -1]", STEPS + "last_one_that_is_seen"),
    # Checkpoints.
    (
        "training/saved.py",
        "        if saved.digests.get(name) != digests[name]:",
        "        if False:",
        STEPS + "something_else",
    ),
    (
        "training/saved.py",
        '("batch", "accumulate", "seed", ',
        '("batch", "seed", ',
        STEPS + "something_else",
    ),
]
