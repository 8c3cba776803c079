"""The processes of a run, kills at any moment, and any file where a checkpoint should be."""
import contextlib
import itertools
import json
import math
import multiprocessing
import os
import random
import re
import shlex
import shutil
import signal
import time
from pathlib import Path

import numpy as np
import pytest
from hypothesis import HealthCheck, Phase, given, settings
from hypothesis import strategies as st

import backward
import model
import sample
import train
from conftest import (
    NAMES, ROOT, SIZES, arrays_of, both_models, call, finish, process, split_of, write_words)

ENDLESS = ["--data", "w.txt", "--steps", "1000000", "--eval-every", "100"]


def edit(path, **changes):
    """Store a checkpoint again with some arrays, or entries of config, replaced or (None) left out.

    A double underscore stands for a dot in an array's name.
    """
    arrays = arrays_of(path)
    if isinstance(changes.get("config"), dict):
        config = {**json.loads(str(arrays["config"])), **changes["config"]}
        config = {name: value for name, value in config.items() if value is not None}
        changes["config"] = np.array(json.dumps(config))
    for name, value in changes.items():
        name = name.replace("__", ".")
        assert name in arrays or name == "foreign"
        arrays[name] = value
    with open(path, "wb") as file:
        np.savez(file, **{name: array for name, array in arrays.items() if array is not None})


# ---- A step in processes, and with dropout

@pytest.fixture
def gradients(learn, monkeypatch):
    """gradients(...) trains a GPT that does not move; gives its run, batches and their gradients.

    So each of three steps takes its gradient at the first values of the parameters.
    """
    def gradients(*flags):
        found = []
        monkeypatch.setitem(train.OPTIMIZERS, "sgd", lambda w, dw, *rest: found.append(dw.copy()))
        assert learn("gpt", "--layers", 2, "--batch", 12, "--weight-decay", 0, "--optimizer", "sgd",
                     "--steps", 3, "--eval-every", 0, *flags, "--out", "x.npz").status == 0
        run = train.load("x.npz")
        examples = model.gpt_examples(sorted(split_of(NAMES)[0]), run.vocabulary,
                                      run.config["context"])
        return run, itertools.islice(train.batches(run.config, examples, 0), 3), found
    return gradients


def of_the_whole(run, batch, masks=None):
    """Loss and gradient of one batch, by the function that the proof is of."""
    g = {name: np.empty_like(w) for name, w in run.p.items()}
    loss, _ = backward.gradient(run.config, run.p, batch, g, masks)
    return loss, np.concatenate([array.ravel() for array in g.values()])


@pytest.mark.parametrize("processes", [1, 2, 3, 7])
def test_all_processes_together_take_the_proven_gradient(gradients, steps_taken, processes):
    run, batches, found = gradients("--processes", processes)
    for batch, loss, dw in zip(batches, steps_taken, found, strict=True):
        expected_loss, expected = of_the_whole(run, batch)
        assert loss == pytest.approx(expected_loss, rel=1e-6)
        np.testing.assert_allclose(dw, expected, rtol=0, atol=1e-6 * abs(expected).max())


def test_more_processes_than_names_in_a_batch_are_not_started(learn, monkeypatch):
    real, alive = train.train_step, []
    monkeypatch.setattr(train, "train_step", lambda *args: alive.append(
        len(multiprocessing.active_children())) or real(*args))
    for batch, expected in (3, 2), (1, 0):
        assert learn("gpt", "--batch", batch, "--processes", 64, "--steps", 2).status == 0
        assert alive[-2:] == [expected, expected]


def test_one_and_two_processes_train_alike(learn, steps_taken):
    for processes in 1, 2:
        assert learn("gpt", "--steps", 40, "--lr", 0.02, "--processes", processes).status == 0
    one, two = steps_taken[:40], steps_taken[40:]
    assert one[-1] < one[0] - 0.5
    np.testing.assert_allclose(one, two, rtol=0, atol=1e-3)


def test_a_step_with_dropout_takes_the_gradient_with_its_masks(
        gradients, monkeypatch, steps_taken):
    masks, real = [], train.dropout_masks
    monkeypatch.setattr(train, "dropout_masks",
                        lambda *args: masks.append(real(*args)) or masks[-1])
    run, batches, found = gradients("--processes", 1, "--dropout", 0.3)
    for batch, loss, dw, drawn in zip(batches, steps_taken, found, masks[-3:], strict=True):
        expected_loss, expected = of_the_whole(run, batch, drawn)
        assert loss == expected_loss
        np.testing.assert_array_equal(dw, expected)
        assert abs(loss - of_the_whole(run, batch)[0]) > 1e-4


def test_masks_differ_by_step_and_process_and_come_again_with_the_seed(gradients, monkeypatch):
    run, (batch, *_), _ = gradients("--processes", 1)
    config, masks, real = dict(run.config, dropout=0.3), [], train.dropout_masks
    monkeypatch.setattr(train, "dropout_masks", lambda *args: masks.append(
        real(*args).tobytes()) or real(*args))
    g = {name: np.empty_like(w) for name, w in run.p.items()}
    for config["seed"], step, k in [*itertools.product([1, 2], [0, 1], [0, 1, 2])] * 2:
        train.shard_gradient(config, run.p, batch, g, step, k)
    assert masks[:12] == masks[12:] and len(set(masks)) == 12


def test_dropout_keeps_its_share_of_every_branch_and_the_mean():
    masks = train.dropout_masks(dict(layers=2, embd=64, dropout=0.25), 500,
                                np.random.default_rng(1))
    assert masks.shape == (4, 500, 64) and masks.dtype == np.float32
    assert np.unique(masks).tolist() == [0, np.float32(4 / 3)]
    assert (masks == 0).mean((1, 2)) == pytest.approx(np.full(4, 0.25), abs=0.01)
    assert masks.mean((1, 2)) == pytest.approx(np.ones(4), abs=0.02)
    for i, j in itertools.combinations(range(4), 2):
        assert ((masks[i] == 0) == (masks[j] == 0)).mean() < 0.7


# ---- How processes start and end

def start(folder, method, *argv, patch="", **options):
    """Start a program that trains with another way to start processes, after a line of its own.

    The processes that it starts read that line too, unless they are forks.
    """
    script = folder / "own.py"
    script.write_text("import multiprocessing, os, signal, sys\n"
                      f"sys.path.insert(0, {str(ROOT)!r})\nimport train\n{patch}\n"
                      "if __name__ == '__main__':\n"
                      "    multiprocessing.set_start_method(sys.argv[1])\n"
                      "    sys.exit(train.main(sys.argv[2:]))\n")
    return process(script.with_suffix(""), method, *SIZES["gpt"], *argv, start_new_session=True,
                   **options)


def after_an_evaluation(started):
    """Wait for one; then what it says later can be read."""
    while not started.stderr.readline().startswith(b"step "):
        assert started.poll() is None
    return started


def saved_step(path, err):
    """The step in a checkpoint, which has to be the one in the only line behind the progress."""
    line, = [line for line in err.decode().splitlines() if not line.startswith("step ")]
    step = train.load(path).step
    assert f"step {step}," in line and "--resume" in line
    return step


@pytest.mark.parametrize("method", multiprocessing.get_all_start_methods())
def test_the_way_in_which_processes_start_changes_nothing(learn, here, method):
    """finish() waits until nobody can write to the standard error: no process is left behind."""
    flags = ["--data", "w.txt", "--steps", "6", "--processes", "3", "--dropout", "0.2",
             "--lr", "0.003", "--batch", "64", "--weight-decay", "0.1", "--out"]
    assert learn("gpt", *flags, "expected.npz").status == 0
    status, _, err = finish(start(here, method, *flags, "x.npz"))
    assert status == 0, err
    assert Path("x.npz").read_bytes() == Path("expected.npz").read_bytes()


@pytest.mark.parametrize("method", ["fork", "spawn"])
@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
def test_a_signal_to_the_whole_group_saves_and_leaves_no_process(here, run, method, number):
    write_words(NAMES)
    started = after_an_evaluation(start(here, method, *ENDLESS, "--processes", "3"))
    os.killpg(started.pid, number)
    status, out, err = finish(started)
    assert (status, out) == (128 + number, b"")
    step = saved_step("out/gpt.npz", err)
    assert run(train, "--resume", "--model", "gpt", "--steps", step).status == 0


@pytest.mark.parametrize("kind", SIZES)
@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM, signal.SIGHUP])
def test_a_signal_to_the_first_process_saves_and_leaves_no_process(here, run, kind, number):
    """The command that it prints goes on."""
    write_words(NAMES)
    started = after_an_evaluation(process("train", *SIZES[kind], *ENDLESS, "--out", "x.npz"))
    started.send_signal(number)
    status, out, err = finish(started)
    assert (status, out) == (128 + number, b"")
    step = saved_step("x.npz", err)
    command = shlex.split(err.decode().splitlines()[-1].split("to go on: ")[1])
    assert command[0] == "python" and Path(command[1]) == ROOT / "train.py"
    assert run(train, *command[2:], "--steps", step).status == 0


@pytest.mark.parametrize("method", ["fork", "spawn"])
def test_the_others_end_when_the_first_process_is_killed(here, method):
    write_words(NAMES)
    started = after_an_evaluation(start(here, method, *ENDLESS, "--processes", "3"))
    started.kill()
    status, _, err = finish(started)
    assert status == -signal.SIGKILL and b"Traceback" not in err
    assert train.load("out/gpt.npz").step % 100 == 0


def test_the_death_of_a_process_is_one_sentence_and_the_run_can_go_on(learn, run, monkeypatch):
    flags = ["--steps", 9, "--eval-every", 4, "--processes", 3, "--dropout", 0.2]
    assert learn("gpt", *flags, "--out", "whole.npz").status == 0
    real, taken = train.train_step, []

    def train_step(*args):
        taken.append(real(*args))
        if len(taken) == 6:
            multiprocessing.active_children()[0].kill()
        return taken[-1]
    monkeypatch.setattr(train, "train_step", train_step)
    result = learn("gpt", *flags)
    assert (result.status, result.out) == (2, "")
    last = result.err.splitlines()[-1]
    assert "process" in last and "--resume" in last and len(taken) == 6
    assert train.load("out/gpt.npz").step == 4
    assert run(train, "--resume", "--model", "gpt").status == 0
    assert Path("out/gpt.npz").read_bytes() == Path("whole.npz").read_bytes()


ERROR = """
real = train.shard_gradient
def shard_gradient(config, p, shard, g, step, k=0):
    if step == 5 and k:
        raise MemoryError
    return real(config, p, shard, g, step, k)
train.shard_gradient = shard_gradient
"""


@pytest.mark.parametrize("method", ["fork", "spawn"])
def test_an_error_in_a_process_ends_the_run_with_a_sentence(here, method):
    write_words(NAMES)
    status, out, err = finish(start(here, method, *ENDLESS, "--eval-every", "4", patch=ERROR))
    assert (status, out) == (2, b"")
    assert re.search(rb"process .*--resume", err.splitlines()[-1])
    assert train.load("out/gpt.npz").step == 4


@pytest.mark.parametrize("how", ["end", "signal", "error"])
def test_no_process_of_a_run_is_left_in_the_program_that_called_it(
        learn, signal_after, monkeypatch, how):
    if how == "signal":
        signal_after(2)
    if how == "error":
        monkeypatch.setattr(train, "evaluate_run", lambda *args: 1 / 0)
    with pytest.raises(ZeroDivisionError) if how == "error" else contextlib.nullcontext():
        status = learn("gpt", "--steps", 4, "--processes", 3).status
        assert status == (130 if how == "signal" else 0)
    for child in multiprocessing.active_children():
        child.join(10)
    assert multiprocessing.active_children() == []


# ---- SIGKILL

@both_models
@pytest.mark.parametrize("kills", [3, pytest.param(25, marks=pytest.mark.slow)])
def test_killed_at_any_moment_a_run_loads_and_goes_on_bit_for_bit(
        here, run, signal_after, kind, kills):
    """A training that saves every third step; the last look is at every bit."""
    write_words(NAMES)
    plan = [*SIZES[kind], *ENDLESS, "--eval-every", "3"]
    dice, known, out = random.Random(kind), 0, Path("x.npz")
    for _ in range(kills):
        again = ["--resume", "--out", "x.npz"] if out.exists() else [*plan, "--out", "x.npz"]
        with process("train", *again) as started:
            if dice.random() < 0.8:                     # else anywhere, the start included
                for line in started.stderr:
                    if line.startswith(b"step "):
                        break
                time.sleep(dice.uniform(0, 0.3))
            else:
                time.sleep(dice.uniform(0, 2))
            started.kill()
            err = started.stderr.read()
            assert started.wait() == -signal.SIGKILL, err
        assert b"Traceback" not in err
        assert out.exists() or not known
        if out.exists():
            stored = train.load(out)
            assert stored.step % 3 == 0 and known <= stored.step
            assert [row[0] for row in stored.history] == list(range(3, stored.step + 1, 3))
            known = stored.step
            assert run(sample, out, "-n", 2).status == 0
    assert known > 4 * kills
    signal_after(1)                                     # one step more, then it saves
    assert run(train, "--resume", "--out", out).status == 130
    signal_after(known + 1)
    assert run(train, *plan, "--out", "y.npz").status == 130
    assert out.read_bytes() == Path("y.npz").read_bytes()


# ---- Loading

def test_what_is_saved_loads_as_it_was(trained):
    for kind in SIZES:
        train.save("again.npz", train.load(f"out/{kind}.npz"))
        assert Path("again.npz").read_bytes() == Path(f"out/{kind}.npz").read_bytes()


@pytest.mark.parametrize("how", [
    lambda raw: b"", lambda raw: raw[:1], lambda raw: raw[:len(raw) // 2], lambda raw: raw[:-1],
    lambda raw: raw[1:], lambda raw: b"anna\nbob\n", lambda raw: b"PK\x03\x04",
    lambda raw: b"\x93NUMPY", lambda raw: bytes(len(raw)),
    lambda raw: raw[:len(raw) // 2] + bytes([raw[len(raw) // 2] ^ 1]) + raw[len(raw) // 2 + 1:],
    lambda raw: b"\x80\x04\x95" + raw], ids=lambda how: None)
@both_models
def test_a_file_that_is_not_a_checkpoint_gets_one_sentence(trained, refused, kind, how):
    out = f"out/{kind}.npz"
    Path(out).write_bytes(how(Path(out).read_bytes()))
    assert out in refused(sample, out)
    assert out in refused(train, "--resume", "--out", out)


def test_loading_never_unpickles(trained, refused):
    class Trap:
        def __reduce__(self):
            return os.mkdir, ("sprung",)
    trap = np.empty(1, object)
    trap[0] = Trap()
    for name in "config", "moments", "best__C", "foreign":
        shutil.copy("out/mlp.npz", "x.npz")
        edit("x.npz", **{name: trap})
        assert "x.npz" in refused(sample, "x.npz")
    np.save("y.npy", trap, allow_pickle=True)
    assert "y.npy" in refused(sample, "y.npy")
    assert not Path("sprung").exists()


def nan_in(array):
    array = array.copy()
    array.flat[0] = math.nan
    return array


@pytest.mark.parametrize("change", [
    "format=np.array(1)", "format=np.array(10**6)", "format=np.array('x')", "format=None",
    "config=None", "vocabulary=None", "step=None", "history=None", "moments=None", "best__C=None",
    "latest__C=None", "config=np.array('{')", "config=np.array('5')", "config=np.array('[]')",
    "config=np.array('[' * 10**5)", "config=dict(model='rnn')", "config=dict(embd=10**9)",
    "config=dict(embd=-4)", "config=dict(embd='big')", "config=dict(embd=None)",
    "config=dict(vocab_size=5)", "config=dict(context=0)", "best__C=a['best.C'].T.copy()",
    "best__C=a['best.C'][1:]", "latest__C=a['latest.C'][..., None]", "best__C=nan_in(a['best.C'])",
    "latest__C=nan_in(a['latest.C'])", "best__C=a['best.C'] / 0", "best__C=a['best.C'].astype(str)",
    "step=np.array([1, 2])", "step=np.array('x')", "step=np.array(math.nan)"])
@pytest.mark.filterwarnings("ignore:divide by zero")
def test_an_edited_checkpoint_gets_one_sentence(trained, refused, change):
    """Format 1 is that of checkpoints which older versions of these programs wrote."""
    out = "out/mlp.npz"
    edit(out, **eval(f"dict({change})", dict(globals(), a=arrays_of(out))))
    text = refused(sample, out)
    assert out in text and ("format" in text or "format" not in change)
    assert out in refused(train, "--resume", "--steps", 70, "--out", out)


# ---- Fuzzing of the loader: success or one sentence

class File(bytes):
    """Bytes that a report shows as what was done to get them."""
    how = ()

    def __repr__(self):
        return f"File({', '.join(map(str, self.how))})"


@st.composite
def damaged(draw, raw):
    """Truncated, flipped, cut out, doubled."""
    changed, how = bytearray(raw), []
    for _ in range(draw(st.integers(1, 4))):
        i = draw(st.integers(0, max(len(changed) - 1, 0)))
        what = draw(st.sampled_from(["end", "flip", "flip", "cut", "insert"]))
        how.append((what, i))
        if what == "end":
            del changed[i:]
        elif what == "flip" and changed:
            changed[i] ^= 1 << draw(st.integers(0, 7))
        elif what == "cut":
            del changed[i:i + draw(st.integers(1, 50))]
        else:
            changed[i:i] = draw(st.binary(min_size=1, max_size=20))
    file = File(changed)
    file.how = how
    return file


def load_any(raw):
    """Load, sample from and go on with a file of these bytes: each works or says one sentence."""
    path = Path("x.npz")
    path.write_bytes(raw)
    try:
        stored = train.load(path)
    except train.UserError as error:
        assert "x.npz" in str(error)
        assert call(sample.main, path) == call(train.main, "--resume", "--out", path) == 2
        return
    assert call(sample.main, path, "-n", 2, "--json") == 0
    assert call(sample.main, path, "--score", stored.vocabulary[1]) == 0
    assert call(train.main, "--resume", "--out", path, "--steps", stored.step + 2) == 0
    assert train.load(path).step == stored.step + 2


@pytest.mark.parametrize("examples", [100, pytest.param(2000, marks=pytest.mark.slow)])
def test_any_file_loads_or_is_refused(trained, examples):
    files = [Path(f"out/{kind}.npz").read_bytes() for kind in SIZES]
    any_file = st.one_of(st.binary(max_size=100), *map(damaged, files))
    settings(max_examples=examples, deadline=None, derandomize=True, database=None,
             phases=[Phase.generate], suppress_health_check=list(HealthCheck))(
                 given(raw=any_file)(load_any))()
