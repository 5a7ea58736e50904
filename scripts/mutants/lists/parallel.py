"""One call for a whole model: its inputs, modes, scaler, and folders."""

MODEL = "tests/parallel/test_parallel_model.py"
CALL = "tests/parallel/test_parallelize.py"
STATE = "tests/parallel/test_training_state.py"
FOLDER = "tests/parallel/test_pretrained.py"
TESTS = MODEL
MUTANTS = [
    # Steps.
    ("parallel/parallel_model.py", "grad_scale *= scale_of", "grad_scale = scale_of"),
    (
        "parallel/grad_scaler.py",
        "        self._was_skipped = True\n",
        "        pass\n",
        "tests/parallel/test_skipped_steps.py -k scale",
    ),
    ("parallel/parallel_model.py", "module.training = mode", "module.training = True"),
    (
        "parallel/parallel_model.py",
        "            stage.drop_unreduced_grads()\n",
        "",
        "tests/dist/test_parallelize_on_processes.py",
    ),
    ("parallel/stage_optimizers.py", "            optimizer.zero_grad()\n", ""),
    (
        "parallel/grad_scaler.py",
        "self._num_good + 1 if self._is_finite else 0",
        "self._num_good + 1",
    ),
    ("parallel/grad_scaler.py", "bool(largest.isfinite())", "True"),
    (
        "parallel/grad_scaler.py",
        "                parameter.grad.mul_(factor)\n",
        "                pass\n",
    ),
    # Copies of a tied parameter.
    ("parallel/tied_values.py", "            if known != digest:", "            if False:", CALL),
    ("parallel/tied_values.py", "(part * places).sum()", "part.sum()", CALL),
    # The state of a training.
    ("parallel/training_state.py", "        self._fill_copies(state)\n", "", STATE),
    (
        "parallel/optimizer_state.py",
        "next((n for n in self._names[parameter] if n in settings), own)",
        "own",
        STATE,
    ),
    (
        "parallel/optimizer_state.py",
        "                    value.copy_(source)\n",
        "                    pass\n",
        STATE,
    ),
    (
        "parallel/optimizer_state.py",
        "if any(each != saved[0] for each in saved):",
        "if False:",
        STATE,
    ),
    # Folders of weights.
    (
        "parallel/safetensors_folder.py",
        "entry.begin + begin * entry.dtype.itemsize",
        "entry.begin",
        FOLDER,
    ),
    (
        "parallel/safetensors_folder.py",
        "            if _version(os.fstat(file.fileno())) != entry.version:\n"
        "                raise _changed(entry)\n",
        "",
        FOLDER,
    ),
    # A Trainer of transformers.
    (
        "parallel/hugging_face_trainer.py",
        "return 1.0 if self._divides else float(num_labels(labels))",
        "return 1.0",
        "tests/parallel/test_trainer_refusals.py tests/parallel/test_labels.py",
    ),
    (
        "parallel/hugging_face_trainer.py",
        "            filled[name][-missing:] = IGNORED\n",
        "            pass\n",
        "tests/parallel/test_hugging_face_trainer.py",
    ),
]
