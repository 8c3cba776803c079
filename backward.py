"""A language model from scratch, file 2 of 4: every gradient of model.py, by hand, and its proof.

The functions stand in the order of model.py, X_backward for X. dX is the derivative of the loss
by X, and has exactly the shape of X. The first contribution to a gradient is written with =, each
later one with +=; a layer that always adds says so. Run as a script, this file proves itself.
"""
import argparse
import inspect
import sys
from math import sqrt

import model as m
from model import GELU_A, GELU_C, MLP_PARAMETERS, kernel

import numpy as np


# ---- The column, from the loss back to C

def mlp_steps_backward(p, X, Y, a):
    """The gradient of every value that mlp_steps computes and of every parameter, by name."""
    C, W1, b1, bngain, bnbias, W2, b2 = (p[name] for name in MLP_PARAMETERS)
    n = len(X)

    # loss = -logprobs[range(n), Y].mean(): each picked element is one of n that are averaged
    dlogprobs = np.zeros_like(a['logprobs'])                                    # (N, V)
    dlogprobs[np.arange(n), Y] = -1 / n                                         # (N,)
    # logprobs = log(probs)
    dprobs = dlogprobs / a['probs']                                             # (N, V)
    # probs = counts * counts_sum_inv: the column was broadcast, so its gradient is a sum
    dcounts = dprobs * a['counts_sum_inv']                                      # (N, V)  1 of 2
    dcounts_sum_inv = (dprobs * a['counts']).sum(1, keepdims=True)              # (N, 1)
    # counts_sum_inv = counts_sum**-1
    dcounts_sum = -dcounts_sum_inv * a['counts_sum_inv']**2                     # (N, 1)
    # counts_sum = counts.sum(1): what was summed gets the gradient of the sum
    dcounts += dcounts_sum                                                      # (N, V)  2 of 2
    # counts = exp(norm_logits)
    dnorm_logits = dcounts * a['counts']                                        # (N, V)
    # norm_logits = logits - logit_maxes
    dlogits = dnorm_logits.copy()                                               # (N, V)  1 of 2
    # zero but for rounding: the same number added to a whole row of logits changes no loss
    dlogit_maxes = -dnorm_logits.sum(1, keepdims=True)                          # (N, 1)
    # logit_maxes = logits.max(1): only the largest of each row was looked at
    dlogits[np.arange(n), a['logits'].argmax(1)] += dlogit_maxes[:, 0]          # (N,)    2 of 2
    # logits = h @ W2 + b2
    dh = dlogits @ W2.T                                                         # (N, H)
    dW2 = a['h'].T @ dlogits                                                    # (H, V)
    db2 = dlogits.sum(0)                                                        # (V,)
    # h = tanh(hpreact)
    dhpreact = (1 - a['h']**2) * dh                                             # (N, H)
    # hpreact = bngain * bnraw + bnbias: both rows were broadcast
    dbngain = (dhpreact * a['bnraw']).sum(0)                                    # (H,)
    dbnraw = dhpreact * bngain                                                  # (N, H)
    dbnbias = dhpreact.sum(0)                                                   # (H,)
    # bnraw = bndiff * bnvar_inv
    dbndiff = dbnraw * a['bnvar_inv']                                           # (N, H)  1 of 2
    dbnvar_inv = (dbnraw * a['bndiff']).sum(0, keepdims=True)                   # (1, H)
    # bnvar_inv = (bnvar + 1e-5)**-0.5
    dbnvar = -0.5 * (a['bnvar'] + 1e-5)**-1.5 * dbnvar_inv                      # (1, H)
    # bnvar = bndiff2.sum(0) / (n - 1)
    dbndiff2 = np.ones_like(a['bndiff2']) / (n - 1) * dbnvar                    # (N, H)
    # bndiff2 = bndiff**2
    dbndiff += 2 * a['bndiff'] * dbndiff2                                       # (N, H)  2 of 2
    # bndiff = hprebn - bnmeani
    dhprebn = dbndiff.copy()                                                    # (N, H)  1 of 2
    dbnmeani = -dbndiff.sum(0, keepdims=True)                                   # (1, H)
    # bnmeani = hprebn.sum(0) / n
    dhprebn += dbnmeani / n                                                     # (N, H)  2 of 2
    # hprebn = embcat @ W1 + b1
    dembcat = dhprebn @ W1.T                                                    # (N, T*E)
    dW1 = a['embcat'].T @ dhprebn                                               # (T*E, H)
    db1 = dhprebn.sum(0)                      # (H,)  zero but for rounding: bnmeani takes b1 away
    # embcat = emb.reshape(n, -1): nothing was computed, so nothing but the shape changes back
    demb = dembcat.reshape(a['emb'].shape)                                      # (N, T, E)
    # emb = C[X]: each row of C gathers the gradients of all its copies. dC[X] += demb would add
    # only one of them where a row was fetched more than once.
    dC = np.zeros_like(C)                                                       # (V, E)
    np.add.at(dC, X, demb)                                                      # (V, E)

    return {name[1:]: value for name, value in locals().items() if name[0] == 'd'}


# ---- Layers, each the algebra of its steps carried through

@kernel
def embedding_backward(demb, X, dC):
    """Each row of dC (V,E) gathers from its copies in demb (N,T*E). Adds to dC. Source: A.6."""
    N, T = X.shape
    E = dC.shape[1]
    for k in range(N):
        for j in range(T):
            drow = dC[X[k, j]]
            for e in range(E):
                drow[e] += demb[k, j*E + e]


@kernel
def add_bias_backward(dy, db):
    """db (O,): the sum of the rows of dy (N,O), to each of which b was added. Source: A.5."""
    db[:] = 0
    for i in range(dy.shape[0]):
        for j in range(dy.shape[1]):
            db[j] += dy[i, j]


def linear_backward(dy, x, W, dx, dW, db):
    """dx = dy W^T, dW = x^T dy: read off the shapes (N,I) (I,O) (N,O). Source: A.5."""
    dy.dot(W.T, out=dx)                                    # (N, I)
    x.T.dot(dy, out=dW)                                    # (I, O)
    if db is not None:
        add_bias_backward(dy, db)                          # (O,)


@kernel
def batchnorm_backward(dy, gain, raw, var_inv, dx, dgain, dbias):
    """Two terms beside dy: mean and variance depend on every row of x (N,H). Source: A.4."""
    N, H = dy.shape
    dgain[:] = 0
    dbias[:] = 0
    for i in range(N):
        for j in range(H):
            dgain[j] += dy[i, j] * raw[i, j]
            dbias[j] += dy[i, j]
    n, n1 = dy.dtype.type(N), dy.dtype.type(N - 1)         # n - 1 is Bessel's, of the variance
    for i in range(N):
        for j in range(H):
            dx[i, j] = gain[j] * var_inv[j] * (
                dy[i, j] - dbias[j] / n - raw[i, j] * dgain[j] / n1)


@kernel
def rmsnorm_backward(dy, gain, raw, rms_inv, dx, dgain):
    """The sum couples the components: all of them went into the root mean square. Source: A.4.

    It adds to dx (N,E), which holds zeros or what came past the branch.
    """
    N, E = dy.shape
    dgain[:] = 0
    for i in range(N):
        coupling = dy.dtype.type(0)
        for j in range(E):
            dgain[j] += dy[i, j] * raw[i, j]
            coupling += gain[j] * dy[i, j] * raw[i, j]
        coupling /= dy.dtype.type(E)
        for j in range(E):
            dx[i, j] += rms_inv[i] * (gain[j] * dy[i, j] - raw[i, j] * coupling)


def layernorm_backward(dy, gain, raw, std_inv, dx, dgain):
    """RMSNorm's, less the mean of each row as x was. Adds to dx (N,E). Source: A.4."""
    dcentred = np.zeros_like(dx)                                                # (N, E)
    rmsnorm_backward(dy, gain, raw, std_inv, dcentred, dgain)                   # (N, E)
    dx += dcentred - dcentred.mean(1, keepdims=True)                            # (N, E)


NORMS_BACKWARD = dict(rmsnorm=rmsnorm_backward, layernorm=layernorm_backward)


@kernel
def tanh_backward(dy, x, s, y, dx):
    """dy (1 - tanh^2 x). Source: A.1."""
    one = dy.dtype.type(1)
    for i in range(dy.shape[0]):
        for j in range(dy.shape[1]):
            dx[i, j] = dy[i, j] * (one - y[i, j] * y[i, j])


def sigmoid_backward(dy, x, s, y, dx):
    """dy sigmoid(x) (1 - sigmoid(x)). Source: A.1."""
    np.multiply(dy, y * (1 - y), out=dx)                   # (N, H)


def relu_backward(dy, x, s, y, dx):
    """dy where x > 0, else 0; at 0, where there is no derivative, 0 too. Source: A.1."""
    np.multiply(dy, x > 0, out=dx)                         # (N, H)


def leaky_relu_backward(dy, x, s, y, dx):
    """dy where x > 0, else 0.01 dy. Source: A.1."""
    np.copyto(dx, np.where(x > 0, dy, 0.01 * dy))          # (N, H)


def silu_backward(dy, x, s, y, dx):
    """dy sigmoid(x) (1 + x (1 - sigmoid(x))). Source: A.1."""
    np.multiply(dy, s * (1 + x * (1 - s)), out=dx)         # (N, H)


@kernel
def gelu_backward(dy, x, s, y, dx):
    """SiLU's, and the chain to 2u: x stands twice in x sigmoid(2u(x)). Source: A.2."""
    one = dy.dtype.type(1)
    c2, c2a3 = dy.dtype.type(2 * GELU_C), dy.dtype.type(2 * GELU_C * 3 * GELU_A)
    for i in range(dy.shape[0]):
        for j in range(dy.shape[1]):
            slope = c2 + c2a3 * x[i, j] * x[i, j]          # of 2u
            dx[i, j] = dy[i, j] * s[i, j] * (one + x[i, j] * (one - s[i, j]) * slope)


ACTIVATIONS_BACKWARD = dict(
    tanh=tanh_backward, sigmoid=sigmoid_backward, relu=relu_backward,
    leaky_relu=leaky_relu_backward, silu=silu_backward, gelu=gelu_backward)


@kernel
def softmax_backward(dprobs, probs, dz):
    """dz_j = p_j (dp_j - sum_k p_k dp_k): the Jacobian times a vector, never built. Source: A.3."""
    dot = probs.dtype.type(0)
    for j in range(len(probs)):
        dot += probs[j] * dprobs[j]
    for j in range(len(probs)):
        dz[j] = probs[j] * (dprobs[j] - dot)


@kernel
def attention_backward(dctx, qkv, t, path, weights, dweights, dqkv):
    """dqkv (N,3E) from dctx (N,E), where M is N; dweights (A,P) is room. Source: A.5."""
    N, E = dctx.shape
    A = len(weights)
    parts, dparts = qkv.reshape(N, 3, A, E // A), dqkv.reshape(N, 3, A, E // A)
    dheads = dctx.reshape(N, A, E // A)
    scale = dctx.dtype.type(1 / sqrt(E // A))
    dqkv[:] = 0
    pair = 0
    for i in range(N):
        seen = path[pair:pair + t[i] + 1]
        for a in range(A):
            dc = dheads[i, a]
            w = weights[a, pair:pair + len(seen)]
            dw = dweights[a, pair:pair + len(seen)]
            for j in range(len(seen)):
                v, dv = parts[seen[j], 2, a], dparts[seen[j], 2, a]
                dot = dctx.dtype.type(0)
                for e in range(len(dc)):
                    dot += dc[e] * v[e]
                    dv[e] += w[j] * dc[e]
                dw[j] = dot
            softmax_backward(dw, w, dw)                    # now dw is of the scores
            q, dq = parts[i, 0, a], dparts[i, 0, a]
            for j in range(len(seen)):
                k, dk = parts[seen[j], 1, a], dparts[seen[j], 1, a]
                dscore = scale * dw[j]
                for e in range(len(dq)):
                    dq[e] += dscore * k[e]
                    dk[e] += dscore * q[e]
        pair += len(seen)


def residual_backward(dx, mask, dbranch):
    """dx passes the branch and, times its mask, enters it: that is returned. Source: A.6."""
    return dx if mask is None else np.multiply(dx, mask, out=dbranch)


def head_backward(dlogits, x, C, dx, dC):
    """The table as readout: the first of two contributions to dC (V,E). Source: A.6."""
    dlogits.dot(C, out=dx)                                 # (B, E)
    dlogits.T.dot(x, out=dC)                               # (V, E)


@kernel
def cross_entropy_backward(probs, Y, dlogits):
    """(probs - onehot(Y)) / N: the mean's 1/N, and so every later gradient has it. Source: A.3."""
    N, V = probs.shape
    share = probs.dtype.type(1 / N)
    for i in range(N):
        for j in range(V):
            dlogits[i, j] = probs[i, j] * share
        dlogits[i, Y[i]] -= share


# ---- The two models: the lines of model.py upside down

def mlp_backward(config, p, batch, a, d, g):
    """After mlp() has filled a: g of the parameters, and d of what has a gradient in a."""
    X, Y = batch
    cross_entropy_backward(a['probs'], Y, d['logits'])                          # (N, V)
    linear_backward(d['logits'], a['h'], p['W2'], d['h'], g['W2'], g['b2'])     # (N, H)
    ACTIVATIONS_BACKWARD[config['act']](d['h'], a['hpreact'], a['s'], a['h'], d['hpreact'])
    if not config['batchnorm']:
        d['hprebn'] = d['hpreact']                         # (N, H)  the same array, not a copy
    else:
        batchnorm_backward(d['hpreact'], p['bngain'], a['bnraw'], a['bnvar_inv'],
                           d['hprebn'], g['bngain'], g['bnbias'])               # (N, H)
    linear_backward(d['hprebn'], a['emb'], p['W1'], d['emb'], g['W1'], g['b1'])    # (N, T*E)
    g['C'][:] = 0                                                               # (V, E)
    embedding_backward(d['emb'], X, g['C'])                                     # (V, E)


def gpt_backward(config, p, batch, a, d, g, masks=None):
    """After gpt() has filled a: g of the parameters; layer 0 of d is room that all layers use."""
    X, Y, t, path, at = batch
    norm_backward, L = NORMS_BACKWARD[config['norm']], config['layers']
    act_backward = ACTIVATIONS_BACKWARD[config['act']]
    masks = [None] * 2*L if masks is None else masks                            # (2*L, N, E)
    dx, dnormed, dctx = d['emb'], d['normed'][0], d['ctx'][0]                   # (N, E)
    dqkv = d['qkv'][0]                                                          # (N, 3*E)
    dup, dh = d['up'][0], d['h'][0]                                             # (N, 4*E)
    dx[:] = 0                                                                   # (N, E)
    cross_entropy_backward(a['probs'], Y, d['logits'])                          # (B, V)
    # dC, 1 of 2: the table as readout
    head_backward(d['logits'], a['last'], p['C'], d['last'], g['C'])            # (V, E)
    # a row gathers from all the characters that were predicted from it
    dnormed[:] = 0                                                              # (N, E)
    embedding_backward(d['last'], at[:, None], dnormed)                         # (N, E)
    norm_backward(dnormed, p['gain'][-1], a['raw'][-1], a['inv'][-1], dx, g['gain'][-1])
    for l in reversed(range(L)):
        i, j = 2*l, 2*l + 1
        dbranch = residual_backward(dx, masks[j], d['branch'])                  # (N, E)
        linear_backward(dbranch, a['h'][l], p['Wdown'][l], dh, g['Wdown'][l], None)
        act_backward(dh, a['up'][l], a['s'][l], a['h'][l], dup)                 # (N, 4*E)
        linear_backward(dup, a['normed'][j], p['Wup'][l], dnormed, g['Wup'][l], None)
        norm_backward(dnormed, p['gain'][j], a['raw'][j], a['inv'][j], dx, g['gain'][j])
        dbranch = residual_backward(dx, masks[i], d['branch'])                  # (N, E)
        linear_backward(dbranch, a['ctx'][l], p['Wo'][l], dctx, g['Wo'][l], None)
        attention_backward(dctx, a['qkv'][l], t, path, a['weights'][l], d['weights'][0], dqkv)
        linear_backward(dqkv, a['normed'][i], p['Wqkv'][l], dnormed, g['Wqkv'][l], None)
        norm_backward(dnormed, p['gain'][i], a['raw'][i], a['inv'][i], dx, g['gain'][i])
    g['P'][:] = 0                                                               # (T, E)
    embedding_backward(d['emb'], t[:, None], g['P'])                            # (T, E)
    # dC, 2 of 2: the table as input
    embedding_backward(d['emb'], X, g['C'])                                     # (V, E)


BACKWARD = dict(mlp=mlp_backward, gpt=gpt_backward)


# ---- The proof: each gradient against the differences of the loss it claims to be of. Source: A.8.
#
# An error is measured against the largest gradient of its block, that along a direction against
# their root mean square, and either against no less than FLOOR times the loss, whose rounding every
# difference has. In single precision few digits are left: wider steps, and a wider tolerance.

FLOOR = 1e-2
STEP = {'float64': 3e-6, 'float32': 5e-3}
TOLERANCE = {'float64': 1e-7, 'float32': 2e-2}


def error_along(loss, corners, w, dw, u):
    """How far dw is from the difference of the loss along the direction u.

    None if the input of a ReLU changed its sign in between: across its corner is no derivative.
    """
    h, kept = STEP[w.dtype.name], w.copy()
    w += h * u
    above, sides = loss(), corners()
    w[...] = kept - h * u
    below, same = loss(), np.array_equal(sides, corners())
    w[...] = kept
    return abs((above - below) / (2*h) - (u * dw).sum()) if same else None


def prove(loss, blocks, rng, samples=None, corners=lambda: 0):
    """A row for each block {name: (w, dw)}: name, shape, and two relative errors of dw.

    The first is the largest of all elements (or of `samples` of them), the second that along one
    random direction. `corners` tells on which side of its corner each ReLU is.
    """
    rows, floor = [], FLOOR * max(1, abs(loss()))
    for name, (w, dw) in blocks.items():
        places = rng.permutation(w.size)[:samples]
        units = ((np.arange(w.size) == place).reshape(w.shape).astype(w.dtype) for place in places)
        errors = [error_along(loss, corners, w, dw, u) for u in units]
        worst = np.max([error for error in errors if error is not None], initial=0)
        for _ in range(100):
            u = rng.standard_normal(w.shape).astype(w.dtype)
            along = error_along(loss, corners, w, dw, u / np.linalg.norm(u))
            if along is not None:
                break
        else:
            raise m.Refusal(f'd{name}: every direction crosses the corner of some ReLU')
        rows.append((name, w.shape, worst / max(abs(dw).max(), floor),
                     along / max(np.linalg.norm(dw) / sqrt(dw.size), floor)))
    return rows


def prove_layer(forward, inputs, given, filled, rng, dtype):
    """Prove a layer and its twin, whose arguments fit together by their names: dX is of X.

    `inputs` and `filled` are shapes of arrays, `given` are other arguments. The loss is what the
    layer returns, or its output weighted by random numbers: these are then the gradient that
    arrives. With ones that of batch norm would be zero, right or wrong.
    """
    twin = globals()[forward.__name__ + '_backward']
    reads, twin_reads = (list(inspect.signature(layer).parameters) for layer in (forward, twin))
    values = {name: rng.standard_normal(shape).astype(dtype) for name, shape in inputs.items()}
    values |= {name: np.zeros(shape, dtype) for name, shape in filled.items()} | given
    d = {name: np.zeros_like(values[name[1:]]) for name in twin_reads if name[1:] in values}
    # dy comes first; at the loss itself nothing arrives
    output = twin_reads[0][1:] if twin_reads[0] in d else None
    weights = rng.standard_normal(np.shape(values.get(output))).astype(dtype)
    if output:
        d['d' + output][:] = weights

    def run():
        after = {name: np.copy(value) for name, value in values.items()}
        result = forward(*(after[name] for name in reads))
        return after, (weights * after[output]).sum() if output else result

    after, _ = run()
    twin(*(d[name] if name in d else after[name] for name in twin_reads))
    blocks = {name: (values[name], d['d' + name]) for name in inputs}
    return prove(lambda: run()[1], blocks, rng)


def prove_layers(rng, dtype):
    """(name, rows) of each layer, on sizes that are small and mostly different."""
    X, Y = np.array([[1, 3], [3, 3], [0, 1]]), np.array([4, 0, 4])
    # names of 3, 3, 1 and 2 rows: the first two have two rows in common
    t, path = np.array([0, 1, 2, 2, 0, 0, 1]), np.array([0, 0, 1, 0, 1, 2, 0, 1, 3, 4, 5, 5, 6])
    mask = (rng.random((3, 5)) < 0.5) * dtype.type(2)
    x, y = dict(x=(3, 5)), dict(s=(3, 5), y=(3, 5))
    norm = dict(x=(3, 5), gain=(5,)), {}, dict(raw=(3, 5), rms_inv=(3,), std_inv=(3,), y=(3, 5))
    for forward, inputs, given, filled in (
            (m.embedding, dict(C=(5, 4)), dict(X=X), dict(emb=(3, 8))),
            (m.linear, dict(x=(3, 5), W=(5, 4), b=(4,)), {}, dict(y=(3, 4))),
            (m.batchnorm, dict(x=(3, 5), gain=(5,), bias=(5,)), {},
             dict(raw=(3, 5), var_inv=(5,), y=(3, 5))),
            (m.rmsnorm, *norm), (m.layernorm, *norm),
            *((activation, x, {}, y) for activation in m.ACTIVATIONS.values()),
            (m.softmax, dict(z=(5,)), {}, dict(probs=(5,))),
            (m.attention, dict(qkv=(7, 18)), dict(t=t, path=path),
             dict(weights=(2, 13), ctx=(7, 6))),
            (m.residual, dict(x=(3, 5), branch=(3, 5)), dict(mask=mask), {}),
            (m.head, dict(x=(3, 4), C=(5, 4)), {}, dict(logits=(3, 5))),
            (m.cross_entropy, dict(logits=(3, 5)), dict(Y=Y), dict(probs=(3, 5)))):
        yield forward.__name__, prove_layer(forward, inputs, given, filled, rng, dtype)


def run_model(config, p, batch, **masks):
    """Forward and backward in new arrays: the loss as a function, and what was filled.

    With `--backward steps` it is the column; the tests prove all values on its way, too.
    """
    kind, dtype = config['model'], p['C'].dtype
    a, d = (m.arrays(m.ACTIVITY[kind](config, *m.sizes(batch)), dtype) for _ in range(2))
    g = m.arrays(m.PARAMETERS[kind](config), dtype)
    if config.get('backward') == 'steps':
        return lambda: m.mlp_steps(p, *batch)[0], a, d, \
            mlp_steps_backward(p, *batch, m.mlp_steps(p, *batch)[1])

    def loss():
        return m.FORWARD[kind](config, p, batch, a, **masks)

    loss()
    BACKWARD[kind](config, p, batch, a, d, g, **masks)
    return loss, a, d, g


def prove_model(config, batch, rng, dtype, samples=None):
    """Rows for the parameters of a whole model, with the masks of its dropout held fixed."""
    if config['model'] == 'gpt' and config['embd'] < 3:
        raise m.Refusal(f"--embd {config['embd']}: a norm of fewer than 3 is too steep to prove")
    masks = {'masks': m.dropout_masks(config, len(batch[0]), rng, dtype.type)} \
        if config.get('dropout') else {}
    p = m.make_parameters({**config, 'init': 'kaiming'}, rng, dtype)
    for w in p.values():                # no gain 1, no bias 0, no branch small
        w += 0.3 * rng.standard_normal(w.shape)
    loss, a, _, g = run_model(config, p, batch, **masks)
    blocks = {name: (w, g[name]) for name, w in p.items()}
    before = a['hpreact' if config['model'] == 'mlp' else 'up']
    return prove(loss, blocks, rng, samples, lambda: before > 0 if 'relu' in config['act'] else 0)


# ---- python backward.py

def print_rows(name, rows, dtype, file=None):
    """Print the rows of a table; returns how many of them fail."""
    failed = 0
    for block, shape, worst, along in rows:
        right = worst <= TOLERANCE[dtype.name] and along <= TOLERANCE[dtype.name]   # not if NaN
        failed += not right
        print(f'{name:<14} {"d" + block:<8} {str(shape):<14} {worst:>9.1e} {along:>9.1e}  '
              f'{"ok" if right else "WRONG"}', file=file)
        name = ''
    return failed


def show_batch():
    """How much of the gradient comes through tanh, and which rows of C it reaches."""
    print('\nOne batch of the MLP, 32 x 3 lookups in C:')
    for init in 'naive', 'kaiming':
        rng = np.random.default_rng(1)
        config, vocabulary, examples = m.own_examples(dict(init=init, batchnorm=False), m.FLAGS)
        X, Y = m.mlp_batch(examples, rng.integers(0, len(examples[1]), 32))
        _, _, d, g = run_model(config, m.make_parameters(config, rng), (X, Y))
        share = abs(d['hpreact']).mean() / abs(d['h']).mean()
        print(f'  {share:.0%} of the gradient comes through tanh with --init {init}')
    used, letters = abs(g['C']).sum(1) > 0, np.array(list('.' + vocabulary[1:]))  # '.': boundary
    print('  rows with gradient ', ''.join(letters[used]))
    print('  characters in batch', ''.join(letters[np.unique(X)]))
    print(f'  {(~used).sum()} of {len(used)} rows are all zero')


# What is proven of each kind: what is changed of the configuration, under which name.
VARIANTS = dict(
    mlp={'mlp_steps': dict(backward='steps'), 'mlp, no norm': dict(batchnorm=False), 'mlp': {}},
    gpt={'gpt, dropout': dict(dropout=0.5), 'gpt': {}})

small = dict(embd=(3, 8), hidden=(5, None), layers=(None, 2), heads=(None, 2))
SMALL = {name: (read, metavar, *small.get(name, own), meaning)
         for name, (read, metavar, *own, meaning) in m.FLAGS.items() if name != 'init'}


@m.command
def main(argv=None):
    """Prove all layers and both models, or one of a kind that is typed; status 1 if one fails."""
    parser = argparse.ArgumentParser(
        'backward.py', description='Prove every gradient against differences of the loss.')
    m.add_flags(parser, 'the model', SMALL)
    parser.add_argument('--dtype', choices=TOLERANCE, default='float64',
                        help='precision of the proof (float64)')
    typed = vars(parser.parse_args(argv))
    dtype, rng = np.dtype(typed.pop('dtype')), np.random.default_rng(1)
    tables = list(prove_layers(rng, dtype))
    for kind in [typed.get('model', 'mlp')] if typed else ('mlp', 'gpt'):
        config, _, examples = m.own_examples({**typed, 'model': kind}, SMALL)
        batch = m.BATCH[kind](examples, np.arange(20 if kind == 'mlp' else 3))
        for name, change in VARIANTS[kind].items():
            if name != 'mlp_steps' or config['batchnorm'] and config['act'] == 'tanh':
                tables.append((name, prove_model({**config, **change}, batch, rng, dtype)))
    print('layer or model gradient shape           element direction')
    failed = sum(print_rows(name, rows, dtype) for name, rows in tables)
    count = sum(len(rows) for _, rows in tables)
    if not typed:
        show_batch()
    print(f'\n{count - failed} of {count} gradients are right to {TOLERANCE[dtype.name]:g} in '
          f'{dtype}' + (f'; {failed} are WRONG' if failed else ''))
    return int(failed > 0)


if __name__ == '__main__':
    sys.exit(main())
