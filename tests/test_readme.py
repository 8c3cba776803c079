"""Every command in the README runs, shortened where it is long, and what it promises holds."""
import ast
import os
import re
import shlex
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest

import model
import train

ROOT = Path(__file__).parent.parent
README = (ROOT / 'README.md').read_text(encoding='utf-8')
BLOCKS = re.findall(r'```(\w*)\n(.*?)```', README, re.DOTALL)
COMMANDS = [line for kind, block in BLOCKS if kind == 'sh' for line in block.splitlines()]
COMMANDS += [' '.join(command.split()) for command in re.findall(r'`(python [^`]+)`', README)]
SHORT = {'train.py': '--steps 20', 'bench.py': '--rounds 1 --only mlp', 'mutate.py': '--list',
         'mistakes.py': '--proof --only 1', 'counting.py': 'towns.txt', 'diary.py': '--steps 200'}


def shortened(command):
    """The command with this Python, this folder's programs, and few steps."""
    program = command.split()[1]
    if '--steps' not in command:
        command += ' ' + SHORT.get(Path(program).name, '')
    command = re.sub(r'--steps \d+', '--steps 20', command)
    return command.replace('python', shlex.quote(sys.executable), 1).replace(
        f' {program}', f' {shlex.quote(str(ROOT / program))}', 1)


def test_the_way_in_is_two_lines_behind_the_pitch():
    assert BLOCKS[0] == ('sh', 'pip install -r requirements.txt && python train.py\n'
                               'pip install -r tests/requirements.txt && python -m pytest\n')


@pytest.mark.slow
def test_every_command_runs_in_the_order_of_the_text(tmp_path):
    pytest.importorskip('matplotlib', reason='--plot is among the commands')
    (tmp_path / 'towns.txt').write_text('\n'.join(['Zürich', 'Bern', 'St. Gallen'] * 20))
    first = 'python train.py --model gpt', 'python train.py'
    run = [command for command in [*first, *COMMANDS]
           if 'pip ' not in command and 'pytest' not in command and 'bench' not in command]
    for command in run:
        if command.startswith('python sample.py -'):       # the reader's newest is of the names
            os.utime(tmp_path / 'out' / 'mlp.npz')
        done = subprocess.run(shortened(command), shell=True, cwd=tmp_path, capture_output=True,
                              text=True, timeout=100)
        assert done.returncode == 0, (command, done.stderr)
        assert 'Traceback' not in done.stderr, command


def test_the_notebook_runs_as_it_is_written_in_a_fresh_process(tmp_path):
    code, = (block for kind, block in BLOCKS if kind == 'python')
    done = subprocess.run([sys.executable, '-c', code], cwd=tmp_path, capture_output=True,
                          text=True, timeout=200, env={**os.environ, 'PYTHONPATH': str(ROOT)})
    assert done.returncode == 0, done.stderr
    first, *_, best, keys = done.stdout.splitlines()
    assert re.fullmatch(r"\[('\w+', ){4}'\w+'\] -\d+\.\d+", first), first
    assert re.fullmatch(r'200 -\d+\.\d+', best), best
    assert {'format', 'config', 'vocabulary', 'best.C', 'latest.C'} <= set(ast.literal_eval(keys))


def test_the_text_before_the_derivative_reference_is_short():
    assert README.split('## The derivative reference')[0].count('\n') <= 250


def test_every_picture_is_there_and_together_they_are_small():
    pictures = [ROOT / path for path in re.findall(r'!\[[^]]+\]\(([^)]+)\)', README)]
    assert len(pictures) == 3 and set(pictures) == set((ROOT / 'data' / 'pictures').iterdir())
    assert sum(path.stat().st_size for path in pictures) <= 400_000


@pytest.mark.slow
def test_the_torch_module_gives_the_same_logits(tmp_path, monkeypatch):
    torch = pytest.importorskip('torch', reason='the module is written with PyTorch')
    from gpt_torch import GPT
    monkeypatch.chdir(tmp_path)
    subprocess.run(shortened('python train.py --model gpt'), shell=True, check=True,
                   capture_output=True)
    gpt, ours = GPT('out/gpt.npz'), train.load('out/gpt.npz').best
    words = ['bartholomew', 'li', 'maria']
    batch = model.batch_of(ours, words)
    logits = model.predict(ours, batch)[1]['logits']
    for word, part in zip(words, np.split(logits, np.flatnonzero(batch.Y == 0) + 1)):
        ids = torch.tensor([[0, *map(ours.vocabulary.index, word)]])
        theirs = gpt(ids)[0].detach().numpy()
        np.testing.assert_allclose(part, theirs, rtol=0, atol=1e-5)
