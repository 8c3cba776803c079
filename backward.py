"""A language model from scratch, file 2 of 4: every gradient of model.py, by hand, and its proof.

The functions stand in the order of model.py, X_backward for X. dX is the derivative of the loss
by X, and has exactly the shape of X. The first contribution to a gradient is written with =,
each later one with +=. Run as a script, this file proves itself: python backward.py.
"""
import argparse
import sys
from math import sqrt

import numpy as np

import model as m
from model import GELU_A, GELU_C, MLP_PARAMETERS, kernel


# ---- The MLP in single operations, from the loss back to C

def mlp_steps_backward(p, X, Y, a):
    """The gradient of every value that mlp_steps computes and of every parameter, by name."""
    C, W1, b1, bngain, bnbias, W2, b2 = (p[name] for name in MLP_PARAMETERS)
    n = len(X)

    # loss = -logprobs[range(n), Y].mean(): each picked element is one of n that are averaged
    dlogprobs = np.zeros_like(a['logprobs'])                                    # (N, V)
    dlogprobs[np.arange(n), Y] = -1 / n
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
    # zero but for rounding, whatever the logits are: the same shift of a whole row changes no loss
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

    return dict(
        logprobs=dlogprobs, probs=dprobs, counts_sum_inv=dcounts_sum_inv, counts_sum=dcounts_sum,
        counts=dcounts, norm_logits=dnorm_logits, logit_maxes=dlogit_maxes, logits=dlogits, h=dh,
        hpreact=dhpreact, bnraw=dbnraw, bnvar_inv=dbnvar_inv, bnvar=dbnvar, bndiff2=dbndiff2,
        bndiff=dbndiff, bnmeani=dbnmeani, hprebn=dhprebn, embcat=dembcat, emb=demb,
        C=dC, W1=dW1, b1=db1, bngain=dbngain, bnbias=dbnbias, W2=dW2, b2=db2)


# ---- Layers, each the algebra of its steps carried through

@kernel
def embedding_backward(demb, X, dC):
    """dC[X[k, j]] += demb[k, j]. It adds to dC, which holds zeros or the first contribution."""
    N, T, E = demb.shape
    for k in range(N):
        for j in range(T):
            for e in range(E):
                dC[X[k, j], e] += demb[k, j, e]


@kernel
def positions_backward(dx, rows, first, dP):
    """dP[rows[i] - first[i]] += dx[i]: each position gathers from all names in the batch."""
    dP[:] = 0
    for i in range(dx.shape[0]):
        for e in range(dx.shape[1]):
            dP[rows[i] - first[i], e] += dx[i, e]


@kernel
def add_bias_backward(dy, db):
    """db (O,): the sum of the rows of dy (N,O), to each of which b was added."""
    db[:] = 0
    for i in range(dy.shape[0]):
        for j in range(dy.shape[1]):
            db[j] += dy[i, j]


def linear_backward(dy, x, W, dx, dW, db):
    """dx = dy W^T, dW = x^T dy: read off the shapes. Source: A.5."""
    np.dot(dy, W.T, out=dx)                                # (N, I)
    np.dot(x.T, dy, out=dW)                                # (I, O)
    if db is not None:
        add_bias_backward(dy, db)                          # (O,)


@kernel
def batchnorm_backward(dy, gain, raw, var_inv, dx, dgain, dbias):
    """In one expression, from the column: mean and variance depend on every row of x (N,H)."""
    N, H = dy.shape
    dgain[:] = 0
    dbias[:] = 0
    for i in range(N):
        for j in range(H):
            dgain[j] += dy[i, j] * raw[i, j]
            dbias[j] += dy[i, j]
    n = dy.dtype.type(N)
    bessel = dy.dtype.type(N / (N - 1))
    for i in range(N):
        for j in range(H):
            dx[i, j] = gain[j] * var_inv[j] / n * (
                n * dy[i, j] - dbias[j] - bessel * raw[i, j] * dgain[j])


@kernel
def rmsnorm_backward(dy, gain, raw, rms_inv, dx, dgain):
    """The sum couples the components: all of them went into the root mean square. Source: A.4.

    It adds to dx, which holds zeros or what came past the branch.
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


@kernel
def layernorm_backward(dy, gain, raw, std_inv, dx, dgain):
    """As RMSNorm's, and one term more: the mean depends on every component too. Adds to dx."""
    N, E = dy.shape
    dgain[:] = 0
    for i in range(N):
        mean = dy.dtype.type(0)
        coupling = dy.dtype.type(0)
        for j in range(E):
            dgain[j] += dy[i, j] * raw[i, j]
            mean += gain[j] * dy[i, j]
            coupling += gain[j] * dy[i, j] * raw[i, j]
        mean /= dy.dtype.type(E)
        coupling /= dy.dtype.type(E)
        for j in range(E):
            dx[i, j] += std_inv[i] * (gain[j] * dy[i, j] - mean - raw[i, j] * coupling)


NORMS_BACKWARD = dict(rmsnorm=rmsnorm_backward, layernorm=layernorm_backward)


@kernel
def tanh_backward(dy, x, s, y, dx):
    """dy (1 - tanh^2 x). Source: A.1."""
    one = dy.dtype.type(1)
    for i in range(dy.shape[0]):
        for j in range(dy.shape[1]):
            dx[i, j] = dy[i, j] * (one - y[i, j] * y[i, j])


@kernel
def sigmoid_backward(dy, x, s, y, dx):
    """dy sigmoid(x) (1 - sigmoid(x)). Source: A.1."""
    one = dy.dtype.type(1)
    for i in range(dy.shape[0]):
        for j in range(dy.shape[1]):
            dx[i, j] = dy[i, j] * y[i, j] * (one - y[i, j])


@kernel
def relu_backward(dy, x, s, y, dx):
    """dy where x > 0, else 0; at zero, where there is no derivative, 0 too. Source: A.1."""
    zero = dy.dtype.type(0)
    for i in range(dy.shape[0]):
        for j in range(dy.shape[1]):
            dx[i, j] = dy[i, j] if x[i, j] > zero else zero


@kernel
def leaky_relu_backward(dy, x, s, y, dx):
    """dy where x > 0, else 0.01 dy. Source: A.1."""
    zero = dy.dtype.type(0)
    slope = dy.dtype.type(0.01)
    for i in range(dy.shape[0]):
        for j in range(dy.shape[1]):
            dx[i, j] = dy[i, j] if x[i, j] > zero else slope * dy[i, j]


@kernel
def silu_backward(dy, x, s, y, dx):
    """dy sigmoid(x) (1 + x (1 - sigmoid(x))). Source: A.1."""
    one = dy.dtype.type(1)
    for i in range(dy.shape[0]):
        for j in range(dy.shape[1]):
            dx[i, j] = dy[i, j] * s[i, j] * (one + x[i, j] * (one - s[i, j]))


@kernel
def gelu_backward(dy, x, s, y, dx):
    """Two terms, as x stands twice in x (1 + tanh u(x)) / 2; the second is easily lost. Source: A.2."""
    one, half = dy.dtype.type(1), dy.dtype.type(0.5)
    c, ca3 = dy.dtype.type(GELU_C), dy.dtype.type(3 * GELU_C * GELU_A)
    for i in range(dy.shape[0]):
        for j in range(dy.shape[1]):
            du = c + ca3 * x[i, j] * x[i, j]
            dx[i, j] = dy[i, j] * half * (
                one + s[i, j] + x[i, j] * (one - s[i, j] * s[i, j]) * du)


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
def attention_backward(dctx, qkv, first, weights, dweights, dqkv):
    """dqkv (N,3E) from dctx (N,E), as far as the diagonal; dweights (A,P). Source: A.5."""
    N, E = dctx.shape
    A = len(weights)
    S = E // A
    scale = dctx.dtype.type(1 / sqrt(S))
    dqkv[:] = 0
    pair = 0
    for i in range(N):
        seen = i - first[i] + 1
        for a in range(A):
            dc = dctx[i, a*S:a*S + S]
            w = weights[a, pair:pair + seen]
            dw = dweights[a, pair:pair + seen]
            for j in range(seen):
                v = qkv[first[i] + j, 2*E + a*S:2*E + a*S + S]
                dv = dqkv[first[i] + j, 2*E + a*S:2*E + a*S + S]
                dot = dctx.dtype.type(0)
                for e in range(S):
                    dot += dc[e] * v[e]
                    dv[e] += w[j] * dc[e]
                dw[j] = dot
            softmax_backward(dw, w, dw)
            q = qkv[i, a*S:a*S + S]
            dq = dqkv[i, a*S:a*S + S]
            for j in range(seen):
                k = qkv[first[i] + j, E + a*S:E + a*S + S]
                dk = dqkv[first[i] + j, E + a*S:E + a*S + S]
                dscore = scale * dw[j]
                for e in range(S):
                    dq[e] += dscore * k[e]
                    dk[e] += dscore * q[e]
        pair += seen


def residual_backward(dx, dbranch):
    """A sum passes its gradient on unchanged, past the branch and into it. Source: A.6."""
    dbranch[:] = dx                                        # (N, E)


def dropout_backward(dx, masks, place):
    """dx *= masks[place], the very mask of the forward pass."""
    if masks is not None:
        dx *= masks[place]                                 # (N, E)


def head_backward(dlogits, x, C, dx, dC):
    """The table as readout gives the first contribution to dC (V,E), its use as input another."""
    np.dot(dlogits, C, out=dx)                             # (N, E)
    np.dot(dlogits.T, x, out=dC)                           # (V, E)


@kernel
def cross_entropy_backward(probs, Y, dlogits):
    """(probs - onehot(Y)) / N: the mean's divisor is in every gradient behind it. Source: A.3."""
    N, V = probs.shape
    share = probs.dtype.type(1 / N)
    for i in range(N):
        for j in range(V):
            dlogits[i, j] = probs[i, j] * share
        dlogits[i, Y[i]] -= share


# ---- The two models: the lines of model.py upside down

def mlp_room(config, N, P=0):
    shapes = m.mlp_activations(config, N)
    return {name: shapes[name] for name in ('emb', 'hprebn', 'hpreact', 'h', 'logits')}


def mlp_backward(config, p, batch, a, d, g):
    """Fill the parameters' gradients g by name, after mlp() has filled a; d is the room for dX."""
    X, Y = batch
    embcat, dembcat = a['emb'].reshape(len(X), -1), d['emb'].reshape(len(X), -1)    # (N, T*E)
    cross_entropy_backward(a['probs'], Y, d['logits'])                          # (N, V)
    linear_backward(d['logits'], a['h'], p['W2'], d['h'], g['W2'], g['b2'])     # (N, H)
    ACTIVATIONS_BACKWARD[config['act']](d['h'], a['hpreact'], a['s'], a['h'], d['hpreact'])
    if not config['batchnorm']:
        d['hprebn'] = d['hpreact']                                              # (N, H)
    else:
        batchnorm_backward(d['hpreact'], p['bngain'], a['bnraw'], a['bnvar_inv'],
                           d['hprebn'], g['bngain'], g['bnbias'])               # (N, H)
    linear_backward(d['hprebn'], embcat, p['W1'], dembcat, g['W1'], g['b1'])    # (N, T*E)
    g['C'][:] = 0
    embedding_backward(d['emb'], X, g['C'])                                     # (V, E)


def gpt_room(config, N, P):
    V, E, A = (config[size] for size in ('vocabulary', 'embd', 'heads'))
    return dict(emb=(N, 1, E), branch=(N, E), normed=(N, E), qkv=(N, 3*E), weights=(A, P),
                ctx=(N, E), up=(N, 4*E), h=(N, 4*E), logits=(N, V))


def gpt_backward(config, p, batch, a, d, g, masks=None):
    """Fill the parameters' gradients g by name, after gpt() has filled a.

    d is the room for dX, used by one layer after the other.
    """
    X, Y, rows, first = batch
    norm_backward = NORMS_BACKWARD[config['norm']]
    act_backward = ACTIVATIONS_BACKWARD[config['act']]
    dx, dbranch, dnormed = d['emb'][:, 0], d['branch'], d['normed']             # (N, E)
    dx[:] = 0                                                                   # (N, E)
    cross_entropy_backward(a['probs'], Y, d['logits'])                          # (N, V)
    # dC, 1 of 2: the table as readout
    head_backward(d['logits'], a['normed'][-1], p['C'], dnormed, g['C'])        # (V, E)
    norm_backward(dnormed, p['gain'][-1], a['raw'][-1], a['inv'][-1], dx, g['gain'][-1])
    for l in reversed(range(config['layers'])):
        i, j = 2*l, 2*l + 1
        residual_backward(dx, dbranch)                                          # (N, E)
        dropout_backward(dbranch, masks, j)
        linear_backward(dbranch, a['h'][l], p['Wdown'][l], d['h'], g['Wdown'][l], None)
        act_backward(d['h'], a['up'][l], a['s'][l], a['h'][l], d['up'])         # (N, 4*E)
        linear_backward(d['up'], a['normed'][j], p['Wup'][l], dnormed, g['Wup'][l], None)
        norm_backward(dnormed, p['gain'][j], a['raw'][j], a['inv'][j], dx, g['gain'][j])
        residual_backward(dx, dbranch)                                          # (N, E)
        dropout_backward(dbranch, masks, i)
        linear_backward(dbranch, a['ctx'][l], p['Wo'][l], d['ctx'], g['Wo'][l], None)
        attention_backward(d['ctx'], a['qkv'][l], first, a['weights'][l], d['weights'], d['qkv'])
        linear_backward(d['qkv'], a['normed'][i], p['Wqkv'][l], dnormed, g['Wqkv'][l], None)
        norm_backward(dnormed, p['gain'][i], a['raw'][i], a['inv'][i], dx, g['gain'][i])
    dropout_backward(dx, masks, -1)
    positions_backward(dx, rows, first, g['P'])                                 # (T, E)
    # dC, 2 of 2: the table as input
    embedding_backward(d['emb'], X, g['C'])                                     # (V, E)


ROOM = dict(mlp=mlp_room, gpt=gpt_room)
BACKWARD = dict(mlp=mlp_backward, gpt=gpt_backward)
