import numpy as np
import pytest
from oracle import (
    ACTIVATIONS, BATCHES, CASES, NORMS, VOCABULARY, WORDS, error, gpt_batch_of, gpt_config,
    mlp_batch_of, mlp_config, random_parameters, run)

import backward
import model as m
import train

torch = pytest.importorskip('torch', reason='PyTorch, the oracle of these tests, is not installed')
F = torch.nn.functional
torch.set_num_threads(1)

# Every measure is max|ours - theirs| / max|ours of the block|. Two gradients are zero by nature,
# so that their largest element is rounding; for these it is over ZERO instead.
AGREEMENT, ZERO = 1e-12, 1
ZERO_BY_NATURE = 'logit_maxes', 'b1'


def rng(*seed):
    return np.random.default_rng(seed)


def tensors(arrays):
    """Leaves of a graph, each a copy."""
    return {name: torch.tensor(array, requires_grad=array.dtype.kind == 'f')
            for name, array in arrays.items()}


# ---- The MLP one operation at a time

def torch_mlp_steps(p, X, Y):
    """Mean loss and all values on the way to it, each told to keep its gradient."""
    n = len(X)
    v = dict(emb=p['C'][X])
    v['embcat'] = v['emb'].view(n, -1)
    v['hprebn'] = v['embcat'] @ p['W1'] + p['b1']
    v['bnmeani'] = v['hprebn'].sum(0, keepdim=True) / n
    v['bndiff'] = v['hprebn'] - v['bnmeani']
    v['bndiff2'] = v['bndiff']**2
    v['bnvar'] = v['bndiff2'].sum(0, keepdim=True) / (n - 1)
    v['bnvar_inv'] = (v['bnvar'] + 1e-5)**-0.5
    v['bnraw'] = v['bndiff'] * v['bnvar_inv']
    v['hpreact'] = p['bngain'] * v['bnraw'] + p['bnbias']
    v['h'] = torch.tanh(v['hpreact'])
    v['logits'] = v['h'] @ p['W2'] + p['b2']
    v['logit_maxes'] = v['logits'].max(1, keepdim=True).values
    v['norm_logits'] = v['logits'] - v['logit_maxes']
    v['counts'] = v['norm_logits'].exp()
    v['counts_sum'] = v['counts'].sum(1, keepdim=True)
    v['counts_sum_inv'] = v['counts_sum']**-1
    v['probs'] = v['counts'] * v['counts_sum_inv']
    v['logprobs'] = v['probs'].log()
    for value in v.values():
        value.retain_grad()
    return -v['logprobs'][range(n), Y].mean(), v


@pytest.mark.parametrize('N', BATCHES)
def test_mlp_steps_agrees_with_autograd_in_every_value_and_gradient(N):
    p, flat = random_parameters(mlp_config(True, 'tanh'), rng(N))
    X, Y = mlp_batch_of(rng(1, N), N)
    loss, values = m.mlp_steps(p, X, Y)
    d = backward.mlp_steps_backward(p, X, Y, values)
    leaves = tensors(p)
    their_loss, theirs = torch_mlp_steps(leaves, torch.tensor(X), torch.tensor(Y))
    their_loss.backward()
    assert loss == pytest.approx(their_loss.item(), rel=AGREEMENT)
    assert list(theirs) == list(values)
    for name, value in {**p, **values}.items():
        their = {**leaves, **theirs}[name]
        floor = ZERO if name in ZERO_BY_NATURE else 0
        assert error(d[name], their.grad.numpy(), floor) <= AGREEMENT, name
        assert error(value, their.detach().numpy()) <= AGREEMENT, name


# ---- Layers

def torch_batchnorm(x, gain, bias):
    """F.batch_norm divides by n, so gain and eps make up for n - 1."""
    share = (len(x) - 1) / len(x)
    return F.batch_norm(x, None, None, gain * share**0.5, bias, training=True, eps=1e-5 * share)


def torch_attention(qkv, position, ancestors, heads=3):
    """One node after the other, its query against the keys of its ancestors and itself."""
    contexts = []
    for seen in ancestors.split((position + 1).tolist()):
        q, k, v = qkv[seen].view(len(seen), 3, heads, -1).permute(1, 2, 0, 3)
        contexts.append(F.scaled_dot_product_attention(q[:, -1:], k, v).flatten())
    return torch.stack(contexts)


TORCH_NORMS = dict(
    rmsnorm=lambda x, gain: F.rms_norm(x, gain.shape, gain, 1e-5),
    layernorm=lambda x, gain: F.layer_norm(x, gain.shape, gain, None, 1e-5))

TORCH_ACTIVATIONS = dict(
    tanh=torch.tanh, sigmoid=torch.sigmoid, relu=F.relu, leaky_relu=F.leaky_relu, silu=F.silu,
    gelu=lambda x: F.gelu(x, approximate='tanh'))

TORCH_LAYERS = dict(
    **TORCH_NORMS, **TORCH_ACTIVATIONS,
    embedding=lambda C, X: F.embedding(X, C).flatten(1),
    embedding_of_one_id=lambda C, X: F.embedding(X, C),
    add_bias=lambda b, x: x + b,
    linear=lambda x, W, b: F.linear(x, W.T, b),
    linear_without_bias=lambda x, W: F.linear(x, W.T),
    batchnorm=torch_batchnorm,
    softmax=lambda z: F.softmax(z, 0),
    attention=torch_attention,
    cross_entropy=lambda logits, Y: F.cross_entropy(logits, Y))


def test_every_layer_has_a_torch_twin():
    assert sorted(TORCH_LAYERS) == sorted(CASES)


@pytest.mark.parametrize('N', BATCHES)
@pytest.mark.parametrize('name', CASES)
def test_layer_agrees_with_torch_forward_and_backward(name, N):
    case = CASES[name](rng(N), N)
    leaves = tensors(case.inputs)
    fixed = {key: torch.tensor(value) if isinstance(value, np.ndarray) else value
             for key, value in case.fixed.items()}
    y = TORCH_LAYERS[name](*leaves.values(), **fixed)
    y.backward(torch.tensor(case.dy))
    assert error(case.forward(), y.detach().numpy()) <= AGREEMENT
    for key, leaf in leaves.items():
        assert error(case.gradients[key], leaf.grad.numpy()) <= AGREEMENT, key


# ---- Both models, with weights from a checkpoint

def torch_mlp(config, p, X, Y):
    z = F.linear(F.embedding(X, p['C']).flatten(1), p['W1'].T, p['b1'])
    if config['batchnorm']:
        z = torch_batchnorm(z, p['bngain'], p['bnbias'])
    h = TORCH_ACTIVATIONS[config['act']](z)
    return F.cross_entropy(F.linear(h, p['W2'].T, p['b2']), Y)


def torch_causal_attention(qkv, heads):
    """Of a whole name, with the causal mask."""
    q, k, v = qkv.view(len(qkv), 3, heads, -1).permute(1, 2, 0, 3)
    context = F.scaled_dot_product_attention(q, k, v, is_causal=True)
    return context.transpose(0, 1).reshape(len(qkv), -1)


def torch_gpt(config, p, X, position, ancestors, Y, predicted_from, masks=None):
    """All names end to end, without a tree: a row for every prediction."""
    X, position = X[predicted_from], position[predicted_from]
    lengths = torch.diff(torch.nonzero(Y == 0)[:, 0], prepend=torch.tensor([-1]))
    norm, act = TORCH_NORMS[config['norm']], TORCH_ACTIVATIONS[config['act']]
    if masks is None:
        masks = torch.ones(2*config['layers'], 1, 1).expand(-1, len(position), 1)
    else:
        masks = masks[:, predicted_from]
    x = F.embedding(X, p['C']) + F.embedding(position, p['P'])
    for l in range(config['layers']):
        qkv = F.linear(norm(x, p['gain'][2*l]), p['Wqkv'][l].T)
        context = torch.cat([torch_causal_attention(name, config['heads'])
                             for name in qkv.split(lengths.tolist())])
        x = x + F.linear(context, p['Wo'][l].T) * masks[2*l]
        up = F.linear(norm(x, p['gain'][2*l + 1]), p['Wup'][l].T)
        x = x + F.linear(act(up), p['Wdown'][l].T) * masks[2*l + 1]
    return F.cross_entropy(F.linear(norm(x, p['gain'][-1]), p['C']), Y)


TORCH_MODELS = dict(mlp=torch_mlp, gpt=torch_gpt)


def from_checkpoint(tmp_path, config, p):
    """Write a checkpoint of p; return what train.load and what NumPy alone read, in float64."""
    statistics = {}
    if config.get('batchnorm'):
        statistics = dict(bnmean=np.zeros(7, np.float32), bnvar=np.ones(7, np.float32))
    moments = np.zeros((2, sum(w.size for w in p.values())), np.float32)
    config, path = dict(config, optimizer='adam'), tmp_path / 'twin.npz'
    best = m.Model(config, VOCABULARY, p, statistics)
    train.save(path, train.Run(config, VOCABULARY, p, moments, best))
    ours = {name: w.astype(np.float64) for name, w in train.load(path).best.p.items()}
    with np.load(path) as file:
        return ours, {name: file[f'best.{name}'].astype(np.float64) for name in p}


def check_model(tmp_path, config, batch, masks=None):
    p, theirs = from_checkpoint(tmp_path, config, random_parameters(config, rng(1), np.float32)[0])
    model, leaves = run(config, p, batch, masks), tensors(theirs)
    more = {} if masks is None else {'masks': torch.tensor(masks)}
    loss = TORCH_MODELS[config['model']](config, leaves, *map(torch.tensor, batch), **more)
    loss.backward()
    assert model.loss() == pytest.approx(loss.item(), rel=AGREEMENT)
    for name, g in model.g.items():
        floor = ZERO if name == 'b1' and config['batchnorm'] else 0
        assert error(g, leaves[name].grad.numpy(), floor) <= AGREEMENT, name


@pytest.mark.parametrize('batchnorm', [True, False])
@pytest.mark.parametrize('act', ACTIVATIONS)
def test_mlp_from_a_checkpoint_agrees_with_its_torch_twin(tmp_path, act, batchnorm):
    check_model(tmp_path, mlp_config(batchnorm, act), mlp_batch_of(rng(2), 32))


@pytest.mark.parametrize('dropout', [False, True])
@pytest.mark.parametrize('norm', NORMS)
@pytest.mark.parametrize('act', ACTIVATIONS)
def test_gpt_from_a_checkpoint_agrees_with_its_torch_twin(tmp_path, act, norm, dropout):
    config = gpt_config(norm, act, 2, 4)
    batch, masks = gpt_batch_of(config, WORDS), None
    if dropout:
        masks = (rng(3).random((4, len(batch.X), 12)) >= 0.3) / 0.7
    check_model(tmp_path, config, batch, masks)


# ---- Optimizers, over 50 steps of the MLP, each with gradients of its own

TORCH_OPTIMIZERS = dict(
    sgd=lambda groups, lr: torch.optim.SGD(groups, lr),
    momentum=lambda groups, lr: torch.optim.SGD(groups, lr, momentum=0.9),
    adam=lambda groups, lr: torch.optim.Adam(groups, lr))


def distance(p, leaves):
    return {name: error(w, leaves[name].detach().numpy()) for name, w in p.items()}


@pytest.mark.parametrize('optimizer', TORCH_OPTIMIZERS)
def test_optimizer_agrees_with_torch_over_50_steps(optimizer):
    config = mlp_config(False, 'tanh')
    p, flat = random_parameters(config, rng(1))
    start, leaves = flat.copy(), tensors(p)
    moments = np.zeros((train.MOMENTS[optimizer], len(flat)))
    theirs = TORCH_OPTIMIZERS[optimizer](leaves.values(), 0.01)
    for t in range(1, 51):
        batch = mlp_batch_of(rng(2, t), 32)
        g = run(config, p, batch).g
        dw = np.concatenate([g[name].ravel() for name in p])
        train.OPTIMIZERS[optimizer](flat, dw, moments, 0.01, t)
        theirs.zero_grad()
        torch_mlp(config, leaves, *map(torch.tensor, batch)).backward()
        theirs.step()
    assert np.abs(flat - start).max() > 0.05
    assert max(distance(p, leaves).values()) <= AGREEMENT


@pytest.mark.parametrize('weight_decay', [0., 0.5])
def test_train_step_agrees_with_torch_adamw_over_50_steps(weight_decay):
    """AdamW decays matrices, not gains and biases, at the learning rate of each step."""
    config = dict(mlp_config(True, 'tanh'), backward='steps', optimizer='adam', steps=50, lr=0.02,
                  weight_decay=weight_decay)
    p, flat = random_parameters(config, rng(1))
    leaves, ours = tensors(p), train.Run(config, VOCABULARY, p, np.zeros((2, len(flat))), None)
    flat_g = np.full((1, len(flat)), np.nan)
    g = m.views(m.parameter_shapes(config), flat_g[0])
    theirs = torch.optim.AdamW([
        dict(params=[w for w in leaves.values() if w.ndim == 2], weight_decay=weight_decay),
        dict(params=[w for w in leaves.values() if w.ndim == 1], weight_decay=0)])
    for step in range(50):
        batch = mlp_batch_of(rng(2, step), 32)
        loss = train.train_step(ours, batch, flat, flat_g, g, [])
        for group in theirs.param_groups:
            group['lr'] = train.learning_rate(config, step)
        theirs.zero_grad()
        their_loss = torch_mlp(config, leaves, *map(torch.tensor, batch))
        their_loss.backward()
        theirs.step()
        assert loss == pytest.approx(their_loss.item(), rel=AGREEMENT)
    far = distance(p, leaves)
    assert far.pop('b1') <= 5e-5        # its gradient is rounding, and Adam divides it by its size
    assert max(far.values()) <= AGREEMENT
