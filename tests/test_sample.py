import json
import math
import os
import sys
import unicodedata
from pathlib import Path

import numpy as np
import pytest

import model
import sample
import train
from conftest import NAMES, best_of, both_models, finish, process, write_words

ALPHABET = sorted(set("".join(NAMES)))


@pytest.fixture
def names(trained, run):
    """names('mlp', ...) are the lines that sample.py prints, once it was asked."""
    def names(kind, *argv):
        result = run(sample, f"out/{kind}.npz", *argv)
        assert result.status == 0
        assert result.out == "" or result.out.endswith("\n")
        return result.out.split("\n")[:-1]
    return names


@pytest.fixture
def asked(monkeypatch):
    """For how many names generate() was asked, call by call."""
    asked, real = [], model.generate
    monkeypatch.setattr(model, "generate", lambda best, n, *rest: asked.append(n) or
                        real(best, n, *rest))
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
    result = run(sample, f"out/{kind}.npz", "-n", 30)
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
def test_the_same_seed_gives_the_same_names_and_another_others(names, kind):
    assert names(kind, "--seed", 3) == names(kind, "--seed", 3) != names(kind, "--seed", 4)
    assert names(kind) == names(kind, "--seed", 0)


@both_models
def test_names_come_as_often_as_their_probabilities_say(trained, kind):
    """20,000 first characters against the exact distribution without the boundary."""
    best = best_of(f"out/{kind}.npz")
    drawn = model.generate(best, 20000, np.random.default_rng(5), max_len=1)
    expected = np.exp(logprobs_of(best, "a")[0, 1:])
    expected /= expected.sum()
    counted = np.array([drawn.count(character) for character in ALPHABET]) / 20000
    assert (abs(counted - expected) < 4.5 * np.sqrt(expected / 20000)).all()


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
    first = {name[0] for name in names(kind, "-n", 500, "--top-k", 3, "--max-len", 1)}
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
    first = {name[0] for name in names(kind, "-n", 500, "--top-p", 0.5, "--max-len", 1)}
    assert first == set(ranked[:fewest])


@both_models
def test_a_higher_temperature_is_wilder(names, kind):
    plain, wild = (names(kind, "-n", 300, "--temperature", value) for value in (0.3, 3))
    assert len(set(plain)) < len(set(names(kind, "-n", 300))) < len(set(wild))
    assert len(names(kind, "-n", 5, "--temperature", 1e6)) == 5


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
@pytest.mark.parametrize("prefix, unknown", [
    ("Anna", "A"), ("an n", " "), ("żół", "ż"), ("a\n", "\\n"), ("🙂", "🙂")])
def test_characters_outside_the_vocabulary_are_named(trained, refused, kind, prefix, unknown):
    for flag in "--prefix", "--score":
        text = refused(sample, f"out/{kind}.npz", flag, prefix)
        assert flag in text and f"'{unknown}'" in text


def test_prefixes_and_scored_words_are_normalised(learn, run):
    write_words(["Zoë", "Noël", "Chloé"] * 4)
    learn("mlp", "--steps", 5)
    apart = unicodedata.normalize("NFD", "Zoë")
    assert apart != "Zoë"
    for flags in ["--prefix", "Zoë"], ["--score", "Zoë"]:
        composed = run(sample, *flags)
        decomposed = run(sample, flags[0], apart)
        assert composed.status == 0 and composed.out == decomposed.out != ""


@both_models
@pytest.mark.parametrize("limit", [1, 2, 3])
def test_max_len_always_ends_a_name(names, kind, limit):
    lines = names(kind, "-n", 100, "--max-len", limit)
    assert max(map(len, lines)) == limit and min(map(len, lines)) >= 1
    assert max(map(len, names(kind, "-n", 100, "--max-len", limit, "--prefix", "a"))) == limit


@both_models
def test_names_end_at_the_boundary_however_large_max_len_is(names, kind):
    assert names(kind, "-n", 30, "--max-len", 200) != []
    assert max(map(len, names(kind, "-n", 100, "--max-len", 200))) < 200


def test_names_end_without_max_len_too_even_if_the_model_never_ends_them(trained, run):
    """A last layer that gives the boundary no chance."""
    stored = train.load("out/mlp.npz")
    stored.best.p["b2"][0] = -1e4
    train.save("x.npz", stored)
    result = run(sample, "x.npz", "-n", 3)
    assert [len(name) for name in result.out.split()] == [stored.config["longest"]] * 3


def test_a_limit_below_the_prefix_is_refused(trained, refused):
    text = refused(sample, "out/mlp.npz", "--prefix", "anna", "--max-len", 3)
    assert "--max-len 3" in text and "anna" in text


# ---- Unique and new ones

@both_models
def test_unique_gives_no_name_twice(names, kind):
    lines = names(kind, "-n", 300, "--unique", "--max-len", 2)
    assert len(lines) == len(set(lines))
    assert len(lines) > 200 or len(lines) <= len(ALPHABET) * (len(ALPHABET) + 1)
    plain = names(kind, "-n", 300, "--max-len", 2)
    assert len(set(plain)) < 300


@both_models
def test_fewer_unique_names_than_wanted_is_a_sentence_and_no_error(trained, run, kind):
    result = run(sample, f"out/{kind}.npz", "--unique", "-n", 9, "--temperature", 0)
    assert result.status == 0 and result.out.count("\n") == 1
    first, last = result.err.splitlines()
    assert first.startswith("out/") and last.startswith("found 1 of 9, ")
    result = run(sample, f"out/{kind}.npz", "--unique", "-n", 100, "--max-len", 1)
    assert sorted(result.out.split()) == ALPHABET
    assert f"found {len(ALPHABET)} of 100, " in result.err.splitlines()[-1]


def test_attempts_are_bounded(trained, run, asked):
    result = run(sample, "out/mlp.npz", "--unique", "-n", 10**9, "--max-len", 1)
    assert result.out.count("\n") == len(ALPHABET)
    assert 10000 < sum(asked) <= 12000


@both_models
def test_more_names_of_a_seed_begin_with_the_fewer(names, kind):
    lines = names(kind, "-n", 1100)
    for n in 0, 1, 20, 500, 501:
        assert names(kind, "-n", n) == lines[:n]
    unique = list(dict.fromkeys(lines))[:30]
    assert names(kind, "-n", 30, "--unique") == unique


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
    expected = run(sample, "out/mlp.npz").out
    data = Path("w.txt")
    if change == "gone":
        data.unlink()
    else:
        data.write_bytes({"other words": b"eva\n", "one byte more": data.read_bytes() + b"\n",
                          "not readable as text": b"\xff\0"}[change])
    assert "--new" in refused(sample, "out/mlp.npz", "--new")
    assert run(sample, "out/mlp.npz").out == expected
    lines = run(sample, "out/mlp.npz", "--json").out.splitlines()
    assert [json.loads(line)["in_data"] for line in lines] == [None] * 20


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


@pytest.mark.parametrize("flags, named", [
    (["--score", ""], "--score"), (["--score", "anna", "Bob", "leo"], "B")])
def test_words_that_cannot_be_scored_are_named_and_nothing_is_printed(
        trained, refused, flags, named):
    assert named in refused(sample, "out/mlp.npz", *flags)


def test_a_word_too_long_for_the_gpt_is_refused_and_any_length_is_scored_by_the_mlp(
        trained, refused, run):
    context = best_of("out/gpt.npz").config["context"]
    assert "--score" in refused(sample, "out/gpt.npz", "--score", "a" * context)
    assert run(sample, "out/gpt.npz", "--score", "a" * (context - 1)).status == 0
    assert run(sample, "out/mlp.npz", "--score", "ab" * 1000).status == 0


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
    result = run(sample, "-n", 50, "--json")
    names = [json.loads(line)["name"] for line in result.out.split("\n")[:-1]]
    assert names == run(sample, "-n", 50).out.split("\n")[:-1]
    assert "李" in result.out and "ë" in result.out


def test_a_terminal_marks_and_counts_names_of_the_data(names, run, monkeypatch):
    flags = ["-n", 40, "--temperature", 0.4]
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
    with process("sample", "out/mlp.npz", "-n", "100000") as started:
        assert started.stdout.readline().endswith(b"\n")
        started.stdout.close()
        err = started.stderr.read()
        assert started.wait(timeout=60) == 0
    assert err.count(b"\n") == 1 and err.startswith(b"out/mlp.npz: ")


def test_output_that_cannot_be_written_is_a_sentence(trained):
    with open("/dev/full", "wb") as full:
        status, _, err = finish(process("sample", "out/mlp.npz", stdout=full))
    assert status in (2, 120) and b"No space left" in err.splitlines()[1]
    assert b"Traceback" not in err


def test_sampling_writes_no_files(trained, run):
    before = {path: path.stat().st_mtime_ns for path in Path().rglob("*")}
    run(sample, "-n", 5)
    assert {path: path.stat().st_mtime_ns for path in Path().rglob("*")} == before
