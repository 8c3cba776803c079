"""Small lists: what counting says of a loss, what is invented, when that is done, and --from."""
import itertools
import json
import math
import re
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest

import model
import sample
import train
from counting import counting_loss
from conftest import (
    NAMES, ROOT, SIZES, best_of, both_models, losses_of, split_of, without_times, write_words)


# ---- Counting

def predictions(words, order):
    """Each character of each word, and its end (None), with the (order - 1) characters before."""
    pairs = []
    for word in words:
        before = (None,) * (order - 1)
        for character in [*word, None]:
            pairs.append((before, character))
            before = (*before, character)[1:]
    return pairs


def witten_bell(seen, before, character, size):
    """The formula written out once more, which looks through all of `seen` each time."""
    shorter = witten_bell(seen, before[1:], character, size) if before else 1 / size
    followed = [then for earlier, then in seen if earlier[len(earlier) - len(before):] == before]
    kinds = len(set(followed))
    return (followed.count(character) + kinds * shorter) / (len(followed) + kinds) if kinds \
        else shorter


def brute_force(train_words, words, size, order):
    seen = predictions(train_words, order)
    return -np.mean([math.log(witten_bell(seen, before, character, size))
                     for before, character in predictions(words, order)])


def test_counting_by_hand():
    """Of "ab" and "a": a, b, end, a, end. So a follows the beginning, twice, and an end b."""
    loss = counting_loss(["ab", "a"], ["b"], 3, 1)
    assert loss == pytest.approx(-(math.log(2 / 8) + math.log(3 / 8)) / 2)
    loss = counting_loss(["ab", "a"], ["b"], 3, 2)
    assert loss == pytest.approx(-(math.log(1 / 3 * 2 / 8) + math.log((1 + 3 / 8) / 2)) / 2)


@pytest.mark.parametrize("order", [1, 2, 3, 4])
def test_counting_is_witten_bells_and_every_distribution_adds_to_one(order):
    """Of "c" nothing is known but that the vocabulary has it."""
    known, size = ["ab", "abba", "b", "ab", "aab", "bbbb"], 4
    seen = predictions(known, order)
    for before in itertools.product([None, *"abc"], repeat=order - 1):
        total = sum(witten_bell(seen, before, character, size) for character in [None, *"abc"])
        assert total == pytest.approx(1, abs=1e-12)
    words = ["".join(word) for n in range(4) for word in itertools.product("abc", repeat=n)]
    for word in words:
        assert counting_loss(known, [word], size, order) == pytest.approx(
            brute_force(known, [word], size, order), rel=1e-12), word
    assert counting_loss(known, words, size, order) == pytest.approx(
        brute_force(known, words, size, order), rel=1e-12)


@pytest.mark.parametrize("order", [1, 2, 3, 5])
def test_the_probabilities_of_all_words_that_are_counted_add_to_one(order):
    lengths = range(300)
    losses = [counting_loss(["a", "aaa", "aa", "a"], ["a" * n], 2, order) for n in lengths]
    assert sum(math.exp(-loss * (n + 1)) for loss, n in zip(losses, lengths)) == pytest.approx(1)


def test_the_bigrams_of_train_py_are_counting_of_order_two():
    """Also for characters that no word begins with, and for ones that were never seen."""
    known, V = ["ab", "abba", "b", "ab", "aab", "bbbb", "cc"], 5
    for words in ["a"], ["dab", "bd", ""], ["c", "acb"], known:
        assert train.bigram_loss(known, words, V) == pytest.approx(
            counting_loss(known, words, V, 2), rel=1e-12)


@pytest.mark.parametrize("order, dev", [(1, 2.8258), (2, 2.460), (4, 2.079), (5, 2.037)])
def test_counting_on_the_names(order, dev):
    """Figures of another program, which counts alike."""
    words = (ROOT / "data/names.txt").read_text().split()
    known, words, _ = split_of(words)
    assert counting_loss(known, words, 27, order) == pytest.approx(dev, abs=6e-4)


def test_counting_py_prints_the_losses_of_all_orders(here):
    write_words(NAMES * 2)
    write_words(["żółw", "łza", "żal"], "other.txt")
    done = subprocess.run([sys.executable, ROOT / "tests/counting.py", "w.txt", "other.txt"],
                          capture_output=True, text=True, timeout=60)
    assert done.returncode == 0, done.stderr
    first, rest = done.stdout.split("other.txt\n")
    for table, words in (first.removeprefix("w.txt\n"), NAMES * 2), (rest, ["żółw", "łza", "żal"]):
        header, *rows = [line.split() for line in table.splitlines()]
        assert header == ["order", "train", "dev", "test"]
        assert [row[0] for row in rows] == ["1", "2", "3", "4", "5", "6"]
        parts = train.split(words)
        for order, *losses in rows:
            expected = [brute_force(parts[0], part, len(set("".join(words))) + 1, int(order))
                        for part in parts]
            assert [float(loss) for loss in losses] == pytest.approx(expected, abs=6e-5)
    failed = subprocess.run([sys.executable, ROOT / "tests/counting.py", "no.txt"],
                            capture_output=True, text=True, timeout=60)
    assert failed.returncode == 2 and "no.txt" in failed.stderr.splitlines()[-1]
    assert "Traceback" not in failed.stderr


# ---- What a loss means

@both_models
def test_a_run_says_once_what_guessing_evenly_and_counting_pairs_cost(learn, run, kind):
    write_words([*NAMES, "żółw"])
    known, dev, _ = split_of([*NAMES, "żółw"])
    size = len(set("".join([*NAMES, "żółw"]))) + 1
    expected = (f"dev loss of guessing evenly: {math.log(size):.3f}, of counting pairs of "
                f"characters: {brute_force(known, dev, size, 2):.3f}")
    results = learn(kind, "--steps", 3, "--eval-every", 1), run(train, "--resume", "--model", kind)
    for result in results:
        lines = result.err.splitlines()
        assert result.status == 0 and lines.count(expected) == 1
        assert not any(line.startswith("step ") for line in lines[:lines.index(expected)])


FIRST, COUNTING = "the first evaluation was the best", "counting pairs of characters is better"


def warnings_of(err):
    return [line for line in err.splitlines() if line.startswith("warning: ")]


@pytest.fixture
def measured(monkeypatch):
    """measured(losses) makes these the dev losses of a run, one after the other."""
    def measured(losses):
        train_and_dev = [loss for dev in losses for loss in (1., dev)]
        monkeypatch.setattr(train, "evaluate", lambda *args: (
            train_and_dev.pop(0) if train_and_dev else 2.))
    return measured


@both_models
@pytest.mark.parametrize("losses, warning", [
    ([2., 2.5, 3.], FIRST), ([2., 2.], FIRST), ([8., 9.], FIRST), ([3., 2., 2.5], None),
    ([3., 2.9, 2.8], None), ([9., 8., 8.5], COUNTING), ([5., 3., 4.], None), ([2.], None),
    ([9.], COUNTING)])
def test_one_sentence_says_what_a_bad_loss_means_and_what_to_type(
        learn, measured, kind, losses, warning):
    """Counting pairs costs 3.369 here."""
    measured(losses)
    result = learn(kind, "--steps", len(losses), "--eval-every", 1)
    assert result.status == 0 and "of counting pairs of characters: 3.369" in result.err
    assert len(warnings_of(result.err)) == bool(warning)
    if warning:
        line, = warnings_of(result.err)
        assert warning in line and "--steps" in line and ("--from" in line) == (warning == FIRST)
        assert line == result.err.splitlines()[-1]


def test_what_was_measured_before_a_stop_counts_too(learn, run, measured, signal_after):
    measured([2., 3.])
    signal_after(2)
    assert learn("mlp", "--steps", 4, "--eval-every", 1).status == 130
    measured([2.5, 2.4])
    assert FIRST in warnings_of(run(train, "--resume").err)[0]


@both_models
def test_a_list_that_is_learnt_by_heart_at_once_is_said(run, kind):
    write_words((ROOT / "data/names.txt").read_text().split()[:60])
    flags = "--model", kind, "--data", "w.txt", "--lr", 0.01, "--weight-decay", 0, "--steps", 200
    for every, expected in (100, FIRST), (0, COUNTING):
        warning, = warnings_of(run(train, *flags, "--eval-every", every).err)
        assert expected in warning


# ---- What a run invents on its way

@both_models
def test_invented_words_end_by_themselves_and_are_drawn_again_up_to_ten_times(
        trained, monkeypatch, kind):
    best, asked, real = best_of(f"out/{kind}.npz"), [], model.generate
    best.config["longest"] = 2
    monkeypatch.setattr(model, "generate", lambda best, n, rng: asked.append(n) or
                        real(best, n, rng))
    found = []
    for step in range(20, 30):
        rng, expected, draws = np.random.default_rng((train.INVENT, 1, step)), [], 0
        while len(expected) < 4 and draws < 10:
            expected += real(best, 4, rng)
            draws += 1
        found.append(len(expected))
        assert train.invent(best, step, 4) == expected[:4]
        assert asked == [4] * draws and draws > 1 and max(map(len, expected)) <= 2
        asked.clear()
    assert max(found) > 4               # once there were more than needed
    monkeypatch.setattr(model, "generate", lambda best, n, rng: asked.append(n) or [])
    assert train.invent(best, 20, 3) == [] and asked == [3] * 10


@both_models
def test_a_model_that_ends_no_word_is_trained_and_reported_all_the_same(learn, monkeypatch, kind):
    monkeypatch.setattr(model, "generate", lambda *args: [])
    result = learn(kind, "--steps", 3, "--eval-every", 1)
    assert result.status == 0 and len(losses_of(result.out)) == 3
    assert result.err.count("\nstep ") == 3


# ---- When it is measured

@pytest.mark.parametrize("steps, expected", [
    (1, {1}), (2, {1, 2}), (3, {1, 2, 3}), (10, {1, *range(1, 11)}),
    (100, {1, 2, 5, *range(10, 101, 10)}), (4000, {40, 80, 200, *range(400, 4001, 400)}),
    (110000, {1100, 2200, 5500, *range(11000, 110001, 11000)})])
def test_evaluations_come_early_at_first(steps, expected):
    assert train.evaluation_steps(dict(steps=steps, eval_every=None)) == expected


@pytest.mark.parametrize("steps, every, expected", [
    (10, 0, {10}), (10, 4, {4, 8, 10}), (10, 5, {5, 10}), (10, 10, {10}), (10, 11, {10}),
    (3, 1, {1, 2, 3})])
def test_a_distance_that_is_given_is_kept(steps, every, expected):
    assert train.evaluation_steps(dict(steps=steps, eval_every=every)) == expected


@pytest.mark.parametrize("steps", [*range(1, 60), 999, 12345])
def test_there_are_at_most_thirteen_evaluations_and_one_at_the_end(steps):
    found = train.evaluation_steps(dict(steps=steps, eval_every=None))
    assert max(found) == steps and min(found) >= 1 and len(found) <= 13


# ---- A run that begins with another one's parameters

def sizes_of(best):
    return {name: value for name, value in best.config.items()
            if name in train.MODEL_DEFAULTS[best.config["model"]]}


def assert_same(p, expected):
    assert p.keys() == expected.keys()
    for name, w in expected.items():
        np.testing.assert_array_equal(p[name], w, name)


@both_models
def test_from_begins_with_the_best_parameters_the_sizes_and_the_vocabulary(trained, run, kind):
    """With a learning rate of 0 they stay as they are, and their loss is the one that was best."""
    stored = train.load(f"out/{kind}.npz")
    best, dev = stored.best, min(row[2] for row in stored.history)
    for w in stored.p.values():         # the latest parameters are there, and not what counts
        w[:] = 0
    train.save("other.npz", stored)
    result = run(train, "--from", "other.npz", "--data", "w.txt", "--steps", 1, "--lr", 0)
    assert result.status == 0 and f"saved in out/{kind}.npz" in result.out
    begun = train.load(f"out/{kind}.npz")
    assert_same(begun.p, best.p)
    assert sizes_of(begun.best) == sizes_of(best) and begun.vocabulary == best.vocabulary
    assert losses_of(result.out)[1] == pytest.approx(dev, abs=6e-5)
    assert begun.history[0][2] == pytest.approx(dev, abs=1e-6)


@both_models
def test_from_trains_on_another_list_of_characters_that_are_known(trained, run, kind):
    """With its own steps, rate and seed; from the first step on it is better than a new run."""
    best = best_of(f"out/{kind}.npz")
    write_words([*reversed(NAMES[1:]), "nola", "lola", "max"], "v.txt")
    flags = ["--data", "v.txt", "--steps", 20, "--eval-every", 1, "--lr", 0.003, "--seed", 5]
    result = run(train, *flags, "--from", f"out/{kind}.npz", "--out", "x.npz")
    begun = train.load("x.npz")
    assert result.status == 0 and "v.txt: 26 words" in result.err
    assert begun.vocabulary == best.vocabulary and sizes_of(begun.best) == sizes_of(best)
    given = {name: begun.config[name] for name in ("steps", "lr", "seed", "eval_every", "longest")}
    assert given == dict(steps=20, lr=0.003, seed=5, eval_every=1, longest=4)
    assert begun.config["data"] == str(trained / "v.txt")
    assert any((w != best.p[name]).any() for name, w in begun.p.items())
    assert begun.history[-1][1] < begun.history[0][1]
    new = run(train, *SIZES[kind], *flags, "--out", "y.npz")
    assert new.status == 0 and begun.history[0][2] < train.load("y.npz").history[0][2] - 0.1


@both_models
def test_from_keeps_characters_that_the_new_list_lacks(trained, run, kind):
    write_words(["nana", "anno", "lola", "nola", "noa"] * 4, "v.txt")
    flags = "--data", "v.txt", "--steps", 20, "--out", "x.npz"
    result = run(train, "--from", f"out/{kind}.npz", *flags)
    size = len(best_of(f"out/{kind}.npz").vocabulary)
    assert result.status == 0 and f"of guessing evenly: {math.log(size):.3f}," in result.err
    assert best_of("x.npz").vocabulary == best_of(f"out/{kind}.npz").vocabulary
    result = run(sample, "x.npz", "--prefix", "z", "--seed", 0, "-n", 3)
    assert result.status == 0 and all(name[0] == "z" for name in result.out.split())


@both_models
def test_from_names_the_characters_that_are_unknown_and_no_others(trained, refused, kind):
    write_words(["Zoë", "bob", "ë-ë", "leo"], "v.txt")
    text = refused(train, "--from", f"out/{kind}.npz", "--data", "v.txt", "--steps", 3)
    assert "--from" in text and text.endswith("does not know: '-Zë'")


def test_from_leaves_out_words_that_the_gpt_cannot_read(trained, run):
    write_words([*NAMES, "annabella"], "v.txt")
    flags = "--data", "v.txt", "--steps", 2, "--out", "x.npz"
    result = run(train, "--from", "out/gpt.npz", *flags)
    assert result.status == 0 and "skipped 1 words of more than 4 characters" in result.err
    assert train.load("x.npz").config["longest"] == 4
    assert "skipped" not in run(train, "--from", "out/mlp.npz", *flags).err


@pytest.mark.parametrize("kind, flags", [
    ("mlp", ["--model", "gpt"]), ("mlp", ["--embd", "5"]), ("mlp", ["--hidden", "9"]),
    ("mlp", ["--context", "4"]), ("mlp", ["--act", "relu"]), ("mlp", ["--no-batchnorm"]),
    ("mlp", ["--init", "naive"]), ("mlp", ["--heads", "2"]), ("gpt", ["--model", "mlp"]),
    ("gpt", ["--embd", "16"]), ("gpt", ["--layers", "2"]), ("gpt", ["--heads", "4"]),
    ("gpt", ["--context", "9"]), ("gpt", ["--norm", "layernorm"]), ("gpt", ["--hidden", "9"])])
def test_from_refuses_flags_that_contradict_the_checkpoint(
        trained, refused, steps_taken, kind, flags):
    text = refused(train, "--data", "w.txt", "--steps", 2, *flags, "--from", f"out/{kind}.npz")
    assert flags[0].replace("no-", "") in text
    assert re.search("leave out --|leave it out", text)
    assert steps_taken == []


@both_models
def test_from_takes_flags_that_agree_with_the_checkpoint_and_all_of_training(learn, trained, kind):
    chosen = dict(lr=0.001, batch=4, optimizer="sgd", weight_decay=0.3, seed=7, eval_every=2,
                  max_len=3, steps=4, **(dict(dropout=0.1, processes=1) if kind == "gpt" else {}))
    flags = [part for name, value in chosen.items()
             for part in ("--" + name.replace("_", "-"), value)]
    result = learn(kind, *flags, "--from", f"out/{kind}.npz", "--out", "x.npz")
    assert result.status == 0                              # learn() gives the sizes, too
    config = train.load("x.npz").config
    assert {name: config[name] for name in chosen} == chosen


@both_models
def test_from_leaves_its_file_as_it_is_and_moves_it_aside_if_it_is_in_the_way(
        trained, run, kind):
    before = Path(f"out/{kind}.npz").read_bytes()
    Path("w.txt").rename("v.txt")                          # its own data may be gone
    flags = "--data", "v.txt", "--steps", 2
    assert run(train, "--from", f"out/{kind}.npz", *flags, "--out", "x.npz").status == 0
    assert Path(f"out/{kind}.npz").read_bytes() == before
    result = run(train, "--from", f"out/{kind}.npz", *flags)
    assert result.status == 0 and f"moved the old out/{kind}.npz to out/{kind}.1.npz" in result.err
    assert Path(f"out/{kind}.1.npz").read_bytes() == before


@both_models
def test_a_run_from_a_checkpoint_is_resumed_bit_for_bit(trained, learn, run, signal_after, kind):
    flags = ["--from", f"out/{kind}.npz", "--steps", 7, "--eval-every", 3, "--seed", 2]
    whole = learn(kind, *flags, "--out", "x.npz")
    expected = Path("x.npz").read_bytes()
    Path("x.npz").unlink()
    signal_after(4)
    assert learn(kind, *flags, "--out", "x.npz").status == 130
    resumed = run(train, "--resume", "--out", "x.npz")
    assert without_times(resumed.out) == without_times(whole.out)
    assert Path("x.npz").read_bytes() == expected


@both_models
def test_stopped_before_any_evaluation_it_is_still_the_model_it_began_with(
        trained, learn, run, signal_after, kind):
    """Its statistics included: at the first step the learning rate is small."""
    signal_after(1)
    learn(kind, "--from", f"out/{kind}.npz", "--steps", 50, "--eval-every", 0, "--out", "x.npz")
    best, begun = best_of(f"out/{kind}.npz"), best_of("x.npz")
    assert_same(begun.p, best.p)
    assert_same(begun.statistics, best.statistics)
    words = model.generate(best, 20, np.random.default_rng(1))
    assert model.generate(begun, 20, np.random.default_rng(1)) == words


@both_models
def test_from_and_check_prove_the_model_that_is_trained(trained, run, kind):
    result = run(train, "--from", f"out/{kind}.npz", "--data", "w.txt", "--steps", 2, "--check")
    assert result.status == 0 and len(re.findall(r"d\w+ .* ok\n", result.out)) > 6


def test_from_and_resume_exclude_each_other(trained, refused):
    text = refused(train, "--from", "out/mlp.npz", "--resume", "--steps", 90)
    assert "--from" in text and "--resume" in text


def test_from_a_file_that_is_no_checkpoint_is_refused(trained, refused):
    for path in "no.npz", "w.txt", "":
        text = refused(train, "--from", path, "--data", "w.txt", "--steps", 2)
        assert f"cannot use {path} as a checkpoint" in text


def test_the_config_stays_what_json_can_hold(trained, run):
    """What is taken from another checkpoint is saved and loaded once more."""
    flags = "--data", "w.txt", "--steps", 2
    assert run(train, "--from", "out/mlp.npz", *flags, "--out", "x.npz").status == 0
    assert run(train, "--from", "x.npz", *flags, "--out", "y.npz").status == 0
    one, other = train.load("x.npz").config, train.load("y.npz").config
    assert one == other == json.loads(json.dumps(one))
