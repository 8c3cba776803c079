"""A language model from scratch, file 2 of 4: every gradient of model.py by hand, and the proof.

The functions stand in the order of model.py: linear_backward belongs to linear, and so on. dW is
the gradient of the loss with respect to W, and has exactly the shape of W; so it is for all names.
Where a value is used more than once, each use contributes to its gradient: the first contribution
is written with =, later ones with +=. `python backward.py` checks every gradient.
"""
import argparse
import sys
from math import sqrt

import model as m
from model import GELU_A, GELU_C, MLP_PARAMETERS, kernel

import numpy as np


# ---- The MLP, one operation at a time: from the loss back to C

def mlp_steps_backward(p, X, Y, values):
    """The gradient of all `values`, which mlp_steps returned, and of all parameters, by name."""
    C, W1, b1, bngain, bnbias, W2, b2 = (p[name] for name in MLP_PARAMETERS)
    (emb, embcat, hprebn, bnmeani, bndiff, bndiff2, bnvar, bnvar_inv, bnraw, hpreact, h,
     logits, logit_maxes, norm_logits, counts, counts_sum, counts_sum_inv, probs,
     logprobs) = values.values()
    N = len(X)

    # loss = -logprobs[range(N), Y].mean(): one element of each row counts, with weight 1 / N
    dlogprobs = np.zeros_like(logprobs)                    # (N, V)
    dlogprobs[np.arange(N), Y] = -1 / N                    # (N,)
    # logprobs = log(probs)
    dprobs = dlogprobs / probs                             # (N, V)
    # probs = counts * counts_sum_inv, (N, V) * (N, 1): what was broadcast is summed on the way back
    dcounts = dprobs * counts_sum_inv                      # (N, V)  1 of 2
    dcounts_sum_inv = (dprobs * counts).sum(1, keepdims=True)                   # (N, 1)
    # counts_sum_inv = counts_sum**-1
    dcounts_sum = -dcounts_sum_inv * counts_sum_inv**2     # (N, 1)
    # counts_sum = counts.sum(1): what was summed is broadcast on the way back
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
    # embcat = emb.reshape(N, -1): the same numbers in another shape
    demb = dembcat.reshape(emb.shape)                      # (N, T, E)
    # emb = C[X]: a row of C was copied to every place where its id stands in X, so its gradient is
    # the sum over these places. dC[X] += demb would add only one of them for each row.
    dC = np.zeros_like(C)                                  # (V, E)
    np.add.at(dC, X, demb)                                 # (V, E)

    return dict(
        logprobs=dlogprobs, probs=dprobs, counts=dcounts, counts_sum_inv=dcounts_sum_inv,
        counts_sum=dcounts_sum, norm_logits=dnorm_logits, logits=dlogits, logit_maxes=dlogit_maxes,
        h=dh, W2=dW2, b2=db2, hpreact=dhpreact, bngain=dbngain, bnraw=dbnraw, bnbias=dbnbias,
        bndiff=dbndiff, bnvar_inv=dbnvar_inv, bnvar=dbnvar, bndiff2=dbndiff2, hprebn=dhprebn,
        bnmeani=dbnmeani, embcat=dembcat, W1=dW1, b1=db1, emb=demb, C=dC)


# ---- Layers of the MLP
#
# dy is the gradient of a layer's output. A backward function returns the gradient of the layer's
# input, and writes those of its parameters into the arrays that it is given (dW, db, ...). It gives
# the vector-Jacobian product: no Jacobian is ever built.

@kernel
def add_at(dC, ids, drows):
    """dC[ids[i]] += drows[i], one i at a time: np.add.at(dC, ids, drows), only faster."""
    for i in range(len(ids)):
        drow = dC[ids[i]]
        for e in range(len(drow)):
            drow[e] += drows[i, e]


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
    """dx = dy W^T, dW = x^T dy, db = the sum of the rows of dy. Source: A.5.

    The shapes (N,I), (I,O) and (N,O) of x, W and dy admit no other products.
    """
    np.dot(x.T, dy, out=dW)                                # (I, O)
    if db is not None:
        sum_rows(dy, db)                                   # (O,)
    return np.dot(dy, W.T)                                 # (N, I)


@kernel
def batchnorm_backward(dy, gain, raw, var_inv, dgain, dbias):
    """dx (N,H); also fills dgain and dbias (H,). Source: A.4.

    As in mlp_steps_backward, x reaches the loss in three ways, each of which gives a term:
    directly, dy; through the mean, -sum(dy) / N = -dbias / N; through the variance,
    -raw sum(dy raw) / (N - 1) = -raw dgain / (N - 1). All are times gain var_inv.
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
    """dx = dy gate (1 + x (1 - gate)), with gate = sigmoid(x). Source: A.1."""
    return dy * (gate * (1 + x * (1 - gate)))              # (N, H)


def gelu_backward(dy, x, y, gate):
    """dx = dy (gate + x gate (1 - gate) 2u'), with u' = c (1 + 3 a x^2). Source: A.2."""
    slope = GELU_C * (1 + 3 * GELU_A * x * x)              # (N, H)  u'
    return dy * (gate + 2 * x * gate * (1 - gate) * slope)                      # (N, H)


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


# ---- The MLP in layers: the lines of mlp(), upside down

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
    scratch = np.empty((2, position.max() + 1), qkv.dtype)                      # reused by all
    begin = 0
    for i in range(N):
        end = begin + position[i] + 1
        seen = ancestors[begin:end]
        for head in range(A):
            weight = weights[head, begin:end]
            dweight, dscores = scratch[0, :len(seen)], scratch[1, :len(seen)]
            # backward through ctx = sum of weight_j value_j
            for j in range(len(seen)):
                value, dvalue = split[seen[j], 2, head], dsplit[seen[j], 2, head]
                dot = qkv.dtype.type(0)
                for e in range(len(value)):
                    dot += dctx[i, head, e] * value[e]
                    dvalue[e] += weight[j] * dctx[i, head, e]
                dweight[j] = dot
            # backward through weight = softmax(score)
            softmax_backward(dweight, weight, dscores)
            # backward through score_j = query . key_j / sqrt(E / A)
            query, dquery = split[i, 0, head], dsplit[i, 0, head]
            for j in range(len(seen)):
                key, dkey = split[seen[j], 1, head], dsplit[seen[j], 1, head]
                for e in range(len(key)):
                    dquery[e] += scale * dscores[j] * key[e]
                    dkey[e] += scale * dscores[j] * query[e]
        begin = end
    return dsplit.reshape(N, 3*E)


# ---- The GPT in layers: the lines of gpt(), upside down

def gpt_backward(config, p, tree, acts, g, masks=None):
    """Fill g, the gradients of the parameters by name, from the activations that gpt() returned."""
    norm_backward, L = NORMS_BACKWARD[config['norm']], config['layers']
    activation_backward = ACTIVATIONS_BACKWARD[config['act']]
    masks = [1] * (2*L) if masks is None else masks        # without dropout all are 1
    layers, raw, inv, last, logits, probs = acts.values()
    dlogits = cross_entropy_backward(probs, tree.Y)        # (B, V)
    np.dot(dlogits.T, last, out=g['C'])                    # (V, E)  1 of 2: the table as readout
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
    embedding_backward(dx, tree.X, g['C'])                 # (V, E)  2 of 2: the table as input


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
#
# A value is moved a little in both directions; the difference of the losses, over twice the
# distance, is its gradient. This is done with every element of a block (a parameter, or an input of
# a layer), and once with the whole block along a random direction. In float32 few digits of a
# difference are left, so that the distance and the tolerance are larger.

DISTANCE = dict(float64=3e-6, float32=5e-3)
TOLERANCE = dict(float64=1e-7, float32=2e-2)


def error_along(run, w, dw, direction):
    """The error of dw along a direction: the slope by differences, and dw times the direction.

    run() gives the loss, and which inputs of activations are positive. If that changes on the way,
    a ReLU has no derivative there, and None is returned.
    """
    distance, before = DISTANCE[w.dtype.name], w.copy()
    w += distance * direction
    loss_above, positive_above = run()
    w[...] = before - distance * direction
    loss_below, positive_below = run()
    w[...] = before
    if not np.array_equal(positive_above, positive_below):
        return None
    return abs((loss_above - loss_below) / (2 * distance) - (dw * direction).sum())


def prove(title, run, blocks, rng, samples=None):
    """Print a row for each block {name: (w, dw)}; returns a list of bools, True if it is right.

    `element` is the largest error of all elements (or of some samples), over the largest gradient.
    `along` is the error along a random direction, over the root mean square of the gradients.
    Both divisors are at least 0.01 max(1, loss), because every difference has the rounding error of
    the loss, even where the gradient is zero.
    """
    right, floor = [], 0.01 * max(1, abs(run()[0]))
    for name, (w, dw) in blocks.items():
        places = rng.permutation(w.size)[:samples]
        units = (np.eye(1, w.size, k=place).reshape(w.shape) for place in places)     # one 1
        errors = [error_along(run, w, dw, unit) for unit in units]
        element = np.max([error for error in errors if error is not None], initial=0)
        along = None
        while along is None:
            direction = rng.standard_normal(w.shape).astype(w.dtype)
            along = error_along(run, w, dw, direction / np.linalg.norm(direction))
        element /= max(abs(dw).max(), floor)
        along /= max(np.linalg.norm(dw) / sqrt(dw.size), floor)
        right.append(element <= TOLERANCE[w.dtype.name] and along <= TOLERANCE[w.dtype.name])
        print(f'{title:<14} {"d" + name:<8} {str(w.shape):<14} {element:>9.1e} {along:>9.1e}  '
              f'{"ok" if right[-1] else "WRONG"}')
        title = ''
    return right


def prove_layers(rng, dtype):
    """Prove all layers, on random numbers; returns a list of bools, True for a right gradient.

    The loss is the sum of a layer's output times random numbers dy, which are then its gradient.
    (With ones instead, the gradient of batch norm would be zero, right or wrong.)
    """
    right = []

    def normal(*shape):
        return rng.standard_normal(shape).astype(dtype)

    def check(title, layer, inputs, dy, **blocks):
        def run():                      # prove() moves the arrays of `blocks`, which are inputs
            outputs = layer(*inputs)
            y = outputs[0] if isinstance(outputs, tuple) else outputs
            return np.sum(dy * y), None                    # no x is near the corner of a ReLU
        right.extend(prove(title, run, blocks, rng))

    x, dy, gain, bias = normal(3, 5), normal(3, 5), normal(5), normal(5)
    dgain, dbias = normal(5), normal(5)                    # a backward overwrites what is in there

    C, dC, X, demb = normal(6, 2), np.zeros((6, 2), dtype), np.array([[1, 3], [3, 3]]), normal(2, 4)
    embedding_backward(demb, X, dC)                        # adds to what is in dC
    check('embedding', m.embedding, (C, X), demb, C=(C, dC))
    W, b, dW, db, dlogits = normal(5, 4), normal(4), normal(5, 4), normal(4), normal(3, 4)
    dx = linear_backward(dlogits, x, W, dW, db)
    check('linear', m.linear, (x, W, b), dlogits, x=(x, dx), W=(W, dW), b=(b, db))
    _, raw, inv = m.batchnorm(x, gain, bias)
    dx = batchnorm_backward(dy, gain, raw, inv, dgain, dbias)
    check('batchnorm', m.batchnorm, (x, gain, bias), dy,
          x=(x, dx), gain=(gain, dgain), bias=(bias, dbias))
    for name, activation in m.ACTIVATIONS.items():
        dx = ACTIVATIONS_BACKWARD[name](dy, x, *activation(x))
        check(name, activation, (x,), dy, x=(x, dx))
    _, probs = m.cross_entropy(x, np.array([4, 0, 4]))
    dx = cross_entropy_backward(probs, np.array([4, 0, 4]))
    check('cross_entropy', m.cross_entropy, (x, np.array([4, 0, 4])), 1, logits=(x, dx))
    for name, norm in m.NORMS.items():
        _, raw, inv = norm(x, gain)
        dx = NORMS_BACKWARD[name](dy, gain, raw, inv, dgain)
        check(name, norm, (x, gain), dy, x=(x, dx), gain=(gain, dgain))
    tree = m.gpt_batch(m.gpt_examples(['ab', 'ac', '', 'bca'], '\0abc', 4), np.arange(4))
    qkv, dctx = normal(len(tree.X), 18), normal(len(tree.X), 6)
    _, weights = m.attention(qkv, tree.position, tree.ancestors, 2)
    dqkv = attention_backward(dctx, qkv, tree.position, tree.ancestors, weights)
    check('attention', m.attention, (qkv, tree.position, tree.ancestors, 2), dctx, qkv=(qkv, dqkv))
    return right


def prove_model(title, config, batch, rng, dtype, samples=None):
    """Prove the parameters of a whole model, with the same dropout masks for every difference."""
    masks = None
    if config.get('dropout'):
        # 0, or 1 / (1 - rate) = 2 at the rate of a half
        masks = 2 * rng.integers(0, 2, (2*config['layers'], len(batch.X), config['embd']))
    p = m.make_parameters({**config, 'init': 'kaiming'}, rng, dtype)
    for w in p.values():                # so that no gain is 1, no bias is 0, and no branch is small
        w += 0.3 * rng.standard_normal(w.shape)
    g = {name: np.full_like(w, np.nan) for name, w in p.items()}
    gradient(config, p, batch, g, masks)
    unused = {name: np.empty_like(w) for name, w in p.items()}

    def run():                          # only the loss is needed of what gradient() computes
        loss, acts = gradient(config, p, batch, unused, masks)
        return loss, [layer['hpreact'] > 0 for layer in acts.get('layers', [acts])]

    return prove(title, run, {name: (w, g[name]) for name, w in p.items()}, rng, samples)


# ---- python backward.py

def main(argv=None):
    """Prove all layers and both models; returns 1 if a gradient is wrong, else 0."""
    parser = argparse.ArgumentParser(description='Compare every gradient with differences.')
    parser.add_argument('--dtype', choices=TOLERANCE, default='float64', help='precision (float64)')
    dtype, rng = getattr(np, parser.parse_args(argv).dtype), np.random.default_rng(1)
    print('layer or model gradient shape           element direction')
    right = prove_layers(rng, dtype)
    mlp, batch = m.first_batch(dict(m.MLP_DEFAULTS, embd=3, hidden=5), 20, rng)
    right += prove_model('mlp_steps', {**mlp, 'backward': 'steps'}, batch, rng, dtype)
    right += prove_model('mlp, no norm', {**mlp, 'batchnorm': False}, batch, rng, dtype)
    right += prove_model('mlp', mlp, batch, rng, dtype)
    gpt, tree = m.first_batch(dict(m.GPT_DEFAULTS, embd=8, layers=2, heads=2), 3, rng)
    right += prove_model('gpt, dropout', {**gpt, 'dropout': 0.5}, tree, rng, dtype)
    right += prove_model('gpt', gpt, tree, rng, dtype)

    print('\nMLP without batch norm: how much of the gradient comes through tanh')
    for sizes in dict(embd=10, hidden=64), dict(embd=2, hidden=100):
        for init in 'naive', 'kaiming':
            config, rng = dict(m.MLP_DEFAULTS, **sizes, init=init), np.random.default_rng(1)
            config, batch = m.first_batch({**config, 'batchnorm': False}, 32, rng)
            p = m.make_parameters(config, rng)
            _, acts = m.mlp(config, p, batch)
            dh = cross_entropy_backward(acts['probs'], batch.Y) @ p['W2'].T     # (N, H)
            dhpreact = tanh_backward(dh, acts['hpreact'], acts['h'], None)      # (N, H)
            print(f'  {sizes} {init:<7} {abs(dhpreact).mean() / abs(dh).mean():>4.0%}')
    print(f'\n{sum(right)} of {len(right)} gradients are right to {TOLERANCE[dtype.__name__]:g}')
    return int(not all(right))


if __name__ == '__main__':
    sys.exit(main())
