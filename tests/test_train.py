import contextlib
import io
import itertools
import json
import math
import os
import re
import resource
import shlex
import shutil
import signal
import subprocess
import sys
import tempfile
import threading
import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import numpy as np
import pytest

import backward
import model
import sample
import train
from conftest import (
    NAMES, ROOT, SIZES, best_of, both_models, call, finish, in_terminal, losses_of, process,
    split_of, without_times, write_words)

all_optimizers = pytest.mark.parametrize("optimizer", ["adam", "momentum", "sgd"])


def evaluations(err):
    """The steps of the lines of progress."""
    return [int(step) for step in re.findall(r"(?m)^step +(\d+)  train \d", err)]


def arrays_of(path):
    with np.load(path) as file:
        return {name: file[name] for name in file.files}


def edit(path, **changes):
    """Store a checkpoint again with some arrays, or entries of config, replaced or (None) left out.

    A double underscore stands for a dot in an array's name.
    """
    arrays = arrays_of(path)
    if "config" in changes and isinstance(changes["config"], dict):
        config = {**json.loads(str(arrays["config"])), **changes["config"]}
        config = {name: value for name, value in config.items() if value is not None}
        changes["config"] = np.array(json.dumps(config))
    for name, value in changes.items():
        name = name.replace("__", ".")
        assert name in arrays or name == "foreign"
        if value is None:
            del arrays[name]
        else:
            arrays[name] = value
    with open(path, "wb") as file:
        np.savez(file, **arrays)


# ---- Optimizers and the learning rate

@all_optimizers
def test_an_optimizer_takes_the_steps_of_its_formula(optimizer):
    rng = np.random.default_rng(1)
    w = rng.standard_normal(50)
    expected, m, v = w.copy(), 0, 0
    moments = np.zeros((train.MOMENTS[optimizer], 50))
    for t in range(1, 8):
        g = rng.standard_normal(50)
        train.OPTIMIZERS[optimizer](w, g, moments, 0.1, t)
        if optimizer == "sgd":
            expected -= 0.1 * g
        elif optimizer == "momentum":
            v = 0.9 * v + g
            expected -= 0.1 * v
        else:
            m = 0.9 * m + 0.1 * g
            v = 0.999 * v + 0.001 * g**2
            expected -= 0.1 * (m / (1 - 0.9**t)) / (np.sqrt(v / (1 - 0.999**t)) + 1e-8)
        np.testing.assert_allclose(w, expected, rtol=0, atol=1e-14)


@all_optimizers
def test_a_row_moves_without_a_gradient_only_if_it_was_fetched_before(optimizer):
    w = np.ones(3, np.float32)
    moments = np.zeros((train.MOMENTS[optimizer], 3), np.float32)
    train.OPTIMIZERS[optimizer](w, np.array([1, 1, 0], np.float32), moments, 0.1, 1)
    fetched = w.copy()
    train.OPTIMIZERS[optimizer](w, np.array([0, 1, 0], np.float32), moments, 0.1, 2)
    assert (w[0] == fetched[0]) == (optimizer == "sgd")
    assert w[1] < fetched[1] < 1 and w[2] == 1


@pytest.mark.parametrize("steps", [1, 2, 7, 1000])
def test_the_learning_rate_rises_once_then_falls_and_never_exceeds_the_one_typed(steps):
    rates = np.array([train.learning_rate(dict(lr=0.5, steps=steps), s) for s in range(steps)])
    assert (0 < rates).all() and (rates <= 0.5).all()
    falls = np.diff(rates) < 0
    assert (falls[falls.argmax():] if falls.any() else ~falls).all()
    if steps == 1000:
        assert rates[0] < 0.01 and rates.max() == 0.5 and rates[-1] < 0.0011
        assert (np.diff(rates[:40]) > 0).all()


# ---- Batches

@both_models
def test_an_epoch_takes_every_example_once_and_the_order_is_the_seeds(kind):
    words = [a + b + c for a in "abcd" for b in "efg" for c in "hi"]        # 24 words, 96 examples
    config = dict(model=kind, context=3, threads=2)
    vocabulary = model.make_vocabulary(words)
    examples = model.EXAMPLES[kind](words, vocabulary, config['context'])
    count = len(examples[1])
    assert count == (96 if kind == "mlp" else 24)

    def epoch(seed, begin=0, number=0):
        settings = dict(config, batch=8, seed=seed)
        steps = count // 8
        taken = itertools.islice(train.batches(settings, examples, number * steps + begin),
                                 steps - begin)
        return [np.concatenate([pairs(*share) for share in shares]) for shares in taken]

    def pairs(X, Y, t=None, path=None, at=slice(None)):
        return np.column_stack([X[at], Y])

    first = epoch(1)
    everything = train.batches(dict(config, batch=count, seed=5), examples, 0)
    whole = np.concatenate([pairs(*share) for share in next(everything)])
    assert sorted(np.concatenate(first).tolist()) == sorted(whole.tolist())
    for same, again in zip(first[2:], epoch(1, begin=2), strict=True):
        np.testing.assert_array_equal(same, again)
    assert np.concatenate(first).tolist() != np.concatenate(epoch(2)).tolist()
    assert np.concatenate(first).tolist() != np.concatenate(epoch(1, number=1)).tolist()


@pytest.mark.parametrize('threads', [1, 2])
def test_names_of_a_batch_share_the_rows_of_their_beginnings(run, monkeypatch, threads):
    """0.72 of them are left; if the words were not sorted it would be 0.85."""
    real, counts = train.train_step, []

    def train_step(run, shares, step):
        counts.append([[len(X), len(Y)] for X, Y, *_ in shares])
        return real(run, shares, step)
    monkeypatch.setattr(train, "train_step", train_step)
    words = (ROOT / "data/names.txt").read_text().split()
    write_words(words[::5])
    assert run(train, "--data", "w.txt", "--model", "gpt", "--embd", 8, "--batch", 64,
               "--steps", 20, "--eval-every", 0, "--threads", threads).status == 0
    assert np.shape(counts) == (20, threads, 2)
    rows, characters = np.sum(counts, (0, 1))
    assert 0.6 < rows / characters < 0.76


def test_the_column_and_the_layers_train_alike(run, steps_taken):
    write_words((ROOT / "data/names.txt").read_text().split()[::50])
    for way in "fused", "steps":
        assert run(train, "--data", "w.txt", "--steps", 100, "--lr", 0.1, "--eval-every", 0,
                   "--backward", way).status == 0
    fused, steps = steps_taken[:100], steps_taken[100:]
    assert len(steps) == 100 and fused[-1] < fused[0] - 0.2
    np.testing.assert_allclose(fused, steps, rtol=0, atol=1e-4)
    assert fused != steps


@pytest.mark.parametrize("flags", [["--no-batchnorm"], ["--act", "relu"]])
def test_the_column_is_refused_where_it_is_not_the_column(refused, flags):
    write_words(NAMES)
    assert "--backward steps" in refused(
        train, "--data", "w.txt", "--steps", 2, "--backward", "steps", *flags)


# ---- What a run says

@both_models
def test_the_report_has_parameters_losses_and_ten_names(learn, kind):
    result = learn(kind, "--steps", 30)
    lines = result.out.splitlines()
    count = sum(w.size for w in best_of(f"out/{kind}.npz")["p"].values())
    assert re.fullmatch(rf"{count} parameters, [\d,]+ steps a second, best at step \d+, "
                        rf"kept in out/{kind}.npz", lines[0])
    assert re.fullmatch(r"train \d\.\d{4}  dev \d\.\d{4}  test \d\.\d{4}", lines[1])
    assert len(lines) == 12 and all(lines[2:])
    assert set("".join(lines[2:])) <= set("".join(NAMES))


def test_the_number_of_parameters_is_what_the_sizes_say(learn):
    V = len(set("".join(NAMES))) + 1
    assert learn("mlp", "--steps", 0).out.startswith(
        f"{V*4 + 3*4*8 + 8 + 2*8 + 8*V + V} parameters, ")
    plain = learn("mlp", "--steps", 0, "--no-batchnorm", "--context", 5, "--out", "x")
    assert plain.out.startswith(
        f"{V*4 + 5*4*8 + 8 + 8*V + V} parameters, ")
    assert learn("gpt", "--steps", 0).out.startswith(
        f"{V*8 + 5*8 + 3*8 + 8*24 + 8*8 + 8*32 + 32*8} parameters, ")


@both_models
def test_reported_losses_are_means_over_the_whole_splits_of_the_best(run, kind):
    """More words and characters than one block of an evaluation takes."""
    words = (ROOT / "data/names.txt").read_text().split()[::20]
    write_words(words)
    result = run(train, *SIZES[kind], "--data", "w.txt", "--steps", 40, "--eval-every", 10)
    best = best_of(f"out/{kind}.npz")
    parts = split_of(words)
    assert len(parts[0]) > 1024 and sum(len(word) + 1 for word in parts[0]) > 8192
    expected = [-sum(model.score(best, word) for word in part)
                / sum(len(word) + 1 for word in part) for part in parts]
    assert losses_of(result.out) == pytest.approx(expected, abs=6e-5)


@both_models
@pytest.mark.parametrize("every, expected", [
    (0, [5]), (1, [1, 2, 3, 4, 5]), (2, [2, 4, 5]), (5, [5]), (6, [5]), (1000, [5]), (None, None)])
def test_evaluations_come_when_they_are_due_and_at_the_end(learn, kind, every, expected):
    steps = 5 if expected else 40
    flags = [] if every is None else ["--eval-every", every]
    result = learn(kind, "--steps", steps, *flags)
    expected = expected or list(range(4, 41, 4))                # a tenth
    assert result.status == 0
    assert evaluations(result.err) == expected
    assert [step for step, _, _ in model.load(f"out/{kind}.npz")["history"]] == expected


@both_models
@pytest.mark.parametrize("steps", [0, 1, 2])
def test_hardly_any_steps(learn, run, steps_taken, kind, steps):
    result = learn(kind, "--steps", steps)
    assert result.status == 0 and len(steps_taken) == steps
    state = model.load(f"out/{kind}.npz")
    assert state["step"] == steps and 0 <= state["best_step"] <= steps
    assert np.isfinite(losses_of(result.out)).all()
    assert run(sample, f"out/{kind}.npz", "-n", 3).out.count("\n") == 3


@both_models
def test_a_batch_larger_than_the_data_is_all_of_it(learn, steps_taken, kind):
    assert learn(kind, "--steps", 3, "--batch", 10**6, "--out", "a").status == 0
    assert len(steps_taken) == 3 and np.isfinite(steps_taken).all()
    words = split_of(NAMES)[0]
    count = len(words) if kind == "gpt" else sum(len(word) + 1 for word in words)
    assert learn(kind, "--steps", 3, "--batch", count, "--out", "b").status == 0
    assert steps_taken[:3] == steps_taken[3:]


def test_a_batch_of_one_has_no_variance(refused, learn):
    write_words(NAMES)
    text = refused(train, "--data", "w.txt", "--steps", 2, "--batch", 1)
    assert "--batch 1" in text and "variance" in text and "--no-batchnorm" in text


def test_a_batch_of_one_without_batch_norm_works(learn, steps_taken):
    result = learn("mlp", "--steps", 20, "--batch", 1, "--no-batchnorm")
    assert result.status == 0
    assert len(steps_taken) == 20 and np.isfinite(steps_taken).all()
    assert learn("gpt", "--steps", 20, "--batch", 1).status == 0


def test_a_log_has_plain_lines_and_a_terminal_has_a_bar(learn):
    flags = [*SIZES["mlp"], "--data", "w.txt", "--steps", "3000", "--eval-every", "1500"]
    log = learn("mlp", *flags)
    assert log.status == 0 and "\r" not in log.out + log.err
    assert evaluations(log.err) == [1500, 3000]
    status, shown, out = in_terminal("train", *flags, "--out", "x.npz", streams=["stderr"])
    assert status == 0
    assert re.search(rb"\r[^\r\n]*\d/3000 [^\r\n]*loss=?\s*\d", shown)
    assert evaluations(re.sub("[^\n]*\r(?!\n)", "", shown.decode())) == [1500, 3000]
    assert out.decode().splitlines()[1:] == log.out.splitlines()[1:]


@both_models
def test_the_same_flags_give_the_same_bytes(learn, kind):
    results = []
    for _ in range(2):
        result = learn(kind, "--steps", 10, "--out", "x.npz", "--eval-every", 3)
        results.append((without_times(result.out), without_times(result.err),
                        Path("x.npz").read_bytes()))
        os.remove("x.npz")
        time.sleep(0.01)
    assert results[0] == results[1]
    learn(kind, "--steps", 10, "--out", "x.npz", "--eval-every", 3, "--seed", 2)
    assert Path("x.npz").read_bytes() != results[0][2]


def test_what_is_stored_holds_no_clock(learn, monkeypatch):
    learn("mlp", "--steps", 2, "--out", "x.npz")
    before = Path("x.npz").read_bytes()
    os.remove("x.npz")
    monkeypatch.setattr(time, "time", lambda: 2e9)
    real = time.localtime
    monkeypatch.setattr(time, "localtime", lambda *when: real(*when or [2e9]))
    learn("mlp", "--steps", 2, "--out", "x.npz")
    assert Path("x.npz").read_bytes() == before


@pytest.mark.slow
@pytest.mark.parametrize("flags", [[], ["--no-batchnorm"], ["--backward", "steps"],
                                   ["--model", "gpt", "--embd", "8"]])
def test_compiling_is_said_once(here, flags):
    write_words(NAMES)
    env = dict(NUMBA_CACHE_DIR=str(here / "kernels"))
    said = []
    for _ in range(2):
        status, out, err = finish(process("train", *flags, "--data", "w.txt", "--steps", "2",
                                          env=env))
        assert status == 0
        said.append(err.decode().count("compiling"))
    assert said == [1, 0]


# ---- Flags

@pytest.mark.parametrize("flags, named", [
    (["--steps", "-1"], "--steps"), (["--steps", "1.5"], "--steps"),
    (["--steps", "many"], "--steps"),
    (["--steps"], "--steps"), (["--batch", "0"], "--batch"), (["--lr", "nan"], "--lr"),
    (["--lr", "inf"], "--lr"), (["--lr", "-1"], "--lr"), (["--lr", "fast"], "--lr"),
    (["--seed", "-1"], "--seed"), (["--context", "-1"], "--context"), (["--embd", "0"], "--embd"),
    (["--hidden", "0"], "--hidden"), (["--optimizer", "newton"], "--optimizer"),
    (["--init", "zero"], "--init"), (["--backward", "no"], "--backward"),
    (["--act", "step"], "--act"), (["--eval-every", "-1"], "--eval-every"),
    (["--max-len", "0"], "--max-len"), (["--model", "rnn"], "--model"),
    (["--weight-decay", "-1"], "--weight-decay"), (["--frobnicate"], "--frobnicate"),
    (["--heads", "4"], "--heads"), (["--layers", "2"], "--layers"),
    (["--norm", "rmsnorm"], "--norm"),
    (["--dropout", "0.1"], "--dropout"), (["--threads", "2"], "--threads"),
    (["--model", "gpt", "--hidden", "8"], "--hidden"),
    (["--model", "gpt", "--no-batchnorm"], "--no-batchnorm"),
    (["--model", "gpt", "--backward", "steps"], "--backward"),
    (["--model", "gpt", "--dropout", "1"], "--dropout"),
    (["--model", "gpt", "--threads", "0"], "--threads"),
    (["--model", "gpt", "--embd", "10", "--heads", "4"], "--heads 4"),
    (["--model", "gpt", "--norm", "batchnorm"], "--norm")])
def test_bad_flags_are_named_and_nothing_is_written(refused, steps_taken, flags, named):
    write_words(NAMES)
    assert named in refused(train, "--data", "w.txt", "--steps", "2", *flags)
    assert steps_taken == []


def test_a_number_too_large_is_not_called_too_small(refused):
    write_words(NAMES)
    text = refused(train, "--data", "w.txt", "--steps", 2, "--seed", 10**30)
    assert "of at least 0" not in text


@pytest.mark.parametrize("out", ["w.txt/mlp.npz", "w.txt/deep/er/mlp.npz", "folder", "n" * 300])
def test_a_place_that_cannot_be_written_is_found_before_the_first_step(refused, steps_taken, out):
    Path("folder").mkdir()
    write_words(NAMES)
    text = refused(train, *SIZES["mlp"], "--data", "w.txt", "--steps", 5, "--out", out)
    assert f"cannot write {out}: " in text and "--out" in text
    assert steps_taken == []


def test_folders_on_the_way_to_the_checkpoint_are_made(learn):
    assert learn("mlp", "--steps", 1, "--out", "a/b/c.npz").status == 0
    assert sorted(map(str, Path().rglob("*"))) == ["a", "a/b", "a/b/c.npz", "w.txt"]


# ---- Checkpoints: best and latest, written whole, moved aside

@both_models
def test_a_checkpoint_is_written_at_every_evaluation(learn, kind, monkeypatch):
    seen, real = [], model.save

    def save(path, state, *args):
        written = real(path, state, *args)
        seen.append(model.load(path)["step"])
        return written
    monkeypatch.setattr(model, "save", save)
    assert learn(kind, "--steps", 7, "--eval-every", 3).status == 0
    assert seen == [3, 6, 7]
    assert sorted(map(str, Path().rglob("*"))) == ["out", f"out/{kind}.npz", "w.txt"]


@both_models
def test_best_and_latest_are_kept_each_with_its_own_statistics(learn, run, signal_after, kind):
    flags = ["--steps", 200, "--eval-every", 10, "--lr", 0.05]
    result = learn(kind, *flags)
    state = model.load(f"out/{kind}.npz")
    dev = {step: loss for step, _, loss in state["history"]}
    best = int(min(dev, key=dev.get))
    assert 10 <= best < 200 and (state["step"], state["best_step"]) == (200, best)
    assert f"best at step {best}," in result.out
    assert losses_of(result.out)[1] == pytest.approx(dev[best], abs=5.1e-5)
    assert f"step {best}, dev loss {dev[best]:.4f}" in run(sample, f"out/{kind}.npz").err

    signal_after(best)                  # a run that ends where the best was, and then one step on
    assert learn(kind, *flags, "--out", "x").status == 130
    there = model.load("x")
    for group in "p", "statistics":
        assert there["latest"][group].keys() == state["best"][group].keys()
        for name, array in there["latest"][group].items():
            np.testing.assert_array_equal(array, state["best"][group][name])
            assert (array != state["latest"][group][name]).any()
    assert bool(state["best"]["statistics"]) == (kind == "mlp")


def test_statistics_are_those_of_the_whole_training_split(learn):
    learn("mlp", "--steps", 20)
    p, statistics = (model.load("out/mlp.npz")["latest"][part] for part in ("p", "statistics"))
    vocabulary = best_of("out/mlp.npz")["vocabulary"]
    X = []
    for word in split_of(NAMES)[0]:
        ids = [0] * 3 + [vocabulary.index(character) for character in word]
        X += [ids[i:i + 3] for i in range(len(word) + 1)]
    hprebn = p["C"].astype(float)[X].reshape(len(X), -1) @ p["W1"].astype(float) + p["b1"]
    np.testing.assert_allclose(statistics["bnmean"], hprebn.mean(0), rtol=0, atol=1e-5)
    np.testing.assert_allclose(statistics["bnvar"], hprebn.var(0, ddof=1), rtol=1e-4)


@both_models
def test_a_new_run_moves_what_stands_there_aside_and_says_so(learn, run, kind):
    name = f"out/{kind}.npz"
    contents = []
    for seed in 1, 2, 3:
        result = learn(kind, "--steps", 3, "--eval-every", 1, "--seed", seed)
        assert result.status == 0
        contents.append(Path(name).read_bytes())
        aside = f"out/{kind}.{seed - 1}.npz"
        assert (result.err.count(aside) == 1) == (seed > 1)
    assert len(set(contents)) == 3
    assert Path(f"out/{kind}.1.npz").read_bytes() == contents[0]
    assert Path(f"out/{kind}.2.npz").read_bytes() == contents[1]
    assert sorted(os.listdir("out")) == [f"{kind}.1.npz", f"{kind}.2.npz", f"{kind}.npz"]
    assert run(sample).err.startswith(f"{name}: ")


def test_without_links_the_old_run_moves_aside_all_the_same(learn, monkeypatch):
    def link(source, target):
        raise PermissionError(1, "Operation not permitted")

    learn("mlp", "--steps", 2)
    before = Path("out/mlp.npz").read_bytes()
    monkeypatch.setattr(os, "link", link)
    assert learn("mlp", "--steps", 3).status == 0
    assert Path("out/mlp.1.npz").read_bytes() == before
    assert model.load("out/mlp.npz")["step"] == 3


def test_two_runs_at_once_into_one_file_lose_nothing(learn, monkeypatch):
    """Another run saves there after this one's step 4: this one goes on beside it."""
    step, other = train.train_step, []

    def interrupted_by_another(run, shares, number):
        if number == 4 and not other:
            other.append(None)
            assert learn("mlp", "--steps", 6, "--seed", 7).status == 0
            other[:] = [Path("out/mlp.npz").read_bytes()]
        return step(run, shares, number)

    monkeypatch.setattr(train, "train_step", interrupted_by_another)
    result = learn("mlp", "--steps", 8, "--eval-every", 4)
    assert result.status == 0
    assert result.err.count("another file stands in out/mlp.npz now: this run is kept in "
                            "out/mlp.2.npz from here on") == 1
    assert "kept in out/mlp.2.npz" in result.out
    assert Path("out/mlp.npz").read_bytes() == other[0]
    assert [model.load(f"out/mlp{end}.npz")["step"] for end in (".1", ".2", "")] == [4, 8, 6]
    assert len(os.listdir("out")) == 3


def test_a_numbered_name_that_another_run_takes_this_moment_is_left_to_it(learn, monkeypatch):
    learn("mlp", "--steps", 2)
    before, real = Path("out/mlp.npz").read_bytes(), os.link

    def link(source, target):
        if target == "out/mlp.1.npz":
            Path(target).write_text("another run's")
        real(source, target)

    monkeypatch.setattr(os, "link", link)
    assert learn("mlp", "--steps", 3).status == 0
    assert Path("out/mlp.1.npz").read_text() == "another run's"
    assert Path("out/mlp.2.npz").read_bytes() == before


def test_first_saves_at_the_same_moment_lose_no_state(trained):
    """Of one process: as in two containers, its number does not tell them apart."""
    state = model.load("out/mlp.npz")

    def save(path, step, barrier):
        barrier.wait()
        return model.save(path, {**state, "step": step})

    with ThreadPoolExecutor(2) as pool:
        for trial in range(40):
            barrier = threading.Barrier(2)
            saved = [pool.submit(save, f"{trial}/x.npz", 1000 + i, barrier) for i in range(2)]
            for future in saved:
                future.result()
            folder = Path(str(trial))
            steps = {path.name: model.load(str(path))["step"] for path in folder.iterdir()}
            assert sorted(steps) == ["x.1.npz", "x.npz"]
            assert sorted(steps.values()) == [1000, 1001]


@pytest.mark.parametrize("gone", [shutil.rmtree, lambda folder: os.rename(folder, "elsewhere")])
def test_a_folder_that_is_gone_meanwhile_is_made_again(learn, monkeypatch, gone):
    step = train.train_step

    def train_step(run, shares, number):
        if number == 5:
            gone("out")
        return step(run, shares, number)

    monkeypatch.setattr(train, "train_step", train_step)
    assert learn("mlp", "--steps", 8, "--eval-every", 4).status == 0
    assert model.load("out/mlp.npz")["step"] == 8 and os.listdir("out") == ["mlp.npz"]


def test_nothing_moves_before_the_first_save(learn, monkeypatch):
    learn("mlp", "--steps", 2)
    before = Path("out/mlp.npz").read_bytes()
    monkeypatch.setattr(train, "train_step", lambda *args: math.nan)
    assert learn("mlp", "--steps", 2).status == 1
    assert os.listdir("out") == ["mlp.npz"] and Path("out/mlp.npz").read_bytes() == before


@both_models
@pytest.mark.parametrize("failing, kept, stopped", [
    ([4], "out", None), ([4, 8], "elsewhere", None), ([6], "elsewhere", 6)])
def test_a_save_that_fails_loses_nothing(
        learn, monkeypatch, signal_after, kind, failing, kept, stopped):
    """On the way it is tried again when it is due; at the end, and after a signal, elsewhere."""
    expected = learn(kind, "--steps", 8, "--eval-every", 4, "--out", "x.npz")
    real = model.save

    def save(path, state, *own):
        if path.startswith("out/") and state["step"] in failing:
            raise model.Refusal(f"cannot write {path}: no space")
        return real(path, state, *own)

    os.mkdir("elsewhere")
    monkeypatch.setattr(tempfile, "tempdir", "elsewhere")
    monkeypatch.setattr(model, "save", save)
    if stopped:
        signal_after(stopped)
    result = learn(kind, "--steps", 8, "--eval-every", 4)
    path = f"{kept}/{kind}.npz"
    assert result.err.count(f"cannot write out/{kind}.npz: no space") == len(failing)
    assert path in (result.err if stopped else result.out)
    assert result.status == (130 if stopped else 0)
    state, whole = (model.load(name, train.ALL_FLAGS) for name in (path, "x.npz"))
    assert state["step"] == (stopped or 8)
    if not stopped:
        assert losses_of(result.out) == losses_of(expected.out)
        np.testing.assert_array_equal(state["moments"], whole["moments"])
        assert state["history"] == whole["history"]


@contextlib.contextmanager
def full_disk():
    """No file can grow beyond 4,096 bytes: not pytest's own output either, so only for a run."""
    before = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (4096, before[1]))
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, before)


@both_models
@pytest.mark.parametrize("again", [["--resume", "--steps", 8], ["--steps", 4, "--seed", 2]])
def test_a_full_disk_is_said_and_the_last_good_file_stays(learn, run, kind, again):
    learn(kind, "--steps", 4, "--eval-every", 2)
    out = Path(f"out/{kind}.npz")
    before = out.read_bytes()
    assert len(before) > 4096
    with full_disk():
        result = run(train, *again, "--out", out, "--data", "w.txt", "--model", kind,
                     *([] if "--resume" in again else SIZES[kind]))
    assert result.status == 2
    assert result.err.count(f"cannot write {out}: ") == (2 if "--resume" in again else 4)
    assert "cannot write " in result.err.splitlines()[-1]
    assert out.read_bytes() == before
    assert os.listdir("out") == [out.name]


# ---- A loss that is not finite

def test_a_gpt_that_diverges_stops_and_keeps_the_last_good_checkpoint(here):
    """In a process of its own: also no warning of NumPy's reaches the user."""
    write_words((ROOT / "data/names.txt").read_text().split()[::20])
    flags = ["--model", "gpt", "--data", "w.txt", "--steps", "400", "--eval-every", "20"]
    status, out, err = finish(process("train", *flags, "--lr", "1e3"))
    err = err.decode()
    assert (status, out) == (1, b"")
    assert "Warning" not in err and "Traceback" not in err
    last = err.splitlines()[-1]
    step = int(re.search(r"not finite after step (\d+)", last)[1])
    done = evaluations(err)
    assert "lower --lr than 1000" in last
    assert step <= (done[-1] if done else 0) + 21
    if done:
        assert model.load("out/gpt.npz")["step"] == done[-1]
    else:
        assert "nothing was written" in last and not Path("out/gpt.npz").exists()


@both_models
@pytest.mark.parametrize("fault", ["loss", "parameters"])
@pytest.mark.parametrize("step", [1, 6, 9, 10])
def test_what_is_not_finite_stops_the_run_within_one_evaluation(
        learn, monkeypatch, kind, fault, step):
    real, taken = train.train_step, []

    def train_step(run, *rest):
        loss = real(run, *rest)
        taken.append(loss)
        if len(taken) != step:
            return loss
        if fault == "loss":
            return math.nan
        run["flat"][:] = math.nan
        return loss
    monkeypatch.setattr(train, "train_step", train_step)
    result = learn(kind, "--steps", 10, "--eval-every", 4)
    good = (step - 1) // 4 * 4
    assert result.status == 1 and result.out == ""
    assert len(taken) <= good + 4
    last = result.err.splitlines()[-1]
    assert "not finite" in last and "lower --lr" in last
    assert evaluations(result.err) == [4, 8][:good // 4]
    if good:
        assert f"out/{kind}.npz keeps step {good}" in last
        assert model.load(f"out/{kind}.npz")["step"] == good
    else:
        assert "nothing was written" in last and not Path(f"out/{kind}.npz").exists()


def test_the_step_that_is_kept_is_the_one_in_the_file(learn, run, signal_after, monkeypatch):
    """After an interruption the file holds a later step than the last evaluation."""
    signal_after(5)
    learn("mlp", "--steps", 10, "--eval-every", 4)
    monkeypatch.setattr(train, "train_step", lambda *args: math.nan)
    result = run(train, "--resume")
    assert result.status == 1 and "out/mlp.npz keeps step 5" in result.err
    assert "keeps step 5." not in result.err
    assert model.load("out/mlp.npz")["step"] == 5


@pytest.mark.parametrize("what", ["parameters", "moments"])
def test_an_interruption_never_saves_what_is_not_finite(learn, run, monkeypatch, what):
    assert learn("mlp", "--steps", 4).status == 0
    before = Path("out/mlp.npz").read_bytes()
    real = train.train_step

    def train_step(run, *rest):
        loss = real(run, *rest)
        (run["flat"] if what == "parameters" else run["state"]["moments"])[:] = math.inf
        signal.raise_signal(signal.SIGINT)
        return loss
    monkeypatch.setattr(train, "train_step", train_step)
    result = run(train, "--resume", "--steps", 8)
    assert "not finite" in result.err and result.status == 1
    assert Path("out/mlp.npz").read_bytes() == before


@both_models
@all_optimizers
@pytest.mark.parametrize("lr", [1, 1e3, 2e9])
@pytest.mark.filterwarnings("error")
def test_at_any_learning_rate_what_is_saved_loads(learn, run, kind, optimizer, lr):
    result = learn(kind, "--steps", 6, "--eval-every", 1, "--lr", lr, "--optimizer", optimizer)
    done = evaluations(result.err)
    assert result.status == (0 if len(done) == 6 else 1)
    assert Path(f"out/{kind}.npz").exists() == bool(done)
    if done:
        assert model.load(f"out/{kind}.npz")["step"] == done[-1]
        assert run(sample, f"out/{kind}.npz", "-n", 2).status == 0
        assert run(sample, f"out/{kind}.npz", "--score", "anna", "bob").status == 0


# ---- Stopping and going on

@both_models
@all_optimizers
@pytest.mark.parametrize("every", [3, 0])
def test_interrupted_anywhere_and_resumed_is_bit_for_bit_the_run_in_one(
        learn, run, monkeypatch, kind, optimizer, every):
    flags = ["--steps", 7, "--eval-every", every, "--optimizer", optimizer, "--lr", 0.05,
             "--batch", 5, "--weight-decay", 0.1]
    if kind == "gpt":
        flags += ["--dropout", 0.2, "--threads", 2]
    whole = learn(kind, *flags, "--out", "x.npz")
    assert whole.status == 0
    expected = Path("x.npz").read_bytes()
    real = train.train_step
    for stops in [[1], [3], [5], [7], [1, 2, 3, 4]] if every else [[2], [7]]:
        os.remove("x.npz")
        reports = []
        for i, stop in enumerate([*stops, None]):
            taken = []

            def train_step(*args, taken=taken, count=stop and stop - (stops[i - 1] if i else 0)):
                taken.append(real(*args))
                if len(taken) == count:
                    signal.raise_signal(signal.SIGINT)
                return taken[-1]
            monkeypatch.setattr(train, "train_step", train_step)
            if i == 0:
                reports.append(learn(kind, *flags, "--out", "x.npz"))
            else:
                reports.append(run(train, "--resume", "--out", "x.npz"))
                assert f"from step {stops[i - 1]} of x.npz" in reports[-1].err
            assert reports[-1].status == (130 if stop else 0)
            assert len(taken) == (stop or 7) - (stops[i - 1] if i else 0)
        monkeypatch.setattr(train, "train_step", real)
        assert Path("x.npz").read_bytes() == expected, stops
        assert without_times(reports[-1].out) == without_times(whole.out), stops


@both_models
@pytest.mark.parametrize("number, status", [(signal.SIGINT, 130), (signal.SIGTERM, 143)])
def test_a_signal_finishes_the_step_saves_and_prints_the_command_to_go_on(
        learn, run, signal_after, monkeypatch, kind, number, status):
    evaluated, generated = [], []
    for function, calls in ("evaluate", evaluated), ("sample", generated):
        real = getattr(train, function)
        monkeypatch.setattr(train, function, lambda *args, real=real, calls=calls:
                            calls.append(args) or real(*args))
    monkeypatch.setattr(sys, "argv", ["train.py"])
    signal_after(5, number)             # of the run that goes on, only 4 are left
    out = "-my runs/it's.npz"
    result = learn(kind, "--steps", 9, "--eval-every", 4, f"--out={out}")
    assert (result.status, result.out) == (status, "")
    assert model.load(out)["step"] == 5
    assert len(evaluated) == 2 and len(generated) == 1                  # those of step 4
    after = result.err.split("step      4 ", 1)[1].splitlines()[1:]
    assert len(after) == 1 and "step 5" in after[0]
    command = shlex.split(after[0][after[0].index("python "):])
    assert command[:2] == ["python", "train.py"]
    resumed = run(train, *command[2:])
    assert resumed.status == 0 and f"from step 5 of {out}" in resumed.err
    assert model.load(out)["step"] == 9


def test_interrupted_at_the_last_losses_it_has_said_that_all_is_kept(learn, run, monkeypatch):
    real, asked = train.evaluate, []

    def evaluate(*args):
        asked.append(None)
        if len(asked) == 3:             # after the sample of train and dev at the last step
            raise KeyboardInterrupt
        return real(*args)

    monkeypatch.setattr(train, "evaluate", evaluate)
    result = learn("mlp", "--steps", 5, "--eval-every", 0)
    assert result.status == 130 and result.out.count("\n") == 1
    assert result.out.endswith("kept in out/mlp.npz\n")
    assert len(losses_of(run(train, "--resume").out)) == 3


def test_signals_are_what_they_were_after_a_run(learn):
    before = [signal.getsignal(number) for number in (signal.SIGINT, signal.SIGTERM)]
    learn("mlp", "--steps", 1)
    assert [signal.getsignal(number) for number in (signal.SIGINT, signal.SIGTERM)] == before


def test_an_interruption_keeps_the_best_known(learn, run, signal_after):
    learn("mlp", "--steps", 8, "--eval-every", 4, "--out", "x")
    signal_after(6)
    learn("mlp", "--steps", 8, "--eval-every", 4)
    state = model.load("out/mlp.npz")
    assert (state["step"], state["best_step"], len(state["history"])) == (6, 4, 1)
    assert "step 4, dev loss" in run(sample).err


def test_interrupted_before_any_evaluation_can_be_sampled_and_says_so(learn, run, signal_after):
    signal_after(2)
    learn("mlp", "--steps", 8, "--eval-every", 4)
    result = run(sample, "-n", 2)
    assert result.status == 0 and result.out.count("\n") == 2
    assert "out/mlp.npz: mlp, step 2, not evaluated yet" in result.err


def test_an_interrupted_new_run_moves_the_old_one_aside(learn, signal_after):
    learn("mlp", "--steps", 3)
    before = Path("out/mlp.npz").read_bytes()
    signal_after(1)
    assert learn("mlp", "--steps", 5, "--eval-every", 0).status == 130
    assert Path("out/mlp.1.npz").read_bytes() == before
    assert model.load("out/mlp.npz")["step"] == 1


def test_processes_stop_at_signals_save_and_say_so(here):
    write_words(NAMES)
    runs = {number: process("train", *SIZES["mlp"], "--data", "w.txt", "--steps", "1000000",
                            "--eval-every", "100", "--out", f"{number.name}.npz")
            for number in (signal.SIGINT, signal.SIGTERM)}
    for number, started in runs.items():
        while not started.stderr.readline().startswith(b"step "):
            assert started.poll() is None
        started.send_signal(number)
    for number, started in runs.items():
        status, out, err = finish(started)
        assert (status, out) == (128 + number, b"")
        stopped = model.load(f"{number.name}.npz")["step"]
        line, = [line for line in err.decode().splitlines() if not line.startswith("step ")]
        assert f"step {stopped}," in line and "--resume" in line


def test_resume_says_where_and_runs_only_the_rest(learn, run, signal_after, steps_taken):
    learn("mlp", "--steps", 6)
    assert len(steps_taken) == 6
    result = run(train, "--resume", "--steps", 10)
    assert result.status == 0 and "from step 6 of out/mlp.npz" in result.err
    assert len(steps_taken) == 10
    assert model.load("out/mlp.npz")["step"] == 10
    assert os.listdir("out") == ["mlp.npz"]


@both_models
@pytest.mark.parametrize("steps", [0, 5])
def test_resuming_a_finished_run_changes_nothing_and_reports_again(
        learn, run, steps_taken, kind, steps):
    first = learn(kind, "--steps", steps, "--eval-every", 2)
    before = Path(f"out/{kind}.npz").read_bytes()
    again = run(train, "--resume", "--model", kind)
    assert again.status == 0 and len(steps_taken) == steps
    assert without_times(again.out) == without_times(first.out)
    assert Path(f"out/{kind}.npz").read_bytes() == before
    assert evaluations(again.err) == []


def test_more_steps_stretch_the_schedule_from_there_on(learn, run, monkeypatch):
    rates, real = [], train.learning_rate
    monkeypatch.setattr(train, "learning_rate",
                        lambda config, step: rates.append(real(config, step)) or rates[-1])
    learn("mlp", "--steps", 40, "--lr", 0.01)
    assert run(train, "--resume", "--steps", 100).status == 0
    assert len(rates) == 100
    assert rates[40:] == [real(dict(lr=0.01, steps=100), step) for step in range(40, 100)]
    assert rates[39] < 0.001 < 0.005 < rates[40] and rates[99] < 0.001
    state = model.load("out/mlp.npz", train.ALL_FLAGS)
    assert (state["config"]["steps"], state["step"]) == (100, 100)
    assert len(state["history"]) == 10 + 15         # every 4 steps as before, that is kept


def test_flags_not_typed_are_the_checkpoints(learn, run, signal_after):
    flags = ["--lr", 0.07, "--seed", 5, "--batch", 7, "--optimizer", "momentum", "--act", "relu",
             "--context", 4, "--no-batchnorm", "--max-len", 3, "--weight-decay", 0.5]
    signal_after(3)
    learn("mlp", "--steps", 9, *flags)
    config = model.load("out/mlp.npz", train.ALL_FLAGS)["config"]
    assert run(train, "--resume").status == 0
    assert model.load("out/mlp.npz", train.ALL_FLAGS)["config"] == config
    assert run(train, "--resume", "--steps", 12, *flags).status == 0            # typed, and true
    assert model.load("out/mlp.npz", train.ALL_FLAGS)["config"] == {**config, "steps": 12}


@pytest.mark.parametrize("kind, flag, value", [
    ("mlp", "--lr", "0.5"), ("mlp", "--seed", "9"), ("mlp", "--hidden", "9"),
    ("mlp", "--embd", "5"),
    ("mlp", "--optimizer", "sgd"), ("mlp", "--model", "gpt"), ("mlp", "--batch", "5"),
    ("mlp", "--max-len", "5"), ("mlp", "--init", "naive"), ("mlp", "--act", "relu"),
    ("mlp", "--context", "4"), ("mlp", "--weight-decay", "0.5"), ("mlp", "--backward", "steps"),
    ("gpt", "--layers", "2"), ("gpt", "--heads", "4"), ("gpt", "--dropout", "0.5"),
    ("gpt", "--norm", "layernorm"), ("gpt", "--threads", "7"), ("gpt", "--context", "9")])
def test_a_typed_flag_that_contradicts_is_refused_with_both_named(
        learn, refused, signal_after, kind, flag, value):
    signal_after(2)
    learn(kind, "--steps", 4, "--out", "x.npz")
    has = model.load("x.npz", train.ALL_FLAGS)["config"][flag.strip("-").replace("-", "_")]
    assert str(has) != value
    text = refused(train, "--resume", "--out", "x.npz", flag, value)
    assert f"{flag} {value} contradicts x.npz, which has {has}:" in text


def test_flags_of_the_other_model_and_switches_contradict_too(learn, refused):
    learn("mlp", "--steps", 2)
    learn("gpt", "--steps", 2)
    text = refused(train, "--resume", "--no-batchnorm")
    assert "--no-batchnorm" in text and "out/mlp.npz" in text
    assert "--heads" in refused(train, "--resume", "--heads", "2")
    text = refused(train, "--resume", "--model", "gpt", "--hidden", "8")
    assert "--hidden" in text and "out/gpt.npz" in text


def test_fewer_steps_than_were_taken_are_refused(learn, refused):
    learn("mlp", "--steps", 6)
    text = refused(train, "--resume", "--steps", 5)
    assert "--steps 5" in text and "step 6" in text


@pytest.mark.parametrize("words", [
    [*NAMES, "żółw"], NAMES[:3], [name.replace("x", "q") for name in NAMES]],
    ids=["more", "fewer", "other characters, as many"])
def test_data_with_another_vocabulary_is_refused_with_both_named(learn, refused, words):
    learn("mlp", "--steps", 4)
    write_words(words, "other.txt")
    text = refused(train, "--resume", "--steps", 9, "--data", "other.txt")
    assert "".join(sorted(set("".join(words)))) in text
    assert "".join(sorted(set("".join(NAMES)))) in text


@both_models
def test_with_other_words_of_the_same_characters_the_best_begins_anew(learn, run, kind):
    """What was learnt of easy words is no measure for harder ones, nor is their length."""
    write_words(["ab"] * 20)
    result = learn(kind, "--steps", 60, "--lr", 0.05, "--context", 8)
    assert losses_of(result.out)[1] < 0.5
    write_words(["abba", "baab", "aabbab", "b"] * 10, "other.txt")
    result = run(train, "--resume", "--model", kind, "--steps", 90, "--eval-every", 30,
                 "--data", "other.txt")
    assert result.status == 0 and "not what this run began with" in result.err
    state = model.load(f"out/{kind}.npz", train.ALL_FLAGS)
    assert [step for step, *_ in state["history"]] == [60, 90]
    dev = {step: loss for step, _, loss in state["history"]}
    assert dev[60] > 1 and state["best_step"] == 90
    assert state["config"]["data"] == "other.txt" and state["config"]["longest"] == 6
    assert losses_of(result.out)[1] == pytest.approx(dev[90], abs=6e-5)


def test_resuming_what_does_not_exist_is_refused(refused):
    assert "cannot read out/mlp.npz: No such file" in refused(train, "--resume")
    assert "cannot read out/gpt.npz: " in refused(train, "--resume", "--model", "gpt")


def test_resuming_without_the_data_is_refused(learn, refused):
    learn("mlp", "--steps", 2)
    os.rename("w.txt", "v.txt")
    text = refused(train, "--resume", "--steps", 4)
    assert "cannot read w.txt" in text


# ---- Loading

def damage(path, how):
    raw = Path(path).read_bytes()
    Path(path).write_bytes(how(raw))


@pytest.mark.parametrize("how", [
    lambda raw: b"", lambda raw: raw[:1], lambda raw: raw[:len(raw) // 2], lambda raw: raw[:-1],
    lambda raw: raw[1:], lambda raw: b"anna\nbob\n", lambda raw: b"PK\x03\x04",
    lambda raw: b"\x93NUMPY", lambda raw: bytes(len(raw)),
    lambda raw: raw[:-2000] + bytes([raw[-2000] ^ 1]) + raw[-1999:],
    lambda raw: b"\x80\x04\x95" + raw], ids=lambda how: None)
@both_models
def test_a_file_that_is_not_a_checkpoint_gets_one_sentence(trained, refused, kind, how):
    out = f"out/{kind}.npz"
    damage(out, how)
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
        if name != "foreign":
            assert "x.npz" in refused(sample, "x.npz")
        else:
            assert call(sample.main, "x.npz") in (0, 2)
    np.save("y.npy", trap, allow_pickle=True)
    assert "y.npy" in refused(sample, "y.npy")
    assert not Path("sprung").exists()


def nan_in(array):
    array = array.copy()
    array.flat[0] = math.nan
    return array


@pytest.mark.parametrize("change", [
    "format=np.array(2)", "format=np.array(10**6)", "format=np.array('x')", "format=np.array(-1)",
    "format=None", "config=None", "vocabulary=None", "step=None", "best_step=None", "history=None",
    "moments=None", "best__C=None", "latest__C=None", "config=np.array('{')",
    "config=np.array('5')", "config=np.array('[' * 10**5)", "config=np.array('[]')",
    "config=dict(model='rnn')", "config=dict(model=['mlp'])", "config=dict(embd=10**9)",
    "config=dict(embd=-4)", "config=dict(embd='big')", "config=dict(embd=None)",
    "config=dict(vocabulary=5)", "config=dict(longest=0)", "config=dict(longest=None)",
    "config=dict(data=None)", "config=dict(sha256=None)", "config=dict(act='step')",
    "config=dict(context=0)", "best__C=a['best.C'].T.copy()", "best__C=a['best.C'][1:]",
    "latest__C=a['latest.C'][..., None]", "best__C=nan_in(a['best.C'])",
    "latest__C=nan_in(a['latest.C'])", "best__C=a['best.C'].astype(str)",
    "best__C=a['best.C'] + 1j", "best__C=a['best.C'].astype(float) * 0 + 1e300",
    "best__C=a['best.C'] > 0",
    "moments=nan_in(a['moments'])", "moments=a['moments'][:, 1:]", "moments=a['moments'].ravel()",
    "moments=a['moments'].astype(complex)", "moments=a['moments'].astype(str)",
    "history=a['history'].astype(str)", "history=a['history'] + 1j", "history=a['history'][0]",
    "history=a['history'][:, :2]", "history=nan_in(a['history'])", "step=np.array(-1)",
    "step=np.array([1, 2])", "step=np.array('x')", "step=np.array(math.nan)",
    "vocabulary=a['vocabulary'][1:]", "vocabulary=a['vocabulary'][::-1].copy()",
    "vocabulary=a['vocabulary'] + 0xd800 * (a['vocabulary'] > 0)",
    "vocabulary=a['vocabulary'] + 0x110000 * (a['vocabulary'] > 0)",
    "vocabulary=a['vocabulary'].astype(float)", "vocabulary=a['vocabulary'][:0]"])
def test_an_edited_checkpoint_gets_one_sentence(trained, refused, change):
    out = "out/mlp.npz"
    edit(out, **eval(f"dict({change})", dict(globals(), a=arrays_of(out))))
    assert out in refused(sample, out)
    assert out in refused(train, "--resume", "--steps", 70, "--out", out)


def test_a_data_file_with_an_impossible_name_gets_one_sentence(trained, refused):
    """A lone surrogate, which no stream can write, must not come as far as a message."""
    edit("out/mlp.npz", config=dict(data="\ud800"))
    assert "not a checkpoint in good order" in refused(sample, "out/mlp.npz", "--new")
    assert "not a checkpoint in good order" in refused(train, "--resume", "--steps", 70)


@pytest.mark.parametrize("kind, config", [
    ("mlp", dict(steps="x")), ("mlp", dict(lr=None)), ("mlp", dict(batch=0)),
    ("mlp", dict(seed=-1)), ("mlp", dict(optimizer="newton")), ("mlp", dict(eval_every=-1)),
    ("mlp", dict(steps=59)), ("mlp", dict(optimizer="momentum")), ("gpt", dict(heads=3)),
    ("gpt", dict(threads=0)), ("gpt", dict(dropout=1.5))])
def test_an_edited_plan_is_not_gone_on_with(trained, refused, kind, config):
    out = f"out/{kind}.npz"
    edit(out, config=config)
    assert out in refused(train, "--resume", "--out", out)


@pytest.mark.parametrize("config", [dict(dropout=0.5), dict(threads=10**9), dict(foreign=1)])
def test_what_the_model_has_not_is_not_gone_on_with(trained, run, config):
    edit("out/mlp.npz", config=config)
    assert run(train, "--resume", "--steps", 62, "--out", "out/mlp.npz").status == 0
    assert not config.keys() & json.loads(str(arrays_of("out/mlp.npz")["config"])).keys()


@pytest.mark.parametrize("count", [0, 1, 3])
def test_moments_of_another_optimizer_are_not_gone_on_with(trained, refused, count):
    """A kernel would read past their end."""
    edit("out/mlp.npz", moments=np.resize(arrays_of("out/mlp.npz")["moments"][:1], (count, 354)))
    assert "out/mlp.npz" in refused(train, "--resume", "--steps", 70)


@pytest.mark.parametrize("step, best", [(61, 60), (60, 7), (60, -1)])
def test_an_edited_step_is_refused_or_sampled(trained, run, step, best):
    edit("out/mlp.npz", step=np.array(step), best_step=np.array(best))
    for result in run(sample, "out/mlp.npz"), run(train, "--resume"):
        assert result.status in (0, 2) and result.err.count("\n") >= 1


def test_a_newer_version_is_named(trained, refused):
    edit("out/mlp.npz", format=np.array(model.FORMAT + 1))
    text = refused(sample, "out/mlp.npz")
    assert f"format {model.FORMAT + 1} is newer than {model.FORMAT}" in text


def test_what_is_saved_loads_as_it_was(trained):
    for kind in SIZES:
        state = model.load(f"out/{kind}.npz", train.ALL_FLAGS)
        model.save("again.npz", state)
        assert Path("again.npz").read_bytes() == Path(f"out/{kind}.npz").read_bytes()


# ---- A name that is taken by something else

@pytest.mark.parametrize("out, flags", [("w.txt", []), ("p.npz", ["--plot", "p.npz"])])
def test_a_checkpoint_takes_the_place_of_no_other_file_of_the_run(refused, steps_taken, out, flags):
    write_words(NAMES)
    before = Path("w.txt").read_bytes()
    flags = ["--data", "w.txt", "--steps", 2, "--out", out, *flags]
    assert out in refused(train, *SIZES["mlp"], *flags)
    assert steps_taken == [] and Path("w.txt").read_bytes() == before and not Path("p.npz").exists()


def test_what_is_no_file_is_not_moved_aside(refused, steps_taken, here):
    write_words(NAMES)
    os.mkfifo("pipe")
    assert "pipe" in refused(train, *SIZES["mlp"], "--data", "w.txt", "--steps", 2, "--out", "pipe")
    assert steps_taken == [] and Path("pipe").is_fifo()


def test_without_matplotlib_a_plot_is_refused_before_the_first_step(
        refused, steps_taken, monkeypatch):
    monkeypatch.setitem(sys.modules, "matplotlib", None)
    write_words(NAMES)
    assert "pip install matplotlib" in refused(
        train, *SIZES["mlp"], "--data", "w.txt", "--steps", 2, "--plot", "p.png")
    assert steps_taken == []


@pytest.mark.parametrize("embd", [1, 2])
def test_a_gpt_too_narrow_to_be_proven_trains_and_is_sampled(learn, run, embd):
    narrow = ["--embd", embd, "--heads", 1, "--steps", 2]
    result = learn("gpt", *narrow, "--check")
    assert result.status == 2 and f"--embd {embd}: " in result.err
    assert learn("gpt", *narrow).status == 0
    assert run(sample, "out/gpt.npz", "-n", 1).status == 0


def test_a_picture_has_an_ending_that_says_what_it_is(refused, steps_taken):
    """A drawing library adds one where there is none, and draws over what has that name."""
    write_words(NAMES)
    flags = [*SIZES["mlp"], "--data", "w.txt", "--steps", 2]
    for name in "c", "c.npz", "c.xyz":
        assert name in refused(train, *flags, "--plot", name)
    assert steps_taken == []


def test_a_link_stays_and_what_it_leads_to_is_written(learn, run):
    os.mkdir("big")
    os.symlink("big/real.npz", "link.npz")
    assert learn("mlp", "--steps", 2, "--out", "link.npz").status == 0
    assert run(train, "--resume", "--steps", 4, "--out", "link.npz").status == 0
    assert os.readlink("link.npz") == "big/real.npz" and os.listdir("big") == ["real.npz"]
    assert model.load("link.npz")["step"] == 4


@pytest.mark.parametrize("number, step", [(signal.SIGHUP, 4), (signal.SIGINT, 2)])
def test_under_nohup_a_closed_terminal_does_not_stop_a_run(learn, signal_after, number, step):
    """But SIGINT does, which a shell lets its background jobs ignore."""
    before = signal.signal(number, signal.SIG_IGN)
    signal_after(2, number)
    try:
        learn("mlp", "--steps", 4)
    finally:
        signal.signal(number, before)
    assert model.load("out/mlp.npz")["step"] == step


def test_a_terminal_that_closes_stops_a_run_and_loses_nothing(learn, signal_after):
    before = signal.signal(signal.SIGHUP, signal.SIG_DFL)       # nohup may run the tests
    signal_after(2, signal.SIGHUP)
    try:
        assert learn("mlp", "--steps", 4, "--eval-every", 0).status == 128 + signal.SIGHUP
    finally:
        signal.signal(signal.SIGHUP, before)
    assert model.load("out/mlp.npz")["step"] == 2


@pytest.mark.parametrize("streams", ["2>&-", "2>/dev/full", ">&- 2>&-", "2>&1 | head -1"])
def test_a_run_that_nobody_listens_to_goes_on_to_its_end(here, streams):
    write_words(NAMES)
    flags = " ".join(map(str, [*SIZES["mlp"], "--data", "w.txt", "--steps", 20]))
    command = f"{sys.executable} {ROOT}/train.py {flags} --eval-every 1 {streams}"
    subprocess.run(["sh", "-c", command], capture_output=True, timeout=60)
    assert model.load("out/mlp.npz")["step"] == 20


def test_an_embedding_one_wide_can_be_drawn(learn):
    pytest.importorskip("matplotlib", reason="it draws")
    assert learn("mlp", "--embd", 1, "--steps", 2, "--plot", "p.png").status == 0
    assert Path("p.png").stat().st_size > 1000


# ---- A step in shares, and with dropout

def one_step(monkeypatch, threads, dropout=0., step=0):
    """A step of a tiny GPT: its run, shares, loss, gradient, masks, and parameters before it."""
    state, parts = train.start(dict(
        model="gpt", embd=8, layers=2, heads=2, batch=12, optimizer="sgd", data="w.txt",
        threads=threads, dropout=dropout))
    config, vocabulary = state["config"], state["vocabulary"]
    examples = model.gpt_examples(sorted(parts["train"]), vocabulary, config["context"])
    before = {name: w.copy() for name, w in state["latest"]["p"].items()}
    masks, real = [], model.dropout_masks
    monkeypatch.setattr(model, "dropout_masks",
                        lambda *args: masks.append(real(*args)) or masks[-1])
    with ThreadPoolExecutor(threads) as pool:
        run = train.new_run(state, dict(train=examples), pool)
        shares = next(train.batches(config, examples, 0))
        loss = train.train_step(run, shares, step)
    monkeypatch.setattr(model, "dropout_masks", real)
    return run, shares, loss, run["rooms"][0]["flat_g"], masks, before


def of_the_whole(run, batch, before, **masks):
    """Loss and gradient of one batch, by the functions that the proof is of."""
    loss, _, _, g = backward.run_model(run["config"], before, batch, **masks)
    return loss(), np.concatenate([array.ravel() for array in g.values()])


@pytest.mark.parametrize("threads", [1, 2, 3, 7])
def test_the_shares_of_all_threads_add_to_the_proven_gradient(here, monkeypatch, threads):
    write_words(NAMES)
    _, (batch,), *_ = one_step(monkeypatch, 1)
    run, shares, loss, g, masks, before = one_step(monkeypatch, threads)
    expected, expected_g = of_the_whole(run, batch, before)
    assert len(shares) == threads and len({len(share[1]) for share in shares}) > (threads > 1)
    assert masks == [] and loss == pytest.approx(expected, rel=1e-6)
    np.testing.assert_allclose(g, expected_g, rtol=0, atol=1e-6 * abs(expected_g).max())


def test_a_step_with_dropout_takes_the_gradient_with_its_masks(here, monkeypatch):
    write_words(NAMES)
    run, (batch,), loss, g, (masks,), before = one_step(monkeypatch, 1, 0.3)
    expected, expected_g = of_the_whole(run, batch, before, masks=masks)
    assert loss == expected
    np.testing.assert_array_equal(g, expected_g)
    without, _ = of_the_whole(run, batch, before)
    assert abs(loss - without) > 1e-4


def test_masks_differ_by_step_and_thread_and_come_again_with_the_seed(here, monkeypatch):
    write_words(NAMES)
    drawn = [mask for step in (0, 1) for mask in one_step(monkeypatch, 3, 0.3, step)[4]]
    again = [mask for step in (0, 1) for mask in one_step(monkeypatch, 3, 0.3, step)[4]]
    bits = [{mask[0, :2].tobytes() for mask in masks} for masks in (drawn, again)]
    assert bits[0] == bits[1] and len(bits[0]) == 6


def test_dropout_keeps_its_share_of_every_branch_and_the_mean():
    masks = model.dropout_masks(dict(layers=2, embd=64, dropout=0.25), 500,
                                np.random.default_rng(1))
    assert masks.shape == (4, 500, 64) and masks.dtype == np.float32
    assert np.unique(masks).tolist() == [0, np.float32(4 / 3)]
    assert (masks == 0).mean((1, 2)) == pytest.approx(np.full(4, 0.25), abs=0.01)
    assert masks.mean((1, 2)) == pytest.approx(np.ones(4), abs=0.02)
    for i, j in itertools.combinations(range(4), 2):
        assert ((masks[i] == 0) == (masks[j] == 0)).mean() < 0.7


def test_a_notebook_whose_streams_cannot_be_changed_trains_too(here):
    write_words(NAMES)
    out = io.StringIO()
    with contextlib.redirect_stdout(out), contextlib.redirect_stderr(io.StringIO()):
        assert train.main([*SIZES["mlp"], "--data", "w.txt", "--steps", "2"]) == 0
    assert len(losses_of(out.getvalue())) == 3


@pytest.mark.slow
def test_compiling_is_said_once_in_a_folder_with_brackets(here):
    """Of a copy, since the kernels are kept beside the files."""
    write_words(NAMES)
    folder = here / "a[b]"
    folder.mkdir()
    for name in "model", "backward", "train":
        shutil.copy(ROOT / f"{name}.py", folder)
    command = [sys.executable, folder / "train.py", "--data", "w.txt", "--steps", "1"]
    env = {name: value for name, value in os.environ.items() if name != "NUMBA_CACHE_DIR"}
    said = [subprocess.run(command, env=env, capture_output=True, text=True).stderr
            for _ in range(2)]
    assert ["compiling the kernels, this once" in err for err in said] == [True, False]
