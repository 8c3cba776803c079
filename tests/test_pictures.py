"""The pictures of train.py and sample.py: that they are there, and that they show what is so."""
import importlib.util
import itertools
import os
import sys
import warnings
from collections import Counter
from pathlib import Path

import numpy as np
import pytest

import model
import sample
import train
from conftest import NAMES, SIZES, best_of, both_models, split_of, write_words

WORD = "emma"


@pytest.fixture
def matplotlib():
    """matplotlib, with the font that it brings; a test that takes it is skipped without."""
    matplotlib = pytest.importorskip("matplotlib", reason="it draws")
    with matplotlib.rc_context({"font.family": "DejaVu Sans"}):
        yield matplotlib


def random_model(kind, characters=NAMES, **config):
    """A model with random parameters, large ones, so that it prefers some characters."""
    vocabulary = model.make_vocabulary(characters)
    defaults = dict(mlp=model.MLP_DEFAULTS, gpt=model.GPT_DEFAULTS)[kind]
    config = {**defaults, "vocab_size": len(vocabulary), "longest": 15, **config}
    config["batchnorm"] = False
    rng = np.random.default_rng(1)
    p = {name: 0.5 * rng.standard_normal(shape).astype(np.float32)
         for name, shape in model.parameter_shapes(config).items()}
    return model.Model(config, vocabulary, p, {})


def run_of(best):
    history = [(0, 3., 3.), (10, 2., 2.5)]
    return train.Run(best.config, best.vocabulary, best.p, np.zeros((0, 0)), best, 10, history)


def texts(labels):
    return [label.get_text() for label in labels]


def image_of(axes):
    """The array that is drawn as a map."""
    image, = axes.get_images()
    return np.ma.filled(image.get_array(), np.nan)


# ---- Files

ENDINGS = pytest.mark.parametrize("ending, begin", [
    ("png", b"\x89PNG\r\n\x1a\n"), ("SVG", b"<?xml"), ("pdf", b"%PDF")])


@ENDINGS
def test_a_picture_of_a_run_is_drawn(learn, run, matplotlib, ending, begin):
    write_words([*NAMES, "$x", "a_b", "\\q"])
    picture = f"p.{ending}"
    for flags in ["mlp", "--embd", 1], ["gpt", "--eval-every", 0]:
        assert learn(*flags, "--steps", 20, "--plot", picture).status == 0
        assert Path(picture).read_bytes().startswith(begin) and os.path.getsize(picture) > 5000
        os.remove(picture)
    assert run(train, "--resume", "--plot", picture).status == 0
    assert Path(picture).read_bytes().startswith(begin)


@both_models
@ENDINGS
def test_a_picture_of_a_word_is_drawn_and_the_word_is_scored(
        trained, run, matplotlib, kind, ending, begin):
    flags = f"out/{kind}.npz", "--score", WORD
    result = run(sample, *flags, "--plot", f"p.{ending}")
    assert Path(f"p.{ending}").read_bytes().startswith(begin)
    assert os.path.getsize(f"p.{ending}") > 5000
    assert (result.status, result.out) == (0, run(sample, *flags).out)
    assert len(result.err.splitlines()) == 1               # nothing but the checkpoint


def test_a_png_can_be_read_and_is_no_wider_than_a_page(trained, run, learn, matplotlib):
    from matplotlib.image import imread
    assert learn("mlp", "--steps", 20, "--plot", "run.png").status == 0
    for kind in SIZES:
        assert run(sample, f"out/{kind}.npz", "--score", WORD, "--plot", f"{kind}.png").status == 0
    sizes = {name: imread(f"{name}.png").shape[:2] for name in ("run", *SIZES)}
    assert sizes["run"] == (550, 1200)
    assert sizes["mlp"][1] == sizes["gpt"][1] == 900
    assert 300 < sizes["mlp"][0] < sizes["gpt"][0] < 1500
    for name in sizes:
        shades = imread(f"{name}.png")[..., :3].reshape(-1, 3)
        assert len(np.unique(shades, axis=0)) > 20 and shades.mean() > 0.5


# ---- The losses and the embedding

def test_the_losses_are_those_of_the_history(matplotlib):
    left, _ = train.plot(run_of(random_model("mlp")), NAMES).axes
    lines = {line.get_label(): line.get_xydata().tolist() for line in left.lines}
    assert lines == dict(train=[[0, 3], [10, 2]], dev=[[0, 3], [10, 2.5]])
    assert texts(left.get_legend().texts) == ["train", "dev"]


@pytest.mark.parametrize("embd", [1, 2, 6])
def test_the_map_shows_the_two_directions_in_which_the_embedding_varies_most(matplotlib, embd):
    best = random_model("mlp", embd=embd)
    _, right = train.plot(run_of(best), NAMES).axes
    C = best.p["C"].astype(float)
    variances = np.sort(np.linalg.eigvalsh(np.cov(C.T, bias=True).reshape(embd, embd)))[::-1]
    shown = right.collections[0].get_offsets()
    expected = [*variances, 0][:2]
    np.testing.assert_allclose(np.cov(shown.T, bias=True), np.diag(expected), atol=1e-5)
    assert right.get_title().startswith(f"Embedding: {sum(expected) / variances.sum():.0%} of")
    if embd <= 2:                       # then nothing is lost, distances least of all
        distances = [np.linalg.norm(at[:, None] - at, axis=2) for at in (C, shown)]
        np.testing.assert_allclose(*distances, atol=1e-4)


def labels_and_dots(figure, vocabulary):
    """The labels of a map by character, and the characters with a dot; all where they belong."""
    right, signs = figure.axes[1], {"↵": "\0", "␣": " "}
    places = dict(zip(vocabulary, right.collections[0].get_offsets().tolist()))
    sizes = dict(zip(vocabulary, right.collections[0].get_sizes()))
    labelled = {signs.get(text.get_text(), text.get_text()): text for text in right.texts}
    assert len(labelled) == len(right.texts)
    for character, text in labelled.items():
        assert np.allclose(text.get_position(), places[character])
        assert right.get_xlim()[0] < places[character][0] < right.get_xlim()[1]
        assert right.get_ylim()[0] < places[character][1] < right.get_ylim()[1]
    dots = {character for character, size in sizes.items() if size}
    assert bool(dots) == bool(right.get_legend())
    return labelled, dots


def test_all_of_a_few_characters_are_labelled_the_unseen_ones_too(matplotlib):
    best = random_model("mlp", [*NAMES, "a q"])
    labelled, dots = labels_and_dots(train.plot(run_of(best), NAMES), best.vocabulary)
    assert labelled.keys() == set(best.vocabulary) and dots == set()
    assert labelled["\0"].get_text() == "↵" and labelled[" "].get_text() == "␣"


def test_of_many_characters_the_hundred_most_frequent_are_labelled(matplotlib):
    alphabet = [chr(code) for code in range(0x100, 0x100 + 150)]
    words = [character * (1 + i % 50) for i, character in enumerate(alphabet)]
    best = random_model("mlp", words)
    labelled, dots = labels_and_dots(train.plot(run_of(best), words), best.vocabulary)
    frequent = dict(Counter("".join(words)).most_common(99))
    assert len(labelled) == 100 and labelled.keys() >= {"\0"}
    assert labelled.keys() | dots == set(best.vocabulary) and len(dots) == 51
    assert (sorted(map("".join(words).count, labelled.keys() - {"\0"}))
            == sorted(frequent.values()))


def test_what_is_frequent_is_counted_in_the_training_words(learn, matplotlib, monkeypatch):
    given, real = [], train.plot
    monkeypatch.setattr(train, "plot", lambda run, words: given.append(words) or real(run, words))
    assert learn("mlp", "--steps", 2, "--plot", "p.png").status == 0
    assert given == [split_of(NAMES)[0]]


# ---- What a model predicts in a word

@pytest.mark.parametrize("kind, sizes, maps", [
    ("mlp", {}, 0), ("gpt", dict(layers=1, heads=1), 1), ("gpt", dict(layers=3, heads=2), 6),
    ("gpt", dict(layers=1, heads=8), 8)])
def test_there_is_a_map_for_the_probabilities_and_for_every_head(matplotlib, kind, sizes, maps):
    figure = sample.plot(random_model(kind, **sizes), WORD)
    bars = 2 if maps else 1
    assert len(figure.axes) == 1 + maps + bars
    assert sum(bool(axes.get_images()) for axes in figure.axes) == 1 + maps


@both_models
@pytest.mark.parametrize("word", [WORD, "a", "bob", "maximilianamax"])
def test_the_marked_characters_are_the_words_and_their_probabilities_are_its_score(
        matplotlib, kind, word):
    best = random_model(kind)
    top = sample.plot(best, word).axes[0]
    circles, characters = top.lines[0].get_xydata(), texts(top.get_yticklabels())
    assert circles[:, 0].tolist() == list(range(len(word) + 1))
    assert "".join(characters[int(y)] for _, y in circles) == word + "↵"
    marked = [image_of(top)[int(y), int(x)] for x, y in circles]
    assert np.log(marked).sum() == pytest.approx(model.score(best, word), abs=1e-4)
    read = ["↵" + word[:i] for i in range(len(word) + 1)]
    assert texts(top.get_xticklabels()) == [
        f"{before[-3:]}\n{p:.0%}" for before, p in zip(read, marked)]


@both_models
def test_all_characters_of_a_small_vocabulary_have_their_probability(matplotlib, kind):
    best = random_model(kind, [*NAMES, "a q"])
    top = sample.plot(best, WORD).axes[0]
    assert texts(top.get_yticklabels()) == ["↵", "␣", *best.vocabulary[2:]]
    np.testing.assert_allclose(image_of(top).sum(0), 1, rtol=1e-5)
    _, acts = model.predict(best, model.batch_of(best, [WORD]))
    np.testing.assert_array_equal(image_of(top), acts["probs"].T)


@both_models
def test_of_many_characters_the_forty_likeliest_are_shown_and_those_that_came(matplotlib, kind):
    best = random_model(kind, [chr(code) for code in range(0x100, 0x100 + 300)])
    word = best.vocabulary[-10:-1]
    top = sample.plot(best, word).axes[0]
    shown = texts(top.get_yticklabels())
    _, acts = model.predict(best, model.batch_of(best, [word]))
    likeliest = np.argsort(-acts["probs"].max(0))[:40]
    expected = {best.vocabulary[i] for i in likeliest} | {*word, "\0"}
    assert shown == ["↵", *sorted(expected - {"\0"})] and 40 < len(shown) < 52
    circles = top.lines[0].get_xydata()
    assert "".join(shown[int(y)] for _, y in circles) == word + "↵"
    assert len(image_of(top)) == len(shown)


def test_an_attention_map_has_a_row_for_who_looks_and_a_column_for_what_is_seen(matplotlib):
    best = random_model("gpt", layers=2, heads=4, embd=16)
    figure = sample.plot(best, WORD)
    _, acts = model.predict(best, model.batch_of(best, [WORD]))
    maps = [axes for axes in figure.axes[2:] if axes.get_images()]
    for i, axes in enumerate(maps):
        l, head = divmod(i, 4)
        query, key, _ = np.split(acts["layers"][l]["qkv"].astype(float), 3, axis=1)
        part = slice(4*head, 4*head + 4)
        scores = np.exp(query[:, part] @ key[:, part].T / 2)
        scores[np.triu_indices(5, 1)] = 0
        expected = scores / scores.sum(1, keepdims=True)
        expected[np.triu_indices(5, 1)] = np.nan
        np.testing.assert_allclose(image_of(axes), expected, rtol=1e-4)
        assert axes.get_images()[0].get_clim() == (0, 1)
        assert axes.get_xlabel() == (f"head {head + 1}" if l == 1 else "")
        assert axes.get_ylabel() == (f"layer {l + 1}" if head == 0 else "")
    corner = maps[4]                    # of the last row and the first column: it has all labels
    assert texts(corner.get_xticklabels()) == texts(corner.get_yticklabels()) == [*"↵emma"]


def inside(box, page):
    return page.x0 <= box.x0 and box.x1 <= page.x1 and page.y0 <= box.y0 and box.y1 <= page.y1


@pytest.mark.parametrize("kind, sizes, word", [
    ("mlp", {}, WORD), ("mlp", {}, "m" * 40), ("gpt", {}, "m" * 15), ("gpt", {}, "a"),
    ("gpt", dict(layers=1, heads=8), "m" * 12), ("gpt", dict(context=32), "m" * 30)])
def test_no_label_covers_another_and_nothing_is_cut(matplotlib, kind, sizes, word):
    from matplotlib.backends.backend_agg import FigureCanvasAgg
    figure = sample.plot(random_model(kind, **sizes), word)
    FigureCanvasAgg(figure).draw()
    for axes in figure.axes:
        assert inside(axes.get_tightbbox(), figure.bbox)
        if axes.get_images():
            for labels in axes.get_xticklabels(), axes.get_yticklabels():
                boxes = [label.get_window_extent() for label in labels]
                assert not any(a.overlaps(b) for a, b in itertools.combinations(boxes, 2))


def test_the_size_of_a_picture_has_an_end(matplotlib):
    best = random_model("gpt", layers=2, heads=2, embd=8, context=400)
    width, height = sample.plot(best, "max" * 100).get_size_inches()
    assert width == 60 and height <= 60


def test_signs_of_formulas_are_drawn_as_they_are(learn, run, matplotlib):
    word = "$_$ \\$^$"
    write_words([word, "$x$", "a_b"] * 8)
    assert learn("gpt", "--steps", 2).status == 0
    assert run(sample, "out/gpt.npz", "--score", word, "--plot", "p.png").status == 0


# ---- Characters that the font lacks

SAID = "characters that the font cannot draw: "


def test_characters_that_the_font_cannot_draw_are_counted_in_one_line(learn, run, matplotlib):
    write_words(["字典", "字🦊", "emma", "a典"] * 10)
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        result = learn("gpt", "--steps", 2, "--plot", "p.png")
        assert result.status == 0 and result.err.splitlines()[-1] == f"p.png: {SAID}3"
        for ending in "png", "svg", "pdf":                 # each picture counts anew
            result = run(sample, "out/gpt.npz", "--score", "字a", "--plot", f"p.{ending}")
            assert result.status == 0 and result.err.splitlines()[1:] == [f"p.{ending}: {SAID}3"]
    assert [warning for warning in caught if "Glyph" in str(warning.message)] == []


def test_nothing_is_said_if_the_font_has_all_characters(learn, run, matplotlib):
    write_words(["münchen", "łódź", "москва", "a b"] * 8)
    assert SAID not in learn("gpt", "--steps", 2, "--plot", "p.png").err
    assert SAID not in run(sample, "--score", "łódź", "--plot", "p.png").err


def test_only_missing_characters_are_counted_each_once(capsys):
    class Figure:
        def savefig(self, path):
            for text in "Glyph 23383 missing", "Glyph 23383 missing", "Glyph 9 missing", "slow":
                warnings.warn(text, stacklevel=1)
    train.save_figure(Figure(), "p.png")
    assert capsys.readouterr().err == f"p.png: {SAID}2\n"


# ---- What is refused

def test_a_picture_that_cannot_be_drawn_is_refused_before_anything_is_done(
        trained, refused, steps_taken, monkeypatch):
    ways = ([train, *SIZES["mlp"], "--data", "w.txt", "--steps", 2],
            [sample, "out/gpt.npz", "--score", WORD])
    for program, *flags in ways:
        for name in "c", "c.npz", "c.xyz":
            text = refused(program, *flags, "--plot", name)
            assert f"--plot {name}" in text and ".png" in text
    monkeypatch.setitem(sys.modules, "matplotlib", None)
    assert importlib.util.find_spec("matplotlib") is None
    for program, *flags in ways:
        assert "pip install matplotlib" in refused(program, *flags, "--plot", "p.png")
    assert steps_taken == []


@pytest.mark.parametrize("flags", [[], ["-n", 3], ["--score", "emma", "anna"]])
def test_a_picture_of_no_word_or_of_two_is_refused(trained, refused, matplotlib, flags):
    assert "--plot draws one word" in refused(sample, "out/gpt.npz", *flags, "--plot", "p.png")


@pytest.mark.parametrize("word, reason", [
    ("", "empty"), ("emmå", "does not know"), ("a" * 60, "at most")])
def test_a_word_that_cannot_be_scored_is_not_drawn(trained, run, matplotlib, word, reason):
    result = run(sample, "out/gpt.npz", "--score", word, "--plot", "p.png")
    assert result.status == 1 and reason in result.out and not Path("p.png").exists()


def test_a_picture_without_a_folder_is_said_and_the_rest_is_done(learn, run, matplotlib):
    result = learn("mlp", "--steps", 2, "--plot", "no/p.png")
    assert result.status == 2 and "no/p.png" in result.err.splitlines()[-1]
    assert train.load("out/mlp.npz").step == 2
    result = run(sample, "--score", WORD, "--plot", "no/p.png")
    assert result.status == 2 and "no/p.png" in result.err.splitlines()[-1]
    assert result.out.startswith("emma\t")


@both_models
def test_the_statistics_of_the_best_model_are_used(trained, run, matplotlib, monkeypatch, kind):
    drawn = []
    monkeypatch.setattr(sample, "save_figure", lambda figure, path: drawn.append(figure))
    run(sample, f"out/{kind}.npz", "--score", WORD, "--plot", "p.png")
    best = best_of(f"out/{kind}.npz")
    _, acts = model.predict(best, model.batch_of(best, [WORD]))
    np.testing.assert_array_equal(image_of(drawn[0].axes[0]), acts["probs"].T)
