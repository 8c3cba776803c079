import os
import pty
import random
import re
import signal
import subprocess
import sys
import termios
from pathlib import Path
from types import SimpleNamespace

import train                            # before numpy, which then keeps to one core

import numpy as np
import pytest

ROOT = Path(__file__).parent.parent
NAMES = """anna bob ella ada noel lea mia zoe kim lou max ned ann bea leo tom ida eva
           ben dan emma nina olga paul""".split()
SIZES = dict(
    mlp=["--model", "mlp", "--embd", "4", "--hidden", "8"],
    gpt=["--model", "gpt", "--embd", "8", "--layers", "1", "--heads", "2"])
both_models = pytest.mark.parametrize("kind", ["mlp", "gpt"])


def write_words(words, path="w.txt"):
    Path(path).write_bytes("".join(word + "\n" for word in words).encode())
    return path


def call(main, *argv):
    """The exit status of main(argv), argparse's included."""
    try:
        return main([str(part) for part in argv])
    except SystemExit as end:
        return end.code


def split_of(words):
    """Train, dev and test, written once more: 80, 10 and 10 % of the shuffled words."""
    words = list(words)
    random.Random(42).shuffle(words)
    a, b = len(words) * 8 // 10, len(words) * 9 // 10
    return words[:a], words[a:b], words[b:]


def without_times(text):
    """A report without the seconds that the run took."""
    return re.sub(r"\d+ s,", "", text)


def losses_of(report):
    """Train, dev and test loss from the one line of a report that has them."""
    line, = re.findall(r"(?m)^train (\d+\.\d{4})  dev (\d+\.\d{4})  test (\d+\.\d{4})$", report)
    return [float(loss) for loss in line]


def process(program, *argv, env=(), **options):
    """Start train.py or sample.py as a user would."""
    clean = {name: value for name, value in os.environ.items()
             if not name.startswith(("PYTHON", "LC_", "LANG"))}
    options = {**dict.fromkeys(["stdout", "stderr"], subprocess.PIPE), **options}
    options |= dict(stdin=subprocess.DEVNULL, env={**clean, "LC_ALL": "C.UTF-8", **dict(env)})
    return subprocess.Popen([sys.executable, ROOT / f"{program}.py", *argv], **options)


def finish(started):
    """Status, standard output and standard error, both as bytes, of a process."""
    out, err = started.communicate(timeout=120)
    return started.returncode, out, err


def in_terminal(program, *argv, streams, env=()):
    """Run with some streams on a terminal; gives status, what it got, and standard output else."""
    master, slave = pty.openpty()
    termios.tcsetwinsize(slave, (24, 100))
    with process(program, *argv, env={"TERM": "xterm", **dict(env)},
                 **dict.fromkeys(streams, slave)) as started:
        os.close(slave)
        shown = b""
        while True:
            try:
                part = os.read(master, 65536)
            except OSError:             # how a terminal says that nobody writes to it any more
                break
            if not part:
                break
            shown += part
        os.close(master)
        rest = started.stdout.read() if started.stdout else b""
        started.wait(timeout=60)
    return started.returncode, shown, rest


@pytest.fixture
def here(tmp_path, monkeypatch):
    """An empty folder, and we are in it."""
    monkeypatch.chdir(tmp_path)
    return tmp_path


@pytest.fixture
def run(here, capsys):
    """run(train, ...) or run(sample, ...) in an empty folder: its status, out and err."""
    def run(program, *argv):
        capsys.readouterr()
        status = call(program.main, *argv)
        out, err = capsys.readouterr()
        assert "Traceback" not in out + err
        return SimpleNamespace(status=status, out=out, err=err)
    return run


@pytest.fixture
def learn(run, monkeypatch):
    """learn('mlp', ...) trains a tiny model on w.txt, which has some names unless it exists.

    The defaults are those for a long list.
    """
    monkeypatch.setattr(train, "fitted", lambda kind, n, V: {})

    def learn(kind, *argv):
        if not Path("w.txt").exists():
            write_words(NAMES)
        return run(train, *SIZES[kind], "--data", "w.txt", *argv)
    return learn


@pytest.fixture
def refused(run):
    """refused(program, ...) asserts one sentence, status 2 and no file touched; gives the text.

    Above it may stand argparse's usage, or what was said about the data or the checkpoint.
    """
    def everything():
        return {path: path.read_bytes() if path.is_file() else None for path in Path().rglob("*")}

    def refused(program, *argv):
        before = everything()
        result = run(program, *argv)
        assert (result.status, result.out) == (2, "")
        assert everything() == before
        last = result.err.splitlines()[-1]
        assert result.err.endswith(last + "\n")
        for line in result.err.splitlines()[:-1]:
            assert re.match(r"usage: |  |.*txt: \d+ words, |\d+% of the dev |skipped \d|"
                            r"for so few words: --|dev loss of guessing evenly: |"
                            r".*: (mlp|gpt), step \d+, ", line)
        return last
    return refused


@pytest.fixture
def steps_taken(monkeypatch):
    """A list that grows by the loss of every step of training."""
    real, losses = train.train_step, []

    def train_step(*args):
        losses.append(real(*args))
        return losses[-1]
    monkeypatch.setattr(train, "train_step", train_step)
    return losses


@pytest.fixture
def signal_after(monkeypatch):
    """signal_after(n, number) sends us a signal within the n-th step that is taken from then on."""
    real = train.train_step

    def signal_after(n, number=signal.SIGINT):
        taken = []

        def train_step(*args):
            loss = real(*args)
            taken.append(loss)
            if len(taken) == n:
                signal.raise_signal(number)
            return loss
        monkeypatch.setattr(train, "train_step", train_step)
    yield signal_after


@pytest.fixture(scope="session")
def checkpoints(tmp_path_factory):
    """A folder with w.txt, mlp.npz and gpt.npz, trained a little; only to be copied."""
    folder, before = tmp_path_factory.mktemp("trained"), os.getcwd()
    os.chdir(folder)
    try:
        write_words(NAMES)
        for kind in SIZES:
            assert call(train.main, *SIZES[kind], "--data", "w.txt", "--steps", 60,
                        "--eval-every", 20, "--lr", 0.02, "--out", f"{kind}.npz") == 0
    finally:
        os.chdir(before)
    return folder


@pytest.fixture
def trained(checkpoints, here):
    """In our folder are w.txt, out/mlp.npz and out/gpt.npz."""
    Path("out").mkdir()
    Path("w.txt").write_bytes((checkpoints / "w.txt").read_bytes())
    for kind in SIZES:
        stored = train.load(checkpoints / f"{kind}.npz")
        stored.config["data"] = os.path.abspath("w.txt")
        train.save(f"out/{kind}.npz", stored)
    return here


def best_of(path):
    """The model in a checkpoint that sampling takes."""
    return train.load(path).best


def arrays_of(path):
    """All that a checkpoint holds, by name."""
    with np.load(path) as file:
        return {name: file[name] for name in file.files}

