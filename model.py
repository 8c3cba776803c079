"""A language model from scratch, file 1 of 4: the models.

A language model reads the beginning of a word and gives a probability to every character that could
come next. Here are two: the MLP (embedding, batch norm, tanh, softmax) and a tiny GPT whose output
is tied to its embedding. Next, read backward.py: the same things in the same order, backwards.
"Source: A.5" and the like name a section of the derivative reference, at the end of README.md.
"""
import os
from math import exp, log, prod, sqrt
from pathlib import Path
from typing import NamedTuple
from unicodedata import normalize

for variable in 'OPENBLAS_NUM_THREADS', 'MKL_NUM_THREADS', 'VECLIB_MAXIMUM_THREADS':
    os.environ.setdefault(variable, '1')    # a matrix product takes one core

import numba
import numpy as np

# The letters for sizes. "# (N, E)" at the end of a line is the shape of the array it computes.
#   V  vocabulary: how many characters, with the boundary token     27 for lowercase names
#   T  context: how many characters a prediction may look at         3 in the MLP   16 in the GPT
#   E  embedding: how many numbers stand for a character            10              64
#   H  hidden units of the MLP; the GPT has 4*E in each layer       64
#   L  layers of the GPT                                                             4
#   A  attention heads, each of width E/A                                            4
#   N  rows of a batch. MLP: predictions. GPT: the distinct         32             330 or so
#      beginnings of its words ("al", "amy" have five: "", a, al, am, amy)
#   B  predictions of a batch. MLP: N. GPT: all characters of       32             460 or so
#      its words, and the ends ("al", "amy" have seven)
#   S  attention scores of a head: pairs of a row and one it looks at             1700 or so

# A configuration, `config`, is one of these dicts of defaults, plus the user's choices, plus
# facts of the data, such as vocab_size and longest, the length of the longest word.
MLP_DEFAULTS = dict(model='mlp', context=3, embd=10, hidden=64, act='tanh', batchnorm=True,
                    init='kaiming')
GPT_DEFAULTS = dict(model='gpt', context=16, embd=64, layers=4, heads=4, act='gelu', norm='rmsnorm',
                    init='kaiming')


# A kernel is a function of loops that Numba compiles at its first call and caches on disk. It may
# reorder sums (reassoc), fuse a*b + c (contract), multiply by 1/x to divide (arcp) and ignore the
# sign of zero (nsz); NaN and 1/0 = infinity are as in NumPy (error_model). With the environment
# variable NUMBA_BOUNDSCHECK=1 kernels check every index, and are not taken from the disk.
kernel = numba.njit(cache=not numba.config.BOUNDSCHECK, error_model='numpy',
                    fastmath={'reassoc', 'contract', 'arcp', 'nsz'})


# ---- The vocabulary

def make_vocabulary(words):
    """A string of all characters in sorted order; the id of a character is its place in it.

    Id 0 is the boundary token, before and after every word; it is NUL, which no word contains.
    """
    return '\0' + ''.join(sorted(set().union(*words)))


def encode(words, vocabulary):
    """The ids of each word between two boundary tokens; KeyError for an unknown character."""
    stoi = {character: i for i, character in enumerate(vocabulary) if i}       # no word has id 0
    return [[0, *(stoi[character] for character in word), 0] for word in words]


# ---- Batches of the MLP: every character is predicted from the T characters before it

class MLPBatch(NamedTuple):
    X: np.ndarray           # (N, T)  the ids before each character to predict
    Y: np.ndarray           # (N,)    the ids to predict


def mlp_examples(words, vocabulary, T):
    """A row of T + 1 ids for each prediction: the context and the id to predict.

    The end of a word is predicted too. "ab" with T = 3 gives [0 0 0 a], [0 0 a b] and [0 a b 0].
    """
    rows = []
    for ids in encode(words, vocabulary):
        ids = [0] * (T - 1) + ids       # with the boundary token already there, T zeros
        for i in range(len(ids) - T):
            rows += ids[i:i + T + 1]    # one flat list, cut into rows below
    return np.array(rows).reshape(-1, T + 1)


def mlp_batch(examples, chosen):
    """An MLPBatch of the examples whose indices are chosen."""
    rows = examples[chosen]                                # (N, T + 1)
    return MLPBatch(rows[:, :-1].copy(), rows[:, -1].copy())    # contiguous arrays are faster


# ---- The MLP, one operation at a time
# C has a row for each character, its embedding. W1 and b1 lead to the hidden units, which batch
# norm brings to mean 0 and variance 1 over the batch, times bngain, plus bnbias. W2 and b2 lead to
# the logits, a number for each character, whose softmax is its probability.

MLP_PARAMETERS = 'C', 'W1', 'b1', 'bngain', 'bnbias', 'W2', 'b2'


def mlp_steps(p, X, Y):
    """The mean loss of an MLPBatch, with the parameters p, and all values on the way by name."""
    C, W1, b1, bngain, bnbias, W2, b2 = (p[name] for name in MLP_PARAMETERS)
    N = len(X)
    emb = C[X]                                             # (N, T, E)
    embcat = emb.reshape(N, -1)                            # (N, T*E)
    hprebn = embcat @ W1 + b1                              # (N, H)
    bnmeani = hprebn.sum(0, keepdims=True) / N             # (1, H)
    bndiff = hprebn - bnmeani                              # (N, H)  b1 cancels here
    bndiff2 = bndiff**2                                    # (N, H)
    bnvar = bndiff2.sum(0, keepdims=True) / (N - 1)        # (1, H)  N - 1: Bessel's correction
    bnvar_inv = (bnvar + 1e-5)**-0.5                       # (1, H)  1e-5: never divide by zero
    bnraw = bndiff * bnvar_inv                             # (N, H)
    hpreact = bngain * bnraw + bnbias                      # (N, H)
    h = np.tanh(hpreact)                                   # (N, H)
    logits = h @ W2 + b2                                   # (N, V)
    logit_maxes = logits.max(1, keepdims=True)             # (N, 1)
    norm_logits = logits - logit_maxes                     # (N, V)  so that exp stays finite
    counts = np.exp(norm_logits)                           # (N, V)
    counts_sum = counts.sum(1, keepdims=True)              # (N, 1)
    counts_sum_inv = counts_sum**-1                        # (N, 1)
    probs = counts * counts_sum_inv                        # (N, V)
    logprobs = np.log(probs)                               # (N, V)
    loss = -logprobs[np.arange(N), Y].mean()
    return loss, dict(
        emb=emb, embcat=embcat, hprebn=hprebn, bnmeani=bnmeani, bndiff=bndiff, bndiff2=bndiff2,
        bnvar=bnvar, bnvar_inv=bnvar_inv, bnraw=bnraw, hpreact=hpreact, h=h, logits=logits,
        logit_maxes=logit_maxes, norm_logits=norm_logits, counts=counts, counts_sum=counts_sum,
        counts_sum_inv=counts_sum_inv, probs=probs, logprobs=logprobs)


# ---- Layers of the MLP
# A layer does several of these operations at once. It returns its output, then whatever else its
# backward function needs. Layers keep the precision of their inputs, float32 to train and float64
# to check gradients: in a kernel, x.dtype.type(0) is a zero of that precision.

def embedding(C, X):
    """Rows of C (V,E) by the ids in X, like C[X]. Source: A.6.

    With X (N,T) the T rows stand side by side: (N,T*E). With X (N,) it is one row each: (N,E).
    """
    return C.take(X, 0).reshape(len(X), -1)                # (N, T*E)


@kernel
def add_bias(y, b):
    """Add the vector b to every row of y."""
    for i in range(y.shape[0]):
        for j in range(y.shape[1]):
            y[i, j] += b[j]


def linear(x, W, b=None):
    """y = x W + b, with I inputs and O outputs: (N,I) (I,O) (O,) -> (N,O). Source: A.5."""
    y = np.dot(x, W)                                       # (N, O)
    if b is not None:
        add_bias(y, b)                                     # (N, O)
    return y


@kernel
def batchnorm(x, gain, bias):
    """Bring each column of x (N,H) to mean 0 and variance 1, then times gain, plus bias (H,).

    Returns y, raw (y before gain and bias) and var_inv (H,): 1 / standard deviation. Source: A.4.
    """
    N, H = x.shape
    mean, var = np.zeros(H, x.dtype), np.zeros(H, x.dtype)                      # (H,)
    for i in range(N):
        for j in range(H):
            mean[j] += x[i, j]
    mean /= x.dtype.type(N)                                # (H,)
    raw, y = np.empty_like(x), np.empty_like(x)            # (N, H)
    for i in range(N):
        for j in range(H):
            raw[i, j] = x[i, j] - mean[j]
            var[j] += raw[i, j] * raw[i, j]
    var_inv = np.empty(H, x.dtype)                         # (H,)
    for j in range(H):
        var_inv[j] = 1 / sqrt(var[j] / (N - 1) + 1e-5)
    for i in range(N):
        for j in range(H):
            raw[i, j] *= var_inv[j]
            y[i, j] = gain[j] * raw[i, j] + bias[j]
    return y, raw, var_inv


# The activations are elementwise functions of x (N,H). Each returns y and gate: SiLU and GELU are
# y = x gate, where gate is a sigmoid; for the others gate is None.

GELU_C, GELU_A = sqrt(2 / np.pi), 0.044715


def tanh(x):
    """y = tanh x. Source: A.1."""
    return np.tanh(x), None


def sigmoid(x):
    """y = 1 / (1 + e^-x), computed as (1 + tanh(x/2)) / 2, which cannot overflow. Source: A.1."""
    return 0.5 + 0.5 * np.tanh(0.5 * x), None


def relu(x):
    """y = max(0, x). Source: A.1."""
    return np.maximum(x, 0), None


def leaky_relu(x):
    """y = max(0.01 x, x). Source: A.1."""
    return np.maximum(0.01 * x, x), None


def silu(x):
    """y = x gate, with gate = sigmoid(x). Source: A.1."""
    gate, _ = sigmoid(x)                                   # (N, H)
    return x * gate, gate


def gelu(x):
    """y = x gate, with gate = sigmoid(2u) = (1 + tanh u) / 2, u = c (x + a x^3). Source: A.2."""
    u = GELU_C * x * (1 + GELU_A * x * x)                  # (N, H)
    gate = 0.5 + 0.5 * np.tanh(u)                          # (N, H)
    return x * gate, gate


ACTIVATIONS = dict(tanh=tanh, sigmoid=sigmoid, relu=relu, leaky_relu=leaky_relu, silu=silu,
                   gelu=gelu)


@kernel
def softmax(z, probs):
    """Fill probs with e^z / sum(e^z) for one row z; returns ln(sum(e^z)). Source: A.3."""
    largest = z[0]
    for j in range(1, len(z)):
        largest = max(largest, z[j])
    total = z.dtype.type(0)
    for j in range(len(z)):
        probs[j] = exp(z[j] - largest)                     # largest is subtracted: exp stays finite
        total += probs[j]
    for j in range(len(z)):
        probs[j] /= total
    return largest + log(total)


@kernel
def cross_entropy(logits, Y):
    """The mean over rows of -ln softmax(logits)[Y], and the softmax (N,V). Source: A.3.

    As ln(sum(e^logits)) - logits[Y] it is finite even where a probability is rounded to zero.
    """
    N, V = logits.shape
    probs = np.empty_like(logits)                          # (N, V)
    loss = 0.
    for i in range(N):
        log_sum = softmax(logits[i], probs[i])
        loss += log_sum - logits[i, Y[i]]
    return loss / N, probs


# ---- The MLP in layers

def mlp(config, p, batch, statistics=None):
    """The mean loss of an MLPBatch, and the activations on the way to it by name.

    In training, batch norm takes mean and variance from the batch. At inference it takes those in
    `statistics`, so that a prediction does not depend on other rows.
    """
    emb = embedding(p['C'], batch.X)                       # (N, T*E)
    hprebn = linear(emb, p['W1'], p['b1'])                 # (N, H)
    bnraw = bnvar_inv = None
    if not config['batchnorm']:
        hpreact = hprebn                                   # (N, H)
    elif statistics:
        scale = p['bngain'] / np.sqrt(statistics['bnvar'] + 1e-5)                # (H,)
        hpreact = scale * (hprebn - statistics['bnmean']) + p['bnbias']          # (N, H)
    else:                                                  # (N, H) (N, H) (H,)
        hpreact, bnraw, bnvar_inv = batchnorm(hprebn, p['bngain'], p['bnbias'])
    h, gate = ACTIVATIONS[config['act']](hpreact)          # (N, H) (N, H)
    logits = linear(h, p['W2'], p['b2'])                   # (N, V)
    loss, probs = cross_entropy(logits, batch.Y)           # () (N, V)
    return loss, dict(emb=emb, hprebn=hprebn, bnraw=bnraw, bnvar_inv=bnvar_inv, hpreact=hpreact,
                      h=h, gate=gate, logits=logits, probs=probs)


# ---- Batches of the GPT: a prefix tree
# The GPT predicts a character from all characters before it. What it computes for the beginning of
# a word does not depend on what follows, so words that begin alike share it. A batch is the prefix
# tree (trie) of its sorted words: every distinct beginning is a node, and one row of activations.
# "al" and "amy" have five nodes and seven predictions:
#   beginning       ""  a   al  am  amy
#   node            0   1   2   3   4
#   X               0   a   l   m   y        its last character
#   position        0   1   2   2   3        its length
#   ancestors       0 | 0 1 | 0 1 2 | 0 1 3 | 0 1 3 4
#   Y               a   l   0 | a   m   y   0      the characters of both words, and their ends
#   predicted_from  0   1   2 | 0   1   3   4      the node of what stands before each

class PrefixTree(NamedTuple):
    X: np.ndarray               # (N,)  the id of the last character of each node's beginning
    position: np.ndarray        # (N,)  the length of the beginning
    ancestors: np.ndarray       # (S,)  for each node, those from the root to itself, concatenated
    Y: np.ndarray               # (B,)  the ids to predict, word after word
    predicted_from: np.ndarray  # (B,)  the node that each of them is predicted from


@kernel
def grow_tree(ids, lengths):
    """The fields of a PrefixTree, from the ids of words end to end, and how many each word has.

    A word shares the nodes of the word before it up to the first id that differs. (If one word
    begins with the other, that id is the boundary token at the end of the shorter one.)
    """
    X = np.empty(len(ids), np.int64)                       # long enough, and cut at the end
    position, Y, predicted_from = np.empty_like(X), np.empty_like(X), np.empty_like(X)
    ancestors = np.empty((lengths * lengths).sum(), np.int64)                   # more than enough
    # node[k] is the node of the first k characters of the current word; ids[start] is the boundary
    # token, so character k is ids[start + k]. Entries shared with the word before stay.
    node = np.empty(lengths.max(), np.int64)
    N, S, B, start, start_before = 0, 0, 0, 0, 0
    for length in lengths:
        shared = start > 0                                 # the first word shares nothing
        for k in range(length - 1):
            shared = shared and ids[start + k] == ids[start_before + k]     # once False, it stays
            if not shared:              # a new node, with number N, and its ancestors
                X[N], position[N] = ids[start + k], k
                node[k] = N
                ancestors[S:S + k + 1] = node[:k + 1]
                N, S = N + 1, S + k + 1
            Y[B], predicted_from[B] = ids[start + k + 1], node[k]
            B += 1
        start, start_before = start + length, start
    return X[:N], position[:N], ancestors[:S], Y[:B], predicted_from[:B]


def gpt_examples(words, vocabulary, T):
    """An array of ids for each word; raises ValueError for one that the GPT cannot read."""
    if max(map(len, words)) >= T:
        raise ValueError(f'the GPT reads words of at most {T - 1} characters')
    return [np.array(ids) for ids in encode(words, vocabulary)]


def gpt_batch(examples, chosen):
    """A PrefixTree of the examples whose indices are chosen.

    Words share the most nodes if `examples` are in alphabetical order.
    """
    words = [examples[i] for i in np.sort(chosen)]
    return PrefixTree(*grow_tree(np.concatenate(words), np.array([len(word) for word in words])))


# ---- Layers of the GPT

@kernel
def rmsnorm(x, gain):
    """Divide each row of x (N,E) by its root mean square, then times gain (E,). Source: A.4.

    Returns y, raw (y before gain) and inv (N,): 1 / root mean square.
    """
    N, E = x.shape
    raw, y = np.empty_like(x), np.empty_like(x)            # (N, E)
    inv = np.empty(N, x.dtype)                             # (N,)
    for i in range(N):
        total = x.dtype.type(0)
        for j in range(E):
            total += x[i, j] * x[i, j]
        inv[i] = 1 / sqrt(total / E + 1e-5)
        for j in range(E):
            raw[i, j] = x[i, j] * inv[i]
            y[i, j] = gain[j] * raw[i, j]
    return y, raw, inv


def layernorm(x, gain):
    """RMSNorm of x (N,E) minus its row means: RMS = standard deviation. Source: A.4."""
    return rmsnorm(x - x.mean(1, keepdims=True), gain)


NORMS = dict(rmsnorm=rmsnorm, layernorm=layernorm)


@kernel
def attention(qkv, position, ancestors, A):
    """The output ctx (N,E) of attention, and its weights (A,S). Source: A.5.

    A row of qkv (N,3E) has a query, a key and a value for each of A heads. A node looks at itself
    and its ancestors: at nothing later in a word. A score is query . key / sqrt(E/A): so scores are
    of similar size at any width. The weights are their softmax, and ctx sums the weighted values.
    """
    N, E = len(qkv), qkv.shape[1] // 3
    split = qkv.reshape(N, 3, A, E // A)
    ctx = np.zeros((N, A, E // A), qkv.dtype)
    weights = np.empty((A, len(ancestors)), qkv.dtype)     # (A, S)
    scale = qkv.dtype.type(1 / sqrt(E // A))
    begin = 0
    for i in range(N):
        end = begin + position[i] + 1
        seen = ancestors[begin:end]                        # the last one is the node itself
        for head in range(A):
            query, weight = split[i, 0, head], weights[head, begin:end]
            for j in range(len(seen)):
                key = split[seen[j], 1, head]
                score = qkv.dtype.type(0)
                for e in range(len(key)):
                    score += query[e] * key[e]
                weight[j] = score * scale
            softmax(weight, weight)     # in place
            for j in range(len(seen)):
                value = split[seen[j], 2, head]
                for e in range(len(value)):
                    ctx[i, head, e] += weight[j] * value[e]
        begin = end
    return ctx.reshape(N, E), weights


# ---- The GPT in layers
# C embeds characters and P positions. The norms have a gain each, two in a layer and one at the
# end. In a layer, Wqkv and Wo belong to attention, Wup and Wdown to the hidden units.

def gpt(config, p, tree, masks=None):
    """The mean loss of a PrefixTree, and the activations on the way to it by name.

    With dropout, what an attention or hidden layer adds to x is multiplied by one of the 2L masks
    (N,E). It is 0 at random elements, so that no unit can rely on another, and 1 / (1 - rate) at
    the others, to keep the mean.
    """
    norm, activation = NORMS[config['norm']], ACTIVATIONS[config['act']]
    L, A = config['layers'], config['heads']
    masks = [1] * (2*L) if masks is None else masks        # without dropout all are 1
    layers = []
    x = embedding(p['C'], tree.X) + embedding(p['P'], tree.position)            # (N, E)
    for l in range(L):
        normed1, raw1, inv1 = norm(x, p['gain'][2*l])      # (N, E) (N, E) (N,)
        qkv = linear(normed1, p['Wqkv'][l])                # (N, 3*E)
        ctx, weights = attention(qkv, tree.position, tree.ancestors, A)         # (N, E) (A, S)
        x += linear(ctx, p['Wo'][l]) * masks[2*l]          # (N, E)  the residual: A.6
        normed2, raw2, inv2 = norm(x, p['gain'][2*l + 1])  # (N, E) (N, E) (N,)
        hpreact = linear(normed2, p['Wup'][l])             # (N, 4*E)
        h, gate = activation(hpreact)                      # (N, 4*E) (N, 4*E)
        x += linear(h, p['Wdown'][l]) * masks[2*l + 1]     # (N, E)
        layers.append(dict(normed1=normed1, raw1=raw1, inv1=inv1, qkv=qkv, ctx=ctx, weights=weights,
                           normed2=normed2, raw2=raw2, inv2=inv2, hpreact=hpreact, h=h,
                           gate=gate))
    normed, raw, inv = norm(x, p['gain'][2*L])             # (N, E) (N, E) (N,)
    last = embedding(normed, tree.predicted_from)          # (B, E)  rows of normed
    logits = np.dot(last, p['C'].T)                        # (B, V)  output layer, tied to C: A.6
    loss, probs = cross_entropy(logits, tree.Y)            # () (B, V)
    return loss, dict(layers=layers, raw=raw, inv=inv, last=last, logits=logits, probs=probs)


# ---- First values

def parameter_shapes(config):
    """The shape of each parameter, by name."""
    V, T, E = config['vocab_size'], config['context'], config['embd']
    if config['model'] == 'mlp':
        H = config['hidden']
        gain_and_bias = dict(bngain=(H,), bnbias=(H,)) if config['batchnorm'] else {}
        return dict(C=(V, E), W1=(T*E, H), b1=(H,), **gain_and_bias, W2=(H, V), b2=(V,))
    L = config['layers']
    return dict(C=(V, E), P=(T, E), gain=(2*L + 1, E), Wqkv=(L, E, 3*E), Wo=(L, E, E),
                Wup=(L, E, 4*E), Wdown=(L, 4*E, E))


def views(shapes, flat):
    """The parts of a flat vector as arrays, by name; an optimizer loops over the same memory."""
    sizes = [prod(shape) for shape in shapes.values()]
    parts = np.split(flat, np.cumsum(sizes)[:-1])
    return {name: part.reshape(shapes[name]) for name, part in zip(shapes, parts)}


def make_parameters(config, rng, dtype=np.float32):
    """The first values of all parameters, by name.

    With init='naive' all but the gains are drawn from N(0, 1). With init='kaiming' biases are zero,
    and a matrix W with I inputs has the standard deviation factor / sqrt(I), so that the outputs of
    a layer are of the same size at any width. The factors were found by trial.
    """
    shapes = parameter_shapes(config)
    p = views(shapes, np.zeros(sum(map(prod, shapes.values())), dtype))
    # The output layer of the GPT is C, too. As x begins as C[id] + P and ends with RMS 1, the
    # character just read has a logit of about E std_C / sqrt(2): in a wide GPT too much.
    std_C = 0.1 if config['model'] == 'mlp' else 0.1 * min(1, 64 / config['embd'])
    # A small W2 makes all characters about as likely. Small Wo and Wdown add little to embeddings.
    factors = dict(C=std_C, P=std_C, W1=0.5, W2=0.2, Wqkv=1, Wo=0.3*std_C, Wup=1, Wdown=0.3*std_C)
    for name, w in p.items():
        inputs = w.shape[-2] if name[0] == 'W' else 1
        std = 1 if config['init'] == 'naive' else factors.get(name, 0) / sqrt(inputs)
        w[:] = 1 if name in ('gain', 'bngain') else std * rng.standard_normal(w.shape)
    return p


# ---- Using a model: predicting, generating, scoring

class Model(NamedTuple):
    config: dict
    vocabulary: str
    p: dict             # the parameters by name
    statistics: dict    # bnmean (H,) and bnvar (H,) of all training data; empty without batch norm


EXAMPLES = dict(mlp=mlp_examples, gpt=gpt_examples)
BATCH = dict(mlp=mlp_batch, gpt=gpt_batch)


def predict(model, batch):
    """The mean loss of a batch and the activations, without dropout."""
    if model.config['model'] == 'mlp':
        return mlp(model.config, model.p, batch, model.statistics)
    return gpt(model.config, model.p, batch)


def batch_of(model, words):
    """A batch of all predictions in these words."""
    kind = model.config['model']
    examples = EXAMPLES[kind](words, model.vocabulary, model.config['context'])
    return BATCH[kind](examples, np.arange(len(examples)))


def choose(logits, u, temperature, top_k, top_p):
    """The id of a character for each row of logits (n,V), by random numbers u (n,) from 0 to 1.

    The probabilities are added up, the likeliest first; the character is the one where the sum
    passes u. A temperature below 1 makes likely characters likelier, 0 takes the likeliest. top_k
    leaves only the k likeliest; top_p only the likeliest, up to the one that brings their sum to
    top_p. With 0, these two leave all.
    """
    order = np.argsort(-logits, axis=1, kind='stable')                          # (n, V)
    z = np.take_along_axis(logits, order, 1).astype(np.float64)                 # (n, V)
    weights = np.exp((z - z[:, :1]) / max(temperature, 1e-9))                   # (n, V)
    top_k = 1 if temperature == 0 else top_k
    if top_k:
        weights[:, top_k:] = 0
    if top_p:
        # A character is left out if the probabilities of the likelier ones sum to top_p already.
        before = weights.cumsum(1) - weights               # (n, V)
        weights[before >= top_p * weights.sum(1, keepdims=True)] = 0
    cumulative = weights.cumsum(1)                                              # (n, V)
    # The place is the number of cumulative sums that u has passed.
    place = (cumulative <= u[:, None] * cumulative[:, -1:]).sum(1)              # (n,)
    return order[np.arange(len(order)), place]


def generate(model, n, rng, temperature=1., top_k=0, top_p=0., prefix='', max_len=None):
    """Up to n words: those that end within max_len characters. No word is empty.

    They grow together, by a character at a time. By default max_len is len(prefix) plus the length
    of the longest word. The words are in Unicode's NFC, where é is one character. For temperature,
    top_k and top_p see choose().
    """
    longest = max_len if max_len else len(prefix) + model.config['longest']
    if model.config['model'] == 'gpt':
        longest = min(longest, model.config['context'] - 1)
    if len(prefix) > longest:
        raise ValueError(f'a word may have {longest} characters, the prefix has {len(prefix)}')
    words, growing = [prefix] * n, np.arange(n)            # which words have not ended
    for k in range(len(prefix), longest + 1):
        batch = batch_of(model, [words[i] for i in growing])
        _, acts = predict(model, batch)
        # The batch has a prediction for every character so far, and one with Y = 0 after the last
        # of each word: its logits are those of the next character.
        logits = acts['logits'][batch.Y == 0]              # (growing, V)
        if k == 0:
            logits[:, 0] = -np.inf                         # no word is empty
        # Also drawn for words that have ended, so that a word does not depend on the others.
        u = rng.random(n)[growing]                         # (growing,)
        ids = choose(logits, u, temperature, top_k, top_p)                      # (growing,)
        growing, ids = growing[ids > 0], ids[ids > 0]      # (growing,)
        for i, character_id in zip(growing, ids):
            words[i] += model.vocabulary[character_id]
        if len(growing) == 0:
            break
    return [normalize('NFC', word) for i, word in enumerate(words) if i not in growing]


def score(model, word):
    """The log-probability of a word and its end, in nats."""
    batch = batch_of(model, [word])
    return -predict(model, batch)[0] * len(batch.Y)


# ---- python model.py

NAMES = Path(__file__).parent / 'data' / 'names.txt'


def first_batch(config, size, rng):
    """The config for names.txt, and a random batch of its words or, for the MLP, predictions."""
    words = sorted(NAMES.read_text('utf-8').split())
    kind, vocabulary = config['model'], make_vocabulary(words)
    examples = EXAMPLES[kind](words, vocabulary, config['context'])
    batch = BATCH[kind](examples, rng.integers(0, len(examples), size))
    return dict(config, vocab_size=len(vocabulary)), batch


def main():
    """Print a prefix tree, the shapes of both models, and what naive first values do to the MLP."""
    print('The prefix tree of "al" and "amy", with characters for ids')
    tree = gpt_batch(gpt_examples(['al', 'amy'], '\0almy', 16), [0, 1])
    for name, array in tree._asdict().items():
        shown = ['0almy'[i] for i in array] if name in ('X', 'Y') else array
        print(f'  {name:<15}', *shown)
    for defaults in MLP_DEFAULTS, GPT_DEFAULTS:
        config, batch = first_batch(defaults, 32, np.random.default_rng(1))
        p = make_parameters(config, np.random.default_rng(1))
        _, acts = predict(Model(config, '', p, {}), batch)
        layers = acts.pop('layers', [{}])                  # the first one is shown
        print(f"\n{config['model']}: {sum(w.size for w in p.values()):,} parameters; activations")
        for name, array in {**p, **layers[0], **acts}.items():
            print(f'  {name:<10} {np.shape(array)}')
    print('\nMLP without batch norm: first loss (ln 27 = 3.30), and how much of h is saturated')
    for sizes in dict(embd=10, hidden=64), dict(embd=2, hidden=100):
        for init in 'naive', 'kaiming':
            config = dict(MLP_DEFAULTS, **sizes, init=init, batchnorm=False)
            config, batch = first_batch(config, 32, np.random.default_rng(1))
            loss, acts = mlp(config, make_parameters(config, np.random.default_rng(1)), batch)
            print(f'  {sizes} {init:<7} {loss:>6.2f} {(abs(acts["h"]) > 0.99).mean():>4.0%}')


if __name__ == '__main__':
    main()
