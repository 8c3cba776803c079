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
    """Arrays of NaN: a gradient that is not overwritten, but added to, stays NaN."""
    return [np.full(shape, np.nan) for shape in shapes]


def tree(rng, N):
    """Positions and ancestors of N nodes, each a root or a child of one of the nodes before it."""
    paths = []
    for i in range(N):
        parent = rng.integers(-1, i) if i > 1 else i - 1
        paths.append([*(paths[parent] if parent >= 0 else []), i])
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


def embedding_case(*T):
    def case(rng, N):
        C, dy, before = normal(rng, (11, 9), (N, 9 * prod(T)), (11, 9))
        X, dC = rng.integers(0, 7, (N, *T)), before.copy()
        backward.embedding_backward(dy, X, dC)             # adds to what is there
        return Case(dict(C=C), dict(X=X), lambda: m.embedding(C, X), dy, dict(C=dC - before))
    return case


def add_bias_case(rng, N):
    b, x, dy = normal(rng, 7, (N, 7), (N, 7))
    db, = unset(7)

    def forward():
        y = x.copy()
        m.add_bias(y, b)
        return y

    backward.sum_rows(dy, db)
    return Case(dict(b=b, x=x), {}, forward, dy, dict(b=db, x=dy))


def linear_case(rng, N):
    x, W, b, dy = normal(rng, (N, 9), (9, 7), 7, (N, 7))
    dW, db = unset((9, 7), 7)
    dx = backward.linear_backward(dy, x, W, dW, db)
    return Case(dict(x=x, W=W, b=b), {}, lambda: m.linear(x, W, b), dy, dict(x=dx, W=dW, b=db))


def linear_without_bias_case(rng, N):
    x, W, dy = normal(rng, (N, 9), (9, 7), (N, 7))
    dW, = unset((9, 7))
    dx = backward.linear_backward(dy, x, W, dW)
    return Case(dict(x=x, W=W), {}, lambda: m.linear(x, W), dy, dict(x=dx, W=dW))


def batchnorm_case(rng, N):
    """x is small, so that eps counts: without eps two rows come out as 0.7 and -0.7, whatever
    they are, and their gradient is zero."""
    x, gain, bias, dy = normal(rng, (N, 7), 7, 7, (N, 7))
    x *= 0.01
    dgain, dbias = unset(7, 7)
    _, raw, var_inv = m.batchnorm(x, gain, bias)
    dx = backward.batchnorm_backward(dy, gain, raw, var_inv, dgain, dbias)
    return Case(dict(x=x, gain=gain, bias=bias), {}, lambda: m.batchnorm(x, gain, bias)[0], dy,
                dict(x=dx, gain=dgain, bias=dbias))


def norm_case(name):
    def case(rng, N):
        x, gain, dy = normal(rng, (N, 9), 9, (N, 9))
        dgain, = unset(9)
        _, raw, inv = m.NORMS[name](x, gain)
        dx = backward.NORMS_BACKWARD[name](dy, gain, raw, inv, dgain)
        return Case(dict(x=x, gain=gain), {}, lambda: m.NORMS[name](x, gain)[0], dy,
                    dict(x=dx, gain=dgain))
    return case


def activation_case(name):
    def case(rng, N):
        x, dy = normal(rng, (N, 7), (N, 7))
        x += 0.01 * np.sign(x)          # away from zero, where rectifiers have no derivative
        dx = backward.ACTIVATIONS_BACKWARD[name](dy, x, *m.ACTIVATIONS[name](x))
        return Case(dict(x=x), {}, lambda: m.ACTIVATIONS[name](x)[0], dy, dict(x=dx))
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
    position, ancestors = tree(rng, N)
    _, weights = m.attention(qkv, position, ancestors, 3)
    dqkv = backward.attention_backward(dy, qkv, position, ancestors, weights)
    return Case(dict(qkv=qkv), dict(position=position, ancestors=ancestors),
                lambda: m.attention(qkv, position, ancestors, 3)[0], dy, dict(qkv=dqkv))


def cross_entropy_case(rng, N):
    """The end of the chain: its upstream gradient is 1 by definition."""
    logits, = normal(rng, (N, 11))
    Y = rng.integers(0, 11, N)
    _, probs = m.cross_entropy(logits, Y)
    return Case(dict(logits=logits), dict(Y=Y), lambda: np.array(m.cross_entropy(logits, Y)[0]),
                np.array(1.), dict(logits=backward.cross_entropy_backward(probs, Y)))


CASES = dict(
    embedding=embedding_case(5), embedding_of_one_id=embedding_case(), add_bias=add_bias_case,
    linear=linear_case, linear_without_bias=linear_without_bias_case, batchnorm=batchnorm_case,
    **{name: norm_case(name) for name in NORMS},
    **{name: activation_case(name) for name in ACTIVATIONS}, softmax=softmax_case,
    attention=attention_case, cross_entropy=cross_entropy_case)


# ---- The MLP one operation at a time

STEPS = next(node.body for node in ast.parse(Path(m.__file__).read_text(encoding='utf-8')).body
             if getattr(node, 'name', '') == 'mlp_steps')


def steps_after(name):
    """The lines of mlp_steps that follow the one of `name`, as a function: values -> loss."""
    place = next(i for i, line in enumerate(STEPS)
                 if isinstance(line, ast.Assign) and ast.unparse(line.targets[0]) == name)
    code = compile(ast.Module(STEPS[place + 1:-1], []), f'mlp_steps after {name}', 'exec')

    def loss(values):
        scope = {'np': np, **values}
        exec(code, scope)
        return scope['loss']
    return loss


# ---- Both models on small, odd sizes

def mlp_config(batchnorm, act):
    return dict(model='mlp', vocab_size=11, context=5, embd=9, hidden=7, batchnorm=batchnorm,
                act=act, init='kaiming', longest=5)


def gpt_config(norm, act, layers, heads):
    return dict(model='gpt', vocab_size=11, context=6, embd=12, layers=layers, heads=heads,
                norm=norm, act=act, init='kaiming', longest=5)


VOCABULARY = m.make_vocabulary(['abcdefghij'])
WORDS = ['bagfe', 'bagga', 'cab', 'd']  # from one character to the full context; no h, i or j


def random_parameters(config, rng, dtype=np.float64):
    """All of them random, gains and biases too, and their flat vector.

    Before batch norm all is small, for the same reason as in batchnorm_case.
    """
    shapes = m.parameter_shapes(config)
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
    return m.MLPBatch(rng.integers(0, 7, (N, 5)), rng.integers(0, 11, N))


def gpt_batch_of(config, words):
    return m.gpt_batch(m.gpt_examples(words, VOCABULARY, config['context']), np.arange(len(words)))


class Run(NamedTuple):
    loss: object        # computes the loss for the parameters as they are now
    acts: dict
    g: dict


def run(config, p, batch, masks=None):
    """One pass forward and backward of either model; all gradients are NaN before."""
    g = {name: np.full_like(w, np.nan) for name, w in p.items()}
    _, acts = backward.gradient(config, p, batch, g, masks)

    def loss():
        if config['model'] == 'mlp':
            return m.mlp(config, p, batch)[0]
        return m.gpt(config, p, batch, masks)[0]

    return Run(loss, acts, g)


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


def plain_gpt_batch(config, p, tree, masks=None):
    """Logits of a batch, one name after the other."""
    starts = np.flatnonzero(tree.position[tree.predicted_from] == 0)
    logits = []
    for name in np.split(tree.predicted_from, starts[1:]):
        mask = masks[:, name] if masks is not None else None
        logits.append(plain_gpt(config, p, tree.X[name], mask))
    return np.concatenate(logits)
