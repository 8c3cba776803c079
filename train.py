"""A language model from scratch, file 3 of 4: optimizers, batches, and the training loop.

python train.py trains on data/names.txt, prints the losses and ten invented names, and leaves a
checkpoint for sample.py.
"""
import argparse
import contextlib
import glob
import importlib.util
import math
import os
import random
import re
import shlex
import signal
import subprocess
import sys
import tempfile
import time
from concurrent.futures import ThreadPoolExecutor

import model as m
import backward
from model import Refusal, kernel, number, one_of

import numpy as np
from tqdm import tqdm

# ---- Optimizers: w (size,) takes a step against its gradient dw, the t-th one
#
# moments (k,size) is what an optimizer remembers of the gradients before.


@kernel
def sgd(w, dw, moments, lr, t):
    """w -= lr dw. Source: A.7."""
    rate = w.dtype.type(lr)
    for i in range(len(w)):
        w[i] -= rate * dw[i]


@kernel
def momentum(w, dw, moments, lr, t):
    """v = 0.9 v + dw, w -= lr v. Source: A.7."""
    rate, beta = w.dtype.type(lr), w.dtype.type(0.9)
    v = moments[0]
    for i in range(len(w)):
        v[i] = beta * v[i] + dw[i]
        w[i] -= rate * v[i]


@kernel
def adam(w, dw, moments, lr, t):
    """Means of the gradient and of its square, corrected for their start at zero. Source: A.7."""
    one, beta1, beta2 = w.dtype.type(1), w.dtype.type(0.9), w.dtype.type(0.999)
    rate = w.dtype.type(lr / (1 - 0.9**t))                 # the corrections are the same for all,
    unbias = w.dtype.type(1 / (1 - 0.999**t))              # so they are taken out of the loop
    eps = w.dtype.type(1e-8)
    mean, square = moments[0], moments[1]
    for i in range(len(w)):
        mean[i] = beta1 * mean[i] + (one - beta1) * dw[i]
        square[i] = beta2 * square[i] + (one - beta2) * dw[i] * dw[i]
        w[i] -= rate * mean[i] / (math.sqrt(square[i] * unbias) + eps)


OPTIMIZERS = dict(adam=adam, momentum=momentum, sgd=sgd)
MOMENTS = dict(adam=2, momentum=1, sgd=0)


def learning_rate(config, step):
    """Up from a hundredth in the first twentieth of the run, then straight down to zero."""
    done = step / config['steps']
    return config['lr'] * min(20*done + 0.01, (1 - done) / 0.95)


# ---- Data

def say(line):
    """A line for whoever is at the terminal; that nobody is must not stop a run."""
    with contextlib.suppress(OSError):
        tqdm.write(line, file=sys.stderr)


def split(words):
    """Train, dev and test: 80, 10 and 10 % of the words in an order that is always the same.

    A part that would be empty, of a tiny list, is the whole list.
    """
    words = words.copy()
    random.Random(42).shuffle(words)
    n1, n2 = int(0.8 * len(words)), int(0.9 * len(words))
    return words[:n1] or words, words[n1:n2] or words, words[n2:] or words


def read_words(config):
    """The words of the data that fit, all and by part, and the vocabulary; says what was found."""
    path = config['data'] or m.DATA
    lines, config['sha256'] = m.read_lines(path)
    words = [line for line in lines if line]
    limit = config['max_len']
    if config['model'] == 'gpt' and config['context']:
        limit = min(limit, config['context'] - 1)
    used = [word for word in words if len(word) <= limit]
    if not used:
        raise Refusal(f'{path} has no word of at most {limit} characters: see --max-len, --context'
                      if words else f'{path} has no words: give a text file, one word a line')
    vocabulary = m.make_vocabulary(used)
    config['longest'] = max(map(len, used))
    train, dev, test = split(used)
    distinct, known = len(set(used)), set(train)
    seen = sum(word in known for word in dev) / len(dev)
    say(f'{path}: {len(lines) - (not lines[-1])} lines, {len(used)} words used')
    say(f'{distinct} distinct, {len(used) - distinct} duplicates, longest {config["longest"]}, '
        f'{len(vocabulary) - 1} characters')
    say(f'{seen:.0%} of the dev words are in train too')
    if len(used) < len(words):
        say(f'skipped {len(words) - len(used)} words longer than {limit} characters '
            '(see --max-len and --context)')
    columns = re.compile(r'\t|[,;](?=\S)')
    table = [i for i, line in enumerate(lines, 1) if not line.isalpha() and columns.search(line)]
    if table:
        more = f' (and {len(table) - 1} more)' if table[1:] else ''
        say(f'warning: line {table[0]} looks like a row of a table{more}; it is learnt as it is')
    # `sample`: as much of train as dev has, for the evaluations on the way
    return dict(all=used, train=train, dev=dev, test=test, sample=train[:len(dev)]), vocabulary


# Seeds of independent generators: what they are for, --seed, and then epoch, step or thread.
FIRST_VALUES, ORDER, DROPOUT, NAMES = range(4)


def batches(config, examples, step):
    """The batches from the given step on, each in one share for each thread.

    The order of an epoch comes from the seed and its number alone, so that going on after an
    interruption needs no stored generator. 64 batches of the MLP are cut out of the data at once.
    """
    n, kind = len(examples[1]), config['model']
    size = min(config['batch'], n)
    while True:
        epoch, begin = divmod(step, n // size)
        order = np.random.default_rng((ORDER, config['seed'], epoch)).permutation(n)
        order = order[:n // size * size].reshape(-1, size)
        for i in range(begin, len(order), 64):
            block = order[i:i + 64]
            if kind == 'mlp':
                yield from ([share] for share in zip(*m.mlp_batch(examples, block)))
            else:
                for chosen in np.sort(block):   # neighbours have beginnings in common
                    shares = np.array_split(chosen, min(config['threads'], size))
                    yield [m.gpt_batch(examples, share) for share in shares]
        step += len(order) - begin


# ---- One step
#
# A run is a dict: config, state, examples by part of the data, the pool of threads, the parameters
# as `flat` and as `p`, and for each thread a room: the activations a, d for their gradients, and g
# for those of the parameters. It is kept in the file `out`, which holds the step `kept` and whose
# which() is `file`: None before there is one.

def new_run(state, examples, pool, out=None, file=None):
    """A run that goes on from a state; the state's latest parameters become views of its `flat`."""
    config, latest = state['config'], state['latest']
    shapes = m.PARAMETERS[config['model']](config)
    flat = np.concatenate([w.ravel() for w in latest['p'].values()])            # (size,)
    latest['p'] = m.views(shapes, flat)
    flat_gs = np.zeros((config.get('threads', 1), len(flat)), flat.dtype)       # (threads, size)
    rooms = [dict(flat_g=flat_g, g=m.views(shapes, flat_g)) for flat_g in flat_gs]
    return dict(config=config, state=state, examples=examples, pool=pool, flat=flat,
                p=latest['p'], rooms=rooms, out=out, file=file, kept=state['step'])


def make_room(config, room, *sizes):
    """Lay out room['a'] and room['d'] for a batch, in vectors that grow if need be."""
    if room.get('sizes') != sizes:
        shapes = m.ACTIVITY[config['model']](config, *sizes)
        size = sum(map(math.prod, shapes.values()))
        if size > len(room.get('flat_a', ())):
            room['flat_a'], room['flat_d'] = np.empty((2, size), np.float32)
        room.update(sizes=sizes, a=m.views(shapes, room['flat_a']),
                    d=m.views(shapes, room['flat_d']))


def gradient(run, share, step, thread, total):
    """A share's part in the mean loss of all predictions; its thread's g gets the gradient."""
    config, p, room = run['config'], run['p'], run['rooms'][thread]
    kind, masks = config['model'], {}
    if config.get('backward') == 'steps':
        loss, a = m.mlp_steps(p, *share)
        d = backward.mlp_steps_backward(p, *share, a)
        for name, g in room['g'].items():
            g[...] = d[name]
        return loss                     # the MLP has one share
    make_room(config, room, *m.sizes(share))
    if config.get('dropout'):
        rng = np.random.default_rng((DROPOUT, config['seed'], step, thread))
        masks['masks'] = m.dropout_masks(config, len(share[0]), rng)            # (2*L, N, E)
    loss = m.FORWARD[kind](config, p, share, room['a'], **masks)
    backward.BACKWARD[kind](config, p, share, room['a'], room['d'], room['g'], **masks)
    part = len(share[1]) / total
    if part < 1:
        room['flat_g'] *= part
    return loss * part


def train_step(run, shares, step):
    """Take a step on a batch, given in shares; returns its loss before the step."""
    config, rooms, pool = run['config'], run['rooms'], run['pool']
    total = sum([len(share[1]) for share in shares])
    others = [pool.submit(gradient, run, share, step, thread, total)
              for thread, share in enumerate(shares[1:], 1)]
    loss, g = gradient(run, shares[0], step, 0, total), rooms[0]['flat_g']      # (size,)
    for other, room in zip(others, rooms[1:]):
        loss += other.result()
        g += room['flat_g']                                                     # (size,)
    lr = learning_rate(config, step)
    if config['weight_decay']:
        for name, w in run['p'].items():
            if name[0].isupper():       # matrices; gains and biases are left alone
                w *= 1 - lr * config['weight_decay']
    OPTIMIZERS[config['optimizer']](run['flat'], g, run['state']['moments'], lr, step + 1)
    return loss


# ---- Evaluation

def evaluate(model, examples, pool):
    """Mean loss over all of the examples, in nats a character, each word's end included."""
    kind, n = model['config']['model'], len(examples[1])
    size = 4096 if kind == 'mlp' else 32

    def block(begin):
        batch = m.BATCH[kind](examples, slice(begin, begin + size))
        return m.predict(model, batch)[0] * len(batch[1]), len(batch[1])

    losses, rows = zip(*pool.map(block, range(0, n, size)))
    return sum(losses) / sum(rows)


def sample(model, step, n):
    """Names from a generator of their own, so that training does not depend on them."""
    return m.generate(model, n, np.random.default_rng((NAMES, model['config']['seed'], step)))


# ---- The run

def keep(run, evaluating):
    """Evaluate if asked to, refuse what is not finite, and save the state."""
    state, config, examples = run['state'], run['config'], run['examples']
    latest, losses = state['latest'], []
    if config.get('batchnorm'):
        latest['statistics'] = m.batchnorm_statistics(latest['p'], examples['train'])
    if evaluating:
        losses = [evaluate(latest, examples[part], run['pool']) for part in ('sample', 'dev')]
    for array in (run['flat'], state['moments'], losses, *latest['statistics'].values()):
        if not np.isfinite(array).all():
            raise FloatingPointError
    if evaluating:
        if losses[1] < min([dev for _, _, dev in state['history']], default=math.inf):
            state['best_step'] = state['step']
        state['history'].append((state['step'], *losses))
    if state['best_step'] in (-1, state['step']):          # -1: nothing was evaluated yet
        state['best'] = {**latest, 'p': {name: w.copy() for name, w in latest['p'].items()}}
    out = run['out']
    try:
        run['out'], run['file'], moved = m.save(out, state, run['file'])
    except Refusal as error:            # a full disk, for one
        say(str(error))
        if evaluating and state['step'] < config['steps']:
            return                      # there will be another time
        out = os.path.join(tempfile.gettempdir(), os.path.basename(out))
        run['out'], run['file'], moved = m.save(out, state)
    run['kept'] = state['step']
    if moved:
        say(f'what stood in {out} is {moved} now')
    if run['out'] != out:
        say(f"another file stands in {out} now: this run is kept in {run['out']} from here on")


def train(run):
    """Train to the end of the plan, or to a signal; returns steps a second and that signal."""
    config, state = run['config'], run['state']
    first, steps, every = state['step'], config['steps'], config['eval_every']
    signals, smooth, begun = [], 0, time.perf_counter()

    def is_due(step):
        return step == steps or every and step and step % every == 0

    def milestone():
        nonlocal begun
        paused = time.perf_counter()
        keep(run, True)
        step, train_loss, dev_loss = state['history'][-1]
        left = (steps - step) * (time.perf_counter() - begun) / max(step - first, 1)
        say(f"step {step:>6}  train {train_loss:.4f}  dev {dev_loss:.4f}  {left:>4.0f} s left  "
            f"{' '.join(sample(state['latest'], step, 3))}")
        begun += time.perf_counter() - paused

    handled = [signal.SIGINT, signal.SIGTERM]
    if hasattr(signal, 'SIGHUP') and signal.getsignal(signal.SIGHUP) != signal.SIG_IGN:
        handled.append(signal.SIGHUP)   # a terminal that closes, and no nohup
    before = [signal.signal(number, lambda number, _: signals.append(number)) for number in handled]
    bar = tqdm(range(first, steps), initial=first, total=steps, unit='step', leave=False,
               disable=not sys.stderr.isatty(), dynamic_ncols=True)
    try:
        if is_due(first) and first not in [step for step, _, _ in state['history']]:
            milestone()                 # it was due when the run was interrupted
        for step, shares in zip(bar, batches(config, run['examples']['train'], first)):
            loss = train_step(run, shares, step)
            if not math.isfinite(loss):
                raise FloatingPointError
            state['step'] = step + 1
            smooth += (loss - smooth) / min(step - first + 1, 200)
            if step == first:
                begun = time.perf_counter()                # the first step may have compiled
            if step % 100 == 0:
                bar.set_postfix_str(f'loss {smooth:.3f}', refresh=False)
            if signals:
                keep(run, False)
                break
            if is_due(step + 1):
                milestone()
        seconds = time.perf_counter() - begun
    finally:
        bar.close()
        for number, handler in zip(handled, before):
            signal.signal(number, handler)
    return max(state['step'] - first - 1, 0) / max(seconds, 1e-9), signals


def plot(state, words, path):
    """Draw the losses, and the embedding as a map of characters, into a picture file."""
    from matplotlib.figure import Figure

    figure = Figure(figsize=(12, 5.5), layout='constrained')
    left, right = figure.subplots(1, 2)
    history = np.array(state['history'])
    left.plot(history[:, 0], history[:, 1:], '.-', label=['train', 'dev'])
    left.set(xlabel='step', ylabel='loss (nats a character)', title='Loss')
    left.legend()
    C = state['best']['p']['C']                                                 # (V, E)
    centred = C - C.mean(0)                                                     # (V, E)
    _, spread, directions = np.linalg.svd(centred, full_matrices=False)
    places = np.zeros((len(C), 2))                                              # (V, 2)
    places[:, :len(directions)] = centred @ directions[:2].T
    right.scatter(*places.T, s=0)                          # texts alone would set no limits
    text = ''.join(words)
    for character, place in zip('↵' + state['vocabulary'][1:], places):
        rare = character in text and text.count(character) < 0.01 * len(text)
        right.text(*place, character, ha='center', va='center', color='red' if rare else 'black')
    share = (spread[:2]**2).sum() / (spread**2).sum()
    right.set(xlabel='first principal direction', ylabel='second',
              title=f'Embedding: {share:.0%} of its spread\n'
                    '"↵" is the boundary, red are characters below 1 %')
    try:
        figure.savefig(path)
    except (OSError, ValueError) as error:
        raise Refusal(f'cannot draw {path}: {m.reason(error)}; the run is kept, '
                      'and --resume --plot draws it')


# ---- The command line

TRAINING = dict(
    data=(str, 'FILE', '', '', 'UTF-8 text, one word a line; default data/names.txt'),
    max_len=(number(int, 1, 2**16 - 1), 'N', 100, 100, 'skip longer words'),
    steps=(number(int, 0), 'N', 110000, 4000, 'steps to train'),
    batch=(number(int, 1), 'N', 32, 64, 'characters or names in a step'),
    lr=(number(float, 0), 'F', 0.002, 0.003, 'highest learning rate'),
    optimizer=(one_of(*OPTIMIZERS), 'NAME', 'adam', 'adam', ', '.join(OPTIMIZERS)),
    weight_decay=(number(float, 0), 'F', 0., 0.1, 'decoupled, of matrices, as in AdamW'),
    dropout=(number(float, 0, 0.99), 'F', None, 0., 'share of each branch that is dropped (gpt 0)'),
    seed=(number(int, 0), 'N', 1, 1, 'for first values, order and dropout'),
    eval_every=(number(int, 0), 'N', 0, 0, 'evaluate every N steps, 0: only at the end (steps/10)'),
    backward=(one_of('fused', 'steps'), 'WAY', 'fused', None, 'steps: one operation a line'),
    threads=(number(int, 1, 64), 'N', None, min(2, os.cpu_count() or 1), 'threads for a batch'))
ALL_FLAGS = {**m.FLAGS, **TRAINING}


def read_command_line(argv):
    """What was typed, by name."""
    parser = argparse.ArgumentParser('train.py', description='Train on a list of words.')
    m.add_flags(parser, 'the model', m.FLAGS)
    m.add_flags(parser, 'the training', TRAINING)
    group = parser.add_argument_group('the run')
    group.add_argument('--out', metavar='FILE', help='checkpoint; default out/MODEL.npz')
    group.add_argument('--resume', action='store_true', help='go on with the run in --out')
    group.add_argument('--check', action='store_true', help='prove the gradients before training')
    group.add_argument('--plot', metavar='FILE', help='draw losses and embedding (by matplotlib)')
    return vars(parser.parse_args(argv))


def start(typed):
    """The state of a new run, and the words it is for, by part."""
    config = m.configure(typed, ALL_FLAGS)
    if 'eval_every' not in typed:
        config['eval_every'] = max(1, config['steps'] // 10)
    if config.get('batchnorm') and config['batch'] == 1:
        raise Refusal('--batch 1 with batch norm: one value has no variance; '
                      'take --batch 2 or more, or --no-batchnorm')
    if config.get('backward') == 'steps' and (config['act'] != 'tanh' or not config['batchnorm']):
        raise Refusal('--backward steps is the column as written, with batch norm and tanh: '
                      'leave out --no-batchnorm and --act')
    parts, vocabulary = read_words(config)
    config['context'] = config['context'] or config['longest'] + 1
    config['vocabulary'] = len(vocabulary)
    p = m.make_parameters(config, np.random.default_rng((FIRST_VALUES, config['seed'])))
    latest = dict(config=config, vocabulary=vocabulary, p=p, statistics={})
    size = sum(w.size for w in p.values())
    moments = np.zeros((MOMENTS[config['optimizer']], size), np.float32)
    return dict(config=config, vocabulary=vocabulary, step=0, best_step=-1, history=[],
                moments=moments, latest=latest), parts


def go_on(typed, out):
    """The state of the run in the file `out`, and the words to go on with, by part."""
    state = m.load(out, ALL_FLAGS)
    config = state['config']
    if len(state['moments']) != MOMENTS[config['optimizer']]:
        raise Refusal(f"{out} has not the moments of {config['optimizer']}")
    for name in typed:
        if name not in ('steps', 'eval_every', 'data') and typed[name] != config.get(name):
            value = '' if name == 'batchnorm' else f' {typed[name]}'
            raise Refusal(f'{m.flag(name)}{value} contradicts {out}, which has '
                          f"{config.get(name, 'none')}: leave it out, or start a new run")
    sha256 = config['sha256']
    config.update(typed)
    if config['steps'] < state['step']:
        raise Refusal(f"--steps {config['steps']}: {out} is at step {state['step']} already")
    parts, vocabulary = read_words(config)
    if vocabulary != state['vocabulary']:
        raise Refusal(f'the characters of the data, {vocabulary[1:]!r}, are not those of {out}, '
                      f"{state['vocabulary'][1:]!r}")
    if config['sha256'] != sha256:
        say('the data is not what this run began with: the best and the losses begin anew, '
            'and dev and test words may have been trained on')
        state.update(best_step=-1, history=[])
    say(f"going on from step {state['step']} of {out}")
    return state, parts


def check_place(flag, path):
    """Try that a file can be written before there is work to lose."""
    try:
        os.makedirs(os.path.dirname(path) or '.', exist_ok=True)
        if os.path.exists(path) and not os.path.isfile(path):
            raise OSError(22, 'it is not a file')
        with open(f'{path}.{os.urandom(4).hex()}.tmp', 'wb') as file:
            pass
        os.remove(file.name)
    except (OSError, ValueError) as error:
        raise Refusal(f'cannot write {path}: {m.reason(error)}; choose another {flag}')


def say_compiling(kernels):
    """Tell that kernels must be compiled first, this once or, without a place for them, always."""
    folder = kernels[0].stats.cache_path
    if not folder:
        say('compiling the kernels, a few seconds each time: no folder can keep them '
            '(NUMBA_CACHE_DIR names another)')
    elif not all(glob.glob(os.path.join(glob.escape(folder), f'*.{kernel.__name__}-*.nbi'))
                 for kernel in kernels):
        say('compiling the kernels, this once: a few seconds')


def check_gradients(config, examples):
    """Prove the gradients of this very model on a few of its words, or refuse to train."""
    batch = m.BATCH[config['model']](examples, slice(16 if config['model'] == 'mlp' else 4))
    rows = backward.prove_model(config, batch, np.random.default_rng(1), np.dtype('float64'), 50)
    if backward.print_rows(config['model'], rows, np.dtype('float64'), sys.stderr):
        raise Refusal('a gradient is wrong, so nothing was trained: see python backward.py')


@m.command
def main(argv=None):
    """Train, or go on training, and report."""
    tqdm.get_lock()                     # else made in say(), where an interruption is an error
    typed = read_command_line(argv)
    resume, check, picture = typed.pop('resume'), typed.pop('check'), typed.pop('plot')
    if '' in (typed.get('data'), typed['out'], picture):
        raise Refusal('--data, --out and --plot take the name of a file, not nothing')
    if picture and not picture.lower().endswith(('.png', '.svg', '.pdf')):
        raise Refusal(f'--plot {picture}: a picture is a .png, .svg or .pdf file')
    out = typed.pop('out') or os.path.join('out', f"{typed.get('model', 'mlp')}.npz")
    if os.path.islink(out):
        out = os.path.realpath(out)     # the link itself stays
    there = m.which(out) if resume else None
    state, parts = go_on(typed, out) if resume else start(typed)
    config = state['config']
    places = [os.path.realpath(path) for path in (config['data'] or m.DATA, out, picture) if path]
    if len(set(places)) < len(places):
        raise Refusal(f'--out {out}, --plot and the data have to be different files')
    if picture:
        if not importlib.util.find_spec('matplotlib'):
            raise Refusal('--plot needs matplotlib: pip install matplotlib')
        check_place('--plot', picture)
    check_place('--out', out)
    to_examples = m.EXAMPLES[config['model']]              # sorted: neighbours begin alike
    examples = {part: to_examples(sorted(parts[part]), state['vocabulary'], config['context'])
                for part in ('train', 'dev', 'test', 'sample')}
    if check:
        check_gradients(config, examples['train'])
    say_compiling([OPTIMIZERS[config['optimizer']],
                   m.attention if config['model'] == 'gpt' else m.embedding])
    with ThreadPoolExecutor(config.get('threads', 1)) as pool:
        run = new_run(state, examples, pool, out, there)
        try:
            speed, signals = train(run)
        except FloatingPointError:
            say(f"the loss is not finite after step {state['step']}: try a lower --lr than "
                f"{config['lr']:g}; " + (f"{run['out']} keeps step {run['kept']}"
                                         if run['file'] else 'nothing was written'))
            return 1
        if signals:
            command = ['python', sys.argv[0], '--resume', f"--out={run['out']}"]
            command += [f'--plot={picture}'] if picture else []
            line = subprocess.list2cmdline(command) if os.name == 'nt' else shlex.join(command)
            say(f"stopped: step {state['step']}, saved; to go on: {line}")
            return 128 + signals[0]
        best = state['best']
        print(f"{sum(w.size for w in best['p'].values())} parameters, {speed:,.0f} steps a second, "
              f"best at step {state['best_step']}, kept in {run['out']}", flush=True)
        losses = {part: evaluate(best, examples[part], pool) for part in ('train', 'dev', 'test')}
    print('  '.join(f'{part} {loss:.4f}' for part, loss in losses.items()))
    print(*sample(best, state['step'], 10), sep='\n')
    if picture:
        plot(state, parts['all'], picture)


if __name__ == '__main__':
    sys.exit(main())
