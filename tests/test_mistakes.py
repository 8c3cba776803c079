import ast
import re

import pytest

import mistakes
from mistakes import MISTAKES, Mistake


def numbered(*titles):
    """The numbers of the mistakes whose titles begin so, as arguments."""
    return [str(number) for number, mistake in enumerate(MISTAKES, 1)
            if mistake.title.startswith(titles)]


def rows(printed):
    """{number: (check, value, error, dev losses)} of a table."""
    found = re.findall(r"(?m)^ ?(\d+)  .{47} (\S+) +(\w+) +(\d+\.\d\d)((?: +\d\.\d{4})*)$", printed)
    return {int(number): (check, value, float(error), [float(loss) for loss in losses.split()])
            for number, check, value, error, losses in found}


@pytest.mark.parametrize("mistake", MISTAKES, ids=lambda mistake: mistake.title)
def test_the_right_line_stands_once_in_its_function_and_the_wrong_one_is_a_program(
        mistake, tmp_path):
    before = (mistakes.ROOT / mistake.file).read_text()
    (tmp_path / mistake.file).write_text(before)
    mistakes.plant(tmp_path, mistake)
    after = (tmp_path / mistake.file).read_text()
    trees = [{getattr(node, "name", i): ast.dump(node) for i, node in enumerate(tree.body)}
             for tree in (ast.parse(before), ast.parse(after))]
    assert trees[0].keys() == trees[1].keys()
    assert [name for name in trees[0] if trees[0][name] != trees[1][name]] == [mistake.function]


def test_titles_are_different_and_the_table_has_room_for_them():
    titles = [mistake.title for mistake in MISTAKES]
    assert len(set(titles)) == len(titles) and max(map(len, titles)) <= 47
    assert 14 <= len(titles) <= 16


@pytest.mark.parametrize("function, right, times", [
    ("one", "x += 1", 2), ("one", "x = 1", 0), ("three", "x += 1", 0)])
def test_a_line_that_is_not_there_or_twice_is_not_replaced(tmp_path, function, right, times):
    source = "def one(x):\n    x += 1\n    x += 1\n\n\ndef two(x):\n    x += 1\n"
    (tmp_path / "backward.py").write_text(source)
    with pytest.raises(ValueError, match=f"{times} times"):
        mistakes.plant(tmp_path, Mistake("", function, right, "", "", ""))
    assert (tmp_path / "backward.py").read_text() == source
    mistakes.plant(tmp_path, Mistake("", "two", "x += 1", "x -= 1", "", ""))
    assert (tmp_path / "backward.py").read_text() == source[:-7] + "x -= 1\n"


def test_two_mistakes_are_caught(capsys):
    one, other = numbered("only one gradient of a repeated row", "GELU without")
    assert mistakes.main(["--proof", "--only", one, other]) == 0
    printed = capsys.readouterr().out
    assert "2 of 2 mistakes are caught" in printed
    assert [row[:2] for row in rows(printed).values()] == [("mlp_steps", "dC"), ("gelu", "dx")]
    assert all(error > 0.1 for _, _, error, _ in rows(printed).values())


def test_what_is_no_mistake_is_caught_by_nothing(monkeypatch, capsys):
    right = MISTAKES[int(*numbered("GELU without")) - 1]
    monkeypatch.setattr(mistakes, "MISTAKES", [right._replace(wrong=right.right)])
    assert mistakes.main(["--proof"]) == 1
    assert "0 of 1 mistakes are caught" in capsys.readouterr().out
    with pytest.raises(RuntimeError, match="SyntaxError"):
        monkeypatch.setattr(mistakes, "MISTAKES", [right._replace(wrong="dy *")])
        mistakes.main(["--proof"])


@pytest.mark.slow
def test_every_mistake_is_caught(capsys):
    assert mistakes.main(["--proof"]) == 0
    caught = rows(capsys.readouterr().out)
    assert list(caught) == list(range(1, len(MISTAKES) + 1))
    for mistake, (check, value, error, losses) in zip(MISTAKES, caught.values()):
        assert (check, value) == ("causality", "logits") or check == mistake.proof
        assert error > 0.1 and losses == []
    ahead, = numbered("a node reads")
    assert [number for number in caught if caught[number][0] == "causality"] == [int(ahead)]


@pytest.mark.slow
def test_training_hardly_sees_three_of_them_and_likes_one_that_looks_ahead(capsys):
    near = numbered("only one gradient", "no copy", "the tied table: no gradient as the output")
    ahead, = numbered("a node reads")
    assert mistakes.main(["--only", *near, ahead]) == 0
    printed = capsys.readouterr().out
    change = {number: wrong - right
              for number, (_, _, _, (right, wrong)) in rows(printed).items()}
    assert change.pop(int(ahead)) < -0.1
    assert len(change) == 3 and all(abs(by) < 0.01 for by in change.values())
    assert "\n3 of 4 change the dev loss by less than 0.01" in printed
