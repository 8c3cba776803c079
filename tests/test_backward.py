import importlib.util
import itertools
import os
import re
import shutil
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest
from oracle import (
    ACTIVATIONS, BATCHES, CASES, NORMS, WORDS, central_difference_along, central_differences,
    complex_step, error, gpt_batch_of, gpt_config, mlp_batch_of, mlp_config, normal,
    plain_gpt_batch, plain_loss, plain_mlp, random_parameters, run, steps_after, unset)

import backward
import model as m
import train

# Every measure is max|ours - truth| / max|gradient of the block|. Two gradients are zero by
# nature, so that their largest element is rounding; for these it is over ZERO instead.
CENTRAL, COMPLEX, ZERO = 1e-7, 1e-13, 1

INTERMEDIATES = (
    'emb', 'embcat', 'hprebn', 'bnmeani', 'bndiff', 'bndiff2', 'bnvar', 'bnvar_inv', 'bnraw',
    'hpreact', 'h', 'logits', 'logit_maxes', 'norm_logits', 'counts', 'counts_sum',
    'counts_sum_inv', 'probs', 'logprobs')
ZERO_BY_NATURE = 'logit_maxes', 'b1'


def rng(*seed):
    return np.random.default_rng(seed)


# ---- The MLP one operation at a time

def steps(N, dtype=np.float64):
    p, flat = random_parameters(mlp_config(True, 'tanh'), rng(N), dtype)
    X, Y = mlp_batch_of(rng(1, N), N)
    loss, values = m.mlp_steps(p, X, Y)
    return p, X, Y, values, backward.mlp_steps_backward(p, X, Y, values)


def floor(name):
    return ZERO if name in ZERO_BY_NATURE else 0


@pytest.mark.parametrize('dtype', [np.float32, np.float64])
def test_mlp_steps_gives_a_gradient_of_the_same_shape_and_dtype_for_every_value(dtype):
    p, X, Y, values, d = steps(4, dtype)
    assert tuple(values) == INTERMEDIATES
    assert sorted(d) == sorted(INTERMEDIATES + m.MLP_PARAMETERS)
    for name, value in {**p, **values}.items():
        assert (d[name].shape, d[name].dtype) == (value.shape, dtype), name


@pytest.mark.parametrize('N', BATCHES)
@pytest.mark.parametrize('name', m.MLP_PARAMETERS)
def test_mlp_steps_parameter_gradients_by_central_differences(name, N):
    p, X, Y, values, d = steps(N)
    truth = central_differences(lambda: m.mlp_steps(p, X, Y)[0], p[name])
    assert error(d[name], truth, floor(name)) <= CENTRAL


@pytest.mark.parametrize('N', BATCHES)
@pytest.mark.parametrize('name', INTERMEDIATES)
def test_mlp_steps_intermediate_gradients_by_central_differences(name, N):
    p, X, Y, values, d = steps(N)
    known, rest = {**p, **values, 'Y': Y, 'N': N}, steps_after(name)
    truth = central_differences(lambda: rest(known), values[name])
    assert error(d[name], truth, floor(name)) <= CENTRAL


@pytest.mark.parametrize('N', BATCHES)
@pytest.mark.parametrize('name', m.MLP_PARAMETERS)
def test_mlp_steps_parameter_gradients_by_complex_step(name, N):
    p, X, Y, values, d = steps(N)
    q = {key: value.astype(np.complex128) for key, value in p.items()}
    truth = complex_step(lambda: m.mlp_steps(q, X, Y)[0], q[name])
    assert error(d[name], truth, floor(name)) <= COMPLEX


@pytest.mark.parametrize('N', BATCHES)
@pytest.mark.parametrize('name', INTERMEDIATES)
def test_mlp_steps_intermediate_gradients_by_complex_step(name, N):
    p, X, Y, values, d = steps(N)
    known = {key: value.astype(np.complex128) for key, value in {**p, **values}.items()}
    rest = steps_after(name)
    truth = complex_step(lambda: rest({**known, 'Y': Y, 'N': N}), known[name])
    assert error(d[name], truth, floor(name)) <= COMPLEX


@pytest.mark.parametrize('name', ZERO_BY_NATURE)
def test_mlp_steps_gradients_that_are_zero_by_nature_are_nothing_but_rounding(name):
    for N in BATCHES:
        assert np.abs(steps(N)[-1][name]).max() <= 2e-14


def test_mlp_steps_in_float32_agrees_with_float64():
    p, X, Y, values, d = steps(32)
    q = {name: value.astype(np.float32) for name, value in p.items()}
    single = backward.mlp_steps_backward(q, X, Y, m.mlp_steps(q, X, Y)[1])
    for name in d:
        assert error(single[name], d[name], floor(name)) <= 5e-6, name


# ---- Layers

@pytest.mark.parametrize('N', BATCHES)
@pytest.mark.parametrize('name', CASES)
def test_layer_gradients_by_central_differences(name, N):
    case = CASES[name](rng(N), N)
    for key, value in case.inputs.items():
        truth = central_differences(case.loss, value)
        assert error(case.gradients[key], truth) <= CENTRAL, key


def test_every_activation_and_norm_has_its_backward():
    assert list(m.ACTIVATIONS) == list(backward.ACTIVATIONS_BACKWARD)
    assert list(m.NORMS) == list(backward.NORMS_BACKWARD)


@pytest.mark.parametrize('name', ['relu', 'leaky_relu'])
def test_rectifier_derivative_at_zero_is_that_of_negative_numbers(name):
    x, dy = np.array([[0., -0., -1.]]), np.array([[3., 5., 7.]])
    dx = backward.ACTIVATIONS_BACKWARD[name](dy, x, *m.ACTIVATIONS[name](x))
    assert (dx == dy * {'relu': 0, 'leaky_relu': 0.01}[name]).all()


def test_softmax_backward_is_the_jacobian_times_the_upstream_gradient():
    dy, z = normal(rng(2), 7, 7)
    probs, dz = unset(7, 7)
    m.softmax(z, probs)
    backward.softmax_backward(dy, probs, dz)
    jacobian = np.diag(probs) - np.outer(probs, probs)
    assert error(dz, jacobian @ dy) <= 1e-15


def test_attention_gives_no_gradient_to_a_node_that_nothing_looked_at():
    case = CASES['attention'](rng(1), 32)
    position, ancestors = case.fixed['position'], case.fixed['ancestors']
    dy, node = np.zeros_like(case.dy), np.argmax(position)
    dy[node] = 1
    _, weights = m.attention(case.inputs['qkv'], position, ancestors, 3)
    dqkv = backward.attention_backward(dy, case.inputs['qkv'], position, ancestors, weights)
    seen = ancestors[:(position + 1)[:node + 1].sum()][-position[node] - 1:]
    assert 3 <= len(seen) < 10
    assert np.flatnonzero(np.abs(dqkv).max(1) > 0).tolist() == seen.tolist()


# ---- Both models

def mlp_inputs(batchnorm, act, N):
    config, generator = mlp_config(batchnorm, act), rng(N)
    p, flat = random_parameters(config, generator)
    return config, p, mlp_batch_of(generator, N)


@pytest.mark.parametrize('N', BATCHES)
@pytest.mark.parametrize('batchnorm', [True, False])
@pytest.mark.parametrize('act', ACTIVATIONS)
def test_mlp_gradients_by_central_differences(act, batchnorm, N):
    config, p, batch = mlp_inputs(batchnorm, act, N)
    model = run(config, p, batch)
    assert list(model.g) == list(p)
    for name, g in model.g.items():
        truth = central_differences(model.loss, p[name])
        assert error(g, truth, floor(name) if batchnorm else 0) <= CENTRAL, name


@pytest.mark.parametrize('batchnorm', [True, False])
@pytest.mark.parametrize('act', ACTIVATIONS)
def test_mlp_gradients_by_complex_step_through_plain_numpy(act, batchnorm):
    config, p, batch = mlp_inputs(batchnorm, act, 4)
    q = {name: w.astype(np.complex128) for name, w in p.items()}
    for name, g in run(config, p, batch).g.items():
        truth = complex_step(lambda: plain_loss(plain_mlp(config, q, batch.X), batch.Y), q[name])
        assert error(g, truth, floor(name) if batchnorm else 0) <= COMPLEX, name


def gpt_inputs(norm, act, layers, heads, dropout):
    config, generator = gpt_config(norm, act, layers, heads), rng(0, layers, heads)
    p, flat = random_parameters(config, generator)
    batch = gpt_batch_of(config, WORDS)
    masks = None
    if dropout:
        masks = (generator.random((2*layers, len(batch.X), 12)) >= 0.3) / 0.7
    return config, p, batch, masks


COMBINATIONS = list(itertools.product(NORMS, ACTIVATIONS, [1, 2], [1, 4], [False, True]))

# Among thousands of steps some carry a rectifier over its corner, where a central difference is
# wrong and a complex step is not: so all elements are tried by the one or by the other, and the
# values of gpt_inputs are of a seed with which no sampled step does.
SMOOTH = [combination for combination in COMBINATIONS if 'relu' not in combination[1]]


@pytest.mark.parametrize('norm, act, layers, heads, dropout', COMBINATIONS)
def test_gpt_gradients_by_central_differences_of_sampled_elements(
        norm, act, layers, heads, dropout):
    config, p, batch, masks = gpt_inputs(norm, act, layers, heads, dropout)
    model, generator = run(config, p, batch, masks), rng(7)
    assert list(model.g) == list(p)
    for name, g in model.g.items():
        picked = generator.choice(g.size, 8, replace=False)
        truth = central_differences(model.loss, p[name], picked)
        assert error(g, truth, picked=picked) <= CENTRAL, name
        direction = generator.standard_normal(g.shape) / np.sqrt(g.size)
        slope = central_difference_along(model.loss, p[name], direction)
        assert abs((g * direction).sum() - slope) / np.abs(g).max() <= CENTRAL, name


@pytest.mark.parametrize('norm, act, layers, heads, dropout', [
    ('rmsnorm', 'gelu', 2, 4, True), ('layernorm', 'silu', 1, 1, False),
    *(pytest.param(*combination, marks=pytest.mark.slow) for combination in SMOOTH)])
def test_gpt_gradients_by_central_differences_of_all_elements(norm, act, layers, heads, dropout):
    config, p, batch, masks = gpt_inputs(norm, act, layers, heads, dropout)
    model = run(config, p, batch, masks)
    for name, g in model.g.items():
        assert error(g, central_differences(model.loss, p[name])) <= CENTRAL, name


def check_gpt_by_complex_step(norm, act, layers, heads, dropout, count):
    config, p, batch, masks = gpt_inputs(norm, act, layers, heads, dropout)
    q = {name: w.astype(np.complex128) for name, w in p.items()}

    def loss():
        return plain_loss(plain_gpt_batch(config, q, batch, masks), batch.Y)

    for name, g in run(config, p, batch, masks).g.items():
        picked = rng(8).permutation(g.size)[:count]
        truth = complex_step(loss, q[name], picked)
        assert error(g, truth, picked=picked) <= COMPLEX, name


@pytest.mark.parametrize('norm', NORMS)
@pytest.mark.parametrize('act', ACTIVATIONS)
def test_gpt_gradients_by_complex_step_through_plain_numpy(norm, act):
    check_gpt_by_complex_step(norm, act, 2, 4, True, 8)


@pytest.mark.slow
@pytest.mark.parametrize('norm, act, layers, heads, dropout', [
    combination for combination in COMBINATIONS if combination not in SMOOTH])
def test_gpt_gradients_by_complex_step_of_all_elements(norm, act, layers, heads, dropout):
    check_gpt_by_complex_step(norm, act, layers, heads, dropout, None)


@pytest.mark.parametrize('words', [['d'], ['bagga'], ['d', 'a', 'd'], ['bagga', 'bagga']])
@pytest.mark.parametrize('norm', NORMS)
def test_gpt_gradients_of_names_of_one_character_and_of_the_full_context(norm, words):
    config = gpt_config(norm, 'gelu', 2, 4)
    p, flat = random_parameters(config, rng(1))
    model, generator = run(config, p, gpt_batch_of(config, words)), rng(2)
    for name, g in model.g.items():
        picked = generator.choice(g.size, 24, replace=False)
        truth = central_differences(model.loss, p[name], picked)
        assert error(g, truth, picked=picked) <= CENTRAL, name


def test_gpt_gives_no_gradient_to_positions_that_no_name_reaches():
    config = gpt_config('rmsnorm', 'gelu', 2, 4)
    p, flat = random_parameters(config, rng(1))
    model = run(config, p, gpt_batch_of(config, ['cab', 'd']))
    assert (np.abs(model.g['P']).max(1) > 0).tolist() == [True] * 4 + [False] * 2


@pytest.mark.parametrize('config', [
    mlp_config(True, 'tanh'), mlp_config(False, 'silu'), gpt_config('rmsnorm', 'gelu', 2, 4),
    pytest.param(gpt_config('layernorm', 'relu', 1, 1), marks=pytest.mark.slow)])
def test_gradients_in_float32_agree_with_float64(config):
    p, flat = random_parameters(config, rng(1))
    q = m.views(m.parameter_shapes(config), flat.astype(np.float32))
    mlp = config['model'] == 'mlp'
    batch = mlp_batch_of(rng(2), 32) if mlp else gpt_batch_of(config, WORDS)
    double, single = run(config, p, batch), run(config, q, batch)
    assert abs(single.loss() - double.loss()) <= 1e-6
    for name, g in double.g.items():
        assert single.g[name].dtype == np.float32
        floor = ZERO if name == 'b1' and config['batchnorm'] else 0
        assert error(single.g[name], g, floor) <= 3e-6, name


@pytest.mark.parametrize('way', ['steps', 'mlp', 'gpt'])
def test_gradient_returns_the_loss_and_the_activations_of_the_forward_pass(way):
    if way == 'gpt':
        config, p, batch, masks = gpt_inputs('rmsnorm', 'gelu', 1, 4, True)
        loss, acts = m.gpt(config, p, batch, masks)
    else:
        (config, p, batch), masks = mlp_inputs(True, 'tanh', 4), None
        loss, acts = m.mlp(config, p, batch) if way == 'mlp' else m.mlp_steps(p, *batch)
    g = m.make_parameters(config, rng(1), np.float64)
    ours, activations = backward.gradient(dict(config, backward=way), p, batch, g, masks)
    assert ours == loss and list(activations) == list(acts)


# ---- The table of characters

def real_batch():
    """32 examples of real names, for a model of the default sizes."""
    config, batch = m.first_batch(m.MLP_DEFAULTS, 32, rng(1))
    p = m.make_parameters(config, rng(2), np.float64)
    flat = np.concatenate([w.ravel() for w in p.values()])
    return config, m.views(m.parameter_shapes(config), flat), flat, batch


@pytest.mark.parametrize('way', ['steps', 'layers'])
def test_rows_with_gradient_are_the_characters_in_the_batch(way):
    config, p, flat, batch = real_batch()
    dC = run(dict(config, backward=way), p, batch).g['C']
    rows_with_gradient = np.flatnonzero(np.abs(dC).sum(1) > 0)
    characters_in_batch = sorted(set(batch.X.ravel().tolist()))
    assert rows_with_gradient.tolist() == characters_in_batch
    assert 0 < len(characters_in_batch) < 27
    assert (np.delete(dC, characters_in_batch, axis=0) == 0).all()


@pytest.mark.parametrize('optimizer, goes_on', [('sgd', False), ('momentum', True), ('adam', True)])
def test_rows_not_fetched_stay_but_under_moments_a_row_fetched_earlier_goes_on(optimizer, goes_on):
    config, p, flat, _ = real_batch()
    moments = np.zeros((train.MOMENTS[optimizer], len(flat)))
    before = p['C'].copy()
    fetched = []
    ids = np.array([[1, 2, 3], [2, 2, 1], [3, 1, 2], [3, 3, 1]])
    for t, X in enumerate([ids, ids + 2], 1):
        model = run(config, p, m.MLPBatch(X, np.array([1, 2, 3, 4])))
        dw = np.concatenate([g.ravel() for g in model.g.values()])
        last = p['C'].copy()
        train.OPTIMIZERS[optimizer](flat, dw, moments, 0.01, t)
        fetched.append(np.flatnonzero((p['C'] != last).any(1)).tolist())
    assert fetched == [[1, 2, 3], [1, 2, 3, 4, 5] if goes_on else [3, 4, 5]]
    never = np.setdiff1d(np.arange(27), [1, 2, 3, 4, 5])
    assert (p['C'][never] == before[never]).all()


def fetches():
    """96 fetches of 27 rows: some rows not at all, some once, some many times."""
    X = rng(5).integers(0, 15, (32, 3))
    X[0] = 20, 21, 22                   # these three exactly once
    return X, normal(rng(6), (32, 3, 10))[0]


def plain_loop(X, demb):
    dC = np.zeros((27, 10))
    for k in range(len(X)):
        for j in range(X.shape[1]):
            dC[X[k, j]] += demb[k, j]
    return dC


def test_fancy_index_addition_is_wrong_in_exactly_the_rows_fetched_more_than_once():
    X, demb = fetches()
    dC = np.zeros((27, 10))
    dC[X] += demb
    times = np.bincount(X.ravel(), minlength=27)
    assert (times == 0).any() and (times == 1).sum() >= 3 and (times > 1).any()
    assert ((dC != plain_loop(X, demb)).any(1) == (times > 1)).all()


def test_add_at_double_loop_kernel_and_one_hot_product_scatter_alike():
    X, demb = fetches()
    truth = plain_loop(X, demb)
    added, jitted = np.zeros((27, 10)), np.zeros((27, 10))
    np.add.at(added, X, demb)
    backward.embedding_backward(demb.reshape(32, 30), X, jitted)
    onehot = np.eye(27)[X.ravel()]
    assert (added == truth).all()
    assert (jitted == truth).all()
    assert error(onehot.T @ demb.reshape(-1, 10), truth) <= 1e-15


def test_embedding_backward_adds_to_what_is_there():
    X, demb = fetches()
    dC = np.ones((27, 10))
    backward.embedding_backward(demb.reshape(32, 30), X, dC)
    assert error(dC - 1, plain_loop(X, demb)) <= 1e-15


# ---- Traps: in each a formula that looks right, and how far the check sees it to be off

def test_trap_layernorm_mean_term():
    case = CASES['layernorm'](rng(4), 4)
    x, gain = case.inputs['x'], case.inputs['gain']
    std_inv = (x.var(1, keepdims=True) + 1e-5)**-0.5
    raw = (x - x.mean(1, keepdims=True)) * std_inv
    draw = gain * case.dy
    coupling = (draw * raw).mean(1, keepdims=True)
    without = std_inv * (draw - raw * coupling)
    right = std_inv * (draw - draw.mean(1, keepdims=True) - raw * coupling)
    truth = central_differences(case.loss, x)
    assert error(without, truth) > 0.05
    assert error(right, truth) <= CENTRAL
    assert error(case.gradients['x'], truth) <= CENTRAL


@pytest.mark.parametrize('norm', NORMS)
def test_trap_norm_coupling_of_components(norm):
    case = CASES[norm](rng(4), 4)
    x, gain = case.inputs['x'], case.inputs['gain']
    mean = x.mean(1, keepdims=True) if norm == 'layernorm' else 0
    inv = (((x - mean)**2).mean(1, keepdims=True) + 1e-5)**-0.5
    draw = gain * case.dy
    without = inv * (draw - (draw.mean(1, keepdims=True) if norm == 'layernorm' else 0))
    truth = central_differences(case.loss, x)
    assert error(without, truth) > 0.05
    assert error(case.gradients['x'], truth) <= CENTRAL


def test_trap_gelu_second_term():
    x = np.linspace(-6, 6, 97).reshape(1, -1)
    dy, = normal(rng(3), x.shape)
    truth = central_differences(lambda: (dy * m.gelu(x)[0]).sum(), x)
    y, gate = m.gelu(x)
    assert gate[0, 48] == 0.5           # at 0
    first_term = dy * gate
    assert error(backward.gelu_backward(dy, x, y, gate), truth) <= CENTRAL
    assert error(first_term, truth) > 0.05
    large = x[0] > 4                    # here it does not show
    assert error(first_term[0, large], truth[large]) < 1e-3


@pytest.mark.parametrize('norm', NORMS)
def test_trap_tied_table_has_two_contributions(norm, monkeypatch):
    config, p, batch, masks = gpt_inputs(norm, 'gelu', 2, 4, True)
    real, arrived = backward.embedding_backward, []
    monkeypatch.setattr(backward, 'embedding_backward', lambda demb, X, dC: (
        arrived.append(demb.copy()), real(demb, X, dC)))
    model = run(config, p, batch, masks)
    truth = central_differences(model.loss, p['C'])
    onehot = np.eye(11)[batch.X]
    dlogits = backward.cross_entropy_backward(model.acts['probs'], batch.Y)
    as_readout, as_input = dlogits.T @ model.acts['last'], onehot.T @ arrived[-1]
    assert error(as_readout + as_input, truth) <= CENTRAL
    assert error(model.g['C'], truth) <= CENTRAL
    assert error(as_readout, truth) > 0.05
    assert error(as_input, truth) > 0.05
    assert (np.abs(as_readout).max(1) > 0).all()           # every row, and only those fetched:
    assert ((np.abs(as_input).max(1) > 0) == onehot.any(0)).all()


def batchnorm_formula(case, divisor_of_variance, bessel):
    """batchnorm_backward's expression with n or n - 1 at will."""
    x, gain, dy = case.inputs['x'], case.inputs['gain'], case.dy
    diff = x - x.mean(0)
    var_inv = ((diff**2).sum(0) / divisor_of_variance + 1e-5)**-0.5
    raw = diff * var_inv
    return gain * var_inv * (dy - dy.mean(0) - bessel * raw * (dy * raw).mean(0))


@pytest.mark.parametrize('N', BATCHES)
def test_trap_bessel_divisor_of_the_variance(N):
    case = CASES['batchnorm'](rng(N), N)
    truth = central_differences(case.loss, case.inputs['x'])
    assert error(batchnorm_formula(case, N - 1, N / (N - 1)), truth) <= CENTRAL
    assert error(batchnorm_formula(case, N - 1, 1), truth) > 0.004
    assert error(batchnorm_formula(case, N, 1), truth) > 0.01
    assert error(case.gradients['x'], truth) <= CENTRAL


@pytest.mark.parametrize('N, off', [(32, 0.016), (4, 0.134), (3, 0.184)])
def test_trap_bessel_counts_more_the_smaller_the_batch(N, off):
    """A backward that believes in n all through is off by 1 - sqrt((n - 1) / n)."""
    case = CASES['batchnorm'](rng(N), N)
    case.inputs['x'][:] *= 1e4          # eps vanishes beside this
    right, wrong = batchnorm_formula(case, N - 1, N / (N - 1)), batchnorm_formula(case, N, 1)
    assert error(wrong, right) == pytest.approx(off, abs=5e-4)


@pytest.mark.parametrize('N', BATCHES)
def test_trap_divisor_of_the_mean(N):
    case = CASES['cross_entropy'](rng(N), N)
    logits, Y = case.inputs['logits'], case.fixed['Y']
    truth = central_differences(case.loss, logits)
    e = np.exp(logits)
    without = e / e.sum(1, keepdims=True) - np.eye(11)[Y]
    assert error(without, truth) == pytest.approx(1 - 1 / N, abs=1e-6)
    assert error(without / N, truth) <= CENTRAL


def test_trap_divisor_of_a_ragged_batch_is_its_predictions_and_not_its_names():
    config, p, batch, masks = gpt_inputs('rmsnorm', 'gelu', 1, 4, False)
    model = run(config, p, batch)
    truth = central_differences(model.loss, p['C'])
    assert len(batch.Y) == 18 and len(WORDS) == 4
    assert error(model.g['C'], truth) <= CENTRAL
    assert error(model.g['C'] * 18 / 4, truth) > 0.5


def test_trap_upstream_gradient_of_ones_hides_a_wrong_normalizer():
    N = 4
    x, dy = normal(rng(N), (N, 7), (N, 7))
    gain, bias = np.ones(7), np.zeros(7)
    _, raw, var_inv = m.batchnorm(x, gain, bias)

    def right(dy):
        return backward.batchnorm_backward(dy, gain, raw, var_inv, *unset(7, 7))

    def wrong(dy):
        return var_inv * (dy - dy.mean(0))

    ones = np.ones((N, 7))
    assert np.abs(right(ones)).max() <= 1e-14
    assert np.abs(wrong(ones)).max() <= 1e-14
    assert error(wrong(dy), right(dy)) > 0.05


def test_trap_an_unlikely_character_has_a_finite_loss_in_layers_only():
    """One logit is 200 above the others. In float32 e^-200 is rounded to zero, its log infinite."""
    config = mlp_config(True, 'tanh')
    p, flat = random_parameters(config, rng(1), np.float32)
    p['b2'][3] = 200
    X, _ = mlp_batch_of(rng(2), 4)
    batch = m.MLPBatch(X, np.array([0, 5, 7, 10]))
    model = run(config, p, batch)
    wide = {name: w.astype(np.float64) for name, w in p.items()}
    loss = plain_loss(plain_mlp(config, wide, batch.X), batch.Y)
    assert 195 < loss < 205 and model.loss() == pytest.approx(loss, rel=1e-6)
    assert all(np.isfinite(g).all() for g in model.g.values())
    with np.errstate(divide='ignore'):
        assert m.mlp_steps(p, *batch)[0] == np.inf


# ---- The gradient check

TITLES = ['embedding', 'linear', 'batchnorm', *ACTIVATIONS, 'cross_entropy', *NORMS, 'attention',
          'mlp_steps', 'mlp_no_norm', 'mlp', 'gpt_dropout', 'gpt']
ROW = r'(?m)^(\S*) +d(\w+) +\((.*?)\) +(\S+)  (ok|WRONG)$'


@pytest.mark.parametrize('dtype', ['float64', 'float32'])
def test_the_proof_is_of_all_layers_all_steps_and_of_models_with_and_without(capsys, dtype):
    assert backward.main(['--dtype', dtype]) == 0
    report = capsys.readouterr().out
    rows = re.findall(ROW, report)
    assert [title for title, *_ in rows if title] == TITLES
    assert len(rows) == 75 and {state for *_, state in rows} == {'ok'}
    first = [title for title, *_ in rows].index('mlp_steps')
    assert sorted(name for _, name, *_ in rows[first:first + 26]) == sorted(
        [*m.MLP_PARAMETERS, *INTERMEDIATES])
    tolerance = backward.TOLERANCE[dtype]
    assert report.endswith(f'\n75 of 75 gradients are right to {tolerance:g}\n')


def test_only_what_was_asked_for_is_proven(capsys):
    assert backward.main(['--only', 'gelu', 'linear']) == 0
    rows = re.findall(ROW, capsys.readouterr().out)
    assert [(title, name) for title, name, *_ in rows] == [
        ('gelu', 'x'), ('linear', 'x'), ('', 'W'), ('', 'b')]
    with pytest.raises(SystemExit):
        backward.main(['--only', 'nothing'])


def quadratic(*arrays):
    """A run() for compare(): the loss is the sum of all squares, so dw = 2 w."""
    return lambda name: (sum((w**2).sum() for w in arrays), None)


@pytest.mark.parametrize('n', [None, 3])
def test_the_proof_sees_a_wrong_gradient_and_leaves_all_values_as_they_were(n):
    w, v = normal(rng(1), (3, 4), 5)
    before = w.copy(), v.copy()
    wrong = 2 * w
    wrong[1, 2] += 1e-4

    def proof(dw, dv):
        return backward.compare(quadratic(w, v), dict(w=(w, dw), v=(v, dv)), rng(1), n)

    assert proof(2 * w, 2 * v) == [True, True]
    assert proof(wrong, 2 * v) == [False, True]
    assert proof(2 * w, np.full(5, np.nan)) == [True, False]
    assert proof(..., 2 * v) == [None, True]
    assert proof(2 * w[:, :3], None) == [False, False]
    assert (w == before[0]).all() and (v == before[1]).all()


def test_the_first_wrong_gradient_is_explained_by_its_worst_element(capsys):
    w, v = np.arange(1., 7).reshape(2, 3), np.arange(1., 4)
    wrong = 2 * w
    wrong[1, 0] = 5
    backward.compare(quadratic(w, v), dict(w=(w, wrong), v=(v, 3 * v)), rng(1))
    lines = capsys.readouterr().out.splitlines()
    assert lines[1].strip() == 'at (1, 0) by hand 5, by differences 8'
    assert len(lines) == 3 and lines[2].endswith('WRONG')  # may follow from the first


def test_a_forgotten_factor_is_named(capsys):
    v = np.arange(1., 4)
    backward.compare(quadratic(v), dict(v=(v, 3 * v)), rng(1))
    assert capsys.readouterr().out.endswith(
        'at (2,) by hand 9, by differences 6, everywhere 1.5 times as much\n')


def test_elements_at_a_corner_of_a_relu_are_left_out_and_nothing_else_is():
    w, dw = np.array([1., -2., 3.]), np.array([2., 5., 6.])                 # dw[1] is wrong

    def run(name, corner):
        return (w**2).sum(), w[1] > -2 if corner else None

    assert backward.compare(lambda name: run(name, False), dict(w=(w, dw)), rng(1)) == [False]
    assert backward.compare(lambda name: run(name, True), dict(w=(w, dw)), rng(1)) == [True]
    dw[1] = np.nan
    assert backward.compare(lambda name: run(name, True), dict(w=(w, dw)), rng(1)) == [False]


def test_a_loss_that_is_nan_or_turns_a_corner_everywhere_proves_nothing():
    w, looks = np.ones(3), itertools.count()
    for loss in (lambda name: (np.nan, None)), (lambda name: ((w**2).sum(), next(looks))):
        assert backward.compare(loss, dict(w=(w, 2 * w)), rng(1)) == [False]


@pytest.fixture
def proof_of(tmp_path, monkeypatch, capsys):
    """proof_of(old, new, only): what the proof says that is not ok, if `new` stands for `old`."""
    def proof_of(old, new, only, compiled=False):
        source = Path(backward.__file__).read_text('utf-8')
        assert old in source
        (tmp_path / 'backward.py').write_text(source.replace(old, new), 'utf-8')
        if not compiled:
            monkeypatch.setattr(m, 'kernel', lambda function: function)     # plain Python is faster
        changed = importlib.util.spec_from_file_location('changed', tmp_path / 'backward.py')
        module = importlib.util.module_from_spec(changed)
        changed.loader.exec_module(module)
        assert module.main(['--only', only]) == 1
        title, *lines = capsys.readouterr().out.splitlines()
        return '\n'.join(line.strip() for line in lines[:-2] if not line.endswith(' ok'))
    return proof_of


@pytest.mark.parametrize('old, new, only, said', [
    ('dbndiff += 2 * bndiff', 'dbndiff = 2 * bndiff', 'mlp_steps',
     r'dbndiff .*WRONG\nat \(\d+, \d\) by hand'),
    ('db2 = dlogits.sum(0)', 'db2 = dlogits.sum(1)', 'mlp_steps',
     r'db2 +\(27,\) +WRONG: its shape is \(20,\)$'),
    ('db2 = dlogits.sum(0)', 'db2 = dlogits.sum(0, keepdims=True)', 'mlp_steps',
     r'db2 +\(27,\) +WRONG: its shape is \(1, 27\)$'),
    ('Y] = -1 / N', 'Y] = -1', 'mlp_steps',
     r'mlp_steps +dlogprobs .*WRONG\n.*everywhere 20 times as much'),
    ('dh = dlogits @ W2.T', 'dh = dlogits @ W2', 'mlp_steps',
     r'mlp_steps +ValueError: matmul.*\nline \d+: dh = dlogits @ W2 +#'),
    ('/ (N - 1) * dbnvar', '/ N * dbnvar', 'mlp_steps',
     r'dbndiff2 .*WRONG\n.*everywhere 0.95 times as much'),
    ('(bnvar + 1e-5)**-1.5', '(bnvr + 1e-5)**-1.5', 'mlp_steps',
     r"mlp_steps +NameError: name 'bnvr' is not defined\nline \d+: dbnvar = .*bnvr"),
    ('dlogprobs / probs', 'dlogprobs / (probs - probs)', 'mlp_steps',
     r'dprobs +\(20, 27\) +nan  WRONG\n'),
    ('return np.dot(dy, W.T)', 'np.dot(dy, W.T)', 'linear',
     r'linear +dx +\(3, 5\) +WRONG: its shape is \(\)$'),
    ('def linear_backward(dy, x', 'def linear_backward(dout, x', 'linear',
     r"linear +NameError: name 'dy' is not defined\nline \d+: np.dot\(x.T, dy"),
    ('    db[:] = 0\n', '', 'linear', r'db .*WRONG\nat'),
    ('db[j] += dy[i, j]', 'db[j] = dy[i, j]', 'linear', r'db .*WRONG\nat'),
    ('dC[ids[i]]\n', 'dC[ids[i]]\n        row[:] = 0\n', 'embedding', 'embedding +dC .*WRONG'),
    ('        for j in range(E):\n            dx[i, j] = inv',
     '        for j in range(E + 1):\n            dx[i, j] = inv', 'rmsnorm',
     r'rmsnorm +IndexError: index 5 is out of bounds.*\nline \d+: dx\[i, j\]')])
def test_the_place_of_a_mistake_is_the_first_that_the_proof_names(proof_of, old, new, only, said):
    report = proof_of(old, new, only)
    assert re.match(said, report), report


def test_an_error_of_the_compiler_becomes_one_line(proof_of):
    report = proof_of('mean /= dy.dtype.type(E)', 'mean /= dy.dtype.type(F)', 'rmsnorm', True)
    assert re.match(r"rmsnorm +\w+: .*name 'F' is not defined\nline \d+: .*BACKWARD.*$", report)


def test_what_is_not_written_yet_is_neither_right_nor_wrong(proof_of):
    report = proof_of('    np.dot(x.T, dy, out=dW)', '    raise NotImplementedError\n#', 'linear')
    assert re.match('linear +not written yet$', report)
    report = proof_of('np.add.at(dC, X, demb)', 'dC = ...', 'mlp_steps')
    assert re.match(r'dC +\(27, 3\) +not written yet$', report)


@pytest.mark.slow
def test_an_index_out_of_bounds_is_seen_if_bounds_are_checked(tmp_path):
    """Also where kernels without that check are in the cache."""
    for name in 'model.py', 'backward.py':
        shutil.copy(Path(m.__file__).parent / name, tmp_path)
    shutil.copytree(m.NAMES.parent, tmp_path / 'data')
    source = (tmp_path / 'backward.py').read_text('utf-8')
    old = 'for j in range(E):\n            dx[i, j] = inv'
    assert old in source
    (tmp_path / 'backward.py').write_text(source.replace(old, old.replace('E', 'E + 1')), 'utf-8')
    for bounds in '0', '1':
        done = subprocess.run(
            [sys.executable, tmp_path / 'backward.py', '--only', 'rmsnorm'], text=True,
            capture_output=True, env=dict(os.environ, NUMBA_CACHE_DIR=str(tmp_path / 'cache'),
                                          NUMBA_BOUNDSCHECK=bounds))
    assert done.returncode == 1 and 'rmsnorm        IndexError' in done.stdout


def test_the_way_back_is_drawn_with_a_map_for_every_value(tmp_path, monkeypatch):
    figures = pytest.importorskip('matplotlib.figure', reason='it draws')
    axes, real = [], figures.Figure.savefig
    monkeypatch.setattr(figures.Figure, 'savefig', lambda figure, path: axes.extend(figure.axes)
                        or real(figure, path))
    assert not backward.main(['--plot', str(tmp_path / 'back.png')])
    assert (tmp_path / 'back.png').read_bytes().startswith(b'\x89PNG')
    titles = [each.get_title().splitlines()[0] for each in axes]
    assert titles[:-2] == [prefix + name for name in steps(4)[-1] for prefix in ('', 'd')]


@pytest.mark.parametrize('name', ['back.txt', 'nowhere/back.png'])
def test_a_picture_that_cannot_be_written_is_a_sentence(tmp_path, capsys, name):
    pytest.importorskip('matplotlib', reason='it draws')
    with pytest.raises(SystemExit, match='2'):
        backward.main(['--plot', str(tmp_path / name)])
    assert f'error: --plot {tmp_path / name}: ' in capsys.readouterr().err


# ---- Kernels on disk

@pytest.mark.slow
def test_kernels_on_disk_do_not_keep_the_old_constants_of_gelu(tmp_path):
    """They are in model.py, and Numba only looks whether the file of the kernel has changed."""
    for name in 'model.py', 'backward.py':
        shutil.copy(Path(m.__file__).parent / name, tmp_path)
    shutil.copytree(m.NAMES.parent, tmp_path / 'data')

    def proof():
        """What is on disk of the kernels of backward.py, after all gradients were right."""
        done = subprocess.run(
            [sys.executable, tmp_path / 'backward.py'], capture_output=True, text=True,
            env=dict(os.environ, NUMBA_CACHE_DIR=str(tmp_path / 'cache')))
        assert done.returncode == 0 and 'WRONG' not in done.stdout, done
        return {path: path.stat().st_mtime_ns for path in tmp_path.rglob('backward.*.nb*')}

    compiled = proof()
    assert any('rmsnorm_backward' in path.name for path in compiled)
    model = tmp_path / 'model.py'
    changed = model.read_text('utf-8').replace('0.044715', '0.07')
    assert '0.07' in changed
    model.write_text(changed, 'utf-8')
    assert proof() == compiled          # none was compiled anew
