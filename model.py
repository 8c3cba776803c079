"""A language model from scratch, file 1 of 4: words, layers, two models, generating, saving.

A model reads the beginning of a name and gives a probability to every character that could come
next. Here are two: the MLP (embedding, batch norm, tanh, softmax) and a tiny GPT with its output
tied to the embedding. Next, read backward.py: the same things in the same order, backwards.

"Source: A.5" and the like name a section of the derivative reference, the end of README.md.
"""
import argparse
import contextlib
import hashlib
import itertools
import json
import os
import sys
import unicodedata
import warnings
import zipfile
from math import exp, log, prod, sqrt

for library in 'OPENBLAS_NUM_THREADS', 'MKL_NUM_THREADS', 'VECLIB_MAXIMUM_THREADS':
    os.environ.setdefault(library, '1')                    # one core for a product: train.py gives
                                                           # each a share of the GPT's batch instead

import numba
import numpy as np

# The letters for sizes, in the tables of shapes and in the comment that ends a line:
#
#   V  vocabulary: characters, the boundary among them          27 for lowercase names
#   T  context: how many characters a prediction may look at     3 in the MLP   16 in the GPT
#   E  embedding: how many numbers stand for a character        10              64
#   H  hidden units; the GPT has 4E, written so                 64
#   L  layers of the GPT                                                         4
#   A  attention heads, each E/A wide                                            4
#   N  rows of a batch, one for each beginning of a name        32             330 or so
#   B  characters to predict; the MLP has a row for each                       460 or so
#   P  pairs of a row with one that its attention looks at                    1700 or so
#   M  rows that attention can look at: N, or all that are kept while names are generated
#   I, O  inputs and outputs of a linear layer
#
# Parameters with a capital letter (C, W1, ...) are matrices, the others (b1, gain, ...) vectors; of
# most the GPT has one for each layer, in one array.


class Refusal(Exception):
    """Something that cannot be done; its text is one sentence that says why and what to do."""


def reason(error):
    """What went wrong, without the number of the error and without the name of the file."""
    return getattr(error, 'strerror', None) or str(error) or 'not enough memory'


# ---- Words, one a line of a text file

def text(argument):
    """What was typed, taken as UTF-8 whatever the locale; bytes that are not stay as they are."""
    return os.fsencode(argument).decode('utf-8', 'surrogateescape')


DATA = os.path.join(os.path.dirname(os.path.abspath(__file__)), 'data', 'names.txt')


def read_lines(path):
    """The lines of a UTF-8 file, in NFC and without spaces at the edges, and the file's sha256.

    Refuses what cannot be read and what is no UTF-8 text.
    """
    try:
        with open(path, 'rb') as file:
            raw = file.read()
    except (OSError, ValueError) as error:
        raise Refusal(f'cannot read {path}: {reason(error)}; it takes a text, one word a line')
    if raw[:2] in (b'\xff\xfe', b'\xfe\xff'):
        raise Refusal(f'{path} is UTF-16; convert it, e.g. iconv -f UTF-16 -t UTF-8')
    try:
        content = raw.decode('utf-8').removeprefix('\ufeff')
    except UnicodeDecodeError as error:
        raise Refusal(f'{path} is not UTF-8: byte {error.start} is 0x{raw[error.start]:02x}; '
                      'convert it, e.g. iconv -f LATIN1 -t UTF-8')
    if '\0' in content:
        raise Refusal(f'{path} is not a text file: it holds a NUL byte')
    content = unicodedata.normalize('NFC', content).replace('\r\n', '\n').replace('\r', '\n')
    return [line.strip(' \t') for line in content.split('\n')], hashlib.sha256(raw).hexdigest()


def make_vocabulary(words):
    """All characters in sorted order, the id of each its place; id 0 is the boundary of words.

    The boundary is written NUL, which no word holds and which sorts before every character.
    """
    return '\0' + ''.join(sorted(set().union(*words)))


def encode(words, vocabulary, T):
    """The ids of all words in one line, with T boundaries before each word and after the last."""
    between = '\0' * T
    line = between + between.join(words) + between
    characters = np.frombuffer(vocabulary.encode('utf-32-le'), np.uint32)
    return np.searchsorted(characters, np.frombuffer(line.encode('utf-32-le'), np.uint32))


# ---- Batches
#
# What a model reads at once. For the MLP it is characters to predict, each by the T before it; for
# the GPT whole names, with a row for each beginning. A row depends on nothing that follows, so
# names that begin alike share rows: "al" and "amy" have the five rows "", a, al, am and amy, and
# seven characters to predict from them, a l end and a m y end.
#
# Kernels are loops that Numba compiles when first called. Those of several threads run at once
# (nogil), 1/0 is infinite as in NumPy (error_model), and the fastmath flags let loops be vectorized
# and leave NaN and infinity as they are.

def kernel(function):
    """Compile by Numba, and keep the machine code on disk if there is a place to write it."""
    options = dict(nogil=True, error_model='numpy', fastmath={'reassoc', 'contract', 'arcp', 'nsz'})
    try:
        return numba.njit(cache=True, **options)(function)
    except RuntimeError:
        return numba.njit(**options)(function)


def mlp_examples(words, vocabulary, T):
    """The line of ids, and the place in it of each character to predict, each word's end too."""
    line = encode(words, vocabulary, T)
    return line, T + np.flatnonzero(line[T:] | line[T - 1:-1]), T  # a character, or behind one


def mlp_batch(examples, chosen):
    """The T ids before each chosen place, and the id in it; `chosen` may be a block of batches."""
    line, places, T = examples
    places = places[chosen]
    X = line[places[..., None] + np.arange(-T, 0)]                              # (N, T)
    Y = line[places]                                                            # (N,)
    return X, Y


def gpt_examples(words, vocabulary, T):
    """The line of ids, the place of the boundary before each word, and its length, end included."""
    line = encode(words, vocabulary, 1)
    boundaries = np.flatnonzero(line == 0)
    return line, boundaries[:-1], np.diff(boundaries)


@kernel
def find_rows(line, begins, lengths, own, X, t, path, Y, at):
    """Fill the arrays that gpt_batch returns, N of X and t, and P of path; returns N and P.

    A word shares the rows of the word before it as long as their characters are the same; own[k] is
    the row of the current word's beginning that ends at position k.
    """
    N, P, B = 0, 0, 0
    for i in range(len(begins)):
        shared = i > 0
        for k in range(lengths[i]):
            shared = shared and line[begins[i] + k] == line[begins[i - 1] + k]
            if not shared:
                own[k], X[N], t[N] = N, line[begins[i] + k], k
                for j in range(k + 1):
                    path[P + j] = own[j]
                N, P = N + 1, P + k + 1
            Y[B], at[B] = line[begins[i] + k + 1], own[k]
            B += 1
    return N, P


def gpt_batch(examples, chosen):
    """The rows of the chosen words, shared by neighbours that begin alike.

    X (N,1) is the last character of each beginning and t (N,) its position; path (P,) lists, for
    each row, those from the boundary to itself. Y (B,) are the characters that follow in all words,
    end to end, and at (B,) the rows to predict them from.
    """
    line, begins, lengths = examples
    begins, lengths = begins[chosen], lengths[chosen]
    X, t, Y, at, own = np.empty((5, lengths.sum()), np.int64)                   # (B,)
    path = np.empty((lengths * (lengths + 1)).sum() // 2, np.int64)
    N, P = find_rows(line, begins, lengths, own, X, t, path, Y, at)
    return X[:N, None], Y, t[:N], path[:P], at


# ---- The MLP in single operations: the column
#
# C holds the embedding of each character; W1 and b1 lead to the hidden units, each of which batch
# norm brings to mean 0 and variance 1 over the batch, times bngain, plus bnbias; W2 and b2 lead to
# the logits, a number for each character, whose softmax is its probability.

MLP_PARAMETERS = 'C', 'W1', 'b1', 'bngain', 'bnbias', 'W2', 'b2'


def mlp_steps(p, X, Y):
    """Mean loss of the MLP and all values on the way to it, one operation a line.

    X (N,T) holds ids of context characters, Y (N,) of those that follow; p, the parameters by name.
    """
    C, W1, b1, bngain, bnbias, W2, b2 = (p[name] for name in MLP_PARAMETERS)
    n = len(X)

    emb = C[X]                                             # (N, T, E)
    embcat = emb.reshape(n, -1)                            # (N, T*E)
    hprebn = embcat @ W1 + b1                              # (N, H)  b1: bnmeani takes it away
    bnmeani = hprebn.sum(0, keepdims=True) / n             # (1, H)
    bndiff = hprebn - bnmeani                              # (N, H)
    bndiff2 = bndiff**2                                    # (N, H)
    bnvar = bndiff2.sum(0, keepdims=True) / (n - 1)        # (1, H)  Bessel: unbiased by n - 1
    bnvar_inv = (bnvar + 1e-5)**-0.5                       # (1, H)  1e-5: never divide by zero
    bnraw = bndiff * bnvar_inv                             # (N, H)
    hpreact = bngain * bnraw + bnbias                      # (N, H)
    h = np.tanh(hpreact)                                   # (N, H)
    logits = h @ W2 + b2                                   # (N, V)
    logit_maxes = logits.max(1, keepdims=True)             # (N, 1)  subtracted: exp stays finite
    norm_logits = logits - logit_maxes                     # (N, V)
    counts = np.exp(norm_logits)                           # (N, V)
    counts_sum = counts.sum(1, keepdims=True)              # (N, 1)
    counts_sum_inv = counts_sum**-1                        # (N, 1)
    probs = counts * counts_sum_inv                        # (N, V)
    logprobs = np.log(probs)                               # (N, V)
    loss = -logprobs[np.arange(n), Y].mean()

    return loss, dict(
        emb=emb, embcat=embcat, hprebn=hprebn, bnmeani=bnmeani, bndiff=bndiff, bndiff2=bndiff2,
        bnvar=bnvar, bnvar_inv=bnvar_inv, bnraw=bnraw, hpreact=hpreact, h=h, logits=logits,
        logit_maxes=logit_maxes, norm_logits=norm_logits, counts=counts, counts_sum=counts_sum,
        counts_sum_inv=counts_sum_inv, probs=probs, logprobs=logprobs)


# ---- Layers
#
# A layer reads its first arguments and fills its last ones (residual its first two), which exist
# already: the large arrays of a step are made once. Matrix products, and what NumPy does in one
# pass over memory, are left to it. Most of the rest is kernels, in float32 to train and float64 to
# prove; x.dtype.type(0) is a zero of x's own kind.

@kernel
def embedding(C, X, emb):
    """emb (N,T*E): rows of C (V,E), T of them end to end, by the ids in X (N,T). Source: A.6."""
    N, T = X.shape
    E = C.shape[1]
    for k in range(N):
        for j in range(T):
            row = C[X[k, j]]
            for e in range(E):
                emb[k, j*E + e] = row[e]


@kernel
def add_bias(b, y):
    """y[i] += b (O,) for every row of y (N,O). Source: A.5."""
    for i in range(y.shape[0]):
        for j in range(y.shape[1]):
            y[i, j] += b[j]


def linear(x, W, b, y):
    """y = x W + b: (N,I) (I,O) (O,) -> (N,O); b may be None. Source: A.5."""
    x.dot(W, out=y)                                        # (N, O)
    if b is not None:
        add_bias(b, y)                                     # (N, O)


@kernel
def batchnorm(x, gain, bias, raw, var_inv, y):
    """Each column of x (N,H) to mean 0 and variance 1, times gain, plus bias -> y (N,H).

    For the way back it keeps raw (N,H), y before gain and bias, and var_inv (H,). Source: A.4.
    """
    N, H = x.shape
    mean = np.zeros(H, x.dtype)
    for i in range(N):
        for j in range(H):
            mean[j] += x[i, j]
    mean /= x.dtype.type(N)
    var = np.zeros(H, x.dtype)
    for i in range(N):
        for j in range(H):
            raw[i, j] = x[i, j] - mean[j]
            var[j] += raw[i, j] * raw[i, j]
    for j in range(H):
        var_inv[j] = 1 / sqrt(var[j] / (N - 1) + 1e-5)     # Bessel, as in the column
    for i in range(N):
        for j in range(H):
            raw[i, j] *= var_inv[j]
            y[i, j] = gain[j] * raw[i, j] + bias[j]


@kernel
def rmsnorm(x, gain, raw, rms_inv, y):
    """Each row of x (N,E) over its root mean square, times gain (E,) -> y (N,E). Source: A.4.

    For the way back it keeps raw (N,E), y before gain, and rms_inv (N,).
    """
    N, E = x.shape
    for i in range(N):
        square = x.dtype.type(0)
        for j in range(E):
            square += x[i, j] * x[i, j]
        rms_inv[i] = 1 / sqrt(square / E + 1e-5)
        for j in range(E):
            raw[i, j] = x[i, j] * rms_inv[i]
            y[i, j] = gain[j] * raw[i, j]


def layernorm(x, gain, raw, std_inv, y):
    """RMSNorm of x (N,E) less the mean of each row: its RMS is the deviation. Source: A.4."""
    rmsnorm(x - x.mean(1, keepdims=True), gain, raw, std_inv, y)                # (N, E)


NORMS = dict(rmsnorm=rmsnorm, layernorm=layernorm)


# Six activations, y = f(x), in one form; `s` keeps what the backward pass would compute again.

@kernel
def tanh_of(x):
    """tanh of one number, in arithmetic alone, so that a loop of it is vectorized.

    Of z = x/16 Lambert's z / (1 + z^2/(3 + z^2/(5 + z^2/(7 + z^2/9)))), here with one division, is
    tanh but for rounding; four times tanh 2z = 2 tanh z / (1 + tanh^2 z) then leads back to x.
    """
    f = type(x)                                            # makes numbers of x's own kind
    z = min(max(x, f(-20)), f(20)) / f(16)                 # from 20 on it is 1, to the last digit
    z2 = z * z
    y = z * (f(945) + f(105)*z2 + z2*z2) / (f(945) + f(420)*z2 + f(15)*z2*z2)
    for _ in range(4):
        y = f(2) * y / (f(1) + y * y)
    return y


@kernel
def tanh(x, s, y):
    """y = tanh x. Source: A.1."""
    for i in range(x.shape[0]):
        for j in range(x.shape[1]):
            y[i, j] = tanh_of(x[i, j])


def sigmoid(x, s, y):
    """y = 1 / (1 + e^-x). Source: A.1."""
    np.exp(-x, out=y)                                      # (N, H)  may be infinite: y is 0 then
    y += 1                                                 # (N, H)
    np.divide(1, y, out=y)                                 # (N, H)


def relu(x, s, y):
    """y = max(0, x). Source: A.1."""
    np.maximum(x, 0, out=y)                                # (N, H)


def leaky_relu(x, s, y):
    """y = max(0.01 x, x). Source: A.1."""
    np.maximum(0.01 * x, x, out=y)                         # (N, H)


def silu(x, s, y):
    """y = x sigmoid(x), s = sigmoid(x). Source: A.1."""
    sigmoid(x, None, s)                                    # (N, H)
    np.multiply(x, s, out=y)                               # (N, H)


GELU_C, GELU_A = sqrt(2 / np.pi), 0.044715


@kernel
def gelu(x, s, y):
    """y = x (1 + tanh u) / 2 = x sigmoid(2u), u = c (x + a x^3), s = sigmoid(2u). Source: A.2."""
    half, c, ca = x.dtype.type(0.5), x.dtype.type(GELU_C), x.dtype.type(GELU_C * GELU_A)
    for i in range(x.shape[0]):
        for j in range(x.shape[1]):
            s[i, j] = half + half * tanh_of(x[i, j] * (c + ca * x[i, j] * x[i, j]))
            y[i, j] = x[i, j] * s[i, j]


ACTIVATIONS = dict(tanh=tanh, sigmoid=sigmoid, relu=relu, leaky_relu=leaky_relu, silu=silu,
                   gelu=gelu)


@kernel
def softmax(z, probs):
    """e^z over the sum of e^z, of one row; returns the logarithm of that sum. Source: A.3."""
    largest = z[0]
    for j in range(1, len(z)):
        largest = max(largest, z[j])                       # subtracted, so that exp stays finite
    total = z.dtype.type(0)
    for j in range(len(z)):
        probs[j] = exp(z[j] - largest)
        total += probs[j]
    for j in range(len(z)):
        probs[j] /= total
    return largest + log(total)


@kernel
def attention(qkv, t, path, weights, ctx):
    """ctx (N,E): what each row gathers from the rows on its path. Source: A.5.

    A row of qkv (M,3E) has a query, a key and a value for each head. The query times each key, over
    the root of their size E/A (or scores would grow with it), is a score; the softmax of the scores
    is weights (A,P), and ctx the mean of the values so weighted.
    path (P,) lists, for each row, the t[i] rows before it in its name and itself: it looks at no
    others, and so at nothing that comes later.
    """
    N, E = ctx.shape
    M, A = len(qkv), len(weights)
    parts, heads = qkv.reshape(M, 3, A, E // A), ctx.reshape(N, A, E // A)
    scale = ctx.dtype.type(1 / sqrt(E // A))
    pair = 0
    for i in range(N):
        seen = path[pair:pair + t[i] + 1]
        for a in range(A):
            q = parts[seen[-1], 0, a]                      # of the row itself
            w = weights[a, pair:pair + len(seen)]
            for j in range(len(seen)):
                k = parts[seen[j], 1, a]
                score = ctx.dtype.type(0)
                for e in range(len(q)):
                    score += q[e] * k[e]
                w[j] = score * scale
            softmax(w, w)
            c = heads[i, a]
            c[:] = 0
            for j in range(len(seen)):
                v = parts[seen[j], 2, a]
                for e in range(len(c)):
                    c[e] += w[j] * v[e]
        pair += len(seen)


def residual(x, branch, mask):
    """x += branch, both (N,E), the branch times its mask. Source: A.6.

    Dropout leaves out a random share of the branch, so that no unit relies on another: mask (N,E)
    is 0 there and 1 / (1 - rate) elsewhere, which keeps the mean. Without dropout it is None.
    """
    if mask is not None:
        np.multiply(branch, mask, out=branch)              # (N, E)
    np.add(x, branch, out=x)                               # (N, E)


def head(x, C, logits):
    """logits (B,V): each row of x (B,E) against every row of the table C (V,E). Source: A.6."""
    x.dot(C.T, out=logits)                                 # (B, V)


@kernel
def cross_entropy(logits, Y, probs):
    """Mean over rows of -ln softmax(logits)[Y]; probs (N,V) = softmax. Source: A.3."""
    N, V = logits.shape
    loss = 0.
    for i in range(N):
        loss += softmax(logits[i], probs[i]) - logits[i, Y[i]]
    return loss / N


# ---- The two models, each a straight line of layers
#
# `config` is a dict of sizes and choices (see Configuration, below), `p` holds the parameters by
# name, `a` the activations. Both are views of a flat vector, laid out by a table of shapes: so an
# optimizer is one loop over the vector of p.

def views(shapes, flat):
    """Arrays of the given shapes by name, side by side in a flat vector that is long enough."""
    arrays, end = {}, 0
    for name, shape in shapes.items():
        begin, end = end, end + prod(shape)
        arrays[name] = flat[begin:end].reshape(shape)
    return arrays


def arrays(shapes, dtype):
    """New arrays of the given shapes by name, to be filled."""
    return views(shapes, np.empty(sum(map(prod, shapes.values())), dtype))


def sizes(batch):
    """N of a batch, and P and B of the GPT's."""
    return len(batch[0]), *map(len, batch[3:])


def mlp_parameters(config):
    V, T, E, H = (config[size] for size in ('vocabulary', 'context', 'embd', 'hidden'))
    gain_and_bias = dict(bngain=(H,), bnbias=(H,)) if config['batchnorm'] else {}
    return dict(C=(V, E), W1=(T*E, H), b1=(H,), **gain_and_bias, W2=(H, V), b2=(V,))


def mlp_activations(config, N):
    V, T, E, H = (config[size] for size in ('vocabulary', 'context', 'embd', 'hidden'))
    kept = dict(bnraw=(N, H), bnvar_inv=(H,)) if config['batchnorm'] else {}
    return dict(emb=(N, T*E), hprebn=(N, H), **kept, hpreact=(N, H), s=(N, H), h=(N, H),
                logits=(N, V), probs=(N, V))


def mlp(config, p, batch, a, statistics=None):
    """Fill the activations, return the mean loss of a batch X (N,T), Y (N,).

    Batch norm takes mean and variance from the batch, or from `statistics` where they are given.
    """
    X, Y = batch
    embedding(p['C'], X, a['emb'])                                              # (N, T*E)
    linear(a['emb'], p['W1'], p['b1'], a['hprebn'])                             # (N, H)
    if not config['batchnorm']:
        a['hpreact'] = a['hprebn']                         # (N, H)  the same array, not a copy
    elif statistics:
        scale = p['bngain'] / np.sqrt(statistics['bnvar'] + 1e-5)               # (H,)
        a['hpreact'][:] = scale * (a['hprebn'] - statistics['bnmean']) + p['bnbias']    # (N, H)
    else:
        batchnorm(a['hprebn'], p['bngain'], p['bnbias'], a['bnraw'], a['bnvar_inv'], a['hpreact'])
    ACTIVATIONS[config['act']](a['hpreact'], a['s'], a['h'])                    # (N, H)
    linear(a['h'], p['W2'], p['b2'], a['logits'])                               # (N, V)
    return cross_entropy(a['logits'], Y, a['probs'])


def gpt_parameters(config):
    """C: characters, P: positions, gain: norms, Wqkv, Wo: attention, Wup, Wdown: hidden layer."""
    V, T, E, L = (config[size] for size in ('vocabulary', 'context', 'embd', 'layers'))
    return dict(C=(V, E), P=(T, E), gain=(2*L + 1, E), Wqkv=(L, E, 3*E), Wo=(L, E, E),
                Wup=(L, E, 4*E), Wdown=(L, 4*E, E))


def gpt_activations(config, N, P, B):
    V, E, L, A = (config[size] for size in ('vocabulary', 'embd', 'layers', 'heads'))
    return dict(emb=(N, E), raw=(2*L + 1, N, E), inv=(2*L + 1, N), normed=(2*L + 1, N, E),
                qkv=(L, N, 3*E), weights=(L, A, P), ctx=(L, N, E), up=(L, N, 4*E), s=(L, N, 4*E),
                h=(L, N, 4*E), branch=(N, E), last=(B, E), logits=(B, V), probs=(B, V))


def gpt(config, p, batch, a, masks=None, memory=None):
    """Fill the activations, return the mean loss of the B predictions that gpt_batch() gives.

    masks (2L,N,E) are those of dropout. `memory` (L,M,3E), where given, keeps queries, keys and
    values from call to call, so that a name can be read character by character.
    """
    X, Y, t, path, at = batch
    norm, act, L = NORMS[config['norm']], ACTIVATIONS[config['act']], config['layers']
    masks = [None] * 2*L if masks is None else masks                            # (2*L, N, E)
    x, branch = a['emb'], a['branch']   # (N, E)  x grows in place: the way back needs no old one
    embedding(p['C'], X, x)                                                     # (N, E)
    embedding(p['P'], t[:, None], branch)                                       # (N, E)
    residual(x, branch, None)                                                   # (N, E)
    for l in range(L):
        i, j = 2*l, 2*l + 1             # the norm before attention, that before the hidden layer
        norm(x, p['gain'][i], a['raw'][i], a['inv'][i], a['normed'][i])         # (N, E)
        linear(a['normed'][i], p['Wqkv'][l], None, a['qkv'][l])                 # (N, 3*E)
        qkv = a['qkv'][l]                                                       # (N, 3*E)
        if memory is not None:
            memory[l, path[(t + 1).cumsum() - 1]] = qkv                         # (N, 3*E)
            qkv = memory[l]                                                     # (M, 3*E)
        attention(qkv, t, path, a['weights'][l], a['ctx'][l])                   # (N, E)
        linear(a['ctx'][l], p['Wo'][l], None, branch)                           # (N, E)
        residual(x, branch, masks[i])                                           # (N, E)
        norm(x, p['gain'][j], a['raw'][j], a['inv'][j], a['normed'][j])         # (N, E)
        linear(a['normed'][j], p['Wup'][l], None, a['up'][l])                   # (N, 4*E)
        act(a['up'][l], a['s'][l], a['h'][l])                                   # (N, 4*E)
        linear(a['h'][l], p['Wdown'][l], None, branch)                          # (N, E)
        residual(x, branch, masks[j])                                           # (N, E)
    norm(x, p['gain'][-1], a['raw'][-1], a['inv'][-1], a['normed'][-1])         # (N, E)
    embedding(a['normed'][-1], at[:, None], a['last'])     # (B, E)  a copy for each prediction
    head(a['last'], p['C'], a['logits'])                                        # (B, V)
    return cross_entropy(a['logits'], Y, a['probs'])


PARAMETERS = dict(mlp=mlp_parameters, gpt=gpt_parameters)
ACTIVITY = dict(mlp=mlp_activations, gpt=gpt_activations)
EXAMPLES = dict(mlp=mlp_examples, gpt=gpt_examples)
BATCH = dict(mlp=mlp_batch, gpt=gpt_batch)
FORWARD = dict(mlp=mlp, gpt=gpt)


def make_parameters(config, rng, dtype=np.float32):
    """First values, by name.

    Matrices W have standard deviation 1 / sqrt(inputs), so that a layer does the same at any width,
    times a factor that was tried out. W2 is small, so that at first all characters are about as
    likely and the loss is ln(V); Wo and Wdown, so that the residual stream, the rows x that every
    branch adds to, starts as the embedding. The tied head then predicts the character just read, by
    a logit that would grow with the width: C and P, and with them the branches, are small there.
    """
    p = arrays(PARAMETERS[config['model']](config), dtype)
    table = 0.1 if config['model'] == 'mlp' else min(0.1, 6.4 / config['embd'])
    factors = dict(C=table, P=table, W1=0.5, W2=0.2, Wqkv=1, Wo=0.3*table, Wup=1, Wdown=0.3*table)
    for name, w in p.items():
        std = factors.get(name, 0)                         # biases start at zero
        if name[0] == 'W':
            std /= sqrt(w.shape[-2])                       # the number of inputs
        if config['init'] == 'naive':
            std = 1
        w[:] = 1 if name in ('gain', 'bngain') else std * rng.standard_normal(w.shape)
    return p


def dropout_masks(config, N, rng, dtype=np.float32):
    """Masks (2L,N,E) for residual(): 0 for what is dropped, else 1 / (1 - rate).

    Names that share a row drop the same there.
    """
    kept = rng.random((2*config['layers'], N, config['embd']), dtype) >= config['dropout']
    return kept * dtype(1 / (1 - config['dropout']))                            # (2*L, N, E)


# ---- Using a model: a dict of its config, vocabulary, parameters p and batch-norm statistics

def predict(model, batch, memory=None):
    """Mean loss of a batch, and the activations; no dropout, and the model's own statistics."""
    config, p = model['config'], model['p']
    a = arrays(ACTIVITY[config['model']](config, *sizes(batch)), p['C'].dtype)
    if config['model'] == 'mlp':
        return mlp(config, p, batch, a, model['statistics']), a
    return gpt(config, p, batch, a, memory=memory), a


def batchnorm_statistics(p, examples):
    """Mean and variance of hprebn over all examples, in blocks: exact, and no state to keep."""
    total, square, N = 0, 0, len(examples[1])
    for begin in range(0, N, 4096):
        X, Y = mlp_batch(examples, slice(begin, begin + 4096))
        hprebn = p['C'][X].reshape(len(X), -1) @ p['W1'] + p['b1']              # (N, H)
        total = total + hprebn.sum(0, dtype=np.float64)                         # (H,)
        square = square + (hprebn.astype(np.float64)**2).sum(0)                 # (H,)
    mean = total / N                                                            # (H,)
    var = np.maximum(square - N * mean**2, 0) / (N - 1)                         # (H,)
    return dict(bnmean=mean.astype(p['C'].dtype), bnvar=var.astype(p['C'].dtype))


def choose(logits, u, temperature, top_k, top_p):
    """An id for each row of logits (n,V); the number u (n,) from 0 to 1 decides which."""
    if temperature < 1e-9:
        return logits.argmax(1)
    order = np.argsort(-logits, axis=1, kind='stable')                          # (n, V)
    z = np.take_along_axis(logits, order, 1).astype(np.float64)                 # (n, V)
    weights = np.exp((z - z[:, :1]) / temperature)                              # (n, V)
    if top_k:
        weights[:, top_k:] = 0
    below = weights.cumsum(1) - weights                                         # (n, V)
    if top_p:                           # the fewest that have top_p together
        weights[below >= top_p * weights.sum(1, keepdims=True)] = 0
    ends = weights.cumsum(1)                                                    # (n, V)
    place = (ends <= u[:, None] * ends[:, -1:]).sum(1)                          # (n,)
    return order[np.arange(len(order)), place]


def generate(model, n, rng, temperature=1., top_k=0, top_p=0., prefix='', max_len=None):
    """n names, which grow together, a character a step; none is empty or longer than max_len."""
    config, vocabulary = model['config'], model['vocabulary']
    T, prefix = config['context'], encode([prefix], vocabulary, 0)
    longest, memory = max_len or len(prefix) + config['longest'], None
    if config['model'] == 'gpt':
        longest = min(longest, T - 1)                      # there is no T-th position to go on from
        memory = np.empty((config['layers'], n*longest, 3*config['embd']), model['p']['C'].dtype)
    ids = np.zeros((n, T + longest), np.int64)
    alive = np.arange(n)
    for t in range(longest):
        Y = np.zeros(len(alive), np.int64)                 # not known, and its loss not looked at
        if config['model'] == 'mlp':
            batch = ids[alive, t:t + T], Y
        else:
            at, seen = np.arange(len(Y)), alive[:, None]*longest + np.arange(t + 1)
            batch = ids[alive, T + t - 1:T + t], Y, np.full_like(Y, t), seen.ravel(), at
        logits = predict(model, batch, memory)[1]['logits']                     # (n, V)
        if t == 0:
            logits[:, 0] = -np.inf                         # no name is empty
        ids[alive, T + t] = prefix[t] if t < len(prefix) else choose(
            logits, rng.random(n)[alive], temperature, top_k, top_p)
        alive = alive[ids[alive, T + t] != 0]
        if not len(alive):
            break
    return [''.join(vocabulary[i] for i in row[row > 0]) for row in ids]


def score(model, word):
    """The log-probability of a word, its end included, in nats."""
    kind = model['config']['model']
    examples = EXAMPLES[kind]([word], model['vocabulary'], model['config']['context'])
    batch = BATCH[kind](examples, slice(None))
    return -predict(model, batch)[0] * len(batch[1])


# ---- Configuration: what is chosen when a model is made, and what it is if nothing is typed

def number(kind, low, high=2**31):
    """A function that reads a whole (int) or any (float) number from low to high."""
    def read(text):
        with contextlib.suppress(ValueError):
            if low <= (value := kind(text)) <= high:
                return value
        what = 'a whole number' if kind is int else 'a number'
        raise argparse.ArgumentTypeError(f'{text!r} is not {what} from {low} to {high}')
    return read


def one_of(*values):
    """A function that reads one of the values."""
    def read(text):
        named = {str(value): value for value in values}
        if text not in named:
            raise argparse.ArgumentTypeError(f"{text!r} is not one of {', '.join(named)}")
        return named[text]
    return read


# A flag is a row: what reads it, its value in the help, what it is to the MLP and to the GPT where
# it is not typed (None: it means nothing there), and its meaning.

FLAGS = dict(
    model=(one_of('mlp', 'gpt'), '{mlp,gpt}', 'mlp', 'gpt', 'which one (mlp)'),
    context=(number(int, 0, 2**16), 'N', 3, 0, 'characters it looks at; 0: longest word + 1'),
    embd=(number(int, 1, 2**16), 'N', 10, 64, 'width of the embedding'),
    hidden=(number(int, 1, 2**16), 'N', 64, None, 'hidden units'),
    layers=(number(int, 1, 2**16), 'N', None, 4, 'layers'),
    heads=(number(int, 1, 2**16), 'N', None, 4, 'attention heads'),
    act=(one_of(*ACTIVATIONS), 'NAME', 'tanh', 'gelu', ', '.join(ACTIVATIONS)),
    norm=(one_of(*NORMS), 'NAME', None, 'rmsnorm', ', '.join(NORMS)),
    batchnorm=(one_of(True, False), None, True, None, 'leave out batch norm (mlp)'),
    init=(one_of('kaiming', 'naive'), 'NAME', 'kaiming', 'kaiming', 'first values; naive: N(0,1)'))


def defaults(flags):
    """What each model has where nothing is typed."""
    return {kind: {name: row[column] for name, row in flags.items() if row[column] is not None}
            for kind, column in (('mlp', 2), ('gpt', 3))}


def flag(name):
    """How an entry of the configuration is typed."""
    return '--no-batchnorm' if name == 'batchnorm' else '--' + name.replace('_', '-')


def add_flags(parser, title, flags):
    """Let a parser know the flags; one that is not typed leaves no trace."""
    group = parser.add_argument_group(title)
    for name, (read, metavar, mlp, gpt, meaning) in flags.items():
        how = dict(type=read, metavar=metavar) if metavar else dict(action='store_false')
        known = [f'{kind} {own}' for kind, own in (('mlp', mlp), ('gpt', gpt)) if own is not None]
        if metavar and (mlp or gpt) and name != 'model':
            meaning += f" ({mlp if mlp == gpt else '; '.join(known)})"
        group.add_argument(flag(name), dest=name, default=argparse.SUPPRESS, **how, help=meaning)


def configure(typed, flags):
    """What was typed, over the defaults of the model.

    Refuses a flag that means nothing to the model, and heads that do not divide the embedding.
    """
    known = defaults(flags)[typed.get('model', 'mlp')]
    for name in typed.keys() - known.keys():
        raise Refusal(f"{flag(name)} means nothing to --model {known['model']}: leave it out")
    config = {**known, **typed}
    if config['embd'] % config.get('heads', 1):
        raise Refusal(f"--heads {config['heads']} does not divide --embd {config['embd']}: "
                      'each head takes an equal share of the embedding')
    return config


# ---- Checkpoints: one .npz, nothing pickled, with all that sampling and going on training need
#
# A training state is a dict: config, vocabulary, step, best_step (-1: none yet), history of
# (step, train loss, dev loss), the optimizer's moments, and two models: the latest and the best.

FORMAT = 1


def which(path):
    """What tells a file from any that takes its place: its number and time; None without one."""
    with contextlib.suppress(OSError, ValueError):
        return os.stat(path).st_ino, os.stat(path).st_mtime_ns


def take_name(file, path):
    """Let a file stand under the first free name of path, path.1, path.2, ...; returns the name."""
    base, end = os.path.splitext(path)
    for number in itertools.count():
        name = f'{base}.{number}{end}' if number else path
        try:
            os.link(file, name)
        except OSError:
            if os.path.lexists(name):
                continue
            os.rename(file, name)       # without links: path is free for a moment
        return name


def save(path, state, own=None):
    """Write a training state; at every moment path holds the whole old file or the whole new one.

    `own` is which() of the file that this run wrote before. A first one moves aside what stands
    there; a later one that finds another in its place takes a name beside it. Returns the new
    file's name, its which(), and the name of what was moved, or None.
    """
    config = json.dumps(state['config'], sort_keys=True, ensure_ascii=False)
    stored = dict(
        format=FORMAT, config=text(config), vocabulary=list(map(ord, state['vocabulary'])),
        step=state['step'], best_step=state['best_step'],
        history=np.array(state['history'], np.float64).reshape(-1, 3), moments=state['moments'])
    for kind in ('best', 'latest'):
        for name, array in {**state[kind]['p'], **state[kind]['statistics']}.items():
            stored[f'{kind}.{name}'] = array
    partial = f'{path}.{os.urandom(4).hex()}.tmp'          # no other run's
    try:
        os.makedirs(os.path.dirname(path) or '.', exist_ok=True)       # it may be gone meanwhile
        with open(partial, 'wb') as file:
            np.savez(file, **stored)
            file.flush()
            os.fsync(file.fileno())
        new, there, moved = which(partial), which(path), None
        if there and not own:
            moved, own = take_name(path, path), there
        if there and there == own:
            os.replace(partial, path)
        else:
            path = take_name(partial, path)
        return path, new, moved
    except OSError as error:
        old = 'what stood there still does' if os.path.lexists(path) else 'nothing is kept'
        raise Refusal(f'cannot write {path}: {reason(error)}; {old}')
    finally:
        with contextlib.suppress(OSError):
            os.remove(partial)


STORED = dict(vocabulary=number(int, 2), longest=number(int, 1), sha256=str,
              data=lambda path: os.fsdecode(os.fsencode(path)))            # raises if it is none


def checked(stored, flags):
    """The training state in the arrays of a checkpoint; raises if any detail is not in order."""
    def expect(condition, what):
        if not condition:
            raise ValueError(what)

    def take(name, *shape, dtype=np.float32):
        array = stored[name]
        expect((array.dtype, array.shape) == (dtype, shape),
               f'{name} is {array.dtype} {array.shape}, not {np.dtype(dtype)} {shape}')
        expect(np.isfinite(array).all(), f'{name} is not finite')
        return array

    version = take('format', dtype=np.int64)
    expect(version == FORMAT, f"format {version} is {'newer' if version > FORMAT else 'other'} "
                              f'than {FORMAT}, the one known here')
    raw = str(stored['config']).encode('utf-8', 'surrogateescape')       # undoes text()
    typed = json.loads(os.fsdecode(raw))
    config = configure({name: flags[name][0](str(typed[name]))
                        for name in defaults(flags)[typed['model']]}, flags)
    config |= {name: read(str(typed[name])) for name, read in STORED.items()}
    vocabulary = ''.join(map(chr, take('vocabulary', config['vocabulary'], dtype=np.int64)))
    expect(vocabulary == make_vocabulary([vocabulary[1:].encode().decode()]),
           'its vocabulary is not in order')
    shapes = PARAMETERS[config['model']](config)
    state = dict(
        config=config, vocabulary=vocabulary, step=int(take('step', dtype=np.int64)),
        best_step=int(take('best_step', dtype=np.int64)),
        history=take('history', len(stored['history']), 3, dtype=np.float64).tolist(),
        moments=take('moments', len(stored['moments']), sum(map(prod, shapes.values()))))
    expect(-1 <= state['best_step'] <= state['step'], 'best_step is not between -1 and step')
    statistics = ('bnmean', 'bnvar') if config.get('batchnorm') else ()
    for kind in 'best', 'latest':
        state[kind] = dict(
            config=config, vocabulary=vocabulary,
            p={name: take(f'{kind}.{name}', *shape) for name, shape in shapes.items()},
            statistics={name: take(f'{kind}.{name}', *shapes['b1']) for name in statistics})
        expect(np.all(state[kind]['statistics'].get('bnvar', 0) >= 0), 'a variance is negative')
    return state


def load(path, flags=FLAGS):
    """The training state in a checkpoint, its config as the flags read it; refuses damaged ones."""
    try:
        with zipfile.ZipFile(path), np.load(path, allow_pickle=False) as file:
            return checked({name: file[name] for name in file.files}, flags)
    except OSError as error:
        raise Refusal(f'cannot read {path}: {reason(error)}')
    except Exception as error:          # what is damaged or edited fails in a dozen ways
        raise Refusal(f'{path} is not a checkpoint in good order: {type(error).__name__}: {error}')


def own_examples(typed, flags):
    """The configuration for data/names.txt where this was typed, the vocabulary, the examples."""
    config = configure(typed, flags)
    words = sorted(line for line in read_lines(DATA)[0] if line)
    vocabulary = make_vocabulary(words)
    config['vocabulary'] = len(vocabulary)
    config['context'] = config['context'] or max(map(len, words)) + 1
    if config['model'] == 'gpt':
        words = [word for word in words if len(word) < config['context']]
    if not words:
        raise Refusal(f"--context {config['context']}: no name of data/names.txt fits, nor its end")
    return config, vocabulary, EXAMPLES[config['model']](words, vocabulary, config['context'])


# ---- What every command does

def command(main):
    """Wrap a main(argv): files and pipes are UTF-8, a refusal is one sentence and status 2."""
    def run(argv=None):
        sys.stdout, sys.stderr = (stream or open(os.devnull, 'w')      # closed: nobody listens
                                  for stream in (sys.stdout, sys.stderr))
        for stream in sys.stdout, sys.stderr:
            if stream.isatty():
                stream.reconfigure(errors='backslashreplace')
            elif hasattr(stream, 'reconfigure'):           # a notebook's has not
                # as in names of files, bytes that are no UTF-8 stay
                stream.reconfigure(encoding='utf-8', errors='surrogateescape')
        warnings.simplefilter('ignore')     # infinity and NaN are looked for where they matter
        try:
            status = main(argv)
            print(end='', flush=True)
            return status or 0
        except KeyboardInterrupt:
            print('interrupted', file=sys.stderr)
            return 130
        except (Refusal, MemoryError, OSError) as error:
            if not isinstance(error, Refusal):
                sys.stdout = None       # or Python would try to write the rest once more, and fail
            if isinstance(error, BrokenPipeError):
                return 0                # as by | head: the reader has seen enough
            print(f'{os.path.basename(sys.argv[0])}: {reason(error)}', file=sys.stderr)
            return 2
    return run


# ---- python model.py

@command
def main(argv=None):
    """Show a model: its parameters, the shapes of one batch, two faults of naive first values."""
    parser = argparse.ArgumentParser(
        'model.py', description='Show the shapes of a model, and what naive first values do.')
    add_flags(parser, 'the model', {name: row for name, row in FLAGS.items() if name != 'init'})
    config, vocabulary, examples = own_examples(vars(parser.parse_args(argv)), FLAGS)
    kind = config['model']
    chosen = np.sort(np.random.default_rng(1).integers(0, len(examples[1]), 32))
    batch = BATCH[kind](examples, chosen)

    shapes = PARAMETERS[kind](config)
    print(f'{kind}: parameters')
    for name, shape in shapes.items():
        print(f'  {name:<10} {str(shape):<16} {prod(shape):>9,}')
    print(f'  {"together":<27} {sum(map(prod, shapes.values())):>9,}')
    print(f"activations of one batch, {len(chosen)} {'characters' if kind == 'mlp' else 'names'}")
    for name, shape in ACTIVITY[kind](config, *sizes(batch)).items():
        print(f'  {name:<10} {shape}')
    print(f"first loss{' without batch norm' if kind == 'mlp' else ''}; "
          f'ln V, that of guessing evenly, is {log(len(vocabulary)):.2f}')
    for init in 'naive', 'kaiming':
        plain = {**config, 'init': init, 'batchnorm': False}
        p = make_parameters(plain, np.random.default_rng(1))
        loss, a = predict(dict(config=plain, p=p, statistics=None), batch)
        flat_ends = f"{(abs(a['h']) > 0.99).mean():7.0%} of h is at the flat ends of tanh"
        print(f"  --init {init:<8} {loss:>6.2f} {flat_ends if config['act'] == 'tanh' else ''}")


if __name__ == '__main__':
    sys.exit(main())
