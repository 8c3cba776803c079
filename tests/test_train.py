"""Training: its steps, what it says and stores, how it stops and goes on."""
import contextlib
import io
import itertools
import math
import os
import re
import resource
import shlex
import signal
import sys
import threading
import warnings
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


@pytest.mark.parametrize("steps", [1, 2, 7, 1000])
def test_the_learning_rate_rises_once_then_falls_and_never_exceeds_the_one_typed(steps):
    rates = np.array([train.learning_rate(dict(lr=0.5, steps=steps), s) for s in range(steps)])
    assert (0 < rates).all() and (rates <= 0.5).all()
    falls = np.diff(rates) < 0
    assert (falls[falls.argmax():] if falls.any() else ~falls).all()
    if steps == 1000:
        assert rates[0] < 0.01 and rates.max() == 0.5 and rates[-1] < 0.0011
        assert (np.diff(rates[:40]) > 0).all()


def test_weight_decay_shrinks_matrices_and_nothing_else(learn, monkeypatch):
    monkeypatch.setattr(train, "learning_rate", lambda config, step: 0.1)
    monkeypatch.setitem(train.OPTIMIZERS, "sgd", lambda *args: None)
    flags = ["--optimizer", "sgd", "--steps", 2, "--weight-decay"]
    for kind in SIZES:
        learn(kind, *flags, 0, "--out", "plain.npz")
        learn(kind, *flags, 0.5, "--out", "decayed.npz")
        plain, decayed = best_of("plain.npz").p, best_of("decayed.npz").p
        for name, w in plain.items():
            factor = 0.95**2 if name in ("C", "P", "W1", "W2", "Wqkv", "Wo", "Wup", "Wdown") else 1
            np.testing.assert_allclose(decayed[name], factor * w, rtol=1e-6)


def test_the_gradient_of_several_processes_is_in_single_precision(learn, monkeypatch):
    found = []
    monkeypatch.setitem(train.OPTIMIZERS, "sgd", lambda w, dw, *rest: found.append(dw.dtype))
    learn("gpt", "--optimizer", "sgd", "--processes", 2, "--steps", 1)
    assert found == [np.float32]


def test_every_random_generator_has_a_seed_of_its_own(learn, monkeypatch):
    """The first number differs, as NumPy takes (1, 2) and (1, 2, 0) for the same seed."""
    real, seeds = np.random.default_rng, []
    monkeypatch.setattr(np.random, "default_rng", lambda seed: seeds.append(seed) or real(seed))
    learn("gpt", "--steps", 2, "--dropout", 0.1, "--processes", 1, "--seed", 7)
    lengths = {seed[0]: len(seed) for seed in seeds}
    assert lengths == {train.FIRST_VALUES: 2, train.ORDER: 3, train.DROPOUT: 4, train.INVENT: 3}
    assert {seed[1] for seed in seeds} == {7}


# ---- Batches

@both_models
def test_an_epoch_takes_every_example_once_and_the_order_is_the_seeds(kind):
    words = [a + b + c for a in "abcd" for b in "efg" for c in "hi"]        # 24 words, 96 examples
    processes = 1 if kind == "mlp" else 2
    examples = model.EXAMPLES[kind](words, model.make_vocabulary(words), 3 + (kind == "gpt"))
    count = len(examples)
    assert count == (96 if kind == "mlp" else 24)

    def taken(batch, seed, begin, stop):
        """All predictions of each batch from one step to another, those of all its shards."""
        config = dict(model=kind, batch=batch, seed=seed)
        shards = [itertools.islice(train.batches(config, examples, begin, processes, k),
                                   stop - begin) for k in range(processes)]
        return [np.concatenate([pairs(shard) for shard in batch]) for batch in zip(*shards)]

    def pairs(shard):
        X = shard.X if kind == "mlp" else shard.X[shard.predicted_from]
        return np.column_stack([X, shard.Y])

    steps = count // 8
    first, second = taken(8, 1, 0, steps), taken(8, 1, steps, 2 * steps)
    whole, = taken(count, 5, 0, 1)
    assert sorted(np.concatenate(first).tolist()) == sorted(whole.tolist())
    for same, again in zip([*first[2:], *second], taken(8, 1, 2, 2 * steps), strict=True):
        np.testing.assert_array_equal(same, again)
    assert np.concatenate(first).tolist() != np.concatenate(taken(8, 2, 0, steps)).tolist()
    assert np.concatenate(first).tolist() != np.concatenate(second).tolist()


def test_names_of_a_batch_share_the_rows_of_their_beginnings(run, monkeypatch):
    """0.72 of them are left; if the words were not sorted it would be 0.85."""
    real, given = train.batches, []
    monkeypatch.setattr(train, "batches", lambda *args: given.append(args) or real(*args))
    write_words((ROOT / "data/names.txt").read_text().split()[::5])
    assert run(train, "--data", "w.txt", "--model", "gpt", "--embd", 8, "--steps", 1,
               "--batch", 64).status == 0
    config, examples, *_ = given[0]
    for processes in 1, 2:
        shards = [shard for k in range(processes) for shard in
                  itertools.islice(train.batches(config, examples, 0, processes, k), 20)]
        assert 0.6 < sum(len(one.X) for one in shards) / sum(len(one.Y) for one in shards) < 0.76


def test_the_steps_and_the_layers_train_alike(run, steps_taken):
    write_words((ROOT / "data/names.txt").read_text().split()[::50])
    for way in "layers", "steps":
        assert run(train, "--data", "w.txt", "--steps", 100, "--lr", 0.1, "--eval-every", 0,
                   "--backward", way).status == 0
    layers, steps = steps_taken[:100], steps_taken[100:]
    assert len(steps) == 100 and layers[-1] < layers[0] - 0.2
    np.testing.assert_allclose(layers, steps, rtol=0, atol=1e-4)
    assert layers != steps


# ---- Over all examples, in blocks

@pytest.mark.parametrize("dtype, tolerance", [(np.float32, 3e-7), (np.float64, 1e-12)])
@pytest.mark.parametrize("N", [2, 4096, 4097, 8193])
def test_statistics_are_of_all_examples_however_many_blocks_they_fill(N, dtype, tolerance):
    rng = np.random.default_rng(N)
    examples = rng.integers(0, 5, (N, 4))
    p = {name: rng.standard_normal(shape).astype(dtype)
         for name, shape in dict(C=(5, 2), W1=(6, 3), b1=3).items()}
    hprebn = (p["C"][examples[:, :-1]].reshape(N, 6) @ p["W1"] + p["b1"]).astype(float)
    ours = train.batchnorm_statistics(p, examples)
    assert ours["bnmean"].dtype == ours["bnvar"].dtype == dtype
    np.testing.assert_allclose(ours["bnmean"], hprebn.mean(0), rtol=0, atol=tolerance)
    np.testing.assert_allclose(ours["bnvar"], hprebn.var(0, ddof=1), rtol=3 * tolerance)


@both_models
def test_an_evaluation_is_of_all_examples_even_if_the_last_block_has_only_one(kind):
    words = [a + b for a in "abcdefgh" for b in "abcdefgh"] + ["hhh"]
    config = dict(model=kind, vocab_size=9, context=5, embd=4, hidden=3, layers=1, heads=2,
                  act="tanh", norm="rmsnorm", batchnorm=False, init="naive")
    examples = model.EXAMPLES[kind](words, model.make_vocabulary(words), 5)
    if kind == "mlp":
        examples = np.resize(examples, (4097, 6))
    p = model.make_parameters(config, np.random.default_rng(1), np.float64)
    best, size = model.Model(config, "", p, {}), len(examples)
    assert size % 64 == 1
    whole, _ = model.predict(best, model.BATCH[kind](examples, np.arange(size)))
    assert train.evaluate(best, examples) == pytest.approx(whole, rel=1e-12)


# ---- What a run says

@both_models
def test_the_report_has_parameters_losses_and_ten_names(learn, kind):
    result = learn(kind, "--steps", 30)
    lines = result.out.splitlines()
    count = sum(w.size for w in best_of(f"out/{kind}.npz").p.values())
    assert re.fullmatch(rf"{count} parameters, \d+ s, best at step \d+, "
                        rf"saved in out/{kind}.npz", lines[0])
    assert re.fullmatch(r"train \d\.\d{4}  dev \d\.\d{4}  test \d\.\d{4}", lines[1])
    assert len(lines) == 12 and all(lines[2:])
    assert set("".join(lines[2:])) <= set("".join(NAMES))


def test_the_number_of_parameters_is_what_the_sizes_say(learn):
    V = len(set("".join(NAMES))) + 1
    flags = ["--no-batchnorm", "--context", 5]
    assert learn("mlp", "--steps", 1).out.startswith(
        f"{V*4 + 3*4*8 + 8 + 2*8 + 8*V + V} parameters, ")
    assert learn("mlp", "--steps", 1, *flags).out.startswith(
        f"{V*4 + 5*4*8 + 8 + 8*V + V} parameters, ")
    assert learn("gpt", "--steps", 1).out.startswith(
        f"{V*8 + 5*8 + 3*8 + 8*24 + 8*8 + 8*32 + 32*8} parameters, ")


def test_nothing_is_said_of_words_that_are_too_long_if_there_are_none(learn):
    assert "skipped" not in learn("mlp", "--steps", 1).err


@both_models
def test_reported_losses_are_means_over_the_whole_splits_of_the_best(run, kind):
    """More words and characters than one block of an evaluation takes."""
    words = (ROOT / "data/names.txt").read_text().split()[::20]
    write_words(words)
    result = run(train, *SIZES[kind], "--data", "w.txt", "--steps", 40, "--eval-every", 10)
    best, parts = best_of(f"out/{kind}.npz"), split_of(words)
    assert len(parts[0]) > 1024 and sum(len(word) + 1 for word in parts[0]) > 8192
    expected = [-sum(model.score(best, word) for word in part)
                / sum(len(word) + 1 for word in part) for part in parts]
    assert losses_of(result.out) == pytest.approx(expected, abs=6e-5)


@both_models
@pytest.mark.parametrize("every, expected", [
    (0, [5]), (1, [1, 2, 3, 4, 5]), (2, [2, 4, 5]), (6, [5]), (None, None)])
def test_evaluations_come_when_they_are_due_and_at_the_end(learn, kind, every, expected):
    result = learn(kind, "--steps", 5 if expected else 40,
                   *([] if every is None else ["--eval-every", every]))
    expected = expected or [1, 2, *range(4, 41, 4)]             # 1, 2, 5, 10, 20, ... 100 %
    assert result.status == 0 and evaluations(result.err) == expected
    assert [step for step, _, _ in train.load(f"out/{kind}.npz").history] == expected


@both_models
@pytest.mark.parametrize("flags", [["--batch", 10**6], ["--batch", 1], ["--lr", 0]])
def test_hardly_any_steps_with_odd_batches(learn, run, steps_taken, kind, flags):
    if kind == "mlp" and 1 in flags:
        flags = [*flags, "--no-batchnorm"]
    for steps in 1, 2:
        result = learn(kind, "--steps", steps, *flags)
        assert result.status == 0 and np.isfinite(losses_of(result.out)).all()
        stored = train.load(f"out/{kind}.npz")
        assert stored.step == steps and 1 <= stored.best_step() <= steps
        assert run(sample, f"out/{kind}.npz", "-n", 3).out.count("\n") == 3
    assert len(steps_taken) == 3 and np.isfinite(steps_taken).all()


@both_models
def test_a_batch_larger_than_the_data_is_all_of_it(learn, steps_taken, kind):
    words = split_of(NAMES)[0]
    count = len(words) if kind == "gpt" else sum(len(word) + 1 for word in words)
    for batch in 10**6, count, count - 1:
        assert learn(kind, "--steps", 3, "--batch", batch).status == 0
    assert steps_taken[:3] == steps_taken[3:6] != steps_taken[6:]


def test_a_log_has_plain_lines_and_a_terminal_has_a_bar(learn):
    flags = [*SIZES["mlp"], "--data", "w.txt", "--steps", "3000", "--eval-every", "1500",
             "--weight-decay", "0"]
    log = learn("mlp", *flags)
    assert log.status == 0 and "\r" not in log.out + log.err
    assert evaluations(log.err) == [1500, 3000]
    status, shown, out = in_terminal("train", *flags, "--out", "x.npz", streams=["stderr"])
    assert status == 0
    assert re.search(rb"\r[^\r\n]*loss \d\.\d[^\r\n]*\d/3000 ", shown)
    assert evaluations(re.sub("[^\n]*\r(?!\n)", "", shown.decode())) == [1500, 3000]
    assert out.decode().splitlines()[1:] == log.out.splitlines()[1:]


@both_models
def test_the_same_flags_give_the_same_bytes_whatever_the_clock_says(learn, kind, monkeypatch):
    results, now = [], train.time.time()
    for moment in now, now + 1e8, now:
        monkeypatch.setattr(train.time, "time", lambda moment=moment: moment)
        seed = 1 + (len(results) == 2)
        result = learn(kind, "--steps", 10, "--out", "x.npz", "--eval-every", 3, "--seed", seed)
        results.append((without_times(result.out), without_times(result.err),
                        Path("x.npz").read_bytes()))
        os.remove("x.npz")
    assert results[0] == results[1]
    assert all(one != other for one, other in zip(results[1], results[2]))


def test_a_notebook_whose_streams_cannot_be_changed_trains_too(here):
    write_words(NAMES)
    out = io.StringIO()
    with contextlib.redirect_stdout(out), contextlib.redirect_stderr(io.StringIO()):
        assert train.main([*SIZES["mlp"], "--data", "w.txt", "--steps", "2"]) == 0
    assert len(losses_of(out.getvalue())) == 3


@both_models
def test_a_thread_that_is_not_the_main_one_trains_alike(learn, kind):
    learn(kind, "--steps", 5, "--out", "x.npz")
    expected, results = Path("x.npz").read_bytes(), []
    os.remove("x.npz")
    before = [signal.getsignal(number) for number in train.SIGNALS]
    thread = threading.Thread(target=lambda: results.append(
        learn(kind, "--steps", 5, "--out", "x.npz")))
    thread.start()
    thread.join()
    assert results[0].status == 0 and Path("x.npz").read_bytes() == expected
    assert [signal.getsignal(number) for number in train.SIGNALS] == before


def test_no_program_changes_the_filters_of_warnings(learn, run, capsys):
    before = list(warnings.filters)
    for kind in SIZES:
        learn(kind, "--steps", 2, "--check")
        learn(kind, "--steps", 2, "--lr", 1e9)
    run(sample, "-n", 2)
    assert call(backward.main) == 0
    model.main()
    assert warnings.filters == before


# ---- Proving

@both_models
def test_check_proves_this_model_before_it_trains(learn, monkeypatch, kind):
    shapes = model.parameter_shapes
    result = learn(kind, "--steps", 2, "--check")
    lines = result.out.splitlines()
    names = list(shapes(train.load(f"out/{kind}.npz").config))
    if kind == "gpt":                   # queries, keys and values apart, at the end
        names.remove("Wqkv")
        names += ["Wq", "Wk", "Wv"]
    assert result.status == 0 and len(lines) == len(names) + 12
    for name, line in zip(names, lines):
        assert f"d{name} " in line and line.endswith("ok")
    assert losses_of(result.out) == losses_of(learn(kind, "--steps", 2).out)


@pytest.mark.parametrize("kind, way", [("mlp", "layers"), ("mlp", "steps"), ("gpt", None)])
def test_a_wrong_gradient_is_not_trained_with(learn, steps_taken, monkeypatch, kind, way):
    real = backward.gradient

    def gradient(config, p, batch, g, masks=None):
        assert config.get("backward") == way
        result = real(config, p, batch, g, masks)
        g["C"] *= 1.001
        return result
    monkeypatch.setattr(backward, "gradient", gradient)
    result = learn(kind, "--steps", 2, "--check", *(["--backward", way] if way else []))
    wrong, = re.findall(r"d(\w+) .* WRONG\n", result.out)
    assert (wrong, result.status, steps_taken) == ("C", 2, [])
    assert "wrong" in result.err.splitlines()[-1] and not Path("out").exists()


# ---- Flags

@pytest.mark.parametrize("flags, named", [
    (["--steps", "-1"], "--steps"), (["--steps", "0"], "--steps"), (["--steps", "1.5"], "--steps"),
    (["--steps", "many"], "--steps"), (["--steps"], "--steps"), (["--batch", "0"], "--batch"),
    (["--lr", "nan"], "--lr"), (["--lr", "inf"], "--lr"), (["--lr", "-1"], "--lr"),
    (["--lr", "fast"], "--lr"), (["--seed", "-1"], "--seed"), (["--seed", "1" * 30], "--seed"),
    (["--context", "-1"], "--context"), (["--embd", "0"], "--embd"), (["--init", "zero"], "--init"),
    (["--optimizer", "newton"], "--optimizer"), (["--hidden", "0"], "--hidden"),
    (["--backward", "no"], "--backward"), (["--act", "step"], "--act"),
    (["--eval-every", "-1"], "--eval-every"), (["--max-len", "0"], "--max-len"),
    (["--model", "rnn"], "--model"), (["--weight-decay", "-1"], "--weight-decay"),
    (["--frobnicate"], "--frobnicate"), (["w.txt"], "w.txt"), (["--batch", "1"], "--batch 1"),
    (["--backward", "steps", "--no-batchnorm"], "--backward steps"),
    (["--backward", "steps", "--act", "relu"], "--backward steps"),
    (["--out", "x"], "--out x"), (["--out", ""], "--out"),
    (["--model", "gpt", "--dropout", "1"], "--dropout"),
    (["--model", "gpt", "--dropout", "-0.1"], "--dropout"),
    (["--model", "gpt", "--processes", "0"], "--processes"),
    (["--model", "gpt", "--embd", "10", "--heads", "4"], "--heads"),
    (["--model", "gpt", "--norm", "batchnorm"], "--norm")])
def test_bad_flags_are_named_and_nothing_is_written(refused, steps_taken, flags, named):
    write_words(NAMES)
    assert named in refused(train, "--data", "w.txt", "--steps", "2", *flags)
    assert steps_taken == []


@pytest.mark.parametrize("kind, flags", [
    ("mlp", ["--heads", "4"]), ("mlp", ["--layers", "2"]), ("mlp", ["--norm", "rmsnorm"]),
    ("mlp", ["--dropout", "0.1"]), ("mlp", ["--processes", "2"]), ("gpt", ["--hidden", "8"]),
    ("gpt", ["--no-batchnorm"]), ("gpt", ["--backward", "steps"])])
def test_flags_that_mean_nothing_to_the_model_are_named(refused, steps_taken, kind, flags):
    write_words(NAMES)
    text = refused(train, "--data", "w.txt", "--steps", "2", "--model", kind, *flags)
    assert flags[0].replace("no-", "") in text and f"--model {kind}" in text
    assert steps_taken == []


def test_help_states_the_defaults(monkeypatch):
    """Some defaults depend on the data or the machine: they are here as the help describes them."""
    described = dict(data="data/names.txt", eval_every="13 times", batchnorm="yes",
                     model="mlp")
    helps, real = {}, train.argparse.ArgumentParser.add_argument

    def add_argument(self, *names, **options):
        helps[names[0].strip("-").replace("-", "_")] = options.get("help", "")
        return real(self, *names, **options)
    monkeypatch.setattr(train.argparse.ArgumentParser, "add_argument", add_argument)
    assert train.parse([]) == {}
    for kind, defaults in train.DEFAULTS.items():
        for name, value in {**defaults, **described}.items():
            if name not in defaults:    # --batchnorm of the GPT
                continue
            if kind == "gpt":
                value = dict(context="longest word + 1", processes=2).get(name, value)
            brackets = re.findall(r"\(([^()]*)\)", helps[name])
            stated = re.findall(rf"\b{kind} ([^,()]+)", ", ".join(brackets)) or brackets[-1:]
            assert stated == ["0" if value == 0 else str(value)], name
    assert train.DEFAULTS["gpt"]["processes"] == min(2, os.cpu_count())


# ---- Checkpoints: best and latest, written whole, moved aside

@pytest.mark.parametrize("out", ["w.txt/mlp.npz", "w.txt/deep/er/mlp.npz", "n" * 300 + ".npz"])
def test_a_place_that_cannot_be_written_is_found_before_the_first_step(refused, steps_taken, out):
    write_words(NAMES)
    text = refused(train, *SIZES["mlp"], "--data", "w.txt", "--steps", 5, "--out", out)
    assert f"cannot write {out}: " in text
    assert steps_taken == []


def test_folders_on_the_way_to_the_checkpoint_are_made(learn):
    assert learn("mlp", "--steps", 1, "--out", "a/b/c.npz").status == 0
    assert sorted(map(str, Path().rglob("*"))) == ["a", "a/b", "a/b/c.npz", "w.txt"]


@both_models
def test_a_checkpoint_is_written_whole_at_the_start_and_at_every_evaluation(
        learn, kind, monkeypatch):
    """What takes the place of the old file is all there, and on the disk."""
    events, replace, fsync = [], os.replace, os.fsync

    def checked_replace(source, target):
        assert (source, target) == (f"out/{kind}.npz.tmp", f"out/{kind}.npz")
        assert events[-1] == os.stat(source).st_ino
        events.append(train.load(source).step)
        replace(source, target)
    monkeypatch.setattr(os, "replace", checked_replace)
    monkeypatch.setattr(os, "fsync", lambda file: events.append(os.fstat(file).st_ino) or
                        fsync(file))
    assert learn(kind, "--steps", 7, "--eval-every", 3).status == 0
    assert events[1::2] == [0, 3, 6, 7] and len(events) == 8
    assert sorted(map(str, Path().rglob("*"))) == ["out", f"out/{kind}.npz", "w.txt"]


@both_models
def test_best_and_latest_are_kept_each_as_it_was(learn, run, signal_after, kind):
    flags = ["--steps", 200, "--eval-every", 10, "--lr", 0.05]
    result = learn(kind, *flags)
    stored = train.load(f"out/{kind}.npz")
    dev = {step: loss for step, _, loss in stored.history}
    best = int(min(dev, key=dev.get))
    assert 10 <= best < 200 and (stored.step, stored.best_step()) == (200, best)
    assert f"best at step {best}," in result.out
    assert losses_of(result.out)[1] == pytest.approx(dev[best], abs=5.1e-5)
    assert f"step {best}, dev loss {dev[best]:.4f}" in run(sample, f"out/{kind}.npz").err

    signal_after(best)                  # a run that ends where the best was, and then one step on
    assert learn(kind, *flags, "--out", "x.npz").status == 130
    there = train.load("x.npz")
    for name, w in there.p.items():
        np.testing.assert_array_equal(w, stored.best.p[name])
        assert (w != stored.p[name]).any()
    assert there.best.statistics.keys() == stored.best.statistics.keys() == (
        {"bnmean", "bnvar"} if kind == "mlp" else set())
    for name, array in there.best.statistics.items():
        np.testing.assert_array_equal(array, stored.best.statistics[name])


def test_statistics_are_those_of_the_whole_training_split(learn):
    learn("mlp", "--steps", 20, "--eval-every", 0)
    best, X = best_of("out/mlp.npz"), []
    for word in split_of(NAMES)[0]:
        ids = [0] * 3 + [best.vocabulary.index(character) for character in word]
        X += [ids[i:i + 3] for i in range(len(word) + 1)]
    p = {name: w.astype(float) for name, w in best.p.items()}
    hprebn = p["C"][X].reshape(len(X), -1) @ p["W1"] + p["b1"]
    np.testing.assert_allclose(best.statistics["bnmean"], hprebn.mean(0), rtol=0, atol=1e-5)
    np.testing.assert_allclose(best.statistics["bnvar"], hprebn.var(0, ddof=1), rtol=1e-4)


@both_models
def test_a_new_run_moves_what_stands_there_aside_once_and_says_so(learn, run, kind):
    name, contents = f"out/{kind}.npz", []
    for seed in 1, 2, 3:
        result = learn(kind, "--steps", 3, "--eval-every", 1, "--seed", seed)
        assert result.status == 0
        contents.append(Path(name).read_bytes())
        assert result.err.count(f"out/{kind}.{seed - 1}.npz") == (seed > 1)
    assert len(set(contents)) == 3
    assert Path(f"out/{kind}.1.npz").read_bytes() == contents[0]
    assert Path(f"out/{kind}.2.npz").read_bytes() == contents[1]
    assert sorted(os.listdir("out")) == [f"{kind}.1.npz", f"{kind}.2.npz", f"{kind}.npz"]
    assert run(sample).err.startswith(f"{name}: ")


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
@pytest.mark.parametrize("full_at, stopped, status", [
    ([4], None, 0), ([4, 8], None, 2), ([6], 6, 2)])
def test_a_save_on_a_full_disk_keeps_the_last_file_and_is_tried_again(
        learn, monkeypatch, signal_after, kind, full_at, stopped, status):
    """At the end, and after a signal, there is no evaluation to come that could try again."""
    real, out = train.save, f"out/{kind}.npz"

    def save(path, run):
        before = Path(path).read_bytes() if run.step else b""
        with full_disk() if run.step in full_at else contextlib.nullcontext():
            try:
                real(path, run)
            except train.UserError:
                assert Path(path).read_bytes() == before
                raise
    monkeypatch.setattr(train, "save", save)
    if stopped:
        signal_after(stopped)
    result = learn(kind, "--steps", 8, "--eval-every", 4)
    assert result.status == status
    assert result.err.count(f"cannot write {out}: ") == len(full_at)
    assert (f"cannot write {out}: " in result.err.splitlines()[-1]) == (status == 2)
    assert train.load(out).step == (8 if status == 0 else 4 if stopped else 0)


# ---- A loss that is not finite

@both_models
@all_optimizers
@pytest.mark.parametrize("lr", [1, 1e3, 2e9])
@pytest.mark.filterwarnings("error")
def test_at_any_learning_rate_what_is_saved_loads(learn, run, kind, optimizer, lr):
    processes = ["--processes", 1] if kind == "gpt" else []     # a fork may warn of threads
    result = learn(kind, "--steps", 6, "--eval-every", 1, "--lr", lr, "--optimizer", optimizer,
                   *processes)
    done = evaluations(result.err)
    assert result.status == (0 if len(done) == 6 else 2)
    assert result.status == 0 or re.search(r"not finite.*--lr", result.err.splitlines()[-1])
    assert train.load(f"out/{kind}.npz").step == max([0, *done])
    assert run(sample, f"out/{kind}.npz", "-n", 2, "--seed", 0).status == 0
    assert run(sample, f"out/{kind}.npz", "--score", "anna", "bob").status == 0


@both_models
@pytest.mark.parametrize("fault", ["loss", "parameters"])
@pytest.mark.parametrize("step", [1, 6, 9, 10])
def test_what_is_not_finite_stops_the_run_within_a_step(learn, monkeypatch, kind, fault, step):
    real, taken = train.train_step, []

    def train_step(run, *rest):
        loss = real(run, *rest)
        taken.append(loss)
        if len(taken) == step:
            for w in run.p.values():
                w[:] = math.nan
        return math.nan if len(taken) == step and fault == "loss" else loss
    monkeypatch.setattr(train, "train_step", train_step)
    result = learn(kind, "--steps", 10, "--eval-every", 4)
    assert (result.status, result.out) == (2, "")
    assert len(taken) == step + (fault == "parameters" and step != 10)
    assert re.search(r"not finite.*--lr", result.err.splitlines()[-1])
    good = (step - 1) // 4 * 4
    assert evaluations(result.err) == [4, 8][:good // 4]
    assert train.load(f"out/{kind}.npz").step == good


def test_a_gpt_that_diverges_says_one_sentence_and_no_warning(here):
    """In a process of its own, so that the warnings of NumPy would reach the user."""
    write_words((ROOT / "data/names.txt").read_text().split()[::20])
    status, out, err = finish(process(
        "train", "--model", "gpt", "--data", "w.txt", "--steps", "400", "--eval-every", "20",
        "--init", "naive", "--lr", "1e9", "--optimizer", "sgd"))
    *rest, last = err.decode().splitlines()
    assert (status, out) == (2, b"") and "not finite" in last and "--lr" in last
    assert all(re.search("w.txt: 1609 words, |dev words|^for so few words|^dev loss of |^step ",
                         line) for line in rest)
    assert train.load("out/gpt.npz").step == max([0, *evaluations(err.decode())])


# ---- Stopping and going on

@both_models
@all_optimizers
@pytest.mark.parametrize("every, processes", [(3, 1), (3, 2), (0, 2)])
def test_interrupted_anywhere_and_resumed_is_bit_for_bit_the_run_in_one(
        learn, run, monkeypatch, kind, optimizer, every, processes):
    """All bytes of the file are the same: parameters, moments, history, the best and the rest."""
    flags = ["--steps", 7, "--eval-every", every, "--optimizer", optimizer, "--lr", 0.05,
             "--batch", 5, "--weight-decay", 0.1]
    if kind == "gpt":
        flags += ["--dropout", 0.2, "--processes", processes]
    elif processes == 1:
        flags += ["--backward", "steps"]
    whole = learn(kind, *flags, "--out", "x.npz")
    assert whole.status == 0
    expected = Path("x.npz").read_bytes()
    real = train.train_step
    for stops in [[1], [3], [7], [1, 2, 3, 5]] if every else [[2]]:
        os.remove("x.npz")
        reports = []
        for begin, stop in zip([0, *stops], [*stops, None]):
            taken = []

            def train_step(*args, taken=taken, count=stop and stop - begin):
                taken.append(real(*args))
                if len(taken) == count:
                    signal.raise_signal(signal.SIGINT)
                return taken[-1]
            monkeypatch.setattr(train, "train_step", train_step)
            if begin == 0:
                reports.append(learn(kind, *flags, "--out", "x.npz"))
            else:
                reports.append(run(train, "--resume", "--out", "x.npz"))
                assert f"from step {begin} of x.npz" in reports[-1].err
            assert reports[-1].status == (130 if stop else 0)
            assert len(taken) == (stop or 7) - begin
        monkeypatch.setattr(train, "train_step", real)
        assert Path("x.npz").read_bytes() == expected, stops
        assert without_times(reports[-1].out) == without_times(whole.out), stops


@both_models
@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM, signal.SIGHUP])
def test_a_signal_finishes_the_step_saves_and_prints_the_command_to_go_on(
        learn, run, signal_after, monkeypatch, kind, number):
    """At once, without an evaluation; the handlers are then those from before."""
    monkeypatch.setattr(sys, "argv", ["train.py"])
    before = signal.signal(number, signal.default_int_handler)  # nohup may run the tests
    signal_after(5, number)             # of the run that goes on, only 4 are left
    out = "-my runs/it's.npz"
    try:
        result = learn(kind, "--steps", 9, "--eval-every", 4, f"--out={out}")
        assert signal.getsignal(number) == signal.default_int_handler
        assert (result.status, result.out) == (128 + number, "")
        stored = train.load(out)
        assert (stored.step, stored.best_step(), len(stored.history)) == (5, 4, 1)
        after = result.err.split("step      4 ", 1)[1].splitlines()[1:]
        assert len(after) == 1 and "step 5" in after[0]
        command = shlex.split(after[0][after[0].index("python "):])
        assert command[:2] == ["python", "train.py"]
        assert "step 4, dev loss" in run(sample, "--", out).err
        resumed = run(train, *command[2:])
    finally:
        signal.signal(number, before)
    assert resumed.status == 0 and f"from step 5 of {out}" in resumed.err
    assert train.load(out).step == 9


def test_handlers_are_those_from_before_after_an_error_too(learn, monkeypatch):
    before = [signal.getsignal(number) for number in train.SIGNALS]
    monkeypatch.setattr(train, "evaluate", lambda *args: math.nan)
    try:
        assert learn("mlp", "--steps", 2).status == 2
        assert [signal.getsignal(number) for number in train.SIGNALS] == before
    finally:
        for number, handler in zip(train.SIGNALS, before):
            signal.signal(number, handler)


@pytest.mark.parametrize("number", [signal.SIGHUP, signal.SIGINT])
def test_a_signal_that_was_ignored_stays_ignored(learn, signal_after, number):
    """As that of a closed terminal under nohup."""
    before = signal.signal(number, signal.SIG_IGN)
    signal_after(2, number)
    try:
        assert learn("mlp", "--steps", 4).status == 0
    finally:
        signal.signal(number, before)
    assert train.load("out/mlp.npz").step == 4


@pytest.mark.parametrize("function", ["read_lines", "evaluate"])
def test_ctrl_c_outside_of_the_steps_ends_a_run_without_a_traceback(
        learn, run, monkeypatch, function):
    """Before them, and at the last losses of all, when the checkpoint is complete."""
    real, asked = getattr(train, function), []

    def interrupted(*args):
        asked.append(None)
        if len(asked) == (3 if function == "evaluate" else 1):
            raise KeyboardInterrupt
        return real(*args)
    monkeypatch.setattr(train, function, interrupted)
    result = learn("mlp", "--steps", 5, "--eval-every", 0)
    assert result.status == 130 and result.err.splitlines()[-1] == "interrupted"
    assert Path("out/mlp.npz").exists() == (function == "evaluate")
    if function == "evaluate":
        assert len(losses_of(run(train, "--resume").out)) == 3


def test_interrupted_before_any_evaluation_can_be_sampled_and_says_so(learn, run, signal_after):
    signal_after(2)
    learn("mlp", "--steps", 8, "--eval-every", 4)
    result = run(sample, "-n", 2)
    assert result.status == 0 and result.out.count("\n") == 2
    assert re.search(r"out/mlp.npz: mlp, step 0, not (trained|evaluated)", result.err)


@both_models
def test_resuming_a_finished_run_changes_nothing_and_reports_again(learn, run, steps_taken, kind):
    first = learn(kind, "--steps", 5, "--eval-every", 2)
    before = Path(f"out/{kind}.npz").read_bytes()
    again = run(train, "--resume", "--model", kind)
    assert again.status == 0 and len(steps_taken) == 5
    assert without_times(again.out) == without_times(first.out)
    assert Path(f"out/{kind}.npz").read_bytes() == before and evaluations(again.err) == []


def test_more_steps_stretch_the_schedule_from_there_on(learn, run, monkeypatch):
    rates, real = [], train.learning_rate
    monkeypatch.setattr(train, "learning_rate",
                        lambda config, step: rates.append(real(config, step)) or rates[-1])
    learn("mlp", "--steps", 40, "--lr", 0.01)
    assert run(train, "--resume", "--steps", 100).status == 0
    assert len(rates) == 100 and os.listdir("out") == ["mlp.npz"]
    assert rates[40:] == [real(dict(lr=0.01, steps=100), step) for step in range(40, 100)]
    assert rates[39] < 0.001 < 0.005 < rates[40] and rates[99] < 0.001
    stored = train.load("out/mlp.npz")
    assert (stored.config["steps"], stored.step) == (100, 100)
    assert [row[0] for row in stored.history] == [1, 2, *range(4, 41, 4), *range(50, 101, 10)]
    assert run(train, "--resume", "--steps", 110, "--eval-every", 5).status == 0
    assert [row[0] for row in train.load("out/mlp.npz").history[-3:]] == [100, 105, 110]


@pytest.mark.parametrize("kind, flag", [
    ("mlp", "--lr 0.5"), ("mlp", "--seed 9"), ("mlp", "--hidden 9"), ("mlp", "--embd 5"),
    ("mlp", "--optimizer sgd"), ("mlp", "--batch 5"), ("mlp", "--max-len 5"), ("mlp", "--act relu"),
    ("mlp", "--init naive"), ("mlp", "--context 4"), ("mlp", "--weight-decay 0.5"),
    ("mlp", "--backward steps"), ("mlp", "--heads 2"),
    ("mlp", "--batchnorm"), ("gpt", "--layers 2"), ("gpt", "--heads 4"), ("gpt", "--dropout 0.5"),
    ("gpt", "--norm layernorm"), ("gpt", "--processes 7"), ("gpt", "--hidden 8")])
def test_only_the_number_of_steps_and_of_evaluations_can_be_changed(trained, refused, kind, flag):
    out = f"out/{kind}.npz"
    text = refused(train, "--resume", "--model", kind, "--steps", 90, "--out", out, *flag.split())
    assert "--resume" in text and (flag.split()[0] in text or "--eval-every" in text)


@both_models
def test_a_checkpoint_of_the_other_model_is_not_gone_on_with(trained, refused, kind):
    other = "gpt" if kind == "mlp" else "mlp"
    assert "--model" in refused(train, "--resume", "--model", kind, "--out", f"out/{other}.npz")


def test_what_cannot_be_gone_on_with_is_refused(learn, refused):
    assert learn("mlp", "--steps", 60).status == 0
    text = refused(train, "--resume", "--steps", 50)
    assert "--steps 50" in text and "step 60" in text
    assert "no.npz" in refused(train, "--resume", "--out", "no.npz")
    write_words([*NAMES, "one"])
    assert "w.txt has changed" in refused(train, "--resume", "--steps", 90)
    os.rename("w.txt", "v.txt")
    assert "w.txt" in refused(train, "--resume", "--steps", 90)
    assert "v.txt has changed" in refused(train, "--resume", "--steps", 90, "--data", "v.txt")


def test_a_list_that_was_moved_can_be_named_when_a_run_goes_on(trained, run):
    os.rename("w.txt", "v.txt")
    assert run(train, "--resume", "--steps", 62, "--data", "v.txt").status == 0
    assert train.load("out/mlp.npz").config["data"] == os.path.abspath("v.txt")
