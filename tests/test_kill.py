"""Kills at any moment, and any file where a checkpoint should be."""
import io
import json
import os
import random
import signal
import time
from pathlib import Path

import numpy as np
import pytest
from hypothesis import HealthCheck, Phase, given, settings
from hypothesis import strategies as st

import model
import sample
import train
from conftest import NAMES, SIZES, both_models, call, finish, process, write_words

# ---- SIGKILL


@pytest.mark.slow
@both_models
def test_killed_25_times_at_any_moment_a_run_loads_and_goes_on_bit_for_bit(
        here, run, signal_after, kind):
    """Twice 25 kills of a training that saves every third step; the last look is at every bit."""
    write_words(NAMES)
    plan = [*SIZES[kind], "--data", "w.txt", "--steps", "1000000", "--eval-every", "3"]
    dice, known = random.Random(kind), 0
    for _ in range(25):
        again = ["--resume"] if known else []
        with process("train", *plan, *again, "--out", "x.npz") as started:
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
        if Path("x.npz").exists():
            state = model.load("x.npz")
            assert state["step"] % 3 == 0 and known <= state["step"]
            assert [row[0] for row in state["history"]] == list(range(3, state["step"] + 1, 3))
            known = state["step"]
            assert run(sample, "x.npz", "-n", 2).status == 0
    assert known > 100
    signal_after(1)                                     # one step more, then it saves
    assert run(train, "--resume", "--out", "x.npz").status == 130
    signal_after(known + 1)
    assert run(train, *plan, "--out", "y.npz").status == 130
    assert Path("x.npz").read_bytes() == Path("y.npz").read_bytes()


@pytest.mark.slow
def test_killed_while_it_moves_an_older_run_aside_no_run_is_lost(here):
    """New runs, killed about when each saves for the first time: all that once stood still does."""
    write_words(NAMES)
    plan = [*SIZES["mlp"], "--data", "w.txt", "--steps", "1000000", "--eval-every", "1"]
    dice, known = random.Random(1), set()
    for kill in range(15):
        with process("train", *plan, "--seed", str(kill)) as started:
            for line in started.stderr:
                if line.startswith((b"what stood", b"step ") if kill % 2 else b"w.txt: "):
                    break
            time.sleep(dice.uniform(0, 0.01 if kill % 2 else 0.3))
            started.kill()
            started.stderr.read()
        seeds = {model.load(str(path), train.ALL_FLAGS)["config"]["seed"]
                 for path in Path("out").glob("*.npz")}
        assert known <= seeds <= set(range(kill + 1))
        known = seeds
    assert len(known) >= 7


@pytest.mark.slow
@both_models
def test_four_runs_at_once_into_one_file_all_end_and_lose_nothing(here, kind):
    write_words(NAMES)
    plan = [*SIZES[kind], "--data", "w.txt", "--steps", "60", "--eval-every", "1"]
    runs = [process("train", *plan, "--seed", str(seed)) for seed in range(4)]
    for started in runs:
        status, out, err = finish(started)
        assert (status, out.count(b"\n")) == (0, 12), err
    states = [model.load(str(path), train.ALL_FLAGS) for path in Path("out").glob("*.npz")]
    ended = {state["config"]["seed"] for state in states if state["step"] == 60}
    assert ended == set(range(4)) and len(states) == len(os.listdir("out")) <= 10


# ---- Fuzzing of the loader: success or one sentence

NUMBERS = st.one_of(
    st.integers(-3, 70), st.sampled_from([2**31, 2**63, -2**63, 10**30, 0.5, 1e300, 5e-324]),
    st.floats(allow_nan=True, allow_infinity=True))
ODD = st.one_of(
    st.none(), st.booleans(), NUMBERS, st.text(max_size=6), st.just("\ud800"), st.just("\0"),
    st.sampled_from(["mlp", "gpt", "adam", "momentum", "sgd", "relu", "layernorm", "steps", "nan",
                     "w.txt", ".", "True", "8", "9" * 5000]),
    st.lists(st.integers(0, 9), max_size=3), st.dictionaries(st.text(max_size=2), st.integers()))
ENTRIES = st.sampled_from([
    "model", "context", "embd", "hidden", "layers", "heads", "act", "norm", "batchnorm", "init",
    "data", "sha256", "max_len", "steps", "batch", "lr", "seed", "optimizer", "weight_decay",
    "eval_every", "backward", "dropout", "threads", "longest", "vocabulary", "foreign"])
DTYPES = st.sampled_from([
    "f2", "f4", "f8", ">f4", "i1", "i8", "u1", "u8", "c8", "?", "U9", "S5", "O", "M8[s]", "m8[D]",
    "f4,i4"])


class File(bytes):
    """Bytes that a report shows as what was done to get them."""
    how = ()

    def __repr__(self):
        return f"File({', '.join(map(str, self.how))})"


@st.composite
def arrays(draw):
    """Any small array; NumPy decides what its dtype makes of the number."""
    shape = draw(st.lists(st.integers(0, 4), max_size=3))
    try:
        return np.full(shape, draw(NUMBERS), draw(DTYPES))
    except (ValueError, OverflowError, TypeError):
        return np.zeros(shape, draw(DTYPES))


@st.composite
def edited(draw, base):
    """The bytes of a checkpoint in which one to three things are not what they were."""
    stored, how = dict(base), []
    for _ in range(draw(st.integers(1, 3))):
        name = draw(st.sampled_from(sorted(stored)))
        array = stored[name]
        what = draw(st.sampled_from(["leave out", "replace", "dtype", "shape", "value", "name",
                                     "config", "config", "config text"]))
        if what == "leave out":
            del stored[name]
        elif what == "replace":
            stored[name] = draw(arrays())
        elif what == "dtype":
            with np.errstate(all="ignore"):
                try:
                    stored[name] = array.astype(draw(DTYPES))
                except (ValueError, TypeError):
                    stored[name] = array.astype(object)
        elif what == "shape":
            stored[name] = draw(st.sampled_from([
                array.ravel(), array[..., None], array[None], array.T, np.resize(array, 3),
                np.repeat(np.atleast_1d(array), 2, -1), np.atleast_1d(array)[1:]]))
        elif what == "value" and array.dtype.kind in "fi" and array.size:
            changed = np.array(array)
            value = draw(NUMBERS)
            if changed.dtype.kind == "f" or isinstance(value, int) and abs(value) < 2**62:
                with np.errstate(all="ignore"):
                    changed.flat[draw(st.integers(0, changed.size - 1))] = value
            stored[name] = changed
        elif what == "name":
            other = draw(st.sampled_from(["foreign", "moments", "best.P", "latest.C", "a/b"]))
            stored[other] = array
        elif what.startswith("config") and not any(edit[1] == "config" for edit in how):
            text = str(base["config"])
            if what == "config text":
                cut = draw(st.integers(0, len(text)))
                text = text[:cut] + draw(st.text(max_size=3)) + text[cut + 1:]
            else:
                entry, value = draw(ENTRIES), draw(ODD)
                config = {**json.loads(text), entry: value}
                if draw(st.booleans()):
                    del config[entry]
                text = json.dumps(config)
            name, stored["config"] = "config", np.array(text)
        how.append((what, name, str(stored.get(name))[:600]))
    raw = io.BytesIO()
    np.savez(raw, **stored)
    file = File(raw.getvalue())
    file.how = how
    return file


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
        state = model.load(str(path))
    except model.Refusal as refusal:
        assert "x.npz" in str(refusal)
        assert call(sample.main, path) == call(train.main, "--resume", "--out", path) == 2
        return
    assert call(sample.main, path, "-n", 2, "--json") == 0
    assert call(sample.main, path, "--score", state["vocabulary"][1]) == 0
    more = ["--steps", state["step"] + 2] if state["step"] < 1000 else []
    assert call(train.main, "--resume", "--out", path, *more) in (0, 1, 2)
    if path.read_bytes() != raw:                        # whatever it wrote is in order
        model.load(str(path))


def fuzz(folder, examples):
    files = [(folder / f"out/{kind}.npz").read_bytes() for kind in SIZES]
    stored = []
    for kind in SIZES:
        with np.load(folder / f"out/{kind}.npz") as file:
            stored.append({name: file[name] for name in file.files})
    any_file = st.one_of(st.binary(max_size=100), *map(damaged, files), *map(edited, stored),
                         *map(edited, stored))
    settings(max_examples=examples, deadline=None, derandomize=True, database=None,
             phases=[Phase.generate], suppress_health_check=list(HealthCheck))(
                 given(raw=any_file)(load_any))()


def test_any_file_loads_or_is_refused(trained):
    fuzz(trained, 100)


@pytest.mark.slow
def test_any_file_loads_or_is_refused_long(trained):
    fuzz(trained, 2000)
