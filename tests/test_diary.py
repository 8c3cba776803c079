import re
from collections import Counter

import diary                            # imports train before numpy, which then keeps to one core
import model
import train

import numpy as np
import pytest

STEPS = 60


@pytest.fixture(scope="module")
def examples():
    words = model.NAMES.read_text().split()
    return model.mlp_examples(sorted(train.split(words)[0]), model.make_vocabulary(words), 3)


def batches(examples):
    config = {**train.DEFAULTS["mlp"], "steps": STEPS}
    return [batch for _, batch in zip(range(STEPS), train.batches(config, examples, 0))]


def test_the_fetches_are_those_of_the_batches(examples):
    written = diary.write_diary(examples, diary.RUNS["lectures SGD"], STEPS, 1)
    counts = [Counter(batch.X.ravel().tolist()) for batch in batches(examples)]
    assert written.fetches.tolist() == [[count[i] for i in range(27)] for count in counts]
    without = diary.read_diaries([written])["without"]
    assert np.allclose(without, [sum(i not in count for count in counts) / STEPS
                                 for i in range(27)])


@pytest.mark.parametrize("label", diary.RUNS)
def test_a_row_that_is_not_fetched_moves_only_under_adam(examples, label):
    fetches, C = diary.write_diary(examples, diary.RUNS[label], STEPS, 1)
    moved = (C[1:] != C[:-1]).any(2)
    assert moved[fetches > 0].all()
    known = fetches.cumsum(0) - fetches > 0                # fetched in a step before
    assert not moved[~known & (fetches == 0)].any()
    of_old = moved[known & (fetches == 0)]
    assert len(of_old) > 100
    assert of_old.mean() > 0.9 if label.endswith("Adam") else not of_old.any()


def test_the_table_is_that_of_train(examples, tmp_path):
    out = str(tmp_path / "model.npz")
    train.main(["--steps", str(STEPS), "--eval-every", "0", "--out", out])
    written = diary.write_diary(examples, diary.RUNS["defaults Adam"], STEPS, 1)
    assert np.array_equal(train.load(out).p["C"], written.C[-1])


def test_what_is_read_from_a_diary():
    """Rows of one number: the first goes there and back, the second goes on, the third stays."""
    first, between, last = [[0.], [0.], [9.]], [[3.], [1.], [9.]], [[1.], [3.], [9.]]
    fetches, C = np.zeros((11, 3), int), np.array([first, *[between] * 10, last])
    fetches[[0, -1]] = [2, 1, 0], [1, 0, 0]
    read = diary.read_diaries([diary.Diary(fetches, C)])
    assert read["path"].tolist() == [5, 3, 0]
    assert read["unfetched"].tolist() == [0, 2, 0]
    assert read["early"].tolist() == [3, 1, 0]
    assert read["moved"].tolist() == [1, 3, 0]
    assert read["place"].tolist() == [2, 1, 3]
    assert np.allclose(read["without"], [9 / 11, 10 / 11, 1])
    assert np.allclose(read["apart"], [10 / 3, 4 / 3, 14 / 3])
    figures = diary.compare(read, C, 1, 10)
    assert figures.keys() == {"path", "early", "moved", "apart", "place", "jump", "unfetched",
                              "path_follows", "moved_follows"}
    assert np.allclose([figures[name] for name in ("path", "early", "moved", "apart", "place")],
                       [1, 1, 3, 0.4, 1])
    assert np.allclose([figures[name] for name in ("jump", "unfetched")], [2, 2 / 3])
    assert np.allclose([figures["path_follows"], figures["moved_follows"]], [1, 0.5])


def test_the_report(examples, monkeypatch, capsys):
    monkeypatch.setattr(diary, "SEEDS", (1,))
    diary.main(["--steps", str(STEPS)])
    report = capsys.readouterr().out
    rows = re.findall(r"(?m)^(\S) +(\d+\.\d\d) +(\d+\.\d)%", report)
    fetches = [float(row[1]) for row in rows]
    assert len(rows) == 27 and fetches == sorted(fetches, reverse=True)
    rare, _, without = rows[-1]
    i = model.make_vocabulary(model.NAMES.read_text().split()).index(rare)
    share = np.mean([i not in batch.X for batch in batches(examples)])
    assert without == f"{100 * share:.1f}"

    def figures(title):
        line, = [line for line in report.splitlines() if title in line]
        return dict(zip(diary.RUNS, map(float, line.split()[-4:])))

    def labels_where(true):
        return ", ".join(label for label in diary.RUNS if true(label)) or "no run"

    jumps = figures(f" has no {rare}: its row moves by")
    assert jumps["lectures SGD"] == jumps["defaults SGD"] == 0
    assert jumps["lectures Adam"] > 0 and jumps["defaults Adam"] > 0
    follows, moved = figures("of fetches and path"), figures(f"row: moved by step {STEPS}")
    assert follows["lectures SGD"] > 0.9 > follows["lectures Adam"]
    for line in (f"  has a shorter path: {labels_where(lambda label: follows[label] > 0.9)}\n",
                 f"  by step {STEPS}: {labels_where(lambda label: moved[label] < 1)}\n"):
        assert line in report
