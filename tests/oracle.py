"""Random inputs for every layer, both models in plain NumPy, and derivatives without formulas."""
import ast
from math import prod, sqrt
from pathlib import Path
from typing import NamedTuple

import numpy as np

import backward
import model as m

BATCHES = 2, 3, 4, 32
ACTIVATIONS = *m.ACTIVATIONS,
NORMS = *m.NORMS,


# ---- Measuring

ALL = slice(None)


def error(ours, truth, floor=0., picked=ALL):
    """The largest difference over the largest element, or over `floor` where all are zero.

    `truth` may be known for the picked elements alone.
    """
    return np.abs(ours.flat[picked] - np.ravel(truth)).max() / max(np.abs(ours).max(), floor)


def central_differences(f, x, picked=ALL):
    """(f(x+h) - f(x-h)) / 2h for the picked elements of x; f() reads x in place."""
    h = 1e-5 * np.abs(x).max()
    slopes = []
    for i in np.arange(x.size)[picked]:
        value = x.flat[i]
        x.flat[i] = value + h
        above = f()
        x.flat[i] = value - h
        slopes.append((above - f()) / (2 * h))
        x.flat[i] = value
    return np.array(slopes)


def central_difference_along(f, x, direction):
    """The same for the whole of x, along one direction."""
    h, value = 1e-5 * np.abs(x).max(), x.copy()
    x[:] = value + h * direction
    above = f()
    x[:] = value - h * direction
    slope = (above - f()) / (2 * h)
    x[:] = value
    return slope


def complex_step(f, x, picked=ALL):
    """Im f(x + ih) / h for the picked elements of the complex x: nothing is subtracted."""
    slopes = []
    for i in np.arange(x.size)[picked]:
        value = x.flat[i]
        x.flat[i] = value + 1e-30j
        slopes.append(f().imag / 1e-30)
        x.flat[i] = value
    return np.array(slopes)


# ---- Arrays

def normal(rng, *shapes):
    return [rng.standard_normal(shape) for shape in shapes]


def unset(*shapes):
    """Room that nothing may read before it is filled."""
    return [np.full(shape, np.nan) for shape in shapes]


def room(shapes, dtype=np.float64):
    return m.views(shapes, np.full(sum(map(prod, shapes.values())), np.nan, dtype))


def tree(rng, N):
    """`t` and `path` of N rows: each begins a name, or goes on from one of the rows before it."""
    paths = []
    for i in range(N):
        before = rng.integers(-1, i) if i > 1 else i - 1
        paths.append([*(paths[before] if before >= 0 else []), i])
    return np.array([len(path) - 1 for path in paths]), np.concatenate(paths)


# ---- Layers, forward and backward on random inputs and a random upstream gradient

class Case(NamedTuple):
    inputs: dict        # what the layer is differentiated by
    fixed: dict         # its other inputs
    forward: object     # computes the output from the inputs, whatever they are now
    dy: np.ndarray      # gradient of the output
    gradients: dict     # what the backward function gives, by the names of the inputs

    def loss(self):
        return (self.dy * self.forward()).sum()


def embedding_case(rng, N):
    C, dy, before = normal(rng, (11, 9), (N, 5 * 9), (11, 9))
    X = rng.integers(0, 7, (N, 5))
    y, = unset((N, 5 * 9))

    def forward():
        m.embedding(C, X, y)
        return y

    dC = before.copy()
    backward.embedding_backward(dy, X, dC)
    return Case(dict(C=C), dict(X=X), forward, dy, dict(C=dC - before))


def add_bias_case(rng, N):
    b, x, dy = normal(rng, 7, (N, 7), (N, 7))
    y, db = unset((N, 7), 7)

    def forward():
        y[:] = x
        m.add_bias(b, y)
        return y

    backward.add_bias_backward(dy, db)
    return Case(dict(b=b, x=x), {}, forward, dy, dict(b=db, x=dy))


def linear_case(rng, N):
    x, W, b, dy = normal(rng, (N, 9), (9, 7), 7, (N, 7))
    y, dx, dW, db = unset((N, 7), (N, 9), (9, 7), 7)

    def forward():
        m.linear(x, W, b, y)
        return y

    backward.linear_backward(dy, x, W, dx, dW, db)
    return Case(dict(x=x, W=W, b=b), {}, forward, dy, dict(x=dx, W=dW, b=db))


def linear_without_bias_case(rng, N):
    x, W, dy = normal(rng, (N, 9), (9, 7), (N, 7))
    y, dx, dW = unset((N, 7), (N, 9), (9, 7))

    def forward():
        m.linear(x, W, None, y)
        return y

    backward.linear_backward(dy, x, W, dx, dW, None)
    return Case(dict(x=x, W=W), {}, forward, dy, dict(x=dx, W=dW))


def batchnorm_case(rng, N):
    """x is small, so that eps counts: without eps two rows come out as 0.7 and -0.7, whatever
    they are, and their gradient is zero."""
    x, gain, bias, dy = normal(rng, (N, 7), 7, 7, (N, 7))
    x *= 0.01
    raw, var_inv, y, dx, dgain, dbias = unset((N, 7), 7, (N, 7), (N, 7), 7, 7)

    def forward():
        m.batchnorm(x, gain, bias, raw, var_inv, y)
        return y

    forward()
    backward.batchnorm_backward(dy, gain, raw, var_inv, dx, dgain, dbias)
    return Case(dict(x=x, gain=gain, bias=bias), {}, forward, dy,
                dict(x=dx, gain=dgain, bias=dbias))


def norm_case(name):
    def case(rng, N):
        x, gain, dy, past = normal(rng, (N, 9), 9, (N, 9), (N, 9))
        raw, inv, y, dgain = unset((N, 9), N, (N, 9), 9)

        def forward():
            m.NORMS[name](x, gain, raw, inv, y)
            return y

        forward()
        dx = past.copy()
        backward.NORMS_BACKWARD[name](dy, gain, raw, inv, dx, dgain)
        return Case(dict(x=x, gain=gain), {}, forward, dy, dict(x=dx - past, gain=dgain))
    return case


def activation_case(name):
    def case(rng, N):
        x, dy = normal(rng, (N, 7), (N, 7))
        x += 0.01 * np.sign(x)          # away from zero, where rectifiers have no derivative
        y, s, dx = unset((N, 7), (N, 7), (N, 7))

        def forward():
            m.ACTIVATIONS[name](x, s, y)
            return y

        forward()
        backward.ACTIVATIONS_BACKWARD[name](dy, x, s, y, dx)
        return Case(dict(x=x), {}, forward, dy, dict(x=dx))
    return case


def softmax_case(rng, N):
    z, dy = normal(rng, N, N)
    y, dz = unset(N, N)

    def forward():
        m.softmax(z, y)
        return y

    backward.softmax_backward(dy, forward(), dz)
    return Case(dict(z=z), {}, forward, dy, dict(z=dz))


def attention_case(rng, N):
    """Three heads, each of five features."""
    qkv, dy = normal(rng, (N, 45), (N, 15))
    t, path = tree(rng, N)
    pairs = len(path)
    weights, dweights, y, dqkv = unset((3, pairs), (3, pairs), (N, 15), (N, 45))

    def forward():
        m.attention(qkv, t, path, weights, y)
        return y

    forward()
    backward.attention_backward(dy, qkv, t, path, weights, dweights, dqkv)
    return Case(dict(qkv=qkv), dict(t=t, path=path), forward, dy, dict(qkv=dqkv))


def residual_case(dropout):
    def case(rng, N):
        x, branch, dy, mask = normal(rng, (N, 7), (N, 7), (N, 7), (N, 7))
        mask = mask * (mask > 0) if dropout else None
        y, scaled, dbranch = unset((N, 7), (N, 7), (N, 7))

        def forward():
            y[:], scaled[:] = x, branch
            m.residual(y, scaled, mask)
            return y

        return Case(dict(x=x, branch=branch), dict(mask=mask), forward, dy,
                    dict(x=dy, branch=backward.residual_backward(dy, mask, dbranch)))
    return case


def head_case(rng, N):
    x, C, dy = normal(rng, (N, 9), (11, 9), (N, 11))
    y, dx, dC = unset((N, 11), (N, 9), (11, 9))

    def forward():
        m.head(x, C, y)
        return y

    backward.head_backward(dy, x, C, dx, dC)
    return Case(dict(x=x, C=C), {}, forward, dy, dict(x=dx, C=dC))


def cross_entropy_case(rng, N):
    """The end of the chain: its upstream gradient is 1 by definition."""
    logits, = normal(rng, (N, 11))
    Y = rng.integers(0, 11, N)
    probs, dlogits = unset((N, 11), (N, 11))

    def forward():
        return np.array(m.cross_entropy(logits, Y, probs))

    forward()
    backward.cross_entropy_backward(probs, Y, dlogits)
    return Case(dict(logits=logits), dict(Y=Y), forward, np.array(1.), dict(logits=dlogits))


CASES = dict(
    embedding=embedding_case, add_bias=add_bias_case, linear=linear_case,
    linear_without_bias=linear_without_bias_case, batchnorm=batchnorm_case,
    **{name: norm_case(name) for name in NORMS},
    **{name: activation_case(name) for name in ACTIVATIONS}, softmax=softmax_case,
    attention=attention_case, residual=residual_case(False), dropout=residual_case(True),
    head=head_case, cross_entropy=cross_entropy_case)


# ---- The column

COLUMN = next(node.body for node in ast.parse(Path(m.__file__).read_text(encoding='utf-8')).body
              if getattr(node, 'name', '') == 'mlp_steps')


def column_after(name):
    """The lines of mlp_steps that follow the one of `name`, as a function: values -> loss."""
    place = next(i for i, line in enumerate(COLUMN)
                 if isinstance(line, ast.Assign) and ast.unparse(line.targets[0]) == name)
    code = compile(ast.Module(COLUMN[place + 1:-1], []), f'mlp_steps after {name}', 'exec')

    def loss(values):
        scope = {'np': np, **values}
        exec(code, scope)
        return scope['loss']
    return loss


# ---- Both models on small, odd sizes

STORED = dict(longest=5, data='', sha256='', optimizer='adam')     # what else a checkpoint tells


def mlp_config(batchnorm, act):
    return dict(model='mlp', vocabulary=11, context=5, embd=9, hidden=7, batchnorm=batchnorm,
                act=act, init='kaiming', **STORED)


def gpt_config(norm, act, layers, heads):
    return dict(model='gpt', vocabulary=11, context=6, embd=12, layers=layers, heads=heads,
                norm=norm, act=act, init='kaiming', **STORED)


VOCABULARY = m.make_vocabulary(['abcdefghij'])
WORDS = ['bagfe', 'bagga', 'cab', 'd']  # from one character to the full context; no h, i or j


def random_parameters(config, rng, dtype=np.float64):
    """All of them random, gains and biases too, and their flat vector.

    Before batch norm all is small, for the same reason as in batchnorm_case.
    """
    shapes = m.PARAMETERS[config['model']](config)
    flat = rng.standard_normal(sum(map(prod, shapes.values()))).astype(dtype)
    p = m.views(shapes, flat)
    for name in p.keys() - {'C', 'P', 'gain', 'bngain', 'bnbias', 'b1', 'b2'}:
        p[name] /= sqrt(p[name].shape[-2])
    if config.get('batchnorm'):
        p['W1'] *= 0.005
        p['b1'] *= 0.005
    if config['model'] == 'mlp':
        p['b2'] *= 0.1                  # no probability so small that a step of 1e-5 is large
    return p, flat


def mlp_batch_of(rng, N):
    """Of 11 characters the last 4 are never fetched, some of the others more than once."""
    return rng.integers(0, 7, (N, 5)), rng.integers(0, 11, N)


def gpt_batch_of(config, words):
    return m.gpt_batch(m.gpt_examples(words, VOCABULARY, config['context']), np.arange(len(words)))


class Run(NamedTuple):
    loss: object        # computes the loss for the parameters as they are now
    a: dict
    d: dict
    g: dict


def run(config, p, batch, masks=None):
    """One pass forward and backward of either model, in room that was not set before."""
    kind, dtype = config['model'], p['C'].dtype
    a, d = (room(m.ACTIVITY[kind](config, *m.sizes(batch)), dtype) for _ in range(2))
    g = room(m.PARAMETERS[kind](config), dtype)
    more = {'masks': masks} if kind == 'gpt' else {}

    def loss():
        return m.FORWARD[kind](config, p, batch, a, **more)

    loss()
    backward.BACKWARD[kind](config, p, batch, a, d, g, **more)
    return Run(loss, a, d, g)


# ---- Both models once more, in plain NumPy, for real and for complex numbers

PLAIN_ACTIVATIONS = dict(
    tanh=np.tanh,
    sigmoid=lambda x: 1 / (1 + np.exp(-x)),
    relu=lambda x: np.where(x.real > 0, x, 0),
    leaky_relu=lambda x: np.where(x.real > 0, x, 0.01 * x),
    silu=lambda x: x / (1 + np.exp(-x)),
    gelu=lambda x: x * (1 + np.tanh(sqrt(2 / np.pi) * (x + 0.044715 * x**3))) / 2)


def plain_norm(name, x, gain):
    if name == 'layernorm':
        x = x - x.mean(1, keepdims=True)
    return gain * x / np.sqrt((x * x).mean(1, keepdims=True) + 1e-5)


def plain_softmax(z):
    e = np.exp(z - z.real.max(-1, keepdims=True))
    return e / e.sum(-1, keepdims=True)


def plain_loss(logits, Y):
    return -np.log(plain_softmax(logits))[np.arange(len(Y)), Y].mean()


def plain_mlp(config, p, X, statistics=None):
    """Logits; batch norm by the batch, or by mean and variance where they are given."""
    z = p['C'][X].reshape(len(X), -1) @ p['W1'] + p['b1']
    if config['batchnorm']:
        mean = z.sum(0) / len(z) if not statistics else statistics['bnmean']
        var = ((z - mean)**2).sum(0) / (len(z) - 1) if not statistics else statistics['bnvar']
        z = p['bngain'] * (z - mean) / np.sqrt(var + 1e-5) + p['bnbias']
    return PLAIN_ACTIVATIONS[config['act']](z) @ p['W2'] + p['b2']


def plain_gpt(config, p, ids, masks=None):
    """Logits of one name, its boundary in front; all pairs are computed, half of them masked."""
    n, A, norm = len(ids), config['heads'], config['norm']
    if masks is None:
        masks = np.ones((2*config['layers'], 1, 1))
    x = p['C'][ids] + p['P'][:n]
    for l in range(config['layers']):
        qkv = plain_norm(norm, x, p['gain'][2*l]) @ p['Wqkv'][l]
        q, k, v = qkv.reshape(n, 3, A, -1).transpose(1, 2, 0, 3)
        scores = q @ k.transpose(0, 2, 1) / sqrt(q.shape[2])
        weights = plain_softmax(np.where(np.tri(n, dtype=bool), scores, -1e9))
        x = x + (weights @ v).transpose(1, 0, 2).reshape(n, -1) @ p['Wo'][l] * masks[2*l]
        up = plain_norm(norm, x, p['gain'][2*l + 1]) @ p['Wup'][l]
        x = x + PLAIN_ACTIVATIONS[config['act']](up) @ p['Wdown'][l] * masks[2*l + 1]
    return plain_norm(norm, x, p['gain'][-1]) @ p['C'].T


def plain_gpt_batch(config, p, batch, masks=None):
    """Logits of a batch, one name after the other."""
    X, Y, t, path, at = batch
    logits = []
    for name in np.split(at, np.flatnonzero(t[at] == 0)[1:]):
        mask = masks[:, name] if masks is not None else None
        logits.append(plain_gpt(config, p, X[name, 0], mask))
    return np.concatenate(logits)
