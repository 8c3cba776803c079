"""Measures how fast everything is, next to PyTorch and to the machine itself: Markdown tables.

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
from concurrent.futures import ThreadPoolExecutor
from itertools import cycle, islice
from pathlib import Path
from types import SimpleNamespace
from unittest import mock

ROOT = Path(__file__).resolve().parent.parent
sys.path.insert(0, str(ROOT))

import model as m
import backward
import train

import numba
import numpy as np

try:
    import torch
    import torch.nn.functional as F
except ImportError:
    torch = None

RATES = dict(sgd=0.1, adam=0.003)
CORES = train.DEFAULTS['gpt']['processes']
BATCHES = dict(mlp=64, gpt=6)           # PyTorch gets that many different ones, over and over


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
        call()                          # brings back to the caches what the others drove out
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

def prepare(kind, **given):
    """A new training as train.py begins it: run, words, examples, and its first batches.

    A batch is a list of its shards. `characters` are those to predict in a batch, `rows` those that
    the layers compute.
    """
    with contextlib.redirect_stderr(io.StringIO()):
        run, words = train.start({'model': kind, 'eval_every': 0, **given})
    config, parts = run.config, dict(zip(('train', 'dev', 'test'), train.split(words)))
    examples = {name: m.EXAMPLES[kind](sorted(part), run.vocabulary, config['context'])
                for name, part in parts.items()}
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


# ---- The same models in PyTorch

def leaves(p):
    """The parameters as PyTorch has them: one tensor a layer, matrices of linear layers (O,I)."""
    parts = {name: list(w) if w.ndim == 3 or name == 'gain' else [w] for name, w in p.items()}
    return {name: [torch.tensor(np.ascontiguousarray(w.T) if name[0] == 'W' else w)
                   .requires_grad_() for w in ws] for name, ws in parts.items()}


def torch_mlp(config, p):
    """The loss of the MLP, as a function of a batch."""
    C, W1, b1, gain, bias, W2, b2 = (p[name][0] for name in m.MLP_PARAMETERS)
    # batch_norm takes the variance over n, the model over n - 1: gain and eps make up for it
    bessel = 1 - 1 / config['batch']
    with torch.no_grad():
        gain *= bessel**0.5

    def loss(X, Y):
        hprebn = F.linear(F.embedding(X, C).flatten(1), W1, b1)
        hpreact = F.batch_norm(hprebn, None, None, gain, bias, training=True, eps=1e-5 * bessel)
        return F.cross_entropy(F.linear(torch.tanh(hpreact), W2, b2), Y)
    return loss


def torch_gpt(config, p):
    """The loss of the GPT, as a function of a batch of padded names."""
    E, A, L = config['embd'], config['heads'], config['layers']
    C, P, gain = p['C'][0], p['P'][0], p['gain']

    def norm(x, i):
        return F.rms_norm(x, (E,), gain[i], 1e-5)

    def loss(X, Y):
        x = F.embedding(X, C) + P[:X.shape[1]]
        for l in range(L):
            qkv = F.linear(norm(x, 2*l), p['Wqkv'][l]).unflatten(2, (3, A, E // A))
            q, k, v = qkv.permute(2, 0, 3, 1, 4)
            ctx = F.scaled_dot_product_attention(q, k, v, is_causal=True)
            x = x + F.linear(ctx.transpose(1, 2).flatten(2), p['Wo'][l])
            up = F.linear(norm(x, 2*l + 1), p['Wup'][l])
            x = x + F.linear(F.gelu(up, approximate='tanh'), p['Wdown'][l])
        logits = F.linear(norm(x, -1), C)
        return F.cross_entropy(logits.flatten(0, 1), Y.flatten(), ignore_index=-100)
    return loss


def torch_batch(kind, shards):
    """The same batch as tensors, its names padded to the longest of them."""
    if kind == 'mlp':
        return [torch.tensor(ids) for ids in shards[0]]
    names = []
    for tree in shards:
        begins = np.flatnonzero(tree.position[tree.predicted_from] == 0)[1:]
        names += zip(np.split(tree.X[tree.predicted_from], begins), np.split(tree.Y, begins))
    return [torch.nn.utils.rnn.pad_sequence(
        [torch.tensor(ids) for ids in side], batch_first=True, padding_value=filler)
        for side, filler in zip(zip(*names), (0, -100))]


def theirs(job, how='foreach', threads=1):
    """As ours(), in PyTorch eager, on batches that are ready.

    `how` is the way its optimizer goes through the parameters.
    """
    config = job.config
    p = leaves(job.run.p)
    loss_of = dict(mlp=torch_mlp, gpt=torch_gpt)[config['model']](config, p)
    make = dict(sgd=torch.optim.SGD, adam=torch.optim.AdamW)[config['optimizer']]
    groups = [dict(params=[w for name in p if name[0].isupper() == matrices for w in p[name]],
                   weight_decay=matrices * config['weight_decay']) for matrices in (True, False)]
    optimizer = make(groups, lr=config['lr'], **{how: True})
    batches = [torch_batch(config['model'], shards) for shards in job.batches]
    for step, batch in enumerate(cycle(batches)):
        if torch.get_num_threads() != threads:
            torch.set_num_threads(threads)
        for group in optimizer.param_groups:
            group['lr'] = train.learning_rate(config, step)
        optimizer.zero_grad(set_to_none=True)
        loss = loss_of(*batch)
        loss.backward()
        optimizer.step()
        yield loss


def check_same_work(kind, **given):
    """Assert that the first steps have the same losses, at a learning rate that can be seen."""
    job = prepare(kind, **given, steps=20)
    for step, (a, b) in enumerate(islice(zip(ours(job), theirs(job)), 6)):
        assert abs(a - b.item()) < 1e-4, f'{kind} {given}, step {step}: {a}, PyTorch {b}'


def next_of(steps, kind):
    """A turn of steps; for PyTorch the same batches in each."""
    return turn(lambda: next(steps), whole=BATCHES[kind])


def best_of_theirs(job, cores):
    """The fastest way of PyTorch in a short race of its own: what it is, and a turn of it."""
    turns = {(how, threads): next_of(theirs(job, how, threads), job.config['model'])
             for how in ('foreach', 'fused') for threads in sorted({1, cores})}
    times = race(turns, 9)
    how, threads = best = min(turns, key=lambda way: np.median(times[way]))
    return f'{how}, {threads} thread' + 's' * (threads > 1), turns[best]


# ---- What is measured

def race_steps(kept, rounds, title, kind, settings):
    """A table of the settings {label: what is given}: ours, PyTorch at its best, the machine."""
    cores, unit, scale = (1, 'µs', 1e6) if kind == 'mlp' else (CORES, 'ms', 1e3)
    turns, jobs, rivals = dict(sgemm=sgemm(cores)), {}, {}
    for label, given in settings.items():
        job = jobs[label] = prepare(kind, **given)
        turns[label] = next_of(ours(job), kind)
        if torch:
            check_same_work(kind, **given)
            same = rivals[label] = str({name: given[name] for name in given if name != 'backward'})
            if same not in turns:
                rivals[same], turns[same] = best_of_theirs(job, cores)
    times, rows = race(turns, rounds), []
    for label, job in jobs.items():
        rival = rivals.get(label)
        rows.append([
            label, scale * times[label], job.characters / times[label],
            100 * flops(job) * times['sgemm'] / times[label],
            *([scale * times[rival], times[rival] / times[label], rivals[rival]]
              if rival else [None] * 3)])
    table(kept, title,
          ['', f'{unit} a step', 'characters a second',
           f'% of sgemm on {cores} core' + 's' * (cores > 1), f'PyTorch {unit}',
           'times faster', 'PyTorch is fastest with'], rows)


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


class Terminal(io.StringIO):
    """Takes what is written to it for a terminal's, so that the bar is drawn."""

    def isatty(self):
        return True


def train_quietly(job, steps):
    """The real loop of train.py, in a terminal; seconds a step after the first, and the Run."""
    run, ends, real = copy.deepcopy(job.run), [], train.train_step
    run.config['steps'] = steps
    few = m.EXAMPLES[run.config['model']](
        job.parts['dev'][:50], run.vocabulary, run.config['context'])

    def train_step(*args):
        loss = real(*args)
        ends.append(time.perf_counter())
        return loss

    with (tempfile.TemporaryDirectory() as folder, contextlib.redirect_stderr(Terminal()),
          mock.patch.object(train, 'train_step', train_step)):
        train.train(run, dict(train=job.examples['train'], train_part=few, dev=few),
                    os.path.join(folder, 'model.npz'))
    return (ends[-1] - ends[0]) / (steps - 1), run


def loop(kept, rounds):
    """What the bar and the rest of the loop take on top of the batch and the step."""
    turns = {}
    for key, given in (
            ('MLP, SGD', dict(kind='mlp', optimizer='sgd', lr=0.1)),
            ('MLP, Adam', dict(kind='mlp')), ('GPT, 32 names', dict(kind='gpt', batch=32))):
        job = prepare(**given)
        if given['kind'] == 'gpt':      # a part of the data, for short turns
            del job.examples['train'][1600:]
        epoch = len(job.examples['train']) // job.config['batch']
        batches = train.batches(job.config, job.examples['train'], 0, job.processes)
        turns[key, 'batch'] = turn(lambda batches=batches: next(batches), whole=epoch)
        steps = ours(job)
        turns[key, 'bare'] = turn(lambda steps=steps: next(steps), whole=epoch)
        # The first step is not timed, so this is one epoch, and the beginning of a second.
        turns[key, 'loop'] = lambda job=job, epoch=epoch: train_quietly(job, epoch + 1)[0]
    times = race(turns, max(1, rounds // 4))
    table(kept, 'The loop of training around the step',
          ['', 'µs a batch', 'µs a batch and a step', 'µs in the loop', '% on top'],
          [[key, *(1e6 * times[key, what] for what in ('batch', 'bare', 'loop')),
            100 * (times[key, 'loop'] / times[key, 'bare'] - 1)]
           for key in dict.fromkeys(key for key, _ in turns)])


def sample(kept, rounds):
    """Names sampled, and evaluation, with models that have learnt how long names are."""
    turns, sizes = {}, {}
    for kind, steps in dict(mlp=4000, gpt=400).items():
        job = prepare(kind)
        best, rng = train_quietly(job, steps)[1].best, np.random.default_rng(0)
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
    times = race({label: next_of(ours(job), kind) for label, job in jobs.items()}, rounds)
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
            f"{numba.__version__}, PyTorch {torch.__version__ if torch else 'not installed'}")


SECTIONS = dict(mlp=mlp, gpt=gpt, loop=loop, sample=sample, start=start)


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
    kept, about = [], machine()
    print(about)
    for section in chosen:
        section(kept, args.rounds)
    if args.json:
        Path(args.json).write_text(json.dumps(
            dict(machine=about, rounds=args.rounds, tables=kept), indent=1,
            default=np.ndarray.tolist, ensure_ascii=False))


if __name__ == '__main__':
    main()
