"""A language model from scratch, file 3 of 4: training, and all that is about files and runs.

`python train.py` trains on data/names.txt, prints the losses and ten invented names, and saves a
checkpoint, from which sample.py makes more names.
"""
import argparse
import contextlib
import hashlib
import importlib.util
import json
import math
import multiprocessing
import os
import random
import re
import shlex
import signal
import sys
import threading
import time
import unicodedata
import warnings
from collections import Counter
from dataclasses import dataclass, field
from itertools import count
from pathlib import Path

import model as m
import backward
from model import kernel

import numpy as np
from tqdm import tqdm


# ---- Optimizers. Source: A.7
# The parameters w (size,) take the t-th step against their gradient dw (size,). moments has 0, 1 or
# 2 rows (size,), which hold what an optimizer remembers of the gradients before.

def sgd(w, dw, moments, lr, t):
    """w = w - lr dw."""
    w -= lr * dw                                           # (size,)


def momentum(w, dw, moments, lr, t):
    """v = 0.9 v + dw, w = w - lr v."""
    v = moments[0]                                         # (size,)
    v[:] = 0.9 * v + dw                                    # (size,)
    w -= lr * v                                            # (size,)


@kernel
def adam(w, dw, moments, lr, t):
    """Running means of the gradient and of its square, both corrected for their start at zero."""
    one, beta1, beta2 = w.dtype.type(1), w.dtype.type(0.9), w.dtype.type(0.999)
    corrected_lr, eps = w.dtype.type(lr / (1 - 0.9**t)), w.dtype.type(1e-8)
    correction = w.dtype.type(1 / (1 - 0.999**t))          # of the mean of the squares
    mean, square = moments[0], moments[1]
    for i in range(len(w)):
        mean[i] = beta1 * mean[i] + (one - beta1) * dw[i]
        square[i] = beta2 * square[i] + (one - beta2) * dw[i] * dw[i]
        w[i] -= corrected_lr * mean[i] / (math.sqrt(square[i] * correction) + eps)


OPTIMIZERS = dict(adam=adam, momentum=momentum, sgd=sgd)
MOMENTS = dict(adam=2, momentum=1, sgd=0)


def learning_rate(config, step):
    """Linear warm-up from 1 % over the first twentieth of the run, then linear decay to zero."""
    done = step / config['steps']
    warmup, decay = 0.01 + done / 0.05, (1 - done) / 0.95  # both are about 1 at a twentieth
    return config['lr'] * min(warmup, decay)


# ---- Errors and messages

class UserError(Exception):
    """Something that the user can change; the text is one sentence that says what."""


def log(line):
    """Print a line on standard error, above the progress bar."""
    tqdm.write(line, file=sys.stderr)


def command(main):
    """Make main(argv) print in UTF-8, and turn errors into one sentence and an exit status."""
    def run(argv=None):
        for stream in sys.stdout, sys.stderr:
            if hasattr(stream, 'reconfigure'):             # a notebook's stream has no such method
                stream.reconfigure(encoding='utf-8', errors='backslashreplace')
        try:
            with np.errstate(all='ignore'):                # a model that diverged may overflow
                status = main(argv) or 0
            sys.stdout.flush()
            return status
        except KeyboardInterrupt:
            log('interrupted')
            return 130
        except BrokenPipeError:         # as with `| head`: whoever reads has read enough
            sys.stdout = None           # or Python would fail to flush it at exit
            return 0
        except (UserError, OSError, MemoryError) as error:
            log(f'{Path(sys.argv[0]).name}: {str(error) or "not enough memory"}')
            return 2
    return run


# ---- Data: one word a line of a UTF-8 text

# Files that are often given by mistake: how they begin, and what to say.
NOT_TEXT = {b'\x1f\x8b': 'is compressed: unpack it with gunzip',
            b'PK\x03\x04': 'is a zip archive or a spreadsheet: unpack it, or save it as text',
            b'\xd0\xcf\x11\xe0': 'is a spreadsheet or a document: save it as text',
            b'%PDF': 'is a PDF file: save it as text',
            **dict.fromkeys([b'\x89PNG', b'\xff\xd8\xff', b'GIF8'], 'is a picture')}


def read_lines(path):
    """The lines of a UTF-8 text, in NFC and without spaces at their ends, and the file's sha256."""
    raw = Path(path).read_bytes()
    for begin, what in NOT_TEXT.items():
        if raw.startswith(begin):
            raise UserError(f'{path} {what}')
    try:
        text = raw.decode('utf-8')
    except UnicodeDecodeError as error:
        byte, encoding = raw[error.start], 'its encoding, e.g. WINDOWS-1251 if it is Russian'
        if 0x80 <= byte < 0xa0:         # in WINDOWS-1252 quotes and dashes, in ISO-8859 unused
            encoding = 'WINDOWS-1252, probably'
        if raw[:2] in (b'\xff\xfe', b'\xfe\xff'):
            encoding = 'UTF-16'
        raise UserError(f'{path} is not UTF-8: byte {error.start} is 0x{byte:02x}; convert it from '
                        f'{encoding}: iconv -f ENCODING -t UTF-8 FILE > NEW')
    if '\0' in text:
        raise UserError(f'{path} is not a text file: it has a NUL byte')
    text = unicodedata.normalize('NFC', text).replace('\r\n', '\n').replace('\r', '\n')
    # An editor or `cat` may have left byte-order marks (U+FEFF) at the beginning of lines.
    return [line.strip(' \t\ufeff') for line in text.split('\n')], hashlib.sha256(raw).hexdigest()


def split(words):
    """Train, dev, test: 80, 10 and 10 % of the shuffled words; an empty part gets all of them."""
    words = words.copy()
    random.Random(42).shuffle(words)
    end1, end2 = int(0.8 * len(words)), int(0.9 * len(words))
    return words[:end1] or words, words[end1:end2] or words, words[end2:] or words


def read_words(path, limit):
    """The words of at most `limit` characters, and the file's sha256; logs what was found."""
    lines, sha256 = read_lines(path)
    found = [line for line in lines if line]
    words = [word for word in found if len(word) <= limit]
    looks = ''
    if sum(line[0] in '[{"' for line in found) > len(found) / 2:
        looks = ' (it looks like JSON)'
    elif sum('\t' in line or ',' in line or ';' in line for line in found) > len(found) / 2:
        looks = ' (it looks like a table)'
    if not words:
        raise UserError(f'{path} has no word of 1 to {limit} characters, one a line'
                        + (looks or ': see --max-len'))
    train, dev, _ = split(words)
    known, distinct = set(train), len(set(words))
    log(f'{path}: {len(words)} words, {distinct} of them distinct, longest {max(map(len, words))}, '
        f'{len(set().union(*words))} characters')
    log(f'{sum(word in known for word in dev) / len(dev):.0%} of the dev words are in train too')
    if len(words) < len(found):
        log(f'skipped {len(found) - len(words)} words of more than {limit} characters')
    if looks:
        log(f'warning: each line is learnt as one word{looks}: keep nothing but the words')
    if re.search('[\ufffd\x80-\x9f]', ''.join(words)):
        log('warning: some characters seem to come from a wrong encoding (U+FFFD, or controls)')
    return words, sha256


def bigram_loss(train_words, words, V):
    """The mean loss on `words` of a bigram model: counted pairs of characters of train_words.

    P(b | a) = (count(a, b) + kinds(a) P(b)) / (count(a) + kinds(a))
    where kinds(a) is how many different characters follow a (Witten-Bell smoothing). P(b) is
    smoothed in the same way, by 1 / V.
    """
    pairs = Counter(pair for word in train_words for pair in zip('\0' + word, word + '\0'))
    counts, kinds = Counter(), Counter()
    # counts[c] is also how often c comes first in a pair, as both ends of a word are \0.
    for (a, b), times in pairs.items():
        counts[b] += times
        kinds[a] += 1
    total, losses = counts.total(), []
    for word in words:
        for a, b in zip('\0' + word, word + '\0'):
            p = (counts[b] + len(counts) / V) / (total + len(counts))              # P(b)
            if counts[a]:
                p = (pairs[a, b] + kinds[a] * p) / (counts[a] + kinds[a])        # P(b | a)
            losses.append(-math.log(p))
    return sum(losses) / len(losses)


# Each use of random numbers has its own generator, with a tuple as seed: (FIRST_VALUES, seed),
# (ORDER, seed, epoch), (DROPOUT, seed, step, k) and (INVENT, seed, step). Here seed is --seed, and
# k the number of the process.
FIRST_VALUES, ORDER, DROPOUT, INVENT = range(4)


def batches(config, examples, step, shards=1, k=0):
    """The batches from a step on. A batch of the GPT is split into shards, one for each process,
    and only shard k is yielded.

    Their order depends on the seed and the epoch alone, so that a resumed run gets the same ones.
    """
    size = min(config['batch'], len(examples))
    while True:
        epoch, taken = divmod(step, len(examples) // size)              # taken in this epoch
        rng = np.random.default_rng((ORDER, config['seed'], epoch))
        order = rng.permutation(len(examples))
        if config['model'] == 'mlp':
            X, Y = m.mlp_batch(examples, order)            # of the whole epoch, for speed
        for begin in range(taken * size, len(order) - size + 1, size):
            end = begin + size
            step += 1
            if config['model'] == 'mlp':
                yield m.MLPBatch(X[begin:end], Y[begin:end])
            else:
                chosen = np.sort(order[begin:end])         # words that begin alike share a shard
                yield m.gpt_batch(examples, np.array_split(chosen, shards)[k])


# ---- A run and its steps

@dataclass
class Run:
    """A training run: what a checkpoint keeps."""
    config: dict            # sizes and choices: the defaults, replaced by what the user chose
    vocabulary: str
    p: dict                 # the parameters by name
    moments: np.ndarray     # (0 to 2, size)  what the optimizer remembers
    best: m.Model           # a copy of the model with the lowest dev loss
    step: int = 0           # how many steps were taken
    history: list = field(default_factory=list)            # of (step, train loss, dev loss)

    def best_step(self):
        """The step of the lowest dev loss; 0 before the first evaluation."""
        return int(min(self.history, key=lambda row: row[2])[0]) if self.history else 0


SIGNALS = signal.SIGINT, signal.SIGTERM, *([signal.SIGHUP] if hasattr(signal, 'SIGHUP') else [])


def dropout_masks(config, N, rng):
    """Masks for gpt(): 0 with the probability of the dropout rate, otherwise 1 / (1 - rate)."""
    kept = rng.random((2*config['layers'], N, config['embd']), np.float32) >= config['dropout']
    return kept * np.float32(1 / (1 - config['dropout']))  # (2*L, N, E)


def shard_gradient(config, p, shard, g, step, k=0):
    """Fill g with the gradient of the mean loss of the k-th shard; returns that loss."""
    masks = None
    if config.get('dropout'):
        rng = np.random.default_rng((DROPOUT, config['seed'], step, k))
        masks = dropout_masks(config, len(shard.X), rng)
    return backward.gradient(config, p, shard, g, masks)[0]


def work(connection, to_close, config, examples, step, memory, processes, k):
    """What process k does: at each message it computes its shard, and answers with the loss.

    `memory` is shared by all processes: the parameters, then a gradient for each process.
    """
    for number in SIGNALS:
        signal.signal(number, signal.SIG_IGN)              # process 0 handles them
    # to_close: process 0's ends of the pipes, of which a fork gets copies. If one stayed open,
    # recv() would wait for ever after process 0 has died.
    for copy in to_close:
        copy.close()
    shared = np.frombuffer(memory, np.float32).reshape(processes + 1, -1)
    p = m.views(m.parameter_shapes(config), shared[0])
    g = m.views(m.parameter_shapes(config), shared[k + 1])
    with contextlib.suppress(EOFError, ConnectionError):   # process 0 has ended
        for shard in batches(config, examples, step, processes, k):
            connection.recv()
            connection.send((shard_gradient(config, p, shard, g, step, k), len(shard.Y)))
            step += 1


@contextlib.contextmanager
def start_processes(config, examples, step, memory, processes):
    """Within this context processes 1, 2, ... are at work; it gives a connection to each."""
    connections, started = [], []
    try:
        for k in range(1, processes):
            connection, theirs = multiprocessing.Pipe()
            connections.append(connection)
            started.append(multiprocessing.Process(target=work, daemon=True, args=(
                theirs, connections, config, examples, step, memory, processes, k)))
            started[-1].start()
            theirs.close()
        yield connections
    except (EOFError, ConnectionError):                    # by send() or recv() in train_step
        raise UserError('a process of this run has died; --resume goes on from the last checkpoint')
    finally:
        for process in started:
            process.kill()              # nothing that it still computes is needed
            process.join()


def train_step(run, shard, flat, flat_g, g, connections):
    """Take a step on a batch, of which `shard` is the first shard; returns its mean loss.

    flat (size,) has all parameters, flat_g (processes,size) a gradient for each process. g is row 0
    of flat_g, that of this process, as arrays by name.
    """
    config, dw = run.config, flat_g[0]
    lr = learning_rate(config, run.step)
    for connection in connections:
        connection.send(None)
    loss = shard_gradient(config, run.p, shard, g, run.step)
    if connections:                     # a shard counts by its number of predictions
        answers = [(loss, len(shard.Y)), *(connection.recv() for connection in connections)]
        losses, counts = zip(*answers)
        weights = np.divide(counts, sum(counts), dtype=np.float32)              # (processes,)
        loss, dw = weights @ losses, weights @ flat_g                           # () (size,)
    if config['weight_decay']:
        for name, w in run.p.items():
            if name[0].isupper():       # only matrices; gains and biases are in lower case
                w *= 1 - lr * config['weight_decay']
    run.step += 1
    OPTIMIZERS[config['optimizer']](flat, dw, run.moments, lr, run.step)
    return loss


# ---- Evaluation

def batchnorm_statistics(p, examples):
    """The mean and the variance of hprebn over all examples, in blocks to save memory."""
    total, squares, N = 0, 0, len(examples)
    for begin in range(0, N, 4096):
        emb = m.embedding(p['C'], examples[begin:begin + 4096, :-1])            # (4096, T*E)
        hprebn = m.linear(emb, p['W1'], p['b1'])                                # (4096, H)
        total = total + hprebn.sum(0, dtype=np.float64)                         # (H,)
        squares = squares + np.square(hprebn, dtype=np.float64).sum(0)          # (H,)
    mean = total / N                                                            # (H,)
    var = np.maximum(squares - N * mean**2, 0) / (N - 1)                        # (H,)
    return dict(bnmean=mean.astype(p['C'].dtype), bnvar=var.astype(p['C'].dtype))


def evaluate(model, examples):
    """The mean loss of a model over all examples, in nats a character."""
    total, N = 0, 0
    size = 4096 if model.config['model'] == 'mlp' else 64  # small enough for the caches
    for begin in range(0, len(examples), size):
        chosen = np.arange(begin, min(begin + size, len(examples)))
        batch = m.BATCH[model.config['model']](examples, chosen)
        total += m.predict(model, batch)[0] * len(batch.Y)
        N += len(batch.Y)
    return total / N


def invent(model, step, n):
    """n words, from a generator of their own, so that training does not depend on them.

    They are fewer if the model seldom ends a word.
    """
    rng, words = np.random.default_rng((INVENT, model.config['seed'], step)), []
    for _ in range(10):
        if len(words) < n:
            words += m.generate(model, n, rng)
    return words[:n]


# ---- Checkpoints: one .npz file, without pickled objects

FORMAT = 2


def save(path, run):
    """Write a checkpoint; whatever happens, `path` has either the whole old file or the new one."""
    arrays = dict(
        format=FORMAT, config=json.dumps(run.config, ensure_ascii=False), vocabulary=run.vocabulary,
        step=run.step, history=np.reshape(run.history, (-1, 3)), moments=run.moments)
    arrays |= {f'latest.{name}': w for name, w in run.p.items()}
    arrays |= {f'best.{name}': w for name, w in {**run.best.p, **run.best.statistics}.items()}
    try:
        Path(path).parent.mkdir(parents=True, exist_ok=True)
        with open(f'{path}.tmp', 'wb') as file:
            np.savez(file, **arrays)
            file.flush()
            os.fsync(file.fileno())     # on the disk before it takes the old file's place
        os.replace(f'{path}.tmp', path)
    except OSError as error:
        raise UserError(f'cannot write {path}: {error.strerror}')


def load(path):
    """The Run in a checkpoint."""
    try:
        with np.load(path, allow_pickle=False) as file:
            arrays = {name: file[name] for name in file.files}
        if arrays['format'] != FORMAT:
            raise ValueError(f'its format is not {FORMAT}')
        config, vocabulary = json.loads(str(arrays['config'])), str(arrays['vocabulary'])
        shapes = m.parameter_shapes(config)
        latest = {name: arrays[f'latest.{name}'] for name in shapes}
        best = {name: arrays[f'best.{name}'] for name in shapes}
        statistics = {name: arrays[f'best.{name}'] for name in ('bnmean', 'bnvar')
                      if f'best.{name}' in arrays}
        for name, w in [*latest.items(), *best.items()]:
            if w.shape != shapes[name] or not np.isfinite(w).all():
                raise ValueError(f'{name} has a wrong shape or is not finite')
        size = sum(w.size for w in latest.values())
        if arrays['moments'].shape != (MOMENTS[config['optimizer']], size):
            raise ValueError('moments has a wrong shape')
        best = m.Model(config, vocabulary, best, statistics)
        return Run(config, vocabulary, latest, arrays['moments'], best, int(arrays['step']),
                   arrays['history'].tolist())
    except Exception as error:          # a file that is missing, damaged or something else
        raise UserError(f'cannot use {path} as a checkpoint: {error}')


def move_aside(path):
    """Rename a file mlp.npz, if there is one, to the first free one of mlp.1.npz, mlp.2.npz, ..."""
    base, end = os.path.splitext(path)
    names = (f'{base}.{i}{end}' for i in count(1))
    if os.path.exists(path):
        free = next(name for name in names if not os.path.exists(name))
        os.rename(path, free)
        log(f'moved the old {path} to {free}')


# ---- The loop

def evaluate_run(run, examples):
    """Add an evaluation to the history, keep the model if it is the best so far, and log it.

    examples is a dict by split, where train_part is as many random words of train as dev has.
    Raises UserError if a loss is not finite.
    """
    statistics = {}
    if run.config.get('batchnorm'):
        statistics = batchnorm_statistics(run.p, examples['train'])
    model = m.Model(run.config, run.vocabulary, run.p, statistics)
    train_loss, dev_loss = (evaluate(model, examples[part]) for part in ('train_part', 'dev'))
    if not math.isfinite(train_loss + dev_loss):
        raise UserError(f'the loss is not finite at step {run.step}: start again with a lower --lr')
    run.history.append((run.step, train_loss, dev_loss))
    if run.best_step() == run.step:     # this dev loss is the lowest
        run.best = model._replace(p={name: w.copy() for name, w in run.p.items()})
    log(f'step {run.step:>6}  train {train_loss:.4f}  dev {dev_loss:.4f}  '
        + ' '.join(invent(model, run.step, 3)))


def evaluation_steps(config):
    """The steps to evaluate after: early ones too, as a small list is soon memorized."""
    steps, every = config['steps'], config['eval_every']
    if every is None:
        shares = 0.01, 0.02, 0.05, *np.linspace(0.1, 1, 10)
        return {max(1, round(share * steps)) for share in shares}
    return {*range(every, steps, every), steps} if every else {steps}


@contextlib.contextmanager
def caught_signals():
    """Within this context a signal to stop (Ctrl-C is one) is only noted in the list it gives."""
    caught, before = [], {}
    if threading.current_thread() is threading.main_thread():               # others cannot do this
        for number in SIGNALS:
            if signal.getsignal(number) != signal.SIG_IGN:     # nohup ignores SIGHUP
                before[number] = signal.signal(number, lambda signum, _: caught.append(signum))
    try:
        yield caught
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)


def train(run, examples, out):
    """Train to the last step or a signal, and save to `out`; returns the signals."""
    config, first, steps, smooth = run.config, run.step, run.config['steps'], 0.
    evaluations = evaluation_steps(config)
    shapes, size = m.parameter_shapes(config), sum(w.size for w in run.p.values())
    processes = min(config.get('processes', 1), config['batch'], len(examples['train']))
    # All processes share this memory: the parameters, and a gradient for each process.
    memory = multiprocessing.RawArray('f', (processes + 1) * size)
    shared = np.frombuffer(memory, np.float32).reshape(processes + 1, size)
    flat, flat_g = shared[0], shared[1:]                   # (size,) (processes, size)
    flat[:] = np.concatenate([w.ravel() for w in run.p.values()])               # (size,)
    run.p, g = m.views(shapes, flat), m.views(shapes, flat_g[0])
    # The first gradient compiles the kernels, before other processes start and need them.
    shard_gradient(config, run.p, next(batches(config, examples['train'], first)), g, first)
    arguments = config, examples['train'], first, memory, processes
    with (caught_signals() as signals, start_processes(*arguments) as connections,
          tqdm(range(first, steps), initial=first, total=steps, unit='step', leave=False,
               disable=not sys.stderr.isatty(), dynamic_ncols=True) as bar):
        for _, shard in zip(bar, batches(config, examples['train'], first, processes)):
            loss = train_step(run, shard, flat, flat_g, g, connections)
            smooth += (loss - smooth) / min(run.step - first, 200)              # a running mean
            if run.step % 100 == 0:
                bar.set_description(f'loss {smooth:.3f}', refresh=False)
            due = run.step in evaluations
            if due or not math.isfinite(loss):
                evaluate_run(run, examples)     # raises UserError if a loss is not finite
            if due or signals:
                try:
                    save(out, run)
                except UserError as error:                 # a full disk, for example
                    if signals or run.step == steps:
                        raise
                    log(f'{error}; the next evaluation tries again')
            if signals:
                break
    return signals


def check_picture(path):
    """Raise UserError if a path is given, and no picture can be drawn into it."""
    if path and not path.lower().endswith(('.png', '.svg', '.pdf')):
        raise UserError(f'--plot {path}: a picture is a .png, .svg or .pdf file')
    if path and not importlib.util.find_spec('matplotlib'):
        raise UserError('--plot needs matplotlib: pip install matplotlib')


def save_figure(figure, path):
    """Write a picture file, and log how many characters the font cannot draw."""
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter('always')
        figure.savefig(path)
    messages = {str(warning.message) for warning in caught}     # e.g. "Glyph 23383 ... missing"
    missing = sum(message.startswith('Glyph ') for message in messages)
    if missing:
        log(f'{path}: characters that the font cannot draw: {missing}')


SIGNS = {0: '↵', ord(' '): '␣'}         # how pictures show the boundary token and a space


def plot(run, words):
    """A Figure of the losses, and of the embedding as a map: its two first principal components."""
    from matplotlib.figure import Figure

    figure = Figure(figsize=(12, 5.5), layout='constrained')
    left, right = figure.subplots(1, 2)
    history = np.array(run.history)                                             # (evaluations, 3)
    left.plot(history[:, 0], history[:, 1:], '.-', label=['train', 'dev'])
    left.set(xlabel='step', ylabel='loss (nats a character)', title='Loss')
    left.legend()
    C = np.pad(run.best.p['C'], ((0, 0), (0, 1)))          # (V, E + 1)  as E may be 1
    U, spread, _ = np.linalg.svd(C - C.mean(0), full_matrices=False)
    places, dots = U[:, :2] * spread[:2], np.full(len(C), 4)              # (V, 2) (V,)
    text = '\0'.join(words)             # the ends of words are counted, too
    for character in sorted(run.vocabulary, key=text.count, reverse=True)[:100]:  # most frequent
        i = run.vocabulary.index(character)
        right.text(*places[i], character.translate(SIGNS), ha='center', va='center')
        dots[i] = 0
    # Dots of size 0 under the texts, too: only dots set the limits of the axes.
    right.scatter(*places.T, dots, '0.7', label='rarer characters')
    if dots.any():
        right.legend()
    explained = (spread[:2]**2).sum() / (spread**2).sum()
    title = f'Embedding: {explained:.0%} of its variance; "↵" is the boundary token'
    right.set(xlabel='first principal direction', ylabel='second', title=title)
    return figure


# ---- The command line

TRAINING_DEFAULTS = dict(data=None, max_len=100, optimizer='adam', seed=1, eval_every=None)
MODEL_DEFAULTS = dict(mlp=m.MLP_DEFAULTS, gpt=m.GPT_DEFAULTS)
DEFAULTS = dict(
    mlp={**m.MLP_DEFAULTS, **TRAINING_DEFAULTS, 'steps': 110000, 'batch': 32, 'lr': 0.002,
         'weight_decay': 0., 'backward': 'layers'},
    gpt={**m.GPT_DEFAULTS, **TRAINING_DEFAULTS, 'context': None,           # longest word + 1
         'steps': 4000, 'batch': 64, 'lr': 0.003, 'weight_decay': 0.1, 'dropout': 0.,
         'processes': min(2, os.cpu_count() or 1)})


def fitted(kind, n, V):
    """What is better than DEFAULTS for a list of only n words with V characters.

    A short list is soon memorized: the shorter, the fewer steps and the more weight decay. If
    most characters are rare, as in Chinese, fewer steps still. Found by trial on some 80 lists.
    """
    if n >= 16000:
        return {}
    if kind == 'mlp' and V > 200:
        return dict(steps=n, lr=0.001, weight_decay=round(min(2, 2000 / n), 2), embd=128,
                    hidden=200, act='relu')
    if kind == 'mlp':
        return dict(steps=min(110000, 16 * n), weight_decay=round(min(2, 500 / n), 2), embd=24)
    if V > 200:
        return dict(steps=max(1, min(2000, n // 2)), lr=0.003, batch=max(16, n // 250), heads=1,
                    weight_decay=round(min(2, 4000 / n), 2))
    return dict(steps=min(4000, n), lr=0.005, batch=max(16, n // 250), heads=1,
                weight_decay=round(min(1.2, 2000 / n), 2))


def number(kind, low, high=2**31):
    """A type for argparse: a whole (int) or any (float) number from low to high."""
    def read(text):
        value = kind(text)
        if not low <= value <= high:
            raise argparse.ArgumentTypeError(f'{text} is not between {low} and {high}')
        return value
    read.__name__ = kind.__name__       # argparse says "invalid int value"
    return read


def parse(argv):
    """What the user gave, by name; what was not given is left out."""
    parser = argparse.ArgumentParser('train.py', description='Train on a list of words.',
                                     argument_default=argparse.SUPPRESS)
    size = number(int, 1, 2**16)
    add = parser.add_argument
    add('--model', choices=['mlp', 'gpt'], help='which model (mlp)')
    add('--context', type=size, metavar='N', help='characters (mlp 3, gpt longest word + 1)')
    add('--embd', type=size, metavar='N', help='width of the embedding (mlp 10, gpt 64)')
    add('--hidden', type=size, metavar='N', help='hidden units (mlp 64)')
    add('--layers', type=size, metavar='N', help='layers (gpt 4)')
    add('--heads', type=size, metavar='N', help='attention heads (gpt 4)')
    add('--act', choices=m.ACTIVATIONS, help='activation (mlp tanh, gpt gelu)')
    add('--norm', choices=m.NORMS, help='normalization (gpt rmsnorm)')
    add('--batchnorm', action=argparse.BooleanOptionalAction, help='batch norm or none (mlp yes)')
    add('--init', choices=['kaiming', 'naive'], help='first values, naive: N(0, 1) (kaiming)')
    add('--data', metavar='FILE', help='UTF-8 text, one word a line (data/names.txt)')
    add('--max-len', type=size, metavar='N', help='skip longer words (100)')
    add('--steps', type=number(int, 1), metavar='N', help='steps (mlp 110000, gpt 4000)')
    add('--batch', type=number(int, 1), metavar='N', help='predictions (mlp 32), words (gpt 64)')
    add('--lr', type=number(float, 0), metavar='F', help='learning rate (mlp 0.002, gpt 0.003)')
    add('--optimizer', choices=OPTIMIZERS, help='(adam)')
    add('--weight-decay', type=number(float, 0), metavar='F', help='as in AdamW (mlp 0, gpt 0.1)')
    add('--dropout', type=number(float, 0, 0.99), metavar='F', help='dropout rate (gpt 0)')
    add('--seed', type=number(int, 0), metavar='N', help='of all random numbers (1)')
    add('--eval-every', type=number(int, 0), metavar='N', help='0: only at the end (13 times)')
    add('--backward', choices=['layers', 'steps'], help='steps: one operation at a time (layers)')
    add('--processes', type=number(int, 1, 64), metavar='N', help='to share a batch (gpt 2)')
    add('--from', metavar='FILE.npz', help='begin with the parameters of this checkpoint')
    add('--out', metavar='FILE.npz', help='checkpoint (out/MODEL.npz)')
    add('--resume', action='store_true', help='go on with --out, up to --steps if they are given')
    add('--check', action='store_true', help='prove the gradients of this model before training')
    add('--plot', metavar='FILE', help='draw the losses and the embedding (needs matplotlib)')
    return vars(parser.parse_args(argv))


def start(given, parent=None):
    """A new Run with what was given over the defaults, and its words.

    With a `parent`, the Model of --from, it has that model's architecture and parameters.
    """
    kind, inherited, statistics = given.get('model', 'mlp'), {}, {}
    if parent:
        inherited = {name: parent.config[name] for name in MODEL_DEFAULTS[parent.config['model']]}
    for name in given:
        flag = '--' + name.replace('_', '-')
        if name in inherited and given[name] != inherited[name]:
            raise UserError(f'--from has {flag} {inherited[name]}: leave out {flag}')
        if name not in DEFAULTS[kind]:
            raise UserError(f'{flag} means nothing to --model {kind}: leave it out')
    config = {**DEFAULTS[kind], **inherited, **given}
    limit = config['max_len']
    if kind == 'gpt' and config['context']:
        limit = min(limit, config['context'] - 1)
    words, config['sha256'] = read_words(config['data'] or m.NAMES, limit)
    vocabulary, config['longest'] = m.make_vocabulary(words), max(map(len, words))
    changed = {name: value for name, value in fitted(kind, len(words), len(vocabulary)).items()
               if name not in {**inherited, **given}}
    if changed:
        log('for so few words: ' + ' '.join(f'--{name.replace("_", "-")} {value}'
                                            for name, value in changed.items()))
    config |= changed
    if config['embd'] % config.get('heads', 1):
        raise UserError('--heads has to divide --embd: each head has its part of the embedding')
    if config.get('batchnorm') and config['batch'] == 1:
        raise UserError('--batch 1 has no variance: take --batch 2 or more, or --no-batchnorm')
    if config.get('backward') == 'steps' and (config['act'] != 'tanh' or not config['batchnorm']):
        raise UserError('--backward steps has tanh and batch norm: add --act tanh --batchnorm')
    if parent:
        if unknown := set(vocabulary) - set(parent.vocabulary):
            raise UserError('--from: leave out words with characters that the checkpoint does not '
                            f'know: {"".join(sorted(unknown))!r}')
        vocabulary, statistics = parent.vocabulary, parent.statistics
    config['vocab_size'] = len(vocabulary)
    config['context'] = config['context'] or config['longest'] + 1
    p = ({name: w.copy() for name, w in parent.p.items()} if parent else
         m.make_parameters(config, np.random.default_rng((FIRST_VALUES, config['seed']))))
    moments = np.zeros((MOMENTS[config['optimizer']], sum(w.size for w in p.values())), np.float32)
    best = m.Model(config, vocabulary, p, statistics)      # until the first evaluation
    return Run(config, vocabulary, p, moments, best), words


def resume(given, out):
    """The Run in a checkpoint, to go on with what was given, and its words."""
    run = load(out)
    config = run.config
    if given.keys() - {'model', 'steps', 'eval_every', 'data'}:
        raise UserError('--resume takes only --steps, --eval-every and --data (if it has moved): '
                        'leave out other flags, or start a new run')
    if given.get('model', config['model']) != config['model']:
        raise UserError(f"{out} is a run of --model {config['model']}")
    config.update(given)
    if config['steps'] < run.step:
        raise UserError(f"--steps {config['steps']}: {out} is at step {run.step} already")
    data = config['data'] or m.NAMES
    words, sha256 = read_words(data, config['longest'])    # longer ones were skipped
    if sha256 != config['sha256']:
        raise UserError(f'{data} has changed since {out} was begun: start a new run')
    log(f'going on from step {run.step} of {out}')
    return run, words


@command
def main(argv=None):
    """Train, or go on training, and report."""
    given = parse(argv)
    parent = load(given.pop('from')).best if 'from' in given else None
    if parent:
        given = {'model': parent.config['model'], **given}
    out = given.pop('out', os.path.join('out', f"{given.get('model', 'mlp')}.npz"))
    going_on, check = given.pop('resume', False), given.pop('check', False)
    picture = given.pop('plot', None)
    if 'data' in given:
        given['data'] = os.path.abspath(given['data'])     # sample.py may run in another folder
    if going_on and parent:
        raise UserError('--resume goes on with --out, not with a new run: leave out --from')
    if not out.endswith('.npz'):
        raise UserError(f'--out {out}: a checkpoint is a .npz file')
    check_picture(picture)
    run, words = resume(given, out) if going_on else start(given, parent)
    config, parts = run.config, dict(zip(('train', 'dev', 'test'), split(words)))
    parts['train_part'] = parts['train'][:len(parts['dev'])]   # for the evaluations on the way
    # In alphabetical order words that begin alike are neighbours: see gpt_batch.
    examples = {name: m.EXAMPLES[config['model']](sorted(part), run.vocabulary, config['context'])
                for name, part in parts.items()}
    bigrams = bigram_loss(parts['train'], parts['dev'], config['vocab_size'])
    log(f"dev loss of guessing evenly: {math.log(config['vocab_size']):.3f}, of counting pairs of "
        f'characters: {bigrams:.3f}')
    if check:
        few = np.arange(min(4, len(examples['train'])))
        batch, rng = m.BATCH[config['model']](examples['train'], few), np.random.default_rng(1)
        if not all(backward.prove(config['model'], backward.prove_model, config, batch, np.float64,
                                  rng, 50)):
            raise UserError('a gradient is wrong, so nothing was trained: see python backward.py')
    if not going_on:
        move_aside(out)
        save(out, run)                  # now, so that a place that cannot be written to is noticed
    start_time = time.perf_counter()
    signals = train(run, examples, out)
    if signals:
        log(f'stopped at step {run.step}, saved; to go on: '
            + shlex.join(['python', sys.argv[0], '--resume', f'--out={out}']))
        return 128 + signals[0]
    size, seconds = sum(w.size for w in run.p.values()), time.perf_counter() - start_time
    print(f'{size} parameters, {seconds:.0f} s, best at step {run.best_step()}, saved in {out}')
    losses = [f'{part} {evaluate(run.best, examples[part]):.4f}'
              for part in ('train', 'dev', 'test')]
    print('  '.join(losses))
    print(*invent(run.best, run.step, 10), sep='\n')
    dev_losses = [dev for _, _, dev in run.history]
    if len(dev_losses) > 1 and dev_losses[0] == min(dev_losses):
        log('warning: the first evaluation was the best; after it words were memorized: try '
            'fewer --steps, a smaller model, or --from a checkpoint of a larger list')
    elif min(dev_losses) > bigrams:
        log('warning: counting pairs of characters is better than this model: try more --steps')
    if picture:
        save_figure(plot(run, parts['train']), picture)


if __name__ == '__main__':
    sys.exit(main())
