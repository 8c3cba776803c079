import ast
import filecmp
import importlib.util
import itertools
import os
import re
import subprocess
import sys
from pathlib import Path

import model as m                       # before numpy, which then keeps to one core

import exercise
import numpy as np
import pytest
from conftest import NAMES, write_words
from exercise import EX1, ROOT
from mistakes import MISTAKES

SOURCE = (ROOT / "backward.py").read_text("utf-8")
BACKWARD = [name for name in exercise.functions(SOURCE) if name.endswith("_backward")]
# The rows of the proof that turn right with a function; the others have one of their own name.
ROWS = {EX1: ["mlp_steps"], "softmax_backward": [], "mlp_backward": ["mlp_no_norm", "mlp"],
        "gpt_backward": ["gpt_dropout", "gpt"]}
SLOW = "gpt_dropout", "gpt"             # if the kernels are plain Python
NOT_YET = {"not written yet"}


@pytest.fixture
def begin(run):
    """begin(...) writes an exercise to the folder x and gives what is printed."""
    def begin(*argv):
        result = run(exercise, "x", *argv)
        assert (result.status, result.err) == (None, "")
        return result.out
    return begin


def text():
    return Path("x/backward.py").read_text("utf-8")


def write(old, new):
    """What a student does."""
    assert text().count(old) == 1
    Path("x/backward.py").write_text(text().replace(old, new), "utf-8")


def function(source, name):
    found, = [node for node in ast.parse(source).body if getattr(node, "name", "") == name]
    return "".join(source.splitlines(True)[found.lineno - 1:found.end_lineno])


def fill_in(name):
    """Give a function back what it had."""
    write(function(text(), name), function(SOURCE, name))


def verdicts(out):
    """{title: the verdicts in its rows}; that an exception was raised is a verdict, too."""
    found, title = {}, ""
    for line in itertools.takewhile(bool, out.splitlines()[1:]):
        title = line[:15].strip() or title
        rows = found.setdefault(title, [])
        rows += re.findall(r"\b(?:ok|WRONG|not written yet|\w+Error)\b", line[15:])
    return found


def in_a_process(*argv, **env):
    """The status and the verdicts of `python backward.py`."""
    done = subprocess.run(
        [sys.executable, "backward.py", *argv], cwd="x", text=True, capture_output=True,
        env={**os.environ, "NUMBA_CACHE_DIR": str(Path("cache").resolve()), **env})
    assert done.stderr == ""
    return done.returncode, verdicts(done.stdout)


@pytest.fixture
def load(monkeypatch):
    """load() imports x/backward.py, with few names to read and kernels that are plain Python."""
    def load():
        monkeypatch.setattr(m, "NAMES", Path(write_words(NAMES)))
        monkeypatch.setattr(m, "kernel", lambda function: function)
        # A .pyc file would be taken for that of a source of the same size and second.
        monkeypatch.setattr(sys, "dont_write_bytecode", True)
        spec = importlib.util.spec_from_file_location("theirs", Path("x/backward.py").resolve())
        module = importlib.util.module_from_spec(spec)
        spec.loader.exec_module(module)
        return module
    return load


@pytest.fixture
def prove(load, capsys):
    """prove(title, ...): the status and the verdicts, like in_a_process, but in this one."""
    def prove(*titles):
        capsys.readouterr()
        status = load().main(["--only", *titles])
        return status, verdicts(capsys.readouterr().out)
    return prove


# ---- The folder

@pytest.mark.parametrize("argv", [[], ["linear_backward"], ["dC"], ["--bug", "1"]])
def test_the_folder_has_what_a_student_needs_and_only_backward_is_changed(begin, argv):
    Path("x").mkdir()
    begin(*argv)
    files = {str(path.relative_to("x")) for path in Path("x").rglob("*") if path.is_file()}
    assert files == {"model.py", "backward.py", "train.py", "sample.py", "requirements.txt",
                     "README.md", "data/README.md", "data/names.txt", "data/prepare.py"}
    changed = [name for name in files if not filecmp.cmp(ROOT / name, Path("x", name), False)]
    assert changed == ["backward.py"]


@pytest.mark.parametrize("names", [
    ["linear_backward"], ["gelu_backward", "add_at"], ["sum_rows", "gradient"]])
def test_only_the_bodies_of_the_named_functions_are_left_out(begin, names):
    assert EX1 not in begin(*names)
    for name in names:
        kept = function(SOURCE, name).rpartition('"""')[0]
        assert function(text(), name) == (
            f"{kept}\"\"\"\n    raise NotImplementedError('not written yet')\n")
        fill_in(name)
    assert text() == SOURCE


def test_all_backward_functions_are_left_out_by_default(begin):
    out = begin()
    assert EX1 in out and "\n  NUMBA_DISABLE_JIT=1 python backward.py --only NAME\n" in out
    left_out = [name for name in exercise.functions(SOURCE)
                if function(SOURCE, name) != function(text(), name)]
    assert left_out == BACKWARD and len(BACKWARD) >= 17


@pytest.mark.parametrize("argv, said", [
    (["x", "linear"], "linear cannot be left out: take Ex1, .*linear_backward"),
    (["x", "compare"], "compare cannot be left out"), (["x", "C"], "C cannot be left out"),
    (["x", "--bug", "1000"], r"--bug 1000: there are mistakes 1 to \d+$"),
    (["x", "--bug", "-1"], "--bug -1: "), (["x", "--bug", "x"], "argument --bug: invalid int"),
    (["x", "Ex1", "--bug"], "with --bug nothing is left out: name no function$"),
    (["full"], "full is there already and is not an empty folder$"),
    (["full", "--bug"], "full is there already"), (["full/file"], "full/file is there already"),
    (["full/file/x"], "full/file/x: Not a directory$"), ([], "the following arguments")])
def test_what_cannot_be_done_is_refused_in_a_sentence(refused, here, argv, said):
    Path("full").mkdir()
    Path("full/file").touch()
    assert re.match(f"exercise.py: error: {said}", refused(exercise, *argv))


# ---- What is not written yet

def test_if_nothing_is_written_every_row_says_so(begin):
    begin()
    status, found = in_a_process(NUMBA_DISABLE_JIT="1")
    assert status == 1 and {*itertools.chain(*found.values())} == NOT_YET
    assert len(found) == 18 and len(found.pop("mlp_steps")) == 26
    assert {len(rows) for rows in found.values()} == {1}


@pytest.mark.slow
def test_compiled_kernels_say_that_they_are_not_written(begin):
    begin()
    status, found = in_a_process()
    assert status == 1 and {*itertools.chain(*found.values())} == NOT_YET and len(found) == 18


def filled_in(prove, slow):
    """Fill in all functions, one after the other; the rows that turn right with each of them."""
    for name in BACKWARD:
        titles = [title for title in ROWS.get(name, [name.removesuffix("_backward")])
                  if slow or title not in SLOW]
        if titles:
            status, found = prove(*titles)
            assert status == 1 and {*itertools.chain(*found.values())} == NOT_YET
        fill_in(name)
        if titles:
            status, found = prove(*titles)
            assert status == 0 and list(found) == titles
            assert {*itertools.chain(*found.values())} == {"ok"}
        yield from titles
    assert text() == SOURCE


def test_with_each_function_that_is_filled_in_its_row_turns_right(begin, prove):
    begin()
    assert len(list(filled_in(prove, slow=False))) == 16


@pytest.mark.slow
def test_so_it_is_with_compiled_kernels_and_all_rows(begin):
    begin()
    assert len(list(filled_in(lambda *titles: in_a_process("--only", *titles), slow=True))) == 18
    assert in_a_process()[0] == 0


# ---- Ex1, line after line

def gradient_of(line):
    """The name of the gradient that a line of Ex1 is about, or None."""
    found = re.match(r" {4}(?:np\.add\.at\()?(d\w+)\b", line)
    return found and found[1]


def lines_of_ex1():
    """(name, text) of the lines to fill in; two that follow each other on one gradient are one."""
    groups = itertools.groupby(function(SOURCE, EX1).splitlines(True), gradient_of)
    return [(name, "".join(lines)) for name, lines in groups if name]


def steps(module):
    """{gradient: True, False or None} of Ex1, proven on a few numbers."""
    config, batch = m.first_batch(dict(m.MLP_DEFAULTS, embd=2, hidden=3), 4,
                                  np.random.default_rng(1))
    arguments = config, batch, np.dtype("float64"), np.random.default_rng(1)
    right = module.prove("mlp_steps", module.prove_steps, *arguments)
    names = re.findall(r"\w+=(d\w+)", function(SOURCE, EX1).rpartition("return dict(")[2])
    assert len(names) == 26
    return dict(zip(names, right, strict=True))


def test_lines_of_ex1_that_are_written_are_right_while_others_are_not(begin, load):
    assert "Write mlp_steps_backward line after line" in begin("Ex1")
    lines = lines_of_ex1()
    assert len(lines) == 30
    for i, (name, line) in enumerate(lines):
        to_come = {name for name, _ in lines[i:]}
        assert steps(load()) == {name: None if name in to_come else True for name, _ in lines}
        place = re.search(r"(?m)^    d\w+ = \.\.\. .*\n", text())[0]
        assert place.split("#")[1].partition(":")[0].strip() in line
        assert gradient_of(place) == name and ("with +=" in place) == bool(re.search("2 of", line))
        Path("x/backward.py").write_text(text().replace(place, line, 1), "utf-8")
    assert all(steps(load()).values())
    assert text() == SOURCE


@pytest.mark.parametrize("name, n", [("dcounts", 24), ("dembcat", 5), ("dC", 1)])
def test_ex1_is_left_out_from_a_gradient_on(begin, load, name, n):
    assert "Write mlp_steps_backward line after line" in begin(name)
    proven = steps(load())
    assert list(proven.values()).count(None) == n
    assert all(proven[name] for name, _ in lines_of_ex1()[:30 - n] if proven[name] is not None)


# ---- What is wrong

@pytest.mark.parametrize("name, row, wrong, verdict", [
    ("tanh_backward", "tanh", "return dy * (1 - y)", "WRONG"),
    ("tanh_backward", "tanh", "pass", "WRONG"),
    ("tanh_backward", "tanh", "return dy * Y", "NameError"),
    ("layernorm_backward", "layernorm", "return 1 * rmsnorm_backward(dy, gain, raw, inv, dgain)",
     "WRONG")])
def test_a_wrong_body_is_wrong(begin, prove, name, row, wrong, verdict):
    begin(name)
    write("raise NotImplementedError('not written yet')", wrong)
    status, found = prove(row)
    assert status == 1 and found[row][0] == verdict


def test_a_wrong_line_of_ex1_is_wrong_and_others_are_not_written_yet(begin, prove):
    begin("Ex1")
    write("dlogprobs = ...", "dlogprobs = np.zeros_like(logprobs); dlogprobs[range(N), Y] = -1 / N")
    write("dprobs = ...", "dprobs = dlogprobs * probs")
    assert prove("mlp_steps") == (1, {"mlp_steps": ["ok", "WRONG", *24 * [*NOT_YET]]})


def test_a_line_that_uses_what_is_not_written_is_told(begin, load, capsys):
    begin("Ex1")
    write("dprobs = ...", "dprobs = dlogprobs / probs")
    assert load().main(["--only", "mlp_steps"]) == 1
    out = capsys.readouterr().out
    assert "TypeError: " in out and "'ellipsis'" in out and ": dprobs = dlogprobs / probs" in out


# ---- A planted mistake

def planted():
    """The lines that differ, as pairs of right and wrong, in all files."""
    pairs = []
    for name in "backward.py", "model.py":
        files = [Path(folder, name).read_text("utf-8").splitlines() for folder in (ROOT, "x")]
        pairs += [pair for pair in zip(*files, strict=True) if pair[0] != pair[1]]
    return pairs


@pytest.mark.parametrize("number", range(1, len(MISTAKES) + 1))
def test_a_mistake_is_planted_and_not_told(begin, number):
    mistake = MISTAKES[number - 1]
    out = begin("--bug", number)
    assert f"one of {len(MISTAKES)} mistakes is planted" in out
    assert mistake.title not in out and mistake.function not in out
    (right, wrong), = planted()
    assert mistake.right in right and mistake.wrong in wrong
    assert right.rfind(" # ") == wrong.rfind(" # ")


def test_a_mistake_is_drawn_from_those_that_the_gradient_check_sees(begin, monkeypatch):
    drawn = []
    monkeypatch.setattr(exercise.random, "choice", lambda of: drawn.extend(of) or of[-1])
    begin("--bug")
    assert drawn == [mistake for mistake in MISTAKES if mistake.file == "backward.py"]
    (right, wrong), = planted()
    assert drawn[-1].wrong in wrong


@pytest.mark.parametrize("number", [
    number if number in (1, 2) else pytest.param(number, marks=pytest.mark.slow)
    for number, mistake in enumerate(MISTAKES, 1) if mistake.file == "backward.py"])
def test_the_proof_sees_the_mistake(begin, prove, number):
    begin("--bug", number)
    row = MISTAKES[number - 1].proof
    status, found = in_a_process("--only", row) if row in SLOW else prove(row)
    assert status == 1 and "WRONG" in found[row]
    assert {*found[row]} <= {"ok", "WRONG"}
