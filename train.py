"""A language model from scratch, file 3 of 4: optimizers, batches, and the training loop.

python train.py trains on data/names.txt, prints the losses and ten invented names, and leaves a
checkpoint for sample.py.
"""
import argparse
import glob
import math
import os
import random
import re
import shlex
import signal
import sys
import time
from concurrent.futures import ThreadPoolExecutor

import model as m
import backward
from model import Refusal, kernel, number, one_of

import numpy as np
from tqdm import tqdm

# ---- Optimizers: w (P,) takes a step against its gradient dw, the t-th one. Source: A.7.
#
# moments (k,P) is what an optimizer remembers of the gradients before.


@kernel
def sgd(w, dw, moments, lr, t):
    rate = w.dtype.type(lr)
    for i in range(len(w)):
        w[i] -= rate * dw[i]


@kernel
def momentum(w, dw, moments, lr, t):
    rate, beta = w.dtype.type(lr), w.dtype.type(0.9)
    v = moments[0]
    for i in range(len(w)):
        v[i] = beta * v[i] + dw[i]
        w[i] -= rate * v[i]


@kernel
def adam(w, dw, moments, lr, t):
    """Means of the gradient and of its square, both corrected for having started at zero."""
    one, beta1, beta2 = w.dtype.type(1), w.dtype.type(0.9), w.dtype.type(0.999)
    rate = w.dtype.type(lr / (1 - 0.9**t))                 # the corrections are the same for all,
    unbias = w.dtype.type(1 / (1 - 0.999**t))              # so they are taken out of the loop
    eps = w.dtype.type(1e-8)
    m, v = moments[0], moments[1]
    for i in range(len(w)):
        m[i] = beta1 * m[i] + (one - beta1) * dw[i]
        v[i] = beta2 * v[i] + (one - beta2) * dw[i] * dw[i]
        w[i] -= rate * m[i] / (math.sqrt(v[i] * unbias) + eps)


OPTIMIZERS = dict(adam=adam, momentum=momentum, sgd=sgd)
MOMENTS = dict(adam=2, momentum=1, sgd=0)


def learning_rate(config, step):
    """Up in a straight line over the first twentieth of the run, then down to zero on a cosine."""
    done = step / config['steps']
    return config['lr'] * min(1, 20 * (done + 1 / config['steps'])) * (0.5 + 0.5 * math.cos(math.pi * done))


# ---- Data

def split(words):
    """Train, dev and test: 80, 10 and 10 % of the words in an order that is always the same.

    A part that would be empty, of a tiny list, is the whole list.
    """
    words = words.copy()
    random.Random(42).shuffle(words)
    n1, n2 = int(0.8 * len(words)), int(0.9 * len(words))
    return words[:n1] or words, words[n1:n2] or words, words[n2:] or words


def read_words(config):
    """The words of the data file that are short enough, its sha256, and what to say about it."""
    path = m.data_path(config)
    lines, sha256 = m.read_lines(path)
    words = [line for line in lines if line]
    limit = config['max_len']
    if config['model'] == 'gpt' and config['context']:
        limit = min(limit, config['context'] - 1)
    used = [word for word in words if len(word) <= limit]
    if not used:
        raise Refusal(f'{path} has no word of at most {limit} characters' if words else
                      f'{path} has no words: give a text file with one word a line')
    train, dev, _ = split(used)
    distinct, known = len(set(used)), set(train)
    seen = sum(word in known for word in dev) / len(dev)
    say = [f'{path}: {len(lines) - (not lines[-1])} lines, {len(used)} words used, {distinct} '
           f'distinct, {len(used) - distinct} duplicates, longest {max(map(len, used))}, '
           f'{len(set().union(*used))} characters; {seen:.0%} of the dev words are in train too']
    if len(used) < len(words):
        say.append(f'skipped {len(words) - len(used)} words longer than {limit} characters '
                   '(see --max-len and --context)')
    table = [i for i, line in enumerate(lines, 1) if re.search(r'\t|[,;](?=\S)', line)]
    if table:
        say.append(f'warning: line {table[0]} looks like a row of a table, and so do '
                   f'{len(table) - 1} more; they are learnt as they are, whole')
    return used, sha256, say


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
                X, Y = m.mlp_batch(config, examples, block)
                for j in range(len(block)):
                    yield [(X[j], Y[j])]
            else:
                for chosen in block:
                    yield [m.gpt_batch(config, examples, chosen[t::config['threads']])
                           for t in range(min(config['threads'], size))]
        step += len(order) - begin


# ---- One step

def make_room(config, room, N, P):
    """Lay out room['a'] and room['d'] for N rows and P pairs, anew only if the sizes changed."""
    if room.get('sizes') == (N, P):
        return
    for name, table in ('a', m.ACTIVITY), ('d', backward.ROOM):
        shapes = table[config['model']](config, N, P)
        size = sum(map(math.prod, shapes.values()))
        if size > len(room.get(f'flat {name}', ())):
            room[f'flat {name}'] = np.empty(size, np.float32)
        room[name] = m.views(shapes, room[f'flat {name}'])
    room['sizes'] = N, P


def mlp_gradient(config, p, batch, room, step, share):
    """Loss of a batch; its gradient goes to room['g']."""
    if config['backward'] == 'steps':
        loss, a = m.mlp_steps(p, *batch)
        d = backward.mlp_steps_backward(p, *batch, a)
        for name, g in room['g'].items():
            g[:] = d[name]
        return loss
    make_room(config, room, len(batch[1]), 0)
    loss = m.mlp(config, p, batch, room['a'])
    backward.mlp_backward(config, p, batch, room['a'], room['d'], room['g'])
    return loss


def gpt_gradient(config, p, batch, room, step, share):
    """Loss of a share of a batch; its gradient goes to room['g']. The masks of dropout are new."""
    X, Y, rows, first = batch
    make_room(config, room, len(Y), int((rows - first + 1).sum()))
    masks, rate = None, config['dropout']
    if rate:
        rng = np.random.default_rng((DROPOUT, config['seed'], step, share))
        masks = rng.random((2*config['layers'] + 1, len(Y), config['embd']), np.float32)
        masks = (masks >= rate) * np.float32(1 / (1 - rate))                    # (2*L+1, N, E)
    loss = m.gpt(config, p, batch, room['a'], masks)
    backward.gpt_backward(config, p, batch, room['a'], room['d'], room['g'], masks)
    return loss


GRADIENT = dict(mlp=mlp_gradient, gpt=gpt_gradient)


def train_step(config, p, flat, moments, shares, rooms, pool, step):
    """Take one step of training; returns the loss of the batch before it."""
    gradient = GRADIENT[config['model']]
    g = rooms[0]['flat g']                                                      # (P,)
    if len(shares) == 1:
        loss = gradient(config, p, shares[0], rooms[0], step, 0)
    else:
        losses = list(pool.map(lambda i: gradient(config, p, shares[i], rooms[i], step, i),
                               range(len(shares))))
        rows = [len(share[1]) for share in shares]
        loss = sum(map(math.prod, zip(losses, rows))) / sum(rows)
        g *= rows[0] / sum(rows)        # a mean over all rows, so each share counts by its rows
        for room, N in zip(rooms[1:], rows[1:]):
            g += room['flat g'] * np.float32(N / sum(rows))
    lr = learning_rate(config, step)
    if config['weight_decay']:
        for name, w in p.items():
            if name[0].isupper():       # matrices; gains and biases are left alone
                w *= 1 - lr * config['weight_decay']
    OPTIMIZERS[config['optimizer']](flat, g, moments, lr, step + 1)
    return loss


# ---- Evaluation

def evaluate(model, examples, pool):
    """Mean loss over all of the examples, in nats a character, each word's end included."""
    kind, n = model['config']['model'], len(examples[1])
    size = 4096 if kind == 'mlp' else 512

    def block(begin):
        chosen = np.arange(begin, min(begin + size, n))
        batch = m.BATCH[kind](model['config'], examples, chosen)
        return m.predict(model, batch)[0] * len(batch[1]), len(batch[1])

    losses, rows = zip(*pool.map(block, range(0, n, size)))
    return sum(losses) / sum(rows)


def usable(state, kind):
    """The 'best' or the 'latest' parameters of a training state, as a model to predict with."""
    return {**state[kind], 'config': state['config'], 'vocabulary': state['vocabulary']}


def sample(state, kind, n):
    """Names from a generator of their own, so that training does not depend on them."""
    rng = np.random.default_rng((NAMES, state['config']['seed'], state['step']))
    return m.generate(usable(state, kind), n, rng)


def keep(state, flat, examples):
    """Copy the parameters into the state, with the batch-norm statistics that belong to them."""
    config = state['config']
    p = m.views(m.PARAMETERS[config['model']](config), flat.copy())
    normed = config.get('batchnorm')
    statistics = m.batchnorm_statistics(config, p, examples['train']) if normed else {}
    state['latest'] = dict(p=p, statistics=statistics)
    if state['best_step'] < 0:          # nothing was evaluated yet, so nothing better is known
        state['best'] = state['latest']


def evaluate_state(state, examples, pool):
    """Evaluate the latest parameters, and keep them as the best if they are. For `train`, as many
    words as `dev` has must do until the end."""
    model = usable(state, 'latest')
    losses = [evaluate(model, examples[part], pool) for part in ('some of train', 'dev')]
    if not np.isfinite(losses).all():
        raise FloatingPointError
    if losses[1] < min([dev for _, _, dev in state['history']], default=math.inf):
        state['best'], state['best_step'] = state['latest'], state['step']
    state['history'].append((state['step'], *losses))


# ---- The run

def train(state, examples, out, aside, pool):
    """Train from where the state is to the end of the plan, or to a signal.

    The state is kept in the file `out`; what stands there goes `aside`. Returns steps a second
    and the number of the signal.
    """
    config, first = state['config'], state['step']
    steps, every = config['steps'], config['eval_every']
    shapes = m.PARAMETERS[config['model']](config)
    flat = np.concatenate([w.ravel() for w in state['latest']['p'].values()])   # (P,)
    p = m.views(shapes, flat)
    rooms = [{'flat g': np.zeros_like(flat)} for _ in range(config.get('threads', 1))]
    for room in rooms:
        room['g'] = m.views(shapes, room['flat g'])
    signals, smooth, pause, begun = [], 0, 0, time.perf_counter()
    before = [signal.signal(number, lambda number, frame: signals.append(number))
              for number in (signal.SIGINT, signal.SIGTERM)]
    bar = tqdm(range(first, steps), initial=first, total=steps, unit='step', leave=False,
               disable=not sys.stderr.isatty(), dynamic_ncols=True)
    try:
        for step, shares in zip(bar, batches(config, examples['train'], first)):
            loss = train_step(config, p, flat, state['moments'], shares, rooms, pool, step)
            if not math.isfinite(loss):
                raise FloatingPointError
            state['step'] = step + 1
            smooth += (loss - smooth) / min(step - first + 1, 200)
            if step == first:
                begun = time.perf_counter()                # the first step may have compiled
            if step % 100 == 0:
                bar.set_postfix_str(f'loss {smooth:.3f}', refresh=False)
            if signals:
                break
            if step + 1 == steps or every and (step + 1) % every == 0:
                paused = time.perf_counter()
                keep(state, flat, examples)
                evaluate_state(state, examples, pool)
                m.save(out, state, aside)
                aside = None
                left = (steps - step - 1) * (time.perf_counter() - begun) / max(step - first, 1)
                _, train_loss, dev_loss = state['history'][-1]
                tqdm.write(f"step {step + 1:>6}  train {train_loss:.4f}  dev {dev_loss:.4f}  "
                           f"{left:>4.0f} s left  {' '.join(sample(state, 'latest', 3))}",
                           file=sys.stderr)
                pause += time.perf_counter() - paused
    finally:
        for number, handler in zip((signal.SIGINT, signal.SIGTERM), before):
            signal.signal(number, handler)
    speed = (state['step'] - first - 1) / max(time.perf_counter() - begun - pause, 1e-9)
    if signals or steps == 0:
        keep(state, flat, examples)
        if steps == 0:
            evaluate_state(state, examples, pool)
        m.save(out, state, aside)
    return max(speed, 0), signals


def plot(state, path):
    """Draw the losses, and the embedding as a map of characters, into a picture file."""
    raise NotImplementedError


# ---- The command line

CHOICES = dict(
    mlp=dict(**m.CHOICES['mlp'], data='', max_len=100, steps=150000, batch=32, lr=0.01, seed=1,
             optimizer='adam', weight_decay=0., eval_every=None, backward='fused'),
    gpt=dict(**m.CHOICES['gpt'], data='', max_len=100, steps=6000, batch=64, lr=0.003, seed=1,
             optimizer='adam', weight_decay=0., eval_every=None, dropout=0.,
             threads=min(2, os.cpu_count() or 1)))

RULES = {
    **m.RULES, 'data': str, 'max_len': number(int, 1), 'steps': number(int, 0),
    'batch': number(int, 1), 'lr': number(float, 0), 'seed': number(int, 0),
    'optimizer': one_of(*OPTIMIZERS), 'weight_decay': number(float, 0), 'eval_every': number(int, 0),
    'backward': one_of('fused', 'steps'), 'dropout': number(float, 0, 0.99),
    'threads': number(int, 1, 64)}


def read_command_line(argv):
    parser = argparse.ArgumentParser('train.py', description='Train on a list of words.')
    m.add_model_flags(parser)
    group = parser.add_argument_group('the training')
    for name, metavar, text in (
            ('data', 'FILE', 'UTF-8 text, one word a line (data/names.txt)'),
            ('max_len', 'N', 'skip longer words (100)'),
            ('steps', 'N', 'steps of training (mlp 150000; gpt 6000)'),
            ('batch', 'N', 'mlp: characters a step (32); gpt: names a step (64)'),
            ('lr', 'F', 'highest learning rate (mlp 0.01; gpt 0.003)'),
            ('optimizer', 'NAME', 'adam, momentum or sgd (adam)'),
            ('weight_decay', 'F', 'pull on matrices, decoupled as in AdamW (0)'),
            ('dropout', 'F', 'gpt: share of the stream dropped (0)'),
            ('seed', 'N', 'of first values, order and dropout (1)'),
            ('eval_every', 'N', 'steps between evaluations, 0: at the end only (a tenth)'),
            ('backward', 'WAY', 'mlp: fused, or steps: in single operations (fused)'),
            ('threads', 'N', 'gpt: shares of a batch, one for each core (2)')):
        m.add_flag(group, RULES, name, metavar, text)
    group = parser.add_argument_group('the run')
    group.add_argument('--out', metavar='FILE', help='checkpoint (out/MODEL.npz)')
    group.add_argument('--resume', action='store_true', help='go on with the run in --out')
    group.add_argument('--check', action='store_true', help='prove the gradients before training')
    group.add_argument('--plot', metavar='FILE', help='draw losses and embedding (needs matplotlib)')
    return vars(parser.parse_args(argv))


def start(typed):
    """The configuration, the words and the state of a new run."""
    config = m.configure(typed, CHOICES)
    if config['eval_every'] is None:
        config['eval_every'] = max(1, config['steps'] // 10)
    if config.get('batchnorm') and config['batch'] == 1:
        raise Refusal('--batch 1 with batch norm: one value has no variance; '
                      'take --batch 2 or more, or --no-batchnorm')
    if config.get('backward') == 'steps' and (config['act'] != 'tanh' or not config['batchnorm']):
        raise Refusal('--backward steps is the column as written, with batch norm and tanh: '
                      'leave out --no-batchnorm and --act')
    words, config['sha256'], notes = read_words(config)
    config['longest'] = max(map(len, words))
    if not config['context']:
        config['context'] = config['longest'] + 1
    vocabulary = m.make_vocabulary(words)
    config['vocabulary'] = len(vocabulary)
    flat = m.make_parameters(config, np.random.default_rng((FIRST_VALUES, config['seed'])))
    state = dict(
        config=config, vocabulary=vocabulary, step=0, best_step=-1, history=[],
        moments=np.zeros((MOMENTS[config['optimizer']], len(flat)), np.float32),
        latest=dict(p=m.views(m.PARAMETERS[config['model']](config), flat), statistics={}))
    return state, words, notes


def go_on(typed, out):
    """The state in a checkpoint, the words it goes on with, and what there is to say."""
    state = m.load(out)
    config = state['config']
    try:
        m.check_rules(config, {**RULES, 'sha256': str}, ['sha256', *CHOICES[config['model']]])
    except (KeyError, argparse.ArgumentTypeError) as error:
        raise Refusal(f'{out} is not a checkpoint in good order: {error}')
    for name in typed:
        if name not in ('steps', 'eval_every', 'data') and typed[name] != config.get(name):
            raise Refusal(f'--{name.replace("_", "-")} {typed[name]} contradicts {out}, which has '
                          f'{config.get(name)}: leave it out, or start a new run')
    if typed.get('steps', config['steps']) < state['step']:
        raise Refusal(f"--steps {typed['steps']}: {out} is at step {state['step']} already")
    sha256 = config['sha256']
    config.update(typed)
    words, config['sha256'], notes = read_words(config)
    vocabulary = m.make_vocabulary(words)
    if vocabulary != state['vocabulary']:
        raise Refusal(f'the characters of the data, {vocabulary[1:]!r}, are not those of {out}, '
                      f"{state['vocabulary'][1:]!r}")
    if config['sha256'] != sha256:
        notes.append('the data is not what this run began with; its characters are')
    notes.append(f"going on from step {state['step']} of {out}")
    return state, words, notes


def check_place(out):
    """Try that the checkpoint can be written; returns a free name for one that stands there."""
    try:
        os.makedirs(os.path.dirname(out) or '.', exist_ok=True)
        if os.path.isdir(out):
            raise IsADirectoryError(21, 'it is a folder')
        with open(f'{out}.tmp', 'wb'):
            pass
        os.remove(f'{out}.tmp')
    except OSError as error:
        raise Refusal(f'cannot write {out}: {error.strerror}; choose another --out')
    base, end = os.path.splitext(out)
    number = 1
    while os.path.exists(f'{base}.{number}{end}'):
        number += 1
    return f'{base}.{number}{end}' if os.path.exists(out) else None


def say_compiling(kernel):
    """Tell once that the kernels are compiled, and if that is so at each start, why."""
    folder = kernel.stats.cache_path
    if not folder:
        print('compiling: no folder can keep the kernels, so this takes a few seconds each time '
              '(NUMBA_CACHE_DIR names another)', file=sys.stderr)
    elif not glob.glob(os.path.join(folder, f'*.{kernel.__name__}-*.nbi')):
        print('compiling the kernels, this once: a few seconds', file=sys.stderr)


@m.command
def main(argv=None):
    typed = read_command_line(argv)
    resume, check, picture = typed.pop('resume'), typed.pop('check'), typed.pop('plot')
    out = typed.pop('out') or os.path.join('out', f"{typed.get('model', 'mlp')}.npz")
    state, words, notes = go_on(typed, out) if resume else start(typed)
    config = state['config']
    aside = check_place(out)
    if resume:
        aside = None
    for note in notes:
        print(note, file=sys.stderr)
    parts = dict(zip(('train', 'dev', 'test'), split(words)))
    parts['some of train'] = parts['train'][:len(parts['dev'])]
    examples = {part: m.EXAMPLES[config['model']](config, some, state['vocabulary'])
                for part, some in parts.items()}
    say_compiling(m.attention if config['model'] == 'gpt' else m.batchnorm)
    with ThreadPoolExecutor(config.get('threads', 1)) as pool:
        try:
            speed, signals = train(state, examples, out, aside, pool)
        except FloatingPointError:
            last = f"{out} keeps step {state['history'][-1][0]}" if state['history'] else \
                'nothing was written'
            print(f"the loss is not finite at step {state['step'] + 1}: try a lower --lr than "
                  f"{config['lr']:g}; {last}", file=sys.stderr)
            return 1
        if signals:
            print(f"stopped at step {state['step']}, all of it kept; to go on: "
                  f"{shlex.join(['python', 'train.py', '--resume', '--out', out])}", file=sys.stderr)
            return 128 + signals[0]
        best = usable(state, 'best')
        losses = {part: evaluate(best, examples[part], pool) for part in ('train', 'dev', 'test')}
    print(f"{sum(w.size for w in best['p'].values())} parameters, {speed:.0f} steps a second, best at "
          f"step {state['best_step']}, kept in {out}")
    print('  '.join(f'{part} {loss:.4f}' for part, loss in losses.items()))
    print(*sample(state, 'best', 10), sep='\n')


if __name__ == '__main__':
    sys.exit(main())
