"""The MLP and the GPT in PyTorch and in JAX, as fast as they go on a CPU, for tests/bench.py.

A rival is a generator. Each next() takes one or more training steps, on batches that are ready
before it begins, by the optimizer and the learning rates of train.py; it gives their losses.
"""
from itertools import count

import model as m
import train

import numpy as np

try:
    import torch
    import torch.nn.functional as F
except ImportError:
    torch = None

try:
    import jax
    import jax.numpy as jnp
except ImportError:
    jax = None


FILLERS = 0, -100       # what pads the ids that are read, and those to predict


def pad(rows, T, filler):
    """An array (n,T) of rows of ids, filled up at their ends."""
    return np.array([np.pad(ids, (0, T - len(ids)), constant_values=filler) for ids in rows])


def padded(kind, shards):
    """A batch as two arrays of ids: those read, and those to predict.

    Names (n,T) are padded to the longest of them.
    """
    if kind == 'mlp':
        return list(shards[0])
    names = []
    for tree in shards:
        begins = np.flatnonzero(tree.position[tree.predicted_from] == 0)[1:]
        names += zip(np.split(tree.X[tree.predicted_from], begins), np.split(tree.Y, begins))
    T = max(len(X) for X, _ in names)
    return [pad(side, T, filler) for side, filler in zip(zip(*names), FILLERS)]


# ---- PyTorch

def leaves(p):
    """The parameters as PyTorch has them: one tensor a layer, matrices of linear layers (O,I)."""
    parts = {name: list(w) if w.ndim == 3 or name == 'gain' else [w] for name, w in p.items()}
    return {name: [torch.tensor(np.ascontiguousarray(w.T) if name[0] == 'W' else w)
                   .requires_grad_() for w in ws] for name, ws in parts.items()}


def torch_mlp(config, p):
    """The loss of the MLP, as a function of a batch."""
    C, W1, b1, gain, bias, W2, b2 = (p[name][0] for name in m.MLP_PARAMETERS)
    # batch_norm takes the variance over n, the model over n - 1: gain and eps make up for it
    bessel = 1 - 1 / config['batch']
    with torch.no_grad():
        gain *= bessel**0.5

    def loss(X, Y):
        hprebn = F.linear(F.embedding(X, C).flatten(1), W1, b1)
        hpreact = F.batch_norm(hprebn, None, None, gain, bias, training=True, eps=1e-5 * bessel)
        return F.cross_entropy(F.linear(torch.tanh(hpreact), W2, b2), Y)
    return loss


def torch_gpt(config, p):
    """The loss of the GPT, as a function of a batch of padded names."""
    E, A, L = config['embd'], config['heads'], config['layers']
    C, P, gain = p['C'][0], p['P'][0], p['gain']

    def norm(x, i):
        return F.rms_norm(x, (E,), gain[i], 1e-5)

    def loss(X, Y):
        x = F.embedding(X, C) + P[:X.shape[1]]
        for l in range(L):
            qkv = F.linear(norm(x, 2*l), p['Wqkv'][l]).unflatten(2, (3, A, E // A))
            q, k, v = qkv.permute(2, 0, 3, 1, 4)
            ctx = F.scaled_dot_product_attention(q, k, v, is_causal=True)
            x = x + F.linear(ctx.transpose(1, 2).flatten(2), p['Wo'][l])
            up = F.linear(norm(x, 2*l + 1), p['Wup'][l])
            x = x + F.linear(F.gelu(up, approximate='tanh'), p['Wdown'][l])
        logits = F.linear(norm(x, -1), C)
        return F.cross_entropy(logits.flatten(0, 1), Y.flatten(), ignore_index=-100)
    return loss


def torch_steps(job, how, threads):
    """PyTorch eager. `how` is the way its optimizer goes through the parameters.

    With 'foreach' or 'fused' it is one of torch.optim; with '_foreach_add_', for SGD only, it is
    nothing but one call of that function, on the gradients as autograd returns them.
    """
    config, p = job.config, leaves(job.run.p)
    batches = [[torch.tensor(ids) for ids in padded(config['model'], shards)]
               for shards in job.batches]
    loss_of = dict(mlp=torch_mlp, gpt=torch_gpt)[config['model']](config, p)
    parameters = [w for ws in p.values() for w in ws]
    if how != '_foreach_add_':
        make = dict(sgd=torch.optim.SGD, adam=torch.optim.AdamW)[config['optimizer']]
        groups = [dict(params=[w for name in p if name[0].isupper() == matrix for w in p[name]],
                       weight_decay=matrix * config['weight_decay']) for matrix in (True, False)]
        optimizer = make(groups, lr=config['lr'], **{how: True})
    for step in count():
        if torch.get_num_threads() != threads:
            torch.set_num_threads(threads)
        lr, batch = train.learning_rate(config, step), batches[step % len(batches)]
        if how == '_foreach_add_':
            loss = loss_of(*batch)
            gradients = torch.autograd.grad(loss, parameters)
            with torch.no_grad():
                torch._foreach_add_(parameters, gradients, alpha=-lr)
        else:
            for group in optimizer.param_groups:
                group['lr'] = lr
            optimizer.zero_grad(set_to_none=True)
            loss = loss_of(*batch)
            loss.backward()
            optimizer.step()
        yield loss.detach()


def torch_ways(job, cores):
    """{what it is: a generator of steps} for PyTorch."""
    hows = ['foreach', 'fused'] + ['_foreach_add_'] * (job.config['optimizer'] == 'sgd')
    return {f'{how}, {threads} thread' + 's' * (threads > 1): torch_steps(job, how, threads)
            for how in hows for threads in sorted({1, cores})}


# ---- JAX

def jax_mlp(config, p, X, Y):
    """The loss of the MLP."""
    hprebn = p['C'][X].reshape(len(X), -1) @ p['W1'] + p['b1']
    raw = (hprebn - hprebn.mean(0)) / jnp.sqrt(hprebn.var(0, ddof=1) + 1e-5)
    logits = jnp.tanh(p['bngain'] * raw + p['bnbias']) @ p['W2'] + p['b2']
    return -jnp.take_along_axis(jax.nn.log_softmax(logits), Y[:, None], 1).mean()


def jax_gpt(config, p, X, Y):
    """The loss of the GPT on padded names."""
    E, A = config['embd'], config['heads']

    def norm(x, gain):
        return gain * x * jax.lax.rsqrt((x * x).mean(-1, keepdims=True) + 1e-5)

    x = p['C'][X] + p['P'][:X.shape[1]]
    for l in range(config['layers']):
        qkv = (norm(x, p['gain'][2*l]) @ p['Wqkv'][l]).reshape(*X.shape, 3, A, E // A)
        q, k, v = jnp.moveaxis(qkv, 2, 0)
        ctx = jax.nn.dot_product_attention(q, k, v, is_causal=True)
        x += ctx.reshape(x.shape) @ p['Wo'][l]
        up = norm(x, p['gain'][2*l + 1]) @ p['Wup'][l]
        x += jax.nn.gelu(up, approximate=True) @ p['Wdown'][l]
    logprobs = jax.nn.log_softmax(norm(x, p['gain'][-1]) @ p['C'].T)
    losses = -jnp.take_along_axis(logprobs, jnp.maximum(Y, 0)[..., None], -1)[..., 0]
    return jnp.where(Y >= 0, losses, 0).sum() / (Y >= 0).sum()


def jax_update(config):
    """A function that takes a step: of the state (p, two moments, t) and of (X, Y, lr)."""
    loss_of = dict(mlp=jax_mlp, gpt=jax_gpt)[config['model']]

    def update(state, batch):
        p, mean, square, t = state
        X, Y, lr = batch
        loss, g = jax.value_and_grad(lambda p: loss_of(config, p, X, Y))(p)
        if config['optimizer'] == 'sgd':
            p = jax.tree.map(lambda w, dw: w - lr * dw, p, g)
            return (p, mean, square, t), loss
        t = t + 1
        mean = jax.tree.map(lambda a, dw: 0.9 * a + 0.1 * dw, mean, g)
        square = jax.tree.map(lambda a, dw: 0.999 * a + 0.001 * dw * dw, square, g)
        decay = {name: 1 - lr * config['weight_decay'] * name[0].isupper() for name in p}
        p = jax.tree.map(
            lambda w, a, b, kept: kept * w - lr / (1 - 0.9**t) * a / (
                jnp.sqrt(b / (1 - 0.999**t)) + 1e-8), p, mean, square, decay)
        return (p, mean, square, t), loss
    return update


def jax_start(job):
    """The state before the first step, a function that takes a step, and the batches."""
    p = {name: jnp.array(w) for name, w in job.run.p.items()}
    moments = [jax.tree.map(jnp.zeros_like, p) for _ in range(2)]
    batches = [padded(job.config['model'], shards) for shards in job.batches]
    return (p, *moments, jnp.zeros((), jnp.float32)), jax_update(job.config), batches


def jax_jit(job):
    """JAX, compiled: one call a step."""
    state, update, batches = jax_start(job)
    batches = [[jnp.array(ids) for ids in batch] for batch in batches]
    compiled = jax.jit(update, donate_argnums=0)
    for step in count():
        lr = np.float32(train.learning_rate(job.config, step))
        state, loss = compiled(state, (*batches[step % len(batches)], lr))
        if (step + 1) % len(batches) == 0:                 # a call may return before it has ended
            loss.block_until_ready()
        yield loss


def jax_scan(job):
    """JAX, compiled: one call for a loop over all batches.

    They have to be of the same shape: names are padded to the longest of all.
    """
    state, update, batches = jax_start(job)
    if job.config['model'] == 'gpt':
        T = max(X.shape[1] for X, _ in batches)
        batches = [[pad(side, T, filler) for side, filler in zip(batch, FILLERS)]
                   for batch in batches]
    X, Y = (jnp.array(np.stack(side)) for side in zip(*batches))
    compiled = jax.jit(lambda state, *batches: jax.lax.scan(update, state, batches),
                       donate_argnums=0)
    for begin in count(0, len(batches)):
        rates = [train.learning_rate(job.config, begin + i) for i in range(len(batches))]
        state, losses = compiled(state, X, Y, np.array(rates, np.float32))
        yield losses.block_until_ready()


def jax_ways(job, cores):
    """{what it is: a generator of steps} for JAX, which takes as many threads as it wants."""
    return {'jit': jax_jit(job), 'scan': jax_scan(job)}


RIVALS = {'PyTorch': torch_ways} if torch else {}
RIVALS |= {'JAX': jax_ways} if jax else {}
