"""Measures how fast everything is, next to PyTorch, JAX and the machine itself: Markdown tables.

Other work on a machine comes and goes. So whatever is compared runs interleaved: a turn of some
tens of milliseconds for each, in an order drawn anew, for many rounds. A ratio is taken within
each round. A cell states the median of the rounds and, in brackets, the quartiles.

`python tests/bench.py --scaling` shows in 3 minutes what the cost grows with, `--scatter` in less
than one the ways to add up the gradient of an embedding, and the wrong line among them.
"""
import argparse
import contextlib
import copy
import io
import json
import multiprocessing
import os
import platform
import random
import subprocess
import sys
import tempfile
import time
import warnings
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from itertools import islice
from pathlib import Path
from types import SimpleNamespace
from unittest import mock

ROOT = Path(__file__).resolve().parent.parent
sys.path[:0] = [str(ROOT), str(ROOT / 'tests')]

import model as m
import backward
import train
from rivals import RIVALS, jax, torch

import numba
import numpy as np

RATES = dict(sgd=0.1, adam=0.003)
CORES = train.DEFAULTS['gpt']['processes']
BATCHES = dict(mlp=64, gpt=6)           # rivals get that many different ones, over and over
SECONDS = dict(mlp=0.03, gpt=0.15)      # of a turn
TO_TWO = 1750                           # steps of the GPT to a dev loss of 2.00


# ---- Timing, and showing what was timed

def turn(call, seconds=0.03, whole=1):
    """A function that makes as many calls as take about that long and returns seconds a call.

    It makes a multiple of `whole` calls, so that each turn is the same work.
    """
    def timed(n):
        begin = time.perf_counter()
        for _ in range(n):
            call()
        return (time.perf_counter() - begin) / n

    call()                              # may compile
    n = whole * max(1, round(seconds / whole / timed(whole)))

    def run():
        # Not timed: until its data is in the caches again and the threads of others are at rest.
        timed(max(1, n // 4))
        return timed(n)
    return run


def race(turns, rounds):
    """Run all turns {name: function} in each round: {name: an array of what each returned}."""
    results = {name: [] for name in turns}
    for _ in range(rounds):
        for name in random.sample(list(turns), len(turns)):
            results[name].append(turns[name]())
    return {name: np.array(values) for name, values in results.items()}


def cell(value):
    """A figure of all rounds as its median (quartiles), anything else as it is."""
    if not isinstance(value, np.ndarray):
        return str(value)
    low, middle, high = np.percentile(value, [25, 50, 75])
    digits = max(0, 2 - int(np.floor(np.log10(max(abs(middle), 1e-3)))))
    return f'{middle:,.{digits}f} ({low:,.{digits}f} … {high:,.{digits}f})'


def table(kept, title, columns, rows):
    """Print a table, a list of cells a row, and keep its figures; a column of None is left out."""
    rows = list(rows)
    shown = [i for i in range(len(columns)) if any(row[i] is not None for row in rows)]
    kept.append(dict(title=title, columns=[columns[i] for i in shown],
                     rows=[[row[i] for i in shown] for row in rows]))
    print(f'\n**{title}**\n')
    for row in columns, ['---'] * len(columns), *rows:
        print('|', ' | '.join(cell(row[i]) for i in shown), '|', flush=True)


# ---- Training, by the functions of train.py

def prepare(kind, epoch=None, **given):
    """A new training as train.py begins it: run, words, examples, and its first batches.

    If `epoch` is given, there are no more examples than for an epoch of so many batches. A batch is
    a list of its shards. `characters` are those to predict in a batch, `rows` those that the layers
    compute.
    """
    with contextlib.redirect_stderr(io.StringIO()):
        run, words = train.start({'model': kind, 'eval_every': 0, **given})
    config, parts = run.config, dict(zip(('train', 'dev', 'test'), train.split(words)))
    examples = {name: m.EXAMPLES[kind](sorted(part), run.vocabulary, config['context'])
                for name, part in parts.items()}
    if epoch:
        examples['train'] = examples['train'][:epoch * config['batch']]
    processes = config.get('processes', 1)
    batches = list(islice(zip(*(train.batches(config, examples['train'], 0, processes, k)
                                for k in range(processes))), BATCHES[kind]))
    rows, characters = (np.mean([sum(len(getattr(shard, ids)) for shard in shards)
                                 for shards in batches]) for ids in 'XY')
    return SimpleNamespace(config=config, run=run, parts=parts, examples=examples,
                           processes=processes, batches=batches, rows=rows, characters=characters)


def ours(job):
    """Each next() makes a batch and takes a step on it, as the loop in train.py; gives the loss."""
    run, config, examples = copy.deepcopy(job.run), job.config, job.examples['train']
    shapes, size = m.parameter_shapes(config), sum(w.size for w in run.p.values())
    memory = multiprocessing.RawArray('f', (job.processes + 1) * size)
    shared = np.frombuffer(memory, np.float32).reshape(job.processes + 1, size)
    flat, flat_g = shared[0], shared[1:]
    flat[:] = np.concatenate([w.ravel() for w in run.p.values()])
    run.p, g = m.views(shapes, flat), m.views(shapes, flat_g[0])
    with train.start_processes(config, examples, 0, memory, job.processes) as connections:
        for shard in train.batches(config, examples, 0, job.processes):
            yield train.train_step(run, shard, flat, flat_g, g, connections)


def flops(job):
    """Operations of a step in matrix products: x W forward, dy W^T and x^T dy backward.

    Those of attention, between a node and its ancestors, are left out: under a fiftieth of all.
    """
    V, T, E = (job.config[size] for size in ('vocab_size', 'context', 'embd'))
    if job.config['model'] == 'mlp':
        multiplications = job.rows * (T*E + V) * job.config['hidden']
    else:
        multiplications = job.rows * job.config['layers'] * 12 * E*E + job.characters * E*V
    return 3 * 2 * multiplications


def sgemm(cores):
    """A turn of float32 products of 512 x 512, on each core at once.

    It returns seconds for one operation, of all cores together.
    """
    A, B, C = np.random.default_rng(1).random((3, cores, 512, 512), np.float32)
    pool = ThreadPoolExecutor(cores)

    def product(i):
        np.dot(A[i], B[i], out=C[i])

    run = turn(lambda: list(pool.map(product, range(cores))))
    return lambda: run() / (cores * 2 * 512**3)


# ---- The rivals, and what is measured

def check_same_work(job, name, steps):
    """Assert that the first steps of a rival have the same losses as ours.

    The job should have few steps, so that the first ones have a learning rate that can be seen.
    """
    size = 6
    losses = np.concatenate([np.atleast_1d(loss) for loss in islice(steps, size)])[:size]
    expected = np.array(list(islice(ours(job), size)))
    assert np.allclose(losses, expected, rtol=0, atol=1e-4), f'{name}: {losses}, not {expected}'


def turn_of(steps, way, kind):
    """A turn of a rival, with the same batches in each; it returns seconds a step."""
    per_next = BATCHES[kind] if way == 'scan' else 1       # steps at each next()
    run = turn(partial(next, steps), SECONDS[kind], BATCHES[kind] // per_next)
    return lambda: run() / per_next


def best_of(ways, job, cores):
    """The fastest way of a rival in a short race of its own: what it is, and a turn of it."""
    kind, short = job.config['model'], copy.deepcopy(job)
    short.config['steps'] = 20
    for way, steps in ways(short, cores).items():
        check_same_work(short, way, steps)
    turns = {way: turn_of(steps, way, kind) for way, steps in ways(job, cores).items()}
    times = race(turns, 9)
    best = min(turns, key=lambda way: np.median(times[way]))
    return best, turns[best]


class Terminal(io.StringIO):
    """Takes what is written to it for a terminal's, so that the bar is drawn."""

    def isatty(self):
        return True


def train_quietly(job, steps):
    """The real loop of train.py, in a terminal: when each step ended, its loss, and the Run."""
    run, ends, losses, real = copy.deepcopy(job.run), [], [], train.train_step
    run.config['steps'] = steps
    few = m.EXAMPLES[run.config['model']](
        job.parts['dev'][:50], run.vocabulary, run.config['context'])

    def train_step(*args):
        losses.append(real(*args))
        ends.append(time.perf_counter())
        return losses[-1]

    with (tempfile.TemporaryDirectory() as folder, contextlib.redirect_stderr(Terminal()),
          mock.patch.object(train, 'train_step', train_step)):
        train.train(run, dict(train=job.examples['train'], train_part=few, dev=few),
                    os.path.join(folder, 'model.npz'))
    return SimpleNamespace(ends=ends, losses=losses, run=run)


def in_the_loop(job, epoch):
    """Seconds a step of the second epoch.

    In the first one a new process still gets its own copies of the pages of memory that it reads.
    """
    ends = train_quietly(job, 2 * epoch).ends
    return (ends[-1] - ends[epoch - 1]) / epoch


def race_steps(kept, rounds, title, kind, settings):
    """A table of the settings {label: what is given}: ours, the rivals at their best, the machine.

    "In the loop" is a step of the real training, with its batch and the bar; "bare" is a batch and
    a step and nothing else.
    """
    cores, unit, scale = (1, 'µs', 1e6) if kind == 'mlp' else (CORES, 'ms', 1e3)
    epoch = dict(mlp=512, gpt=60)[kind]                    # a part of the data, for short turns
    turns, jobs, rivals = dict(sgemm=sgemm(cores)), {}, {}
    for label, given in settings.items():
        job = jobs[label] = prepare(kind, epoch, **given)
        turns[label, 'bare'] = turn(partial(next, ours(job)), whole=epoch)
        turns[label, 'loop'] = partial(in_the_loop, job, epoch)
    for label, given in settings.items():
        for name, ways in RIVALS.items():
            key = name, str({flag: given[flag] for flag in given if flag != 'backward'})
            if key not in turns:
                rivals[key], turns[key] = best_of(ways, jobs[label], cores)
            rivals[label, name] = key
    times, rows = race(turns, rounds), []
    for label, job in jobs.items():
        bare, loop = times[label, 'bare'], times[label, 'loop']
        row = [label, scale * loop, scale * bare, 100 * (loop / bare - 1),
               100 * flops(job) * times['sgemm'] / bare]
        for name in RIVALS:
            key = rivals[label, name]
            row += [scale * times[key], times[key] / loop, rivals[key]]
        rows.append(row)
    table(kept, title,
          ['', f'{unit} in the loop', f'{unit} bare', '% on top', f'% of sgemm on {cores} core'
           + 's' * (cores > 1), *(column for name in RIVALS for column in (
               f'{name}, {unit}', f'{name} / in the loop', f'{name} is fastest with'))], rows)


def mlp(kept, rounds):
    """A step of the MLP."""
    race_steps(kept, rounds, 'A step of the MLP, 32 characters, one process', 'mlp', {
        f'hidden {hidden}, {optimizer}, {way}': dict(
            hidden=hidden, optimizer=optimizer, lr=RATES[optimizer], backward=way)
        for hidden in (64, 200) for optimizer in RATES for way in ('layers', 'steps')})


def gpt(kept, rounds):
    """A step of the GPT."""
    race_steps(kept, rounds, f'A step of the GPT, Adam, no dropout, {CORES} processes', 'gpt', {
        f'{batch} names': dict(batch=batch, dropout=0.) for batch in (32, 64)})


def recorded_step(job):
    """The calls of a step of this process: {'products' or 'other': [(function, arguments)]}.

    Products are those of np.dot. The other work is the kernels, the activations, the rows of the
    embedding, the batch and the optimizer.
    """
    calls, steps = dict(products=[], other=[]), ours(job)
    next(steps)                         # compiles the kernels, which call each other by name

    def spy(function, kind):
        def call(*args, **kwargs):
            calls[kind].append((function, args, kwargs))
            return function(*args, **kwargs)
        return call

    with contextlib.ExitStack() as stack:
        put = stack.enter_context
        put(mock.patch.object(np, 'dot', spy(np.dot, 'products')))
        put(mock.patch.object(m, 'embedding', spy(m.embedding, 'other')))
        for module in m, backward, train:
            for name, function in list(vars(module).items()):
                if isinstance(function, numba.core.dispatcher.Dispatcher):
                    put(mock.patch.object(module, name, spy(function, 'other')))
        for functions in (m.ACTIVATIONS, m.NORMS, backward.ACTIVATIONS_BACKWARD,
                          backward.NORMS_BACKWARD, train.OPTIMIZERS):
            put(mock.patch.dict(functions, {name: spy(function, 'other')
                                            for name, function in functions.items()}))
        next(steps)
    return calls


def replay(calls):
    """A function that makes the recorded calls again."""
    def run():
        for function, args, kwargs in calls:
            function(*args, **kwargs)
    return run


def where(kept, rounds):
    """Where the time of a step goes, on one core."""
    turns, jobs = dict(sgemm=sgemm(1)), {}
    for label, given in {'MLP, hidden 64': dict(kind='mlp'),
                         'MLP, hidden 200': dict(kind='mlp', hidden=200),
                         'GPT, 32 names': dict(kind='gpt', batch=32, processes=1),
                         'GPT, 64 names': dict(kind='gpt', processes=1)}.items():
        job = jobs[label] = prepare(**given)
        turns[label, 'step'] = turn(partial(next, ours(job)), SECONDS[given['kind']])
        for part, calls in recorded_step(job).items():
            turns[label, part] = turn(replay(calls))
    times, rows = race(turns, rounds), []
    for label, job in jobs.items():
        step, products, other = (1e6 * times[label, part] for part in ('step', 'products', 'other'))
        rows.append([label, step, products, other, step - products - other,
                     1e8 * flops(job) * times['sgemm'] / products])
    table(kept, 'Where the time of a step goes, Adam, one process, in µs',
          ['', 'whole step', 'products', 'other kernels and layers', 'the rest: Python, caches',
           'products: % of sgemm'], rows)


def whole(kept, rounds):
    """The GPT from the first step to a dev loss of 2.00, here and in PyTorch, the same steps."""
    job = prepare('gpt', steps=TO_TWO)
    losses, dev, turns = {}, {}, {}

    def here():
        done = train_quietly(job, TO_TWO)
        losses['here'] = done.losses
        dev['loss'] = train.evaluate(done.run.best, job.examples['dev'])
        return done.ends[-1] - done.ends[0]

    turns['here'] = here
    if torch:
        ways = RIVALS['PyTorch']
        way, _ = best_of(ways, job, CORES)
        shards = [train.batches(job.config, job.examples['train'], 0, job.processes, k)
                  for k in range(job.processes)]
        job.batches = list(islice(zip(*shards), TO_TWO))
        rival = f'PyTorch, {way}'

        def there():
            steps = ways(job, CORES)[way]
            begin = time.perf_counter()
            losses[rival] = list(islice(steps, TO_TWO))
            return time.perf_counter() - begin

        turns[rival] = there
    times = race(turns, max(1, rounds // 10))
    table(kept, f"{TO_TWO} steps of the GPT, which bring the dev loss to {dev['loss']:.3f}",
          ['', 's', 'times as long', 'mean loss of the last 100 batches'],
          [[name, times[name], times[name] / times['here'], f'{np.mean(losses[name][-100:]):.3f}']
           for name in turns])


def sample(kept, rounds):
    """Names sampled, and evaluation, with models that have learnt how long names are."""
    turns, sizes = {}, {}
    for kind, steps in dict(mlp=4000, gpt=400).items():
        job = prepare(kind)
        best, rng = train_quietly(job, steps).run.best, np.random.default_rng(0)
        sizes[kind] = len(''.join(job.parts['dev'])) + len(job.parts['dev'])
        turns[kind, 'names'] = turn(lambda best=best, rng=rng: m.generate(best, 1000, rng))
        turns[kind, 'dev'] = turn(
            lambda best=best, job=job: train.evaluate(best, job.examples['dev']))
    times = race(turns, max(1, rounds // 4))
    table(kept, 'Sampling, 1,000 names at once, and evaluating',
          ['', 'names a second', 's for 10,000', 'ms to evaluate dev', 'characters a second'],
          [[kind, 1000 / times[kind, 'names'], 10 * times[kind, 'names'],
            1e3 * times[kind, 'dev'], sizes[kind] / times[kind, 'dev']] for kind in sizes])


# What children run. A process counts the memory of the one that started it as its own peak, so
# the one that measures is started by a small one, which reports on it.
IMPORTS = '''
import time
begin = time.time()
import model, backward, train, sample
print(time.time() - begin)
'''
FIRST_STEP = '''
import os, sys, time
import train
def first(*args, step=train.train_step):
    step(*args)
    print(time.time() - float(sys.argv[1]), flush=True)
    os._exit(0)
train.train_step = first
train.main(sys.argv[2:])
'''
PEAK = '''
import resource, subprocess, sys
subprocess.run(sys.argv[1:], check=True, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)
print(resource.getrusage(resource.RUSAGE_CHILDREN).ru_maxrss)
'''


def child(cache, code, *argv):
    """The number that a Python program prints, its kernels kept in the folder `cache`."""
    done = subprocess.run([sys.executable, '-c', code, *argv], check=True, capture_output=True,
                          text=True, cwd=ROOT, env={**os.environ, 'NUMBA_CACHE_DIR': str(cache)})
    return float(done.stdout)


def peak_memory(cache, *argv):
    """The most memory in MB that one process of train.py takes, from beginning to end."""
    unit = 2**20 if sys.platform == 'darwin' else 2**10
    with tempfile.TemporaryDirectory() as folder:
        return child(cache, PEAK, sys.executable, str(ROOT / 'train.py'), '--out',
                     os.path.join(folder, 'model.npz'), *argv) / unit


def start(kept, rounds):
    """From the start of a process to its first step, imports, and memory."""
    def first_step(cache, kind):
        return child(cache, FIRST_STEP, str(time.time()), '--model', kind, '--out',
                     os.path.join(cache, 'model.npz'))

    def cold(kind):
        with tempfile.TemporaryDirectory() as empty:
            return first_step(empty, kind)

    with tempfile.TemporaryDirectory() as cache:
        turns = {}
        for kind in m.EXAMPLES:
            first_step(cache, kind)     # fills it
            turns[kind, 'cold'] = lambda kind=kind: cold(kind)
            turns[kind, 'warm'] = lambda kind=kind: first_step(cache, kind)
            turns[kind, 'peak'] = lambda kind=kind: peak_memory(
                cache, '--model', kind, '--steps', '100')
        turns['import'] = lambda: child(cache, IMPORTS)
        times = race(turns, min(2, rounds))
    table(kept, 'Seconds from the start of the process to its first step; importing all four '
          'modules; most memory of a process in a run of 100 steps',
          ['', 'kernels to compile', 'kernels kept', 'imports', 'MB'],
          [[kind, times[kind, 'cold'], times[kind, 'warm'], times['import'], times[kind, 'peak']]
           for kind in m.EXAMPLES])


# ---- Scaling

def grow(kept, rounds, title, kind, settings):
    """A table of the cost of a step against the settings {label: what is given}."""
    jobs = {label: prepare(kind, **given) for label, given in settings.items()}
    times = race({label: turn(partial(next, ours(job)), SECONDS[kind])
                  for label, job in jobs.items()}, rounds)
    first = next(iter(jobs))
    table(kept, title,
          ['', 'µs a step', 'against the first', 'characters a step', 'µs a character'],
          [[label, 1e6 * times[label], times[label] / times[first], f'{job.characters:.0f}',
            1e6 * times[label] / job.characters] for label, job in jobs.items()])


def write_lines(path, count, length=None):
    """A file of lines, each of some names that are joined, and cut if a length is given."""
    names, rng = m.NAMES.read_text('utf-8').split(), random.Random(1)
    joined = 2 if length is None else length // 2 + 1      # no name is shorter than 2
    path.write_text(''.join(f"{''.join(rng.choices(names, k=joined))[:length]}\n"
                            for _ in range(count)))
    return str(path)


def scaling(kept, rounds):
    """How the cost grows with everything."""
    doubling = [2**k for k in range(10)]
    sizes = [('batch', doubling[3:], 'mlp', 'characters'), ('batch', doubling[3:], 'gpt', 'names'),
             ('hidden', doubling[5:9], 'mlp', 'hidden units'), ('embd', doubling[5:9], 'gpt', ''),
             ('layers', doubling[:4], 'gpt', ''), ('context', doubling[:5], 'mlp', 'characters'),
             ('processes', sorted({1, CORES}), 'gpt', '')]
    for name, values, kind, unit in sizes:
        grow(kept, rounds, f'{kind.upper()}: a step against --{name}'
             + (f' ({unit})' if unit else ''), kind,
             {value: {'batch': 32, name: value} for value in values})
    with tempfile.TemporaryDirectory() as folder:
        folder = Path(folder)
        grow(kept, rounds, 'GPT: a step against the length of the words', 'gpt',
             {n: dict(batch=32, data=write_lines(folder / f'{n}.txt', 2000, n))
              for n in doubling[2:7]})
        rows = []
        for count in 1000, 6000, 32000, 206000:
            path = write_lines(folder / f'{count}.txt', count)
            load = turn(lambda path=path: prepare('mlp', data=path))
            peaks = [race({kind: lambda path=path, kind=kind: peak_memory(
                folder, '--model', kind, '--data', path, '--steps', '100')}, 1)[kind]
                for kind in m.EXAMPLES]
            rows.append([f'{count:,}', f'{os.path.getsize(path) / 1e6:.2f}',
                         race(dict(load=load), 3)['load'], *peaks])
    table(kept, 'Against the data: loading it, and most memory of a process in a run of 100 steps',
          ['lines', 'MB on disk', 's to load', 'MB, MLP', 'MB, GPT'], rows)


# ---- The gradient of an embedding

VOCABULARIES = 27, 1000, 30000


def contexts(V):
    """Ids X (32,3): of names for 27 characters, otherwise drawn by Zipf's law.

    By this law the k-th id has a probability proportional to 1/k, about as words in a text have.
    """
    rng = np.random.default_rng(1)
    if V == 27:
        return m.first_batch(m.MLP_DEFAULTS, 32, rng)[1].X
    weights = 1 / np.arange(1, V + 1)
    return rng.choice(V, (32, 3), p=weights / weights.sum())


def onehot(X, V):
    """A row for each id in X: 1 in the column of the id, 0 in all others."""
    hot = np.zeros((X.size, V), np.float32)
    hot[np.arange(X.size), X.reshape(-1)] = 1
    return hot


def ways_to_add(dC, X, demb):
    """{the way: a call that is to add the rows of demb (N,T,E) to the rows X (N,T) of dC (V,E)}."""
    V, E = dC.shape
    dembcat, drows = demb.reshape(len(X), -1), demb.reshape(-1, E)

    def double_loop():
        for n in range(X.shape[0]):
            for t in range(X.shape[1]):
                dC[X[n, t]] += demb[n, t]

    def product():
        dC[...] += onehot(X, V).T @ drows

    def line_that_looks_right():
        dC[X] += demb

    ways = {'the double loop in Python': double_loop,
            'np.add.at(dC, X, demb)': lambda: np.add.at(dC, X, demb),
            'dC += onehot(X).T @ demb': product,
            'embedding_backward(demb, X, dC)':
                lambda: backward.embedding_backward(dembcat, X, dC)}
    if torch:
        tensor, index, source = map(torch.from_numpy, (dC, X.reshape(-1), drows))
        ways['dC.index_add_(0, X, demb), PyTorch'] = lambda: tensor.index_add_(0, index, source)
    return {**ways, 'dC[X] += demb': line_that_looks_right}


def ways_to_fetch(C, X):
    """{the way: a call that returns the rows X (N,T) of C (V,E) side by side, (N,T*E)}."""
    return {'embedding(C, X)': lambda: m.embedding(C, X),
            'onehot(X) @ C': lambda: (onehot(X, len(C)) @ C).reshape(len(X), -1)}


def race_ways(kept, rounds, title, calls, result):
    """A table of the calls {V: {way: call}}: is each result what the first way gives, and its time.

    result(V, call) is what a call computes.
    """
    results = {V: {way: result(V, call) for way, call in calls[V].items()} for V in calls}
    times = race({(V, way): turn(call) for V in calls for way, call in calls[V].items()}, rounds)
    ways = list(calls[27])
    right = {way: all(np.allclose(results[V][way], results[V][ways[0]], atol=1e-5) for V in calls)
             for way in ways}
    table(kept, title, ['', 'right', *(f'µs, V = {V:,}' for V in calls)],
          [[way, 'right' if right[way] else 'wrong', *(1e6 * times[V, way] for V in calls)]
           for way in ways])


def scatter(kept, rounds):
    """The ways to add up the gradient of C and to fetch its rows; what a large table costs."""
    E, rng = m.MLP_DEFAULTS['embd'], np.random.default_rng(2)
    X = {V: contexts(V) for V in VOCABULARIES}
    C = {V: rng.standard_normal((V, E), np.float32) for V in X}
    dC, demb = {V: np.zeros_like(C[V]) for V in X}, rng.standard_normal((32, 3, E), np.float32)

    def gradient(V, add):
        dC[V][:] = 0
        add()
        return dC[V].copy()

    distinct = ', '.join(f'{len(np.unique(X[V]))} of {V:,}' for V in X)
    race_ways(kept, rounds, f'Adding 96 rows of demb to {distinct} rows of dC (ids of names for '
              "27, by Zipf's law for more)",
              {V: ways_to_add(dC[V], X[V], demb) for V in X}, gradient)
    race_ways(kept, rounds, 'Fetching 96 rows of C, by looking them up, and as the product with '
              'the matrix of a first layer',
              {V: ways_to_fetch(C[V], X[V]) for V in X}, lambda V, fetch: fetch())
    dense(kept, rounds)


def dense(kept, rounds):
    """How much of a step is work on rows that the batch has not fetched.

    All rows of dC are set to 0, and Adam goes over all rows of C. Sparse gradients, which hold only
    the rows that were fetched, are among what this project leaves out.
    """
    V, E = VOCABULARIES[-1], 64
    config, rng = dict(m.MLP_DEFAULTS, vocab_size=V, embd=E), np.random.default_rng(1)
    shapes, batch = m.parameter_shapes(config), m.MLPBatch(contexts(V), contexts(V)[:, 0].copy())
    flat = np.concatenate([w.ravel() for w in m.make_parameters(config, rng).values()])
    flat_g, moments = np.zeros_like(flat), np.zeros((2, flat.size), np.float32)
    p, g = m.views(shapes, flat), m.views(shapes, flat_g)
    C, dC, moments_of_C = p['C'].ravel(), g['C'], np.zeros((2, V * E), np.float32)
    demb = rng.standard_normal((len(batch.X), batch.X.shape[1] * E), np.float32)

    def step():
        backward.gradient(config, p, batch, g)
        train.adam(flat, flat_g, moments, 0., 1)           # at the rate 0 each step is the same

    parts = {'the whole step': step,
             'adding up dC': lambda: backward.embedding_backward(demb, batch.X, dC),
             'setting dC to 0': lambda: dC.fill(0),
             'Adam over C': lambda: train.adam(C, dC.ravel(), moments_of_C, 0., 1)}
    times = race({part: turn(call) for part, call in parts.items()}, rounds)
    times['the last two'] = times['setting dC to 0'] + times['Adam over C']
    table(kept, f'A step of the MLP with Adam and a table of {V:,} x {E}, of which the batch '
          f'fetches {len(np.unique(batch.X))} rows', ['', 'ms', '% of the step'],
          [[part, 1e3 * seconds, 100 * seconds / times['the whole step']]
           for part, seconds in times.items()])


# ---- The command line

def machine():
    """What all of this ran on."""
    name = platform.processor() or platform.machine()
    with contextlib.suppress(OSError, IndexError):
        name = Path('/proc/cpuinfo').read_text().split('model name\t: ')[1].split('\n')[0]
    blas = np.show_config(mode='dicts')['Build Dependencies']['blas']
    kernel = ''
    with contextlib.suppress(ImportError):
        from threadpoolctl import threadpool_info
        kernel = ' '.join(sorted({part['architecture'] for part in threadpool_info()
                                  if part.get('internal_api') == 'openblas'}))
    return (f'{name}, {os.cpu_count()} cores; Python {platform.python_version()}, NumPy '
            f"{np.__version__} with {blas['name']} {blas['version']} {kernel}, Numba "
            f"{numba.__version__}, PyTorch {torch.__version__ if torch else 'not installed'}, "
            f"JAX {jax.__version__ if jax else 'not installed'}")


SECTIONS = dict(mlp=mlp, gpt=gpt, where=where, whole=whole, sample=sample, start=start)


def main(argv=None):
    parser = argparse.ArgumentParser('bench.py', description=__doc__)
    parser.add_argument('--rounds', type=int, default=30, help='the more the surer (30)')
    parser.add_argument('--only', choices=SECTIONS, help='one part of it')
    parser.add_argument('--scaling', action='store_true', help='instead: what the cost grows with')
    parser.add_argument('--scatter', action='store_true',
                        help='instead: the ways to add up the gradient of an embedding')
    parser.add_argument('--json', metavar='FILE', help='keep the figures of all rounds')
    args = parser.parse_args(argv)
    chosen = [scaling] if args.scaling else [scatter] if args.scatter else \
        [SECTIONS[args.only]] if args.only else SECTIONS.values()
    # JAX warns of a fork, as it has threads. The new processes use only NumPy and Numba.
    warnings.filterwarnings('ignore', 'os.fork')
    kept, about = [], machine()
    print(about)
    try:
        for section in chosen:
            section(kept, args.rounds)
    finally:                            # Python would wait for processes that are still at work
        for process in multiprocessing.active_children():
            process.kill()
    if args.json:
        Path(args.json).write_text(json.dumps(
            dict(machine=about, rounds=args.rounds, tables=kept), indent=1,
            default=np.ndarray.tolist, ensure_ascii=False))


if __name__ == '__main__':
    main()
