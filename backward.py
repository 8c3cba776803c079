"""A language model from scratch, file 2 of 4: every gradient of model.py by hand, and the proof.

The functions stand in the order of model.py: linear_backward belongs to linear, and so on. dW is
the gradient of the loss with respect to W, and has exactly the shape of W (textbooks call this the
denominator layout); so it is for all names. Where a value is used more than once, the first
contribution to its gradient is written with =, later ones with +=. `python backward.py` checks
every gradient.
"""
import argparse
import ast
import inspect
import re
import sys
import traceback
from functools import partial
from math import sqrt
from pathlib import Path

import model as m
from model import GELU_A, GELU_C, MLP_PARAMETERS, kernel

import numpy as np


# ---- The MLP, one operation at a time: from the loss back to C

def mlp_steps_backward(p, X, Y, values):
    """The gradient of all `values`, which mlp_steps returned, and of all parameters, by name.

    Five patterns are enough. A function of each element: times its derivative. A product: each
    factor gets the gradient times the other one. What was broadcast is summed. What was summed is
    broadcast. What was used more than once: the contributions are added.
    """
    C, W1, b1, bngain, bnbias, W2, b2 = (p[name] for name in MLP_PARAMETERS)
    (emb, embcat, hprebn, bnmeani, bndiff, bndiff2, bnvar, bnvar_inv, bnraw, hpreact, h,
     logits, logit_maxes, norm_logits, counts, counts_sum, counts_sum_inv, probs,
     logprobs) = values.values()                           # in the order of mlp_steps
    N = len(X)

    # loss = -logprobs[range(N), Y].mean(): one element of each row counts, with weight 1 / N
    dlogprobs = np.zeros_like(logprobs)                    # (N, V)
    dlogprobs[np.arange(N), Y] = -1 / N                    # (N,)
    # logprobs = log(probs)
    dprobs = dlogprobs / probs                             # (N, V)
    # probs = counts * counts_sum_inv, (N, V) * (N, 1)
    dcounts = dprobs * counts_sum_inv                      # (N, V)  1 of 2
    dcounts_sum_inv = (dprobs * counts).sum(1, keepdims=True)                   # (N, 1)
    # counts_sum_inv = counts_sum**-1
    dcounts_sum = -dcounts_sum_inv * counts_sum_inv**2     # (N, 1)
    # counts_sum = counts.sum(1)
    dcounts += dcounts_sum                                 # (N, V)  2 of 2
    # counts = exp(norm_logits)
    dnorm_logits = dcounts * counts                        # (N, V)
    # norm_logits = logits - logit_maxes
    dlogits = dnorm_logits.copy()                          # (N, V)  1 of 2
    dlogit_maxes = -dnorm_logits.sum(1, keepdims=True)     # (N, 1)  0 up to rounding: no effect
    # logit_maxes = logits.max(1): the largest element of each row was copied
    dlogits[np.arange(N), logits.argmax(1)] += dlogit_maxes[:, 0]               # (N,)  2 of 2
    # logits = h @ W2 + b2
    dh = dlogits @ W2.T                                    # (N, H)
    dW2 = h.T @ dlogits                                    # (H, V)
    db2 = dlogits.sum(0)                                   # (V,)
    # h = tanh(hpreact)
    dhpreact = (1 - h**2) * dh                             # (N, H)
    # hpreact = bngain * bnraw + bnbias, (H,) * (N, H) + (H,)
    dbngain = (dhpreact * bnraw).sum(0)                    # (H,)
    dbnraw = dhpreact * bngain                             # (N, H)
    dbnbias = dhpreact.sum(0)                              # (H,)
    # bnraw = bndiff * bnvar_inv, (N, H) * (1, H)
    dbndiff = dbnraw * bnvar_inv                           # (N, H)  1 of 2
    dbnvar_inv = (dbnraw * bndiff).sum(0, keepdims=True)   # (1, H)
    # bnvar_inv = (bnvar + 1e-5)**-0.5
    dbnvar = -0.5 * (bnvar + 1e-5)**-1.5 * dbnvar_inv      # (1, H)
    # bnvar = bndiff2.sum(0) / (N - 1)
    dbndiff2 = np.ones_like(bndiff2) / (N - 1) * dbnvar    # (N, H)
    # bndiff2 = bndiff**2
    dbndiff += 2 * bndiff * dbndiff2                       # (N, H)  2 of 2
    # bndiff = hprebn - bnmeani, (N, H) - (1, H)
    dhprebn = dbndiff.copy()                               # (N, H)  1 of 2
    dbnmeani = -dbndiff.sum(0, keepdims=True)              # (1, H)
    # bnmeani = hprebn.sum(0) / N
    dhprebn += dbnmeani / N                                # (N, H)  2 of 2
    # hprebn = embcat @ W1 + b1
    dembcat = dhprebn @ W1.T                               # (N, T*E)
    dW1 = embcat.T @ dhprebn                               # (T*E, H)
    db1 = dhprebn.sum(0)                                   # (H,)  0 up to rounding: b1 cancels
    # embcat = emb.reshape(N, -1): the same numbers in another shape, changed back
    demb = dembcat.reshape(emb.shape)                      # (N, T, E)
    # emb = C[X]: a row of C was copied to every place where its id stands in X, so its gradient is
    # the sum over these places. dC[X] += demb would add only one of them for each row.
    dC = np.zeros_like(C)                                  # (V, E)
    np.add.at(dC, X, demb)                                 # (V, E)

    return dict(                        # in the order in which they became complete
        logprobs=dlogprobs, probs=dprobs, counts_sum_inv=dcounts_sum_inv, counts_sum=dcounts_sum,
        counts=dcounts, norm_logits=dnorm_logits, logit_maxes=dlogit_maxes, logits=dlogits, h=dh,
        W2=dW2, b2=db2, hpreact=dhpreact, bngain=dbngain, bnraw=dbnraw, bnbias=dbnbias,
        bnvar_inv=dbnvar_inv, bnvar=dbnvar, bndiff2=dbndiff2, bndiff=dbndiff, bnmeani=dbnmeani,
        hprebn=dhprebn, embcat=dembcat, W1=dW1, b1=db1, emb=demb, C=dC)


# ---- Layers of the MLP
# dy is the gradient of a layer's output. A backward function returns the gradient of the layer's
# input, and writes those of its parameters into the arrays that it is given (dW, db, ...). It gives
# the product of dy and the Jacobian (the derivatives of all outputs with respect to all inputs),
# which is never built: for tanh it would have (N*H)^2 numbers, and only N*H of them not 0.

@kernel
def add_at(dC, ids, drows):
    """dC[ids[i]] += drows[i], one i at a time: np.add.at(dC, ids, drows), only faster."""
    for i in range(len(ids)):
        row = dC[ids[i]]
        for e in range(len(row)):
            row[e] += drows[i, e]


def embedding_backward(demb, X, dC):
    """Add the T parts of each row of demb (N,T*E) to the rows X (N,T) of dC (V,E). Source: A.6.

    What was in dC before stays in the sum.
    """
    add_at(dC, X.reshape(-1), demb.reshape(-1, dC.shape[1]))                    # (V, E)


@kernel
def sum_rows(dy, db):
    """Fill db (O,) with the sum of the rows of dy (N,O)."""
    db[:] = 0
    for i in range(dy.shape[0]):
        for j in range(dy.shape[1]):
            db[j] += dy[i, j]


def linear_backward(dy, x, W, dW, db=None):
    """dx = dy W^T; also fills dW = x^T dy and db, the sum of the rows of dy. Source: A.5.

    The shapes (N,I), (I,O) and (N,O) of x, W and dy admit no other products.
    """
    np.dot(x.T, dy, out=dW)                                # (I, O)
    if db is not None:
        sum_rows(dy, db)                                   # (O,)
    return np.dot(dy, W.T)                                 # (N, I)


@kernel
def batchnorm_backward(dy, gain, raw, var_inv, dgain, dbias):
    """dx (N,H); also fills dgain and dbias (H,). Source: A.4.

    x reaches the loss in three ways: directly (dy), through the mean (-sum(dy) / N) and through the
    variance (-raw sum(dy raw) / (N - 1)). dx is the sum of the three, times gain var_inv. Here
    sum(dy) is dbias, and sum(dy raw) is dgain.
    """
    N, H = dy.shape
    dgain[:] = 0                                           # (H,)
    dbias[:] = 0                                           # (H,)
    for i in range(N):
        for j in range(H):
            dgain[j] += dy[i, j] * raw[i, j]
            dbias[j] += dy[i, j]
    n, n_minus_1 = dy.dtype.type(N), dy.dtype.type(N - 1)
    dx = np.empty_like(dy)                                 # (N, H)
    for i in range(N):
        for j in range(H):
            dx[i, j] = gain[j] * var_inv[j] * (
                dy[i, j] - dbias[j] / n - raw[i, j] * dgain[j] / n_minus_1)
    return dx


# The backward functions of all activations have the same arguments. (That of tanh is a kernel for
# the speed of the MLP.)

@kernel
def tanh_backward(dy, x, y, gate):
    """dx = dy (1 - tanh^2 x). Source: A.1."""
    dx, one = np.empty_like(dy), dy.dtype.type(1)          # (N, H) ()
    for i in range(dy.shape[0]):
        for j in range(dy.shape[1]):
            dx[i, j] = dy[i, j] * (one - y[i, j] * y[i, j])
    return dx


def sigmoid_backward(dy, x, y, gate):
    """dx = dy sigmoid(x) (1 - sigmoid(x)). Source: A.1."""
    return dy * (y * (1 - y))                              # (N, H)


def relu_backward(dy, x, y, gate):
    """dx = dy where x > 0, else 0. At 0, where there is no derivative, it is 0 too. Source: A.1."""
    return dy * (x > 0)                                    # (N, H)


def leaky_relu_backward(dy, x, y, gate):
    """dx = dy where x > 0, else 0.01 dy. Source: A.1."""
    return np.where(x > 0, dy, 0.01 * dy)                  # (N, H)


def silu_backward(dy, x, y, gate):
    """dx = dy (gate + x gate (1 - gate)), with gate = sigmoid(x), and x gate is y. Source: A.1."""
    return dy * (gate + y * (1 - gate))                    # (N, H)


def gelu_backward(dy, x, y, gate):
    """dx = dy (gate + x gate (1 - gate) 2u'), with u' = c (1 + 3 a x^2). Source: A.2.

    Two terms, because x is used twice: as a factor, and in the gate.
    """
    slope = 2 * GELU_C * (1 + 3 * GELU_A * x * x)          # (N, H)  2u'
    return dy * (gate + y * (1 - gate) * slope)            # (N, H)


ACTIVATIONS_BACKWARD = dict(
    tanh=tanh_backward, sigmoid=sigmoid_backward, relu=relu_backward,
    leaky_relu=leaky_relu_backward, silu=silu_backward, gelu=gelu_backward)


@kernel
def softmax_backward(dprobs, probs, dz):
    """Fill dz_j = p_j (dp_j - sum_k p_k dp_k), for one row. Source: A.3."""
    total = probs.dtype.type(0)
    for k in range(len(probs)):
        total += probs[k] * dprobs[k]
    for j in range(len(probs)):
        dz[j] = probs[j] * (dprobs[j] - total)


@kernel
def cross_entropy_backward(probs, Y):
    """dlogits (N,V) = (probs - onehot(Y)) / N: the loss is a mean over N rows. Source: A.3."""
    N, V = probs.shape
    inv_n = probs.dtype.type(1 / N)
    dlogits = np.empty_like(probs)                         # (N, V)
    for i in range(N):
        for j in range(V):
            dlogits[i, j] = probs[i, j] * inv_n
        dlogits[i, Y[i]] -= inv_n
    return dlogits


# ---- The MLP in layers: the lines of mlp() in reverse order

def mlp_backward(config, p, batch, acts, g):
    """Fill g, the gradients of the parameters by name, from the activations that mlp() returned."""
    emb, hprebn, bnraw, bnvar_inv, hpreact, h, gate, logits, probs = acts.values()
    dlogits = cross_entropy_backward(probs, batch.Y)                            # (N, V)
    dh = linear_backward(dlogits, h, p['W2'], g['W2'], g['b2'])                 # (N, H)
    dhpreact = ACTIVATIONS_BACKWARD[config['act']](dh, hpreact, h, gate)        # (N, H)
    if config['batchnorm']:
        dhprebn = batchnorm_backward(
            dhpreact, p['bngain'], bnraw, bnvar_inv, g['bngain'], g['bnbias'])  # (N, H)
    else:
        dhprebn = dhpreact                                                      # (N, H)
    demb = linear_backward(dhprebn, emb, p['W1'], g['W1'], g['b1'])             # (N, T*E)
    g['C'][:] = 0                                                               # (V, E)
    embedding_backward(demb, batch.X, g['C'])                                   # (V, E)


# ---- Layers of the GPT

@kernel
def rmsnorm_backward(dy, gain, raw, inv, dgain):
    """dx (N,E); also fills dgain (E,). Source: A.4.

    x reaches the loss directly, and through the root mean square of its row, which couples all
    elements. The two ways give gain dy and -raw mean(gain dy raw), each times inv.
    """
    N, E = dy.shape
    dgain[:] = 0                                           # (E,)
    dx = np.empty_like(dy)                                 # (N, E)
    for i in range(N):
        mean = dy.dtype.type(0)                            # of gain dy raw
        for j in range(E):
            dgain[j] += dy[i, j] * raw[i, j]
            mean += gain[j] * dy[i, j] * raw[i, j]
        mean /= dy.dtype.type(E)
        for j in range(E):
            dx[i, j] = inv[i] * (gain[j] * dy[i, j] - raw[i, j] * mean)
    return dx


def layernorm_backward(dy, gain, raw, inv, dgain):
    """RMSNorm's dx minus its row means, as the row means of x were subtracted. Source: A.4."""
    dcentred = rmsnorm_backward(dy, gain, raw, inv, dgain)                      # (N, E)
    return dcentred - dcentred.mean(1, keepdims=True)                           # (N, E)


NORMS_BACKWARD = dict(rmsnorm=rmsnorm_backward, layernorm=layernorm_backward)


@kernel
def attention_backward(dctx, qkv, position, ancestors, weights):
    """dqkv (N,3E). Source: A.5.

    A query was used in all scores of its node, a key and a value by every node that looked at them:
    their gradients are sums, which begin at zero.
    """
    N, E = dctx.shape
    A = len(weights)
    split, dsplit = qkv.reshape(N, 3, A, E // A), np.zeros((N, 3, A, E // A), qkv.dtype)
    dctx = dctx.reshape(N, A, E // A)
    scale = qkv.dtype.type(1 / sqrt(E // A))
    dweights, dscores = np.empty_like(weights), np.empty_like(weights)          # (A, S) (A, S)
    begin = 0
    for i in range(N):
        end = begin + position[i] + 1
        # backward through ctx = sum of weight_s value_s
        for s in range(begin, end):
            values, dvalues = split[ancestors[s], 2], dsplit[ancestors[s], 2]   # (A, E/A) (A, E/A)
            for head in range(A):
                dot = qkv.dtype.type(0)
                for e in range(E // A):
                    dot += dctx[i, head, e] * values[head, e]
                    dvalues[head, e] += weights[head, s] * dctx[i, head, e]
                dweights[head, s] = dot
        # backward through weight = softmax(score)
        pairs = slice(begin, end)
        for head in range(A):
            softmax_backward(dweights[head, pairs], weights[head, pairs], dscores[head, pairs])
        # backward through score_s = query . key_s / sqrt(E / A)
        queries, dqueries = split[i, 0], dsplit[i, 0]      # (A, E/A) (A, E/A)
        for s in range(begin, end):
            keys, dkeys = split[ancestors[s], 1], dsplit[ancestors[s], 1]       # (A, E/A) (A, E/A)
            for head in range(A):
                for e in range(E // A):
                    dqueries[head, e] += scale * dscores[head, s] * keys[head, e]
                    dkeys[head, e] += scale * dscores[head, s] * queries[head, e]
        begin = end
    return dsplit.reshape(N, 3*E)


# ---- The GPT in layers: the lines of gpt() in reverse order

def gpt_backward(config, p, tree, acts, g, masks=None):
    """Fill g, the gradients of the parameters by name, from the activations that gpt() returned."""
    norm_backward, L = NORMS_BACKWARD[config['norm']], config['layers']
    activation_backward = ACTIVATIONS_BACKWARD[config['act']]
    masks = [1] * (2*L) if masks is None else masks        # without dropout all are 1
    layers, raw, inv, last, logits, probs = acts.values()
    dlogits = cross_entropy_backward(probs, tree.Y)        # (B, V)
    np.dot(dlogits.T, last, out=g['C'])                    # (V, E)  1 of 2: as output layer
    dlast = np.dot(dlogits, p['C'])                        # (B, E)
    dnormed = np.zeros_like(raw)                           # (N, E)
    embedding_backward(dlast, tree.predicted_from, dnormed)                     # (N, E)
    dx = norm_backward(dnormed, p['gain'][2*L], raw, inv, g['gain'][2*L])       # (N, E)
    for l in reversed(range(L)):
        (normed1, raw1, inv1, qkv, ctx, weights,
         normed2, raw2, inv2, hpreact, h, gate) = layers[l].values()
        # x += branch: dx goes on unchanged to the x before; what the branch gives back is added
        dbranch = dx * masks[2*l + 1]                      # (N, E)
        dh = linear_backward(dbranch, h, p['Wdown'][l], g['Wdown'][l])          # (N, 4*E)
        dhpreact = activation_backward(dh, hpreact, h, gate)                    # (N, 4*E)
        dnormed = linear_backward(dhpreact, normed2, p['Wup'][l], g['Wup'][l])  # (N, E)
        dx += norm_backward(dnormed, p['gain'][2*l + 1], raw2, inv2, g['gain'][2*l + 1])    # (N, E)
        dbranch = dx * masks[2*l]                          # (N, E)
        dctx = linear_backward(dbranch, ctx, p['Wo'][l], g['Wo'][l])            # (N, E)
        dqkv = attention_backward(dctx, qkv, tree.position, tree.ancestors, weights)    # (N, 3*E)
        dnormed = linear_backward(dqkv, normed1, p['Wqkv'][l], g['Wqkv'][l])    # (N, E)
        dx += norm_backward(dnormed, p['gain'][2*l], raw1, inv1, g['gain'][2*l])            # (N, E)
    g['P'][:] = 0                                          # (T, E)
    embedding_backward(dx, tree.position, g['P'])          # (T, E)
    embedding_backward(dx, tree.X, g['C'])                 # (V, E)  2 of 2: as embedding


# ---- Both models

def gradient(config, p, batch, g, masks=None):
    """Fill g with the gradient of the mean loss, by name; returns the loss and the activations."""
    if config.get('backward') == 'steps':                  # train.py --backward steps
        loss, acts = m.mlp_steps(p, batch.X, batch.Y)
        gradients = mlp_steps_backward(p, batch.X, batch.Y, acts)
        for name, dw in g.items():
            dw[...] = gradients[name]
    elif config['model'] == 'mlp':
        loss, acts = m.mlp(config, p, batch)
        mlp_backward(config, p, batch, acts, g)
    else:
        loss, acts = m.gpt(config, p, batch, masks)
        gpt_backward(config, p, batch, acts, g, masks)
    return loss, acts


# ---- The gradient check. Source: A.8
# An array is moved a little back and forth in a direction; the difference of the two losses, over
# twice the distance, is the slope in this direction. If the direction is 1 at one element and 0 at
# all others, it is the gradient of this element. In float32 few digits of a difference are left, so
# that distance and tolerance are larger.

DISTANCE = dict(float64=3e-6, float32=5e-3)                # times the largest element
TOLERANCE = dict(float64=1e-7, float32=2e-2)


def slope_along(run, w, direction):
    """The slope of the loss in a direction of w, by differences.

    run() gives the loss and, for a whole model, which hpreact are positive. If one of them crosses
    0 on the way, where a ReLU has no derivative, the slope is NaN, which compare() leaves out.
    """
    distance = DISTANCE[w.dtype.name] * abs(w).max()
    before = w.copy()
    w += distance * direction
    loss_above, positive_above = run()
    w[...] = before - distance * direction
    loss_below, positive_below = run()
    w[...] = before
    same = np.array_equal(positive_above, positive_below)
    return (loss_above - loss_below) / (2 * distance) if same else np.nan


def compare(run, blocks, rng, n=None):
    """Check gradients, {name: (w, dw)}: print a row for each, the first after a title.

    Returns a list: True for a right gradient, False for a wrong one, None for one not written yet.
    Without n every element of w is moved by itself, with n all of w in n random directions.
    run(name) is the run() of slope_along for the array of that name. An error is divided by the
    largest gradient, or by 0.01 max(1, loss) if that is more: where a gradient is 0, the
    differences are rounding errors only.
    """
    right = []
    for name, (w, dw) in blocks.items():
        indent = ' ' * 15 if right else ''
        print(f'{indent}{"d" + name:<16} {str(w.shape):<12} ', end='')
        # In tests/exercise.py a line left out is `dX = ...`: then dX is Python's Ellipsis object.
        if dw is ... or np.shape(dw) != w.shape:
            print('not written yet' if dw is ... else f'WRONG: its shape is {np.shape(dw)}')
            right.append(None if dw is ... else False)
            continue
        directions = np.eye(w.size) if n is None else rng.standard_normal((n, w.size))
        directions /= np.linalg.norm(directions, axis=1, keepdims=True)
        numeric = np.array([slope_along(partial(run, name), w, direction.reshape(w.shape))
                            for direction in directions])
        by_hand = dw.ravel() if n is None else directions @ dw.ravel()
        errors = np.where(np.isnan(numeric), 0, abs(by_hand - numeric))
        error = errors.max() / max(abs(by_hand).max(), 0.01, 0.01 * abs(run(name)[0]))
        right.append(bool(error <= TOLERANCE[w.dtype.name] and not np.isnan(numeric).all()))
        print(f'{error:>9.1e}  {"ok" if right[-1] else "WRONG"}', flush=True)
        if right.count(False) == 1 and not right[-1]:      # details only of the first wrong one
            # Is one factor wrong everywhere? `ratio` fits best (least squares).
            worst, ratio = errors.argmax(), (by_hand @ numeric) / (numeric @ numeric)
            at = f'direction {worst}' if n else tuple(map(int, np.unravel_index(worst, w.shape)))
            everywhere = np.allclose(by_hand, ratio * numeric, rtol=1e-3, atol=1e-6)
            factor = f', everywhere {ratio:.4g} times as much' if everywhere else ''
            print(f'{"":15}at {at} by hand {by_hand[worst]:.5g}, '
                  f'by differences {numeric[worst]:.5g}{factor}')
    return right


LAYERS = ('embedding', 'linear', 'batchnorm', *m.ACTIVATIONS, 'cross_entropy', *m.NORMS,
          'attention')


def prove_layer(title, dtype, rng):
    """Prove a layer on random numbers.

    The loss is the sum of its output times random numbers dy, which are then its gradient. (If dy
    were all ones, the gradient of batch norm would be zero, right or wrong.) dW, dgain and so on
    begin as random numbers, to catch a function that adds to them where it should overwrite.
    """
    def normal(*shapes):
        return [rng.standard_normal(shape).astype(dtype) for shape in shapes]

    x, dy, gain, bias, dgain, dbias = normal((3, 5), (3, 5), 5, 5, 5, 5)
    if title == 'embedding':
        C, dC, dy = normal((6, 2), (6, 2), (2, 4))
        X, before = np.array([[1, 3], [3, 3]]), dC.copy()
        embedding_backward(dy, X, dC)                      # adds to what was in dC before
        layer, blocks = partial(m.embedding, C, X), dict(C=(C, dC - before))
    elif title == 'linear':
        W, b, dW, db, dy = normal((5, 4), 4, (5, 4), 4, (3, 4))
        linear_backward(dy, x, W, dW)                      # it must run without b, as in the GPT
        dx = linear_backward(dy, x, W, dW, db)
        layer, blocks = partial(m.linear, x, W, b), dict(x=(x, dx), W=(W, dW), b=(b, db))
    elif title == 'batchnorm':
        layer = partial(m.batchnorm, x, gain, bias)
        _, raw, var_inv = layer()
        dx = batchnorm_backward(dy, gain, raw, var_inv, dgain, dbias)
        blocks = dict(x=(x, dx), gain=(gain, dgain), bias=(bias, dbias))
    elif title in m.ACTIVATIONS:
        layer = partial(m.ACTIVATIONS[title], x)
        y, gate = layer()
        blocks = dict(x=(x, ACTIVATIONS_BACKWARD[title](dy, x, y, gate)))
    elif title == 'cross_entropy':
        Y, dy = np.array([4, 0, 4]), 1
        layer = partial(m.cross_entropy, x, Y)
        _, probs = layer()
        blocks = dict(logits=(x, cross_entropy_backward(probs, Y)))
    elif title in m.NORMS:
        layer = partial(m.NORMS[title], x, gain)
        _, raw, inv = layer()
        dx = NORMS_BACKWARD[title](dy, gain, raw, inv, dgain)
        blocks = dict(x=(x, dx), gain=(gain, dgain))
    else:
        tree = m.gpt_batch(m.gpt_examples(['ab', 'ac', '', 'bca'], '\0abc', 4), np.arange(4))
        qkv, dy = normal((len(tree.X), 18), (len(tree.X), 6))
        layer = partial(m.attention, qkv, tree.position, tree.ancestors, 2)
        _, weights = layer()
        dqkv = attention_backward(dy, qkv, tree.position, tree.ancestors, weights)
        blocks = dict(qkv=(qkv, dqkv))

    def run(name):                      # compare() moves arrays of `blocks`, which layer() reads
        outputs = layer()
        y = outputs[0] if isinstance(outputs, tuple) else outputs
        return np.sum(dy * y), None                        # no x is near the corner of a ReLU

    return compare(run, blocks, rng)


def small_random(config, dtype, rng):
    """Random parameters, also for gains and biases, whose first values are 1 and 0."""
    shapes = m.parameter_shapes(config)
    return {name: 0.3 * rng.standard_normal(shape).astype(dtype) for name, shape in shapes.items()}


def prove_steps(config, batch, dtype, rng):
    """Prove the gradients of all values of mlp_steps, in the order of mlp_steps_backward.

    To move a value in the middle, mlp_steps is executed line by line: after the line that computes
    the value, it is replaced by the moved array. (A parameter is moved in p itself.)
    """
    p = small_random(config, dtype, rng)
    _, values = m.mlp_steps(p, *batch)
    gradients = mlp_steps_backward(p, *batch, values)
    function = ast.parse(inspect.getsource(m.mlp_steps)).body[0]
    lines = []                                             # (name assigned, code)
    for line in function.body[1:-1]:                       # no docstring, no return
        code = compile(ast.Module([line], []), 'mlp_steps', 'exec')
        lines.append((ast.unparse(line.targets[0]), code))

    def run(name):
        scope = dict(p=p, X=batch.X, Y=batch.Y, np=np, MLP_PARAMETERS=MLP_PARAMETERS)
        for computed, line in lines:
            exec(line, scope)
            if computed == name:
                scope[name] = values[name]                 # which is the array that is moved
        return scope['loss'], None

    return compare(run, {name: ({**values, **p}[name], dw) for name, dw in gradients.items()}, rng)


def prove_model(config, batch, dtype, rng, n=None):
    """Prove the parameters of a whole model, with the same dropout masks for every difference."""
    masks = None
    if config.get('dropout'):
        shape = 2*config['layers'], len(batch.X), config['embd']
        masks = 2 * rng.integers(0, 2, shape).astype(dtype)     # of rate 0.5; any would do
    p, g = small_random(config, dtype, rng), small_random(config, dtype, rng)
    unused = small_random(config, dtype, rng)
    gradient(config, p, batch, g, masks)

    def run(name):                      # only the loss is needed of what gradient() computes
        loss, acts = gradient(config, p, batch, unused, masks)
        layers = acts.get('layers', [acts])                # the MLP is like one layer
        return loss, [layer['hpreact'] > 0 for layer in layers]     # see slope_along

    blocks = {name: (w, g[name]) for name, w in p.items()}
    if 'Wqkv' in blocks:                # views of it for queries, keys and values apart
        w, dw = blocks.pop('Wqkv')
        q, k, v = np.split(w, 3, axis=-1)
        dq, dk, dv = np.split(dw, 3, axis=-1)
        blocks |= dict(Wq=(q, dq), Wk=(k, dk), Wv=(v, dv))
    return compare(run, blocks, rng, n)


def prove(title, proof, *arguments):
    """Call a proof and return its list; an exception becomes a row, too."""
    print(f'{title:<14} ', end='', flush=True)             # to be seen if Python itself crashes
    try:
        with np.errstate(all='ignore'):
            return proof(*arguments)
    except NotImplementedError:         # a function that tests/exercise.py has left out
        print('not written yet')
        return [None]
    except Exception as error:
        # Numba's errors begin with lines "Failed in ..." and go on for long: one line is shown.
        said = re.sub('Failed in .*\n', '', str(error)).partition('\n')[0]
        place = [frame for frame in traceback.extract_tb(error.__traceback__)
                 if Path(frame.filename).name in ('model.py', 'backward.py')][-1]
        print(f'{type(error).__name__}: {said}\n{"":15}line {place.lineno}: {place.line}')
        return [False]


# ---- python backward.py

def tanh_gradients(sizes, init):
    """h, dh, and dh after tanh_backward, of an MLP without batch norm: (32,H) each."""
    config = dict(m.MLP_DEFAULTS, **sizes, init=init, batchnorm=False)
    rng = np.random.default_rng(1)
    config, batch = m.first_batch(config, 32, rng)
    p = m.make_parameters(config, rng)
    _, acts = m.mlp(config, p, batch)
    dh = cross_entropy_backward(acts['probs'], batch.Y) @ p['W2'].T         # (N, H)
    return acts['h'], dh, tanh_backward(dh, acts['hpreact'], acts['h'], None)


def plot(path):
    """Draw all values of mlp_steps with their gradients, and what the first values do to tanh."""
    from matplotlib.figure import Figure

    config, batch = m.first_batch(m.MLP_DEFAULTS, 32, np.random.default_rng(1))
    p = m.make_parameters(config, np.random.default_rng(1))
    _, values = m.mlp_steps(p, *batch)
    figure = Figure((9, 11), layout='constrained')
    top, bottom = figure.subfigures(2, height_ratios=[4, 1])
    top.suptitle('From the loss back to C, row by row: each value and, below it, its gradient\n'
                 '(red is positive, blue is negative; ± is the number of the darkest colour)')
    gradients = mlp_steps_backward(p, *batch, values)
    for part, (name, gradient) in zip(top.subfigures(4, 7).flat, gradients.items()):
        pair = {name: {**values, **p}[name], 'd' + name: gradient}
        for axes, (label, array) in zip(part.subplots(2), pair.items()):
            largest, rows = abs(array).max(), np.atleast_2d(array)
            image = rows.reshape(len(rows), -1) / (largest or 1)
            axes.imshow(image.round(1), 'coolwarm', vmin=-1, vmax=1, aspect='auto',
                        interpolation='nearest')           # rounded: a smaller file
            axes.set_title(f'{label}\n{array.shape} ±{largest:.2g}', size=8)
            axes.set_axis_off()
    left, right = bottom.subplots(1, 2)
    left.set(title='h without batch norm, by first values', xticks=[-1, 0, 1], ylabel='elements')
    right.set(title='dhpreact, as a multiple of the mean |dh|')
    for init in 'naive', 'kaiming':
        h, dh, dhpreact = tanh_gradients({}, init)
        left.hist(h.ravel(), np.linspace(-1, 1, 40), label=init, alpha=0.6)
        right.hist(dhpreact.ravel() / abs(dh).mean(), np.linspace(-4, 4, 40), label=init, alpha=0.6)
    right.legend()
    figure.savefig(path)


def main(argv=None):
    """Prove all layers and both models; returns 1 if a gradient is wrong or not written, else 0."""
    rng = np.random.default_rng(1)
    mlp, batch = m.first_batch(dict(m.MLP_DEFAULTS, embd=3, hidden=5), 20, rng)
    gpt, tree = m.first_batch(dict(m.GPT_DEFAULTS, embd=8, layers=2, heads=2), 3, rng)
    proofs = {title: (prove_layer, title) for title in LAYERS}
    proofs |= dict(
        mlp_steps=(prove_steps, mlp, batch),
        mlp_no_norm=(prove_model, {**mlp, 'batchnorm': False}, batch),
        mlp=(prove_model, mlp, batch),
        gpt_dropout=(prove_model, {**gpt, 'dropout': 0.5}, tree),
        gpt=(prove_model, gpt, tree))
    parser = argparse.ArgumentParser(description='Compare every gradient with differences.')
    parser.add_argument('--dtype', choices=TOLERANCE, default='float64', help='precision (float64)')
    parser.add_argument('--only', choices=proofs, default=proofs, nargs='+', metavar='NAME',
                        help='prove only these: ' + ' '.join(proofs))
    parser.add_argument('--plot', metavar='FILE', help='draw values and gradients, prove nothing')
    args = parser.parse_args(argv)
    if args.plot:
        try:
            return plot(args.plot)
        except (ImportError, ValueError, OSError) as error:
            parser.error(f'--plot {args.plot}: {error}')
    print('layer or model gradient         shape            error')
    right = []
    for title in args.only:
        proof, *arguments = proofs[title]
        right += prove(title, proof, *arguments, np.dtype(args.dtype), np.random.default_rng(1))
    if all(right) and len(args.only) == len(proofs):
        print('\nMLP without batch norm: how much of the gradient comes through tanh')
        for sizes in dict(embd=10, hidden=64), dict(embd=2, hidden=100):
            for init in 'naive', 'kaiming':
                h, dh, dhpreact = tanh_gradients(sizes, init)
                print(f'  {sizes} {init:<7} {abs(dhpreact).mean() / abs(dh).mean():>4.0%}')
    unwritten = f', {right.count(None)} are not written yet' if None in right else ''
    print(f'\n{right.count(True)} of {len(right)} gradients are right to '
          f'{TOLERANCE[args.dtype]:g}{unwritten}')
    return int(not all(right))


if __name__ == '__main__':
    sys.exit(main())
