"""Silent mistakes: what the gradient check says of them, and what training says.

    python tests/mistakes.py               plant every mistake, check and train: 2 to 3 minutes
    python tests/mistakes.py --proof       do not train: half a minute
    python tests/mistakes.py --only 1 9    only the mistakes 1 and 9

No mistake here stops the program or gives an array a wrong shape. The loss falls with each of them,
with half of them as far as it should, and with the last one far below. The checks catch them all.

Each mistake is planted in a copy of the project. There, `python backward.py` checks the gradients
of the layer or the model that it belongs to. The table has the first gradient that is wrong, and
its error relative to the gradient. Then `python train.py` trains the copy, and the table has its
dev loss beside that of the right program, after the same steps with the same seed. Two programs run
at a time. The exit status is 1 if a mistake was not caught.
"""
import argparse
import ast
import os
import re
import shutil
import subprocess
import sys
import tempfile
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from pathlib import Path
from typing import NamedTuple

from tqdm import tqdm

ROOT = Path(__file__).resolve().parent.parent

STEPS = '--backward steps --steps 11000'
MLP = '--steps 11000'
SGD = '--steps 11000 --optimizer sgd --lr 0.1'
GPT = '--model gpt --steps 1000 --batch 32 --processes 1'
LAYERNORM = f'{GPT} --norm layernorm'


class Mistake(NamedTuple):
    title: str
    function: str       # the one that has the line
    right: str          # what stands there, exactly once in this function
    wrong: str          # what is planted in its place
    proof: str          # the layer or model whose gradients show it: see python backward.py --help
    flags: str          # those of train.py for a run that uses the line
    file: str = 'backward.py'


MISTAKES = [
    Mistake('only one gradient of a repeated row is added', 'mlp_steps_backward',
            'np.add.at(dC, X, demb)',
            'dC[X] += demb', 'mlp_steps', STEPS),
    Mistake('a repeated row is assigned to, not added to', 'add_at',
            'row[e] += drows[i, e]',
            'row[e] = drows[i, e]', 'embedding', GPT),
    Mistake('the sum of the gradients begins at one', 'mlp_steps_backward',
            'dC = np.zeros_like(C)',
            'dC = np.ones_like(C)', 'mlp_steps', STEPS),
    Mistake('reshaped back in another order', 'mlp_steps_backward',
            'demb = dembcat.reshape(emb.shape)',
            "demb = dembcat.reshape(emb.shape, order='F')", 'mlp_steps', STEPS),
    Mistake('no copy: two names for one array', 'mlp_steps_backward',
            'dhprebn = dbndiff.copy()',
            'dhprebn = dbndiff', 'mlp_steps', STEPS),
    Mistake('the mean loss without its 1/N, with SGD', 'cross_entropy_backward',
            'inv_n = probs.dtype.type(1 / N)',
            'inv_n = probs.dtype.type(1)', 'cross_entropy', SGD),
    Mistake('the mean loss without its 1/N, with Adam', 'cross_entropy_backward',
            'inv_n = probs.dtype.type(1 / N)',
            'inv_n = probs.dtype.type(1)', 'cross_entropy', GPT),
    Mistake('batch norm with N, where the forward has N - 1', 'batchnorm_backward',
            'raw[i, j] * dgain[j] / n_minus_1',
            'raw[i, j] * dgain[j] / n', 'batchnorm', MLP),
    Mistake('GELU without the second term', 'gelu_backward',
            'dy * (gate + y * (1 - gate) * slope)',
            'dy * gate', 'gelu', GPT),
    Mistake('RMSNorm without the coupling in a row', 'rmsnorm_backward',
            '(gain[j] * dy[i, j] - raw[i, j] * mean)',
            'gain[j] * dy[i, j]', 'rmsnorm', GPT),
    Mistake('LayerNorm without its mean', 'layernorm_backward',
            'return dcentred - dcentred.mean(1, keepdims=True)',
            'return dcentred', 'layernorm', LAYERNORM),
    Mistake('attention without 1/sqrt(E/A)', 'attention_backward',
            'scale = qkv.dtype.type(1 / sqrt(E // A))',
            'scale = qkv.dtype.type(1)', 'attention', GPT),
    Mistake('the gradient of a branch is set, not added', 'gpt_backward',
            "dx += norm_backward(dnormed, p['gain'][2*l],",
            "dx = norm_backward(dnormed, p['gain'][2*l],", 'gpt', GPT),
    Mistake('the tied table: no gradient as the output', 'gpt_backward',
            "np.dot(dlogits.T, last, out=g['C'])",
            "g['C'][:] = 0", 'gpt', GPT),
    Mistake('the tied table: no gradient as embedding', 'gpt_backward',
            "embedding_backward(dx, tree.X, g['C'])",
            'pass', 'gpt', GPT),
    Mistake('a node reads the character it has to predict', 'grow_tree',
            'X[N], position[N] = ids[start + k], k',
            'X[N], position[N] = ids[start + k + 1], k', 'gpt', GPT, 'model.py')]


# ---- A copy of the project, and a mistake in it

def plant(folder, mistake):
    """Write the mistake into the copy of the project in `folder`.

    Raises ValueError unless the right line stands exactly once in its function.
    """
    path = Path(folder, mistake.file)
    source = path.read_text('utf-8')
    bodies = [ast.get_source_segment(source, node) for node in ast.parse(source).body
              if isinstance(node, ast.FunctionDef) and node.name == mistake.function]
    found = sum(body.count(mistake.right) for body in bodies)
    if found != 1:
        raise ValueError(f'{mistake.file}: {mistake.function} has this {found} times, not once: '
                         f'{mistake.right}')
    body = bodies[0].replace(mistake.right, mistake.wrong)
    path.write_text(source.replace(bodies[0], body), 'utf-8')


def copy_project(folder, mistake=None):
    """What is needed for checking and training, with a mistake or without, in a new folder."""
    folder.mkdir()
    for name in 'model.py', 'backward.py', 'train.py':
        shutil.copy(ROOT / name, folder)
    shutil.copytree(ROOT / 'data', folder / 'data')
    if mistake:
        plant(folder, mistake)
    return folder


def run(folder, *command, compiled=True):
    """Run Python in a copy, which has its own place for what Numba compiles."""
    env = {**os.environ, 'NUMBA_CACHE_DIR': str(folder / 'cache'),
           'NUMBA_DISABLE_JIT': str(int(not compiled))}
    return subprocess.run([sys.executable, *command], cwd=folder, env=env, capture_output=True,
                          text=True)


# ---- The checks

class Caught(NamedTuple):
    check: str          # which check it was, or 'nothing'
    value: str          # the first value that is wrong
    error: float        # how much, relative to the value


ROW = re.compile(r'(d\w+) +(\(.*?\)) +(.*?) +(ok|WRONG)')   # gradient, shape, errors, verdict


def check(folder, mistake):
    """What catches the mistake in a copy: a gradient that is wrong, or else a look ahead."""
    # Layers are proven on a few numbers: without compiling this is faster.
    done = run(folder, 'backward.py', '--only', mistake.proof, compiled=mistake.proof == 'gpt')
    rows = ROW.findall(done.stdout)
    wrong = [Caught(mistake.proof, name, max(map(float, errors.split())))
             for name, _, errors, verdict in rows if verdict == 'WRONG']
    if not rows or done.returncode != bool(wrong):
        raise RuntimeError(f'{mistake.title}: {done.stdout}{done.stderr}')
    if wrong:
        return wrong[0]
    code = f'import sys; sys.path.append({str(ROOT / "tests")!r}); import mistakes as t; '
    error = float(run(folder, '-c', code + 'print(t.look_ahead())', compiled=False).stdout)
    return Caught('causality', 'logits', error) if error > 1e-7 else Caught('nothing', '', error)


def look_ahead():
    """How much logits of the GPT depend on characters that come later, relative to the logits.

    Two words begin alike, so the logits for what follows "", "a" and "an" have to be the same.
    """
    import model as m
    import numpy as np

    words = 'anna', 'anbb'
    vocabulary = m.make_vocabulary(words)
    config = dict(m.GPT_DEFAULTS, vocab_size=len(vocabulary))
    p = m.make_parameters(config, np.random.default_rng(1), np.float64)
    model = m.Model(config, vocabulary, p, {})
    one, other = (m.predict(model, m.batch_of(model, [word]))[1]['logits'] for word in words)
    return abs(one - other)[:3].max() / abs(one).max()


def dev_loss(folder, flags):
    """The dev loss after training in a copy."""
    done = run(folder, 'train.py', *flags.split(), '--eval-every', '0')
    if done.returncode:
        raise RuntimeError(f'train.py {flags}: {done.stderr}')
    return float(re.search(r'dev (\S+)', done.stdout)[1])


# ---- The table

def run_all(mistakes, training):
    """A dict: at ('check', number) a Caught, at ('right', flags) and ('wrong', number) dev losses.

    The right program trains once for all mistakes that have the same flags.
    """
    with tempfile.TemporaryDirectory() as scratch, ThreadPoolExecutor(2) as pool:
        copies = {number: copy_project(Path(scratch, str(number)), mistake)
                  for number, mistake in mistakes.items()}
        jobs = {('check', number): partial(check, copies[number], mistake)
                for number, mistake in mistakes.items()}
        if training:
            for flags in {mistake.flags: None for mistake in mistakes.values()}:
                copy = copy_project(Path(scratch, f'right{len(jobs)}'))
                jobs['right', flags] = partial(dev_loss, copy, flags)
            for number, mistake in mistakes.items():
                jobs['wrong', number] = partial(dev_loss, copies[number], mistake.flags)
        results = pool.map(lambda job: job(), jobs.values())
        bar = tqdm(results, total=len(jobs), unit='run', leave=False, disable=None)
        return dict(zip(jobs, bar))


def main(argv=None):
    """Print the table; returns 1 if a mistake was not caught, else 0."""
    numbers = range(1, len(MISTAKES) + 1)
    parser = argparse.ArgumentParser('mistakes.py', description=__doc__.splitlines()[0])
    parser.add_argument('--proof', action='store_true', help='do not train')
    parser.add_argument('--only', metavar='N', type=int, nargs='+', choices=numbers,
                        default=numbers, help='only the mistakes with these numbers')
    args = parser.parse_args(argv)
    mistakes = {number: MISTAKES[number - 1] for number in args.only}
    results = run_all(mistakes, not args.proof)
    caught = [results['check', number] for number in mistakes]
    print(f'{"":<52}{"caught by":<23}{"error":>6}' + '   dev: right wrong' * (not args.proof))
    for (number, mistake), found in zip(mistakes.items(), caught):
        print(f'{number:>2}  {mistake.title:<47} {found.check:<14} {found.value:<9}'
              f'{found.error:>5.2f}', end='')
        if not args.proof:
            right, wrong = results['right', mistake.flags], results['wrong', number]
            print(f'{right:>10.4f} {wrong:.4f}', end='')
        print(f'\n    {mistake.right} -> {mistake.wrong}')
    missed = sum(found.check == 'nothing' for found in caught)
    print(f'\n{len(caught) - missed} of {len(caught)} mistakes are caught')
    if not args.proof:
        near = sum(abs(results['wrong', number] - results['right', mistake.flags]) < 0.01
                   for number, mistake in mistakes.items())
        print(f'{near} of {len(caught)} change the dev loss by less than 0.01')
    if any(found.check == 'causality' for found in caught):
        print('causality: all gradients are right, because forward and backward read the same '
              'wrong batch;\nbut the logits for the beginning of a word depend on what comes later')
    return int(missed > 0)


if __name__ == '__main__':
    sys.exit(main())
