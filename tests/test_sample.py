import contextlib
import json
import math
import os
import shlex
import subprocess
import sys
import unicodedata
from collections import Counter
from pathlib import Path

import numpy as np
import pytest

import model
import sample
import train
from conftest import (
    NAMES, ROOT, arrays_of, best_of, both_models, finish, process, write_words)

ALPHABET = sorted(set("".join(NAMES)))


@pytest.fixture
def names(trained, run):
    """names('mlp', ...) are the lines that sample.py prints, with --seed 0 or what is given."""
    def names(kind, *argv):
        result = run(sample, f"out/{kind}.npz", "--seed", 0, *argv)
        assert result.status == 0
        assert result.out == "" or result.out.endswith("\n")
        return result.out.split("\n")[:-1]
    return names


@pytest.fixture
def asked(monkeypatch):
    """For how many names generate() was asked, call by call."""
    asked, real = [], model.generate
    monkeypatch.setattr(model, "generate", lambda best, n, *rest, **named: asked.append(n) or
                        real(best, n, *rest, **named))
    return asked


def logprobs_of(best, text):
    """Log-probabilities of all characters, the boundary first, after each beginning of a text."""
    z = model.predict(best, model.batch_of(best, [text]))[1]["logits"].astype(float)
    return z - np.log(np.exp(z).sum(1, keepdims=True))


def beginning(best, text):
    """Log-probability that a name begins so: that of the word, without that of its end."""
    logprobs = logprobs_of(best, text)
    return sum(logprobs[i, best.vocabulary.index(text[i])] for i in range(len(text)))


# ---- Which checkpoint

def test_the_newest_checkpoint_is_taken_and_named(trained, run):
    os.utime("out/gpt.npz", (1000, 1000))
    os.utime("out/mlp.npz", (2000, 2000))
    assert run(sample, "-n", 1).err.startswith("out/mlp.npz: mlp, step ")
    os.utime("out/gpt.npz", (3000, 3000))
    assert run(sample, "-n", 1).err.startswith("out/gpt.npz: gpt, step ")
    assert run(sample, "out/mlp.npz", "-n", 1).err.startswith("out/mlp.npz: mlp, step ")


def test_no_checkpoint_is_a_sentence(refused):
    assert "train.py" in refused(sample)
    Path("out").mkdir()
    Path("out/notes.txt").write_text("")
    assert "train.py" in refused(sample)


@pytest.mark.parametrize("path, reason", [
    ("no.npz", "No such file"), ("folder", "Is a directory"), ("w.txt/x.npz", "Not a directory")])
def test_a_checkpoint_that_cannot_be_read_is_named(refused, path, reason):
    Path("folder").mkdir()
    write_words(NAMES)
    text = refused(sample, path)
    assert path in text and reason in text


@both_models
def test_sampling_uses_the_best_and_says_its_step_and_loss(trained, run, kind):
    stored = train.load(f"out/{kind}.npz")
    step, loss = min(((step, loss) for step, _, loss in stored.history), key=lambda row: row[1])
    for name in stored.p:               # the latest parameters are there, and not what counts
        stored.p[name] = np.zeros_like(stored.p[name])
    train.save(f"out/{kind}.npz", stored)
    result = run(sample, f"out/{kind}.npz", "-n", 30, "--seed", 0)
    assert f"step {step:.0f}, dev loss {loss:.4f}" in result.err
    expected = model.generate(best_of(f"out/{kind}.npz"), 500, np.random.default_rng(0))[:30]
    assert result.out.split() == expected


# ---- Names

@both_models
def test_output_is_one_name_a_line_and_nothing_else(names, kind):
    lines = names(kind, "-n", 200)
    assert len(lines) == 200 and all(lines)
    assert set("".join(lines)) <= set(ALPHABET)
    assert len(names(kind)) == 20 and names(kind, "-n", 0) == []


@both_models
def test_names_come_as_often_as_their_probabilities_say(trained, kind):
    """40,000 draws, against the exact probabilities of all names of up to two characters."""
    best = best_of(f"out/{kind}.npz")
    drawn = model.generate(best, 40000, np.random.default_rng(5), max_len=2)
    short = [*ALPHABET, *(one + other for one in ALPHABET for other in ALPHABET)]
    empty = np.exp(logprobs_of(best, "a")[0, 0])
    expected = 4e4 * np.exp([model.score(best, name) for name in short]) / (1 - empty)
    counts = Counter(drawn)
    counted = np.array([counts[name] for name in short])
    assert counted.sum() == len(drawn)
    assert abs(len(drawn) - expected.sum()) < 4.5 * np.sqrt(expected.sum())
    often = expected > 10
    assert often.sum() > 60
    assert (abs(counted - expected)[often] < 4.5 * np.sqrt(expected[often])).all()


@both_models
@pytest.mark.parametrize("flag", [["--temperature", "0"], ["--temperature", "1e-40"],
                                  ["--temperature", "1e-9"], ["--top-k", "1"], ["--top-p", "1e-9"]])
def test_greedy_is_the_same_for_every_seed(names, kind, flag):
    greedy = [name for seed in range(4) for name in names(kind, "-n", 5, "--seed", seed, *flag)]
    assert set(greedy) == set(names(kind, "-n", 1, "--temperature", "0"))
    assert len(greedy) == 20


@both_models
def test_greedy_takes_the_likeliest_character_every_time(names, kind):
    name, = names(kind, "-n", 1, "--temperature", 0)
    best = best_of(f"out/{kind}.npz")
    for i, character in enumerate(name):
        assert character == max(ALPHABET, key=lambda other: beginning(best, name[:i] + other))


@both_models
@pytest.mark.parametrize("off", [
    ["--top-k", "0"], ["--top-k", str(len(ALPHABET) + 1)], ["--top-k", "1000000"],
    ["--top-p", "0"], ["--top-p", "1"], ["--temperature", "1"],
    ["--prefix", ""], ["--prefix="]])
def test_values_that_mean_off_change_nothing(names, kind, off):
    assert names(kind, *off) == names(kind)


@both_models
def test_top_k_takes_only_the_likeliest(names, kind):
    first = {name[0] for name in names(kind, "-n", 500, "--top-k", 3)}
    best = best_of(f"out/{kind}.npz")
    ranked = sorted(ALPHABET, key=lambda character: -beginning(best, character))
    assert first == set(ranked[:3])


@both_models
def test_top_p_takes_the_fewest_that_have_the_probability(names, kind):
    best = best_of(f"out/{kind}.npz")
    p = {character: math.exp(beginning(best, character)) for character in ALPHABET}
    total = sum(p.values())             # without the boundary, which cannot come first
    ranked = sorted(ALPHABET, key=lambda character: -p[character])
    fewest = next(k for k in range(1, 99) if sum(p[c] for c in ranked[:k]) >= 0.5 * total)
    first = {name[0] for name in names(kind, "-n", 500, "--top-p", 0.5)}
    assert first == set(ranked[:fewest])


@both_models
def test_a_higher_temperature_is_wilder(names, kind):
    rows = [[json.loads(line) for line in names(kind, "-n", 300, "--temperature", value, "--json")]
            for value in (0.3, 1, 3, 1e6)]
    mean = [sum(row["logprob"] for row in some) / sum(len(row["name"]) + 1 for row in some)
            for some in rows]
    assert mean == sorted(mean, reverse=True)
    distinct = [len({row["name"] for row in some}) for some in rows]
    assert distinct[0] < distinct[1] and all(len(some) == 300 for some in rows)


@pytest.mark.parametrize("flags, named", [
    (["--temperature", "-1"], "--temperature"), (["--temperature", "nan"], "--temperature"),
    (["--temperature", "inf"], "--temperature"), (["--temperature=-inf"], "--temperature"),
    (["--temperature", "hot"], "--temperature"), (["--temperature", ""], "--temperature"),
    (["--top-k", "-1"], "--top-k"), (["--top-k", "1.5"], "--top-k"),
    (["--top-k", "all"], "--top-k"), (["--top-p", "-0.1"], "--top-p"),
    (["--top-p", "nan"], "--top-p"), (["--top-p", "inf"], "--top-p"),
    (["--top-p", "some"], "--top-p"), (["--top-p", "1.1"], "--top-p"), (["-n", "-1"], "-n"),
    (["-n", "few"], "-n"),
    (["--seed", "-1"], "--seed"), (["--max-len", "0"], "--max-len"),
    (["--max-len", "x"], "--max-len"), (["--frobnicate"], "--frobnicate"), (["--score"], "--score"),
    (["out/mlp.npz", "b.npz"], "b.npz")])
def test_bad_flags_are_named(trained, refused, flags, named):
    assert named in refused(sample, *flags)


# ---- Seeds

@both_models
def test_the_same_seed_gives_the_same_names_and_another_others(names, kind):
    assert names(kind, "--seed", 3) == names(kind, "--seed", 3) != names(kind, "--seed", 4)


def told(err):
    """The command that gives the same names again, as arguments."""
    line, = [line for line in err.splitlines() if line.startswith("these names again: ")]
    return shlex.split(line.removeprefix("these names again: "))


@pytest.mark.parametrize("flags", [
    [], ["out/mlp.npz"], ["out/gpt.npz", "-n", "7"], ["-n", "30", "my runs/it's.npz"],
    ["--unique", "--new", "--max-len", "3"], ["--temperature=2", "--top-k=9", "--top-p", "0.9"],
    ["--prefix", "an"], ["--prefix=", "--json"], ["--data", "moved words.txt", "--new"],
    ["-n", "3", "--", "-my.npz"], ["--"]])
def test_without_a_seed_names_are_others_each_time_and_a_command_gives_them_again(
        trained, run, monkeypatch, flags):
    """Also when another checkpoint has become the newest."""
    monkeypatch.setattr(sys, "argv", ["sample.py"])
    Path("my runs").mkdir()
    for path in "my runs/it's.npz", "-my.npz":
        Path(path).write_bytes(Path("out/mlp.npz").read_bytes())
    if "--data" in flags:
        os.rename("w.txt", "moved words.txt")
    os.utime("out/mlp.npz", (2000, 2000))
    os.utime("out/gpt.npz", (3000, 3000))
    results = [run(sample, *flags) for _ in range(2)]
    assert results[0].out != results[1].out
    os.utime("out/mlp.npz", (4000, 4000))
    for result in results:
        assert result.status == 0 and result.out and result.err.count("\n") == 2
        python, program, *argv = told(result.err)
        assert (python, program) == ("python", "sample.py")
        again = run(sample, *argv)
        assert (again.status, again.out) == (0, result.out)
        assert again.err == result.err.splitlines(keepends=True)[0]     # now it has a seed


def test_the_command_that_gives_the_names_again_can_be_pasted_into_a_shell(trained):
    """A file `python` stands for what a user has there."""
    Path("bin").mkdir()
    Path("bin/python").write_text(f'#!/bin/sh\nexec {shlex.quote(sys.executable)} "$@"\n')
    os.chmod("bin/python", 0o755)
    os.rename("out/gpt.npz", "out/it's $HOME.npz")
    write_words(["$a b'", "'"])
    status, out, err = finish(process("sample", "out/it's $HOME.npz", "--prefix", "a", "-n", "9"))
    assert status == 0 and out.count(b"\n") == 9
    line = err.decode().splitlines()[-1].removeprefix("these names again: ")
    again = subprocess.run(line, shell=True, capture_output=True, timeout=60, env={
        **os.environ, "PATH": f"bin:{os.environ['PATH']}"})
    assert (again.returncode, again.stdout) == (0, out)


def test_a_seed_that_is_given_is_not_said_and_names_alone_have_one(names, run):
    assert run(sample, "out/mlp.npz", "--seed", 5).err.count("\n") == 1
    assert run(sample, "out/mlp.npz", "--score", "anna").err.count("\n") == 1


# ---- Prefixes and lengths

@both_models
@pytest.mark.parametrize("prefix", ["a", "an", "mia"])
def test_a_prefix_begins_every_name(names, kind, prefix):
    lines = names(kind, "-n", 50, "--prefix", prefix)
    assert len(lines) == 50 and all(line.startswith(prefix) for line in lines)
    assert len(set(lines)) > 5


def test_a_prefix_may_be_longer_than_the_context_of_the_mlp(names):
    lines = names("mlp", "-n", 30, "--prefix", "annabellaleo")
    assert all(line.startswith("annabellaleo") for line in lines) and len(set(lines)) > 5


@both_models
def test_a_prefix_may_be_the_whole_name(names, kind):
    lines = names(kind, "-n", 20, "--prefix", "noel", "--max-len", 4)
    assert lines == ["noel"] * 20


def test_a_prefix_that_leaves_the_gpt_no_room_is_refused(trained, refused):
    context = best_of("out/gpt.npz").config["context"]
    text = refused(sample, "out/gpt.npz", "--prefix", "a" * context)
    assert "--prefix" in text and str(context - 1) in text


@pytest.mark.parametrize("flags, prefix", [
    (["--prefix", "a=b"], "a=b"), (["--prefix==b"], "=b"), (["--prefix=-a"], "-a"),
    (["--prefix=--b"], "--b"), (["--prefix", "b -"], "b -"), (["--prefix", " "], " "),
    (["--prefix", "a "], "a ")])
@both_models
def test_a_prefix_may_hold_signs_and_spaces(learn, run, kind, flags, prefix):
    write_words(["a=b", "-a b", "b - a", "=b=", "--b"] * 4)
    learn(kind, "--steps", 5)
    result = run(sample, f"out/{kind}.npz", "-n", 5, *flags)
    assert result.status == 0
    lines = result.out.split("\n")[:-1]
    assert len(lines) == 5 and all(line.startswith(prefix) for line in lines)


@both_models
@pytest.mark.parametrize("text, unknown", [
    ("Anna", "A"), ("an n", " "), ("żółw", "ż"), ("a\n", "\\n"), ("🙂", "🙂"), ("a\0b", "\\x00")])
def test_characters_outside_the_vocabulary_are_named(trained, refused, run, kind, text, unknown):
    said = refused(sample, f"out/{kind}.npz", "--prefix", text)
    assert "--prefix" in said and f"'{unknown}'" in said
    result = run(sample, f"out/{kind}.npz", "--score", text)
    assert result.status == 1 and result.out.startswith(f"{text}\tno score: ")
    assert f"'{unknown}'" in result.out


def test_prefixes_and_scored_words_are_normalised(learn, run):
    write_words(["Zoë", "Noël", "Chloé"] * 4)
    learn("mlp", "--steps", 5)
    apart = unicodedata.normalize("NFD", "Zoë")
    assert apart != "Zoë"
    for flag in "--prefix", "--score":
        composed, decomposed = (run(sample, "--seed", 0, flag, text) for text in ("Zoë", apart))
        assert composed.status == 0 and composed.out == decomposed.out != ""


@both_models
@pytest.mark.parametrize("limit", [1, 2, 3])
def test_names_of_at_most_max_len_are_those_that_end_by_themselves(names, kind, limit):
    """So they are the names without a limit, in the same shares, but for the longer ones."""
    lines = names(kind, "-n", 100, "--max-len", limit)
    assert len(lines) == 100 and {len(name) for name in lines} == set(range(1, limit + 1))
    lines = names(kind, "-n", 100, "--max-len", limit, "--prefix", "a")
    assert all(name[0] == "a" and len(name) <= limit for name in lines) and len(lines) == 100
    best = best_of(f"out/{kind}.npz")
    longer, limited = (model.generate(best, 3000, np.random.default_rng(1), max_len=length)
                       for length in (best.config["longest"], limit))
    short = [name for name in longer if len(name) <= limit]
    assert 30 < len(limited) < 3000 and abs(len(short) - len(limited)) < 4.5 * len(limited)**0.5


@both_models
def test_names_end_at_the_boundary_however_large_max_len_is(names, kind):
    assert names(kind, "-n", 30, "--max-len", 200) != []
    assert max(map(len, names(kind, "-n", 100, "--max-len", 200))) < 200


@pytest.mark.parametrize("flags", [[], ["--max-len", 9], ["--prefix", "a"], ["--unique"]])
def test_names_that_never_end_are_not_printed_and_that_is_said(trained, run, asked, flags):
    """A last layer that gives the boundary no chance."""
    stored = train.load("out/mlp.npz")
    stored.best.p["b2"][0] = -1e4
    train.save("x.npz", stored)
    result = run(sample, "x.npz", "-n", 3, "--seed", 0, *flags)
    assert (result.status, result.out, sum(asked)) == (0, "", 10000)
    assert result.err.splitlines()[1:] == ["found 0 of 3, and nothing more in 10000 tries"]


@pytest.mark.parametrize("kind, context, prefix, limit", [
    ("mlp", 3, "", 4), ("mlp", 3, "mia", 7), ("mlp", 3, "annabell", 12), ("gpt", 12, "", 4),
    ("gpt", 12, "mia", 7), ("gpt", 12, "annabell", 11), ("gpt", 5, "mia", 4)])
def test_without_max_len_a_name_has_the_prefix_and_as_much_as_the_longest_word(
        learn, kind, context, prefix, limit):
    """The context of the GPT is a limit, too."""
    learn(kind, "--steps", 5, "--context", context)
    drawn = model.generate(best_of(f"out/{kind}.npz"), 3000, np.random.default_rng(1),
                           prefix=prefix)
    assert max(map(len, drawn)) == limit and all(name.startswith(prefix) for name in drawn)


@both_models
def test_generate_returns_fewer_names_or_none_and_raises_for_a_prefix_it_cannot_have(
        trained, kind):
    best, rng = best_of(f"out/{kind}.npz"), np.random.default_rng(1)
    assert 0 < len(model.generate(best, 100, rng, max_len=3)) < 100
    assert model.generate(best, 20, rng, top_k=1, max_len=1) == []
    assert set(model.generate(best, 500, rng, prefix="noel", max_len=4)) == {"noel"}
    with pytest.raises(ValueError, match="3 characters.* 4"):
        model.generate(best, 1, rng, prefix="noel", max_len=3)
    with pytest.raises(KeyError, match="'O'"):
        model.generate(best, 1, rng, prefix="nO")


MARKED = ["än", "n\u0308e", "an\u0308", "nä", "en\u0308a", "ane", "nen", "ena"]


@both_models
def test_names_are_normalised_before_they_are_compared_and_printed(learn, run, kind):
    """The model knows "ä", and U+0308 after "n" (which is no character of its own), apart."""
    write_words(MARKED * 6)
    learn(kind, "--steps", 5)
    best = best_of(f"out/{kind}.npz")
    assert best.vocabulary == "\0aenä\u0308"
    flags = f"out/{kind}.npz", "-n", 400, "--seed", 0
    rows = [json.loads(line) for line in run(sample, *flags, "--json").out.splitlines()]
    lines = run(sample, *flags).out.splitlines()
    assert lines == [row["name"] for row in rows]
    assert all(name == unicodedata.normalize("NFC", name) for name in lines)
    assert any("ë" in name for name in lines)              # the model made it of two
    for row in rows:
        assert row["in_data"] is (row["name"] in MARKED)
        known = set(row["name"]) <= set(best.vocabulary)
        assert row["logprob"] == (model.score(best, row["name"]) if known else None)
    assert {row["logprob"] is None for row in rows} == {True, False}
    unique = run(sample, *flags[:1], "-n", 40, "--seed", 0, "--unique", "--new").out.splitlines()
    assert unique == [name for name in dict.fromkeys(lines) if name not in MARKED][:40]


def test_a_limit_below_the_prefix_is_refused(trained, refused):
    text = refused(sample, "out/mlp.npz", "--prefix", "anna", "--max-len", 3)
    assert "--max-len 3" in text and "anna" in text


# ---- Unique and new ones

@both_models
def test_unique_gives_no_name_twice(names, kind):
    lines = names(kind, "-n", 300, "--unique", "--max-len", 2)
    plain = names(kind, "-n", 300, "--max-len", 2)
    assert len(set(plain)) < 300 and len(set(plain)) < len(lines) == len(set(lines))


@both_models
def test_fewer_unique_names_than_wanted_is_a_sentence_and_no_error(trained, run, kind):
    result = run(sample, f"out/{kind}.npz", "--unique", "-n", 9, "--temperature", 0, "--seed", 0)
    assert result.status == 0 and result.out.count("\n") == 1
    first, last = result.err.splitlines()
    assert first.startswith("out/")
    assert last == "found 1 of 9, and nothing more in 10000 tries"


@both_models
def test_tries_are_bounded_since_the_last_name(trained, run, asked, kind):
    """The same 500 at a time once more: after the last new name there are 10,000 tries."""
    result = run(sample, f"out/{kind}.npz", "--unique", "-n", 10**9, "--max-len", 1, "--seed", 0)
    blocks, found = asked.copy(), []
    best, rng = best_of(f"out/{kind}.npz"), np.random.default_rng(0)
    for block in range(len(blocks)):
        for name in model.generate(best, 500, rng, max_len=1):
            if name not in found:
                found.append(name)
                last = block
    assert blocks == [500] * (last + 1 + 20) and last > 2
    assert result.out.split() == found and set(found) <= set(ALPHABET)
    assert result.err.splitlines()[-1] == (
        f"found {len(found)} of 1000000000, and nothing more in 10000 tries")
    assert result.status == 0


@both_models
@pytest.mark.parametrize("flags", [
    [], ["--unique"], ["--new", "--temperature", "0.5"], ["--max-len", "3"], ["--prefix", "an"],
    ["--json"]])
def test_more_names_of_a_seed_begin_with_the_fewer(names, kind, flags):
    lines = names(kind, "-n", 700, *flags)
    assert len(lines) == 700
    for n in 0, 1, 20, 500, 501:
        assert names(kind, "-n", n, *flags) == lines[:n]


@both_models
def test_unique_and_new_only_leave_names_out(names, kind):
    lines = names(kind, "-n", 600)
    assert names(kind, "-n", 30, "--unique") == list(dict.fromkeys(lines))[:30]
    new = [name for name in lines if name not in NAMES]
    assert 40 < len(new) < 600
    assert names(kind, "-n", 40, "--new") == new[:40]
    assert names(kind, "-n", 40, "--new", "--unique") == list(dict.fromkeys(new))[:40]


@both_models
def test_new_gives_no_name_of_the_data(names, kind):
    plain = names(kind, "-n", 500, "--max-len", 4, "--temperature", 0.7)
    assert set(plain) & set(NAMES)
    lines = names(kind, "-n", 300, "--max-len", 4, "--temperature", 0.7, "--new")
    assert len(lines) == 300 and not set(lines) & set(NAMES)
    assert len(set(lines)) < 300
    lines = names(kind, "-n", 100, "--max-len", 4, "--temperature", 0.7, "--new", "--unique")
    assert len(lines) == len(set(lines)) == 100 and not set(lines) & set(NAMES)


def test_nothing_new_to_find_is_a_sentence_and_no_error(learn, run):
    write_words(["a", "b", "c"] * 4)
    learn("mlp", "--steps", 5)
    result = run(sample, "--new", "-n", 3, "--max-len", 1)
    assert (result.status, result.out) == (0, "")
    assert "found 0 of 3, " in result.err.splitlines()[-1]


@pytest.mark.parametrize("change", ["gone", "other words", "one byte more", "not readable as text"])
def test_without_the_data_file_new_is_refused_and_the_rest_works(trained, run, refused, change):
    expected = run(sample, "out/mlp.npz", "--seed", 0).out
    data = Path("w.txt")
    if change == "gone":
        data.unlink()
    else:
        data.write_bytes({"other words": b"eva\n", "one byte more": data.read_bytes() + b"\n",
                          "not readable as text": b"\xff\0"}[change])
    text = refused(sample, "out/mlp.npz", "--new")
    assert "--new" in text and "--data" in text
    assert run(sample, "out/mlp.npz", "--seed", 0).out == expected
    lines = run(sample, "out/mlp.npz", "--json").out.splitlines()
    assert [json.loads(line)["in_data"] for line in lines] == [None] * 20


@both_models
def test_the_data_is_found_from_any_folder(learn, run, monkeypatch, kind):
    flags = "-n", 300, "--seed", 0, "--temperature", 0.5
    learn(kind, "--steps", 60, "--lr", 0.02, "--eval-every", 20)
    expected, here = run(sample, f"out/{kind}.npz", *flags, "--new"), os.getcwd()
    assert expected.status == 0
    Path("else/where").mkdir(parents=True)
    monkeypatch.chdir("else/where")
    assert run(sample, f"../../out/{kind}.npz", *flags, "--new").out == expected.out
    lines = run(sample, f"../../out/{kind}.npz", *flags, "--json").out.splitlines()
    assert {json.loads(line)["in_data"] for line in lines} == {True, False}
    config = json.loads(str(arrays_of(f"../../out/{kind}.npz")["config"]))
    assert config["data"] == os.path.join(here, "w.txt")


def test_data_says_where_the_list_has_moved(trained, run, refused):
    flags = "out/mlp.npz", "-n", 300, "--seed", 0, "--temperature", 0.5
    expected = run(sample, *flags, "--new")
    Path("else").mkdir()
    os.rename("w.txt", "else/v.txt")
    assert "--data" in refused(sample, *flags, "--new")
    result = run(sample, *flags, "--new", "--data", "else/v.txt")
    assert (result.status, result.out) == (0, expected.out)
    lines = run(sample, *flags, "--json", "--data", "else/v.txt").out.splitlines()
    assert {json.loads(line)["in_data"] for line in lines} == {True, False}


@pytest.mark.parametrize("flags", [["--new"], ["--json"], []])
def test_data_that_is_another_file_is_refused(trained, refused, flags):
    write_words([*NAMES, "one"], "other.txt")
    for path in "other.txt", "no.txt":
        assert f"--data {path}" in refused(sample, "out/mlp.npz", "--data", path, *flags)


# ---- Scores

@both_models
def test_scores_are_log_probabilities_with_the_boundary(names, kind):
    words = ["anna", "bob", "x", "noel"]
    lines = names(kind, "--score", *words)
    best = best_of(f"out/{kind}.npz")
    for line, word in zip(lines, words, strict=True):
        given, *numbers = line.split("\t")
        logprob = beginning(best, word) + logprobs_of(best, word)[-1, 0]
        per_char = logprob / (len(word) + 1)
        assert given == word
        assert [float(number) for number in numbers] == pytest.approx(
            [logprob, per_char, math.exp(-per_char)], abs=6e-5)


def test_the_score_of_the_mlp_is_what_numpy_says(names):
    """The whole model written out again."""
    best = best_of("out/mlp.npz")
    p = {name: array.astype(float) for name, array in best.p.items()}
    ids = [0, 0, 0, *[best.vocabulary.index(character) for character in "anna"], 0]
    logprob = 0
    for i in range(5):
        hidden = p["C"][ids[i:i + 3]].ravel() @ p["W1"] + p["b1"]
        hidden = (hidden - best.statistics["bnmean"]) / np.sqrt(
            best.statistics["bnvar"].astype(float) + 1e-5)
        z = np.tanh(p["bngain"] * hidden + p["bnbias"]) @ p["W2"] + p["b2"]
        logprob += z[ids[i + 3]] - np.log(np.exp(z).sum())
    line, = names("mlp", "--score", "anna")
    assert float(line.split("\t")[1]) == pytest.approx(logprob, abs=6e-5)


@both_models
def test_the_probabilities_of_all_names_add_to_one(learn, kind):
    """One character in the vocabulary: a name is its length, and each longer one is rarer."""
    write_words(["a", "aa", "aaa"] * 5)
    learn(kind, "--steps", 40, "--lr", 0.05, *(["--context", 40] if kind == "gpt" else []))
    best = best_of(f"out/{kind}.npz")
    count = 39 if kind == "gpt" else 400
    logprobs = [model.score(best, "a" * n) for n in range(1, count)]
    empty = 1 - math.exp(beginning(best, "a"))
    rest = math.exp(beginning(best, "a" * count))
    assert np.exp(logprobs).sum() + empty + rest == pytest.approx(1, abs=2e-5)


@both_models
def test_scores_as_json(names, kind):
    plain = [line.split("\t") for line in names(kind, "--score", "anna", "leo")]
    for line, (word, *numbers) in zip(names(kind, "--score", "anna", "leo", "--json"), plain,
                                      strict=True):
        scored = json.loads(line)
        assert list(scored) == ["word", "logprob", "per_char", "perplexity"]
        assert scored["word"] == word
        assert [f"{scored[key]:.4f}" for key in list(scored)[1:]] == numbers


@both_models
def test_a_score_does_not_depend_on_its_company(names, kind):
    together = names(kind, "--score", *NAMES[:40], "--json")
    assert together == [names(kind, "--score", name, "--json")[0] for name in NAMES[:40]]


@both_models
@pytest.mark.parametrize("flags", [[], ["--json"]])
def test_a_word_that_cannot_be_scored_gets_a_line_that_says_so_and_the_others_are_scored(
        trained, run, names, kind, flags):
    words = ["anna", "Bob", "", "leo", "a" * 5, "x y"]
    result = run(sample, f"out/{kind}.npz", *flags, "--score", *words)
    lines = result.out.split("\n")[:-1]
    assert result.status == 1 and len(lines) == 6 and result.err.count("\n") == 1
    scored = [lines[i] for i in (0, 3, 4) if kind == "mlp" or i != 4]
    assert scored == names(kind, *flags, "--score", "anna", "leo", *["a" * 5] * (kind == "mlp"))
    reasons = {1: "the model does not know 'B'", 2: "it is empty", 5: "the model does not know ' '"}
    if kind == "gpt":
        reasons[4] = "the GPT reads words of at most 4 characters"
    for i, why in reasons.items():
        if flags:
            assert json.loads(lines[i]) == dict(
                word=words[i], logprob=None, per_char=None, perplexity=None, error=why)
        else:
            assert lines[i] == f"{words[i]}\tno score: {why}"


def test_the_longest_word_for_the_gpt_is_scored_and_any_length_by_the_mlp(trained, run):
    context = best_of("out/gpt.npz").config["context"]
    assert run(sample, "out/gpt.npz", "--score", "a" * (context - 1)).status == 0
    assert run(sample, "out/mlp.npz", "--score", "ab" * 1000).status == 0


@contextlib.contextmanager
def standard_input(raw):
    """Within this context file descriptor 0 gives these bytes."""
    Path("stdin").write_bytes(raw)
    saved = os.dup(0)
    with open("stdin", "rb") as file:
        os.dup2(file.fileno(), 0)
    try:
        yield
    finally:
        os.dup2(saved, 0)
        os.close(saved)


@both_models
@pytest.mark.parametrize("flags", [[], ["--json"]])
def test_words_are_read_from_standard_input_and_scored_as_if_they_were_typed(
        trained, run, kind, flags):
    words = [*NAMES * 20, "Bob", "", "leo"]
    typed = run(sample, f"out/{kind}.npz", *flags, "--score", *words)
    with standard_input("\n".join(words).encode()):
        read = run(sample, f"out/{kind}.npz", *flags, "--score", "-")
        assert os.read(0, 1) == b""     # it was read to its end and is open
    assert (read.status, read.out, read.err) == (typed.status, typed.out, typed.err)
    assert read.out.count("\n") == len(words)


@pytest.mark.parametrize("raw, words", [
    (b"anna\r\nleo\rida\n", ["anna", "leo", "ida"]),
    (b"  anna\t\n leo ", ["anna", "leo"]),
    (b"anna\n\nleo\n", ["anna", "", "leo"]),
    ("Zoe\u0308\n".encode(), ["Zoë"]),
    (b"an\xffna\nleo\n", ["an\ufffdna", "leo"]),
    (b"an\0na\nleo\n", ["an\0na", "leo"]),
    (b"\xef\xbb\xbfanna\n\xef\xbb\xbfleo\n", ["anna", "leo"]),
    (b"-\n--json\nx.npz\n", ["-", "--json", "x.npz"]),
    (b"", [])])
def test_lines_of_standard_input_are_words_as_those_of_a_list_are(trained, run, raw, words):
    with standard_input(raw):
        result = run(sample, "out/mlp.npz", "--score", "-", "--json")
    rows = [json.loads(line) for line in result.out.splitlines()]
    assert [row["word"] for row in rows] == words
    unknown = [word for word in words if not word or set(word) - set(ALPHABET)]
    assert [row["word"] for row in rows if row["logprob"] is None] == unknown
    assert result.status == bool(unknown)


def test_a_list_is_scored_by_a_shell_as_the_readme_says(trained):
    command = f"{shlex.quote(sys.executable)} {shlex.quote(str(ROOT / 'sample.py'))}"
    done = subprocess.run(f"{command} out/gpt.npz --score - < w.txt | sort -k2 -rn", shell=True,
                          capture_output=True, text=True, timeout=60)
    assert sorted(line.split("\t")[0] for line in done.stdout.splitlines()) == sorted(NAMES)
    closed = subprocess.run(f"{command} out/gpt.npz --score - <&-", shell=True,
                            capture_output=True, text=True, timeout=60)
    assert (closed.returncode, closed.stdout) == (2, "") and "Traceback" not in closed.stderr


def test_a_dash_is_the_standard_input_only_alone(trained, run):
    with standard_input(b"anna\n"):
        result = run(sample, "out/mlp.npz", "--score", "-", "leo")
    assert [line.split("\t")[0] for line in result.out.splitlines()] == ["-", "leo"]


def test_a_checkpoint_may_be_typed_after_the_words(trained, run, refused):
    os.utime("out/mlp.npz", (3000, 3000))
    os.utime("out/gpt.npz", (2000, 2000))
    expected = run(sample, "out/gpt.npz", "--score", "anna", "leo")
    assert run(sample, "--score", "anna", "leo", "out/gpt.npz").out == expected.out
    result = run(sample, "--json", "--score", "anna", "out/gpt.npz")
    assert result.err.startswith("out/gpt.npz: gpt, ") and result.out.count("\n") == 1
    with standard_input(b"anna\nleo\n"):
        assert run(sample, "--score", "-", "out/gpt.npz").out == expected.out
    assert "out/no.npz" in refused(sample, "--score", "anna", "out/no.npz")
    # Where another one was named before, or no word is left, it is a word like any other.
    result = run(sample, "out/gpt.npz", "--score", "leo", "mlp.npz")
    assert result.err.startswith("out/gpt.npz: ") and "mlp.npz\tno score: " in result.out
    result = run(sample, "--score", "out/gpt.npz")
    assert result.status == 1 and result.out.startswith("out/gpt.npz\tno score: ")
    assert result.err.startswith("out/mlp.npz: ")


def test_a_picture_is_of_one_word_wherever_the_words_and_the_checkpoint_stand(
        trained, run, refused):
    for raw in b"", b"anna\nleo\n":
        with standard_input(raw):
            text = refused(sample, "out/gpt.npz", "--plot", "p.png", "--score", "-")
        assert "--plot" in text
    pytest.importorskip("matplotlib", reason="it draws")
    with standard_input(b"anna\n"):
        assert run(sample, "out/gpt.npz", "--plot", "p.png", "--score", "-").status == 0
    result = run(sample, "--plot", "q.png", "--score", "anna", "out/gpt.npz")
    assert result.status == 0 and Path("q.png").read_bytes() == Path("p.png").read_bytes()


def test_a_certain_word_has_log_probability_zero(learn, run):
    write_words(["a"] * 20)
    learn("mlp", "--steps", 200, "--lr", 0.05)
    stored = train.load("out/mlp.npz")
    for name in "W2", "b2":
        stored.best.p[name] *= 1e4
    train.save("x.npz", stored)
    word, *numbers = run(sample, "x.npz", "--score", "a").out.split()
    assert [word, *map(float, numbers)] == ["a", 0, 0, 1]


def test_a_perplexity_beyond_all_numbers_is_printed(trained, run):
    stored = train.load("out/mlp.npz")
    stored.best.p["b2"][0] = -1e5
    train.save("x.npz", stored)
    plain, as_json = (run(sample, "x.npz", "--score", "a", *flags) for flags in ([], ["--json"]))
    assert plain.status == as_json.status == 0
    assert float(plain.out.split("\t")[3]) > 1e300
    assert json.loads(as_json.out, parse_constant=pytest.fail)["perplexity"] > 1e300


# ---- JSON, terminals and pipes

@both_models
def test_names_as_json(names, kind):
    plain = names(kind, "-n", 100, "--temperature", 0.5)
    lines = names(kind, "-n", 100, "--temperature", 0.5, "--json")
    best = best_of(f"out/{kind}.npz")
    seen = set()
    for line, name in zip(lines, plain, strict=True):
        given = json.loads(line)
        assert list(given) == ["name", "logprob", "in_data"]
        assert given["name"] == name and given["in_data"] is (name in NAMES)
        assert given["logprob"] == model.score(best, name)
        seen.add(given["in_data"])
    assert seen == {True, False}


def test_json_keeps_characters_as_they_are_and_escapes_what_must_be(learn, run):
    write_words(['"Zoë"', "\\李", "a\x1fb"] * 5)
    learn("mlp", "--steps", 5)
    result = run(sample, "-n", 50, "--seed", 0, "--json")
    names = [json.loads(line)["name"] for line in result.out.split("\n")[:-1]]
    assert names == run(sample, "-n", 50, "--seed", 0).out.split("\n")[:-1]
    assert "李" in result.out and "ë" in result.out


def test_a_terminal_marks_and_counts_names_of_the_data(names, run, monkeypatch):
    flags = ["-n", 40, "--temperature", 0.4, "--seed", 0]
    plain = names("mlp", *flags)
    old = [name in NAMES for name in plain]
    assert 0 < sum(old) < 40
    monkeypatch.setattr(sys.stdout, "isatty", lambda: True)
    shown = run(sample, "out/mlp.npz", *flags)
    for line, name, known in zip(shown.out.splitlines(), plain, old, strict=True):
        assert line.startswith(name) and (line != name) == known
    assert f"{sum(old)} of 40 names" in shown.err.splitlines()[-1]
    Path("w.txt").unlink()
    shown = run(sample, "out/mlp.npz", *flags)
    assert shown.out.splitlines() == plain and shown.err.count("\n") == 1


def test_a_closed_pipe_ends_quietly(trained):
    """As by | head -1: more names than a pipe holds, and nobody reads on."""
    with process("sample", "out/mlp.npz", "-n", "100000", "--seed", "0") as started:
        assert started.stdout.readline().endswith(b"\n")
        started.stdout.close()
        err = started.stderr.read()
        assert started.wait(timeout=60) == 0
    assert err.count(b"\n") == 1 and err.startswith(b"out/mlp.npz: ")


def test_output_that_cannot_be_written_is_a_sentence(trained):
    with open("/dev/full", "wb") as full:
        status, _, err = finish(process("sample", "out/mlp.npz", "--seed", "0", stdout=full))
    assert status in (2, 120) and b"No space left" in err.splitlines()[1]
    assert b"Traceback" not in err


def test_sampling_writes_no_files(trained, run):
    before = {path: path.stat().st_mtime_ns for path in Path().rglob("*")}
    run(sample, "-n", 5)
    assert {path: path.stat().st_mtime_ns for path in Path().rglob("*")} == before
