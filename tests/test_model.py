import os
import re
import subprocess
import sys
from math import log, prod
from pathlib import Path

import numpy as np
import pytest
from oracle import (
    ACTIVATIONS, CASES, NORMS, VOCABULARY, WORDS, error, gpt_batch_of, gpt_config, mlp_batch_of,
    mlp_config, normal, plain_gpt, plain_gpt_batch, plain_loss, plain_mlp, random_parameters, run,
    unset)

import backward
import model as m
import train


def rng(*seed):
    return np.random.default_rng(seed)


def names(count=None):
    return m.NAMES.read_text('utf-8').split()[:count]


# ---- The worked example: three characters, two numbers each, read at [2, 0, 2], and then comes 1

TABLE = np.array([[1., 0.], [0., 1.], [2., -1.]])
CONTEXT, TARGET = np.array([[2, 0, 2]]), np.array([1])
W = np.tile(np.eye(3), (2, 1))


def look_up(C):
    return m.embedding(C, CONTEXT).reshape(1, 3, 2)


def test_worked_example_forward():
    emb = look_up(TABLE)
    assert emb[0].tolist() == [[2, -1], [1, 0], [2, -1]]
    x = emb.reshape(1, 6)
    assert x[0].tolist() == [2, -1, 1, 0, 2, -1]
    logits = m.linear(x, W)
    assert logits[0].tolist() == [2, 1, 0]
    loss, probs = m.cross_entropy(logits, TARGET)
    assert probs[0].round(3).tolist() == [0.665, 0.245, 0.090]
    assert round(loss, 4) == 1.4076
    assert loss == pytest.approx(-log(probs[0, 1]), abs=1e-15)


def test_worked_example_backward():
    x = look_up(TABLE).reshape(1, 6)
    _, probs = m.cross_entropy(m.linear(x, W), TARGET)
    dlogits = backward.cross_entropy_backward(probs, TARGET)
    assert dlogits[0].round(3).tolist() == [0.665, -0.755, 0.090]
    assert abs(dlogits.sum()) <= 1e-15
    dx = backward.linear_backward(dlogits, x, W, np.empty_like(W))
    assert dx[0].round(3).tolist() == [0.665, -0.755, 0.090, 0.665, -0.755, 0.090]
    demb = dx.reshape(1, 3, 2)
    assert demb[0].round(3).tolist() == [[0.665, -0.755], [0.090, 0.665], [-0.755, 0.090]]
    dC = np.zeros_like(TABLE)
    backward.embedding_backward(dx, CONTEXT, dC)
    assert dC.round(3).tolist() == [[0.090, 0.665], [0, 0], [-0.090, -0.665]]
    assert dC[2].tolist() == (demb[0, 0] + demb[0, 2]).tolist()


SELECTION = [[0, 0, 0, 0, 1, 0], [0, 0, 0, 0, 0, 1], [1, 0, 0, 0, 0, 0],
             [0, 1, 0, 0, 0, 0], [0, 0, 0, 0, 1, 0], [0, 0, 0, 0, 0, 1]]


def test_jacobian_of_the_lookup_is_a_selection_matrix():
    """Cells of emb down, cells of C across, both by moving C and from the backward pass."""
    columns, rows = [], []
    for cell in range(6):
        C, demb, dC = TABLE.copy(), np.zeros((1, 6)), np.zeros((3, 2))
        C.flat[cell] += 1
        columns.append((look_up(C) - look_up(TABLE)).ravel())
        demb.flat[cell] = 1
        backward.embedding_backward(demb, CONTEXT, dC)
        rows.append(dC.ravel())
    assert np.transpose(columns).tolist() == SELECTION
    assert np.array(rows).tolist() == SELECTION
    assert [row.count(1) for row in SELECTION] == [1] * 6


def test_nudging_a_cell_of_the_table_moves_its_two_copies_by_exactly_that():
    C = TABLE.copy()
    C[2, 0] = 2.01
    moved = look_up(C) - look_up(TABLE)
    assert moved[0].tolist() == [[2.01 - 2.0, 0], [0, 0], [2.01 - 2.0, 0]]
    assert look_up(TABLE)[0, 1, 0] == 1            # where the derivative is 0 the value is not


def test_copy_scaled_by_3_5_moves_3_5_times():
    C = TABLE.copy()
    C[2, 0] = 2.01
    moved = m.linear(look_up(C)[0], 3.5 * np.eye(2)) - m.linear(look_up(TABLE)[0], 3.5 * np.eye(2))
    assert moved[[0, 2], 0] == pytest.approx([0.035, 0.035], abs=1e-14)
    assert np.count_nonzero(moved) == 2


# ---- Parameters

def default_config(kind, **choices):
    defaults = dict(mlp=m.MLP_DEFAULTS, gpt=m.GPT_DEFAULTS)[kind]
    return {**defaults, 'vocab_size': 27, 'longest': 15, **choices}


def sizes(config):
    return {name: prod(shape) for name, shape in m.parameter_shapes(config).items()}


def test_mlp_has_4137_parameters():
    size = sizes(default_config('mlp'))
    assert size['C'] + size['W1'] + size['b1'] == 2254
    assert size['bngain'] + size['bnbias'] + size['W2'] + size['b2'] == 1883
    assert sum(size.values()) == 4137


def test_mlp_without_batchnorm_lacks_gain_and_bias():
    assert sum(sizes(default_config('mlp', batchnorm=False)).values()) == 4137 - 2 * 64


def test_gpt_has_199936_parameters():
    size = sizes(default_config('gpt'))
    assert size == dict(C=27 * 64, P=16 * 64, gain=9 * 64, Wqkv=4 * 64 * 192, Wo=4 * 64 * 64,
                        Wup=4 * 64 * 256, Wdown=4 * 256 * 64)
    assert sum(size.values()) == 199_936


@pytest.mark.parametrize('kind', ['mlp', 'gpt'])
@pytest.mark.parametrize('dtype', [np.float32, np.float64])
def test_parameters_have_their_shapes_and_precision_and_depend_on_the_seed_alone(kind, dtype):
    config = default_config(kind)
    p, again, other = (m.make_parameters(config, rng(seed), dtype) for seed in (1, 1, 2))
    assert {name: w.shape for name, w in p.items()} == m.parameter_shapes(config)
    assert {w.dtype.type for w in p.values()} == {dtype}
    for name, w in p.items():
        assert (w == again[name]).all()
        assert (w == other[name]).all() == (len(np.unique(w)) == 1), name


def test_views_share_one_flat_vector_in_order():
    flat = np.arange(10.)
    arrays = m.views(dict(a=(2, 3), b=(4,)), flat)
    assert arrays['a'].tolist() == [[0, 1, 2], [3, 4, 5]]
    assert arrays['b'].tolist() == [6, 7, 8, 9]
    arrays['b'][0] = -1
    assert flat[6] == -1


def first_loss(config, seed):
    """Loss of some 1500 predictions by the first values of the parameters."""
    examples = m.mlp_examples(names(200), m.make_vocabulary(names()), config['context'])
    batch = m.mlp_batch(examples, np.arange(len(examples)))
    return m.mlp(config, m.make_parameters(config, rng(seed), np.float64), batch)[0]


@pytest.mark.parametrize('config', [
    default_config('mlp'), default_config('mlp', hidden=200),
    default_config('mlp', batchnorm=False), default_config('mlp', batchnorm=False, hidden=200)])
def test_first_loss_is_that_of_27_equal_chances(config):
    for seed in range(3):
        assert abs(first_loss(config, seed) - log(27)) <= 0.05


@pytest.mark.parametrize('hidden, loss, tolerance', [(64, 15, 0.6), (200, 27, 1.2)])
def test_first_loss_is_far_higher_with_naive_values(hidden, loss, tolerance):
    """One seed differs from the next by 0.6 and 1.9: the mean of ten by about a third of that."""
    config = default_config('mlp', init='naive', batchnorm=False, hidden=hidden)
    assert abs(np.mean([first_loss(config, seed) for seed in range(10)]) - loss) <= tolerance


def first_values(config):
    return m.make_parameters(config, rng(1), np.float64)


@pytest.mark.parametrize('embd', [16, 64, 256, 1024])
def test_the_first_loss_of_the_gpt_does_not_grow_with_its_width(embd):
    config, tree = m.first_batch(dict(m.GPT_DEFAULTS, embd=embd, layers=1), 30, rng(1))
    assert log(27) < m.gpt(config, m.make_parameters(config, rng(1)), tree)[0] < 5


@pytest.mark.parametrize('kind, choices', [
    ('mlp', dict(embd=10, hidden=64)), ('gpt', dict(embd=16, layers=2, context=16))])
def test_first_values_spread_as_one_over_the_root_of_the_inputs(kind, choices):
    """Kaiming's rule: with four times the width, half the spread. Biases are 0 and gains 1."""
    wider = {name: 4 * choices[name] for name in ('embd', 'hidden') if name in choices}
    narrow = first_values(default_config(kind, **choices))
    wide = first_values(default_config(kind, **{**choices, **wider}))
    for name in narrow.keys() - {'C', 'P'}:
        if name[0] == 'W':
            assert wide[name].std() / narrow[name].std() == pytest.approx(1 / 2, rel=0.06), name
            assert abs(narrow[name].mean()) < 0.1 * narrow[name].std(), name
        else:
            assert (narrow[name] == (1 if name in ('gain', 'bngain') else 0)).all(), name


@pytest.mark.parametrize('kind, embd, std_C', [
    ('mlp', 10, 0.1), ('mlp', 128, 0.1), ('gpt', 64, 0.1), ('gpt', 128, 0.05)])
def test_first_values_have_the_spreads_that_were_found_by_trial(kind, embd, std_C):
    factors = dict(C=std_C, P=std_C, W1=0.5, W2=0.2, Wqkv=1, Wo=0.3*std_C, Wup=1, Wdown=0.3*std_C)
    p = first_values(default_config(kind, embd=embd))
    for name in p.keys() & factors:
        std = factors[name] / (np.sqrt(p[name].shape[-2]) if name[0] == 'W' else 1)
        assert p[name].std() == pytest.approx(std, rel=3 / np.sqrt(2 * p[name].size)), name


@pytest.mark.parametrize('kind', ['mlp', 'gpt'])
def test_first_values_of_naive_are_all_of_spread_one_but_the_gains(kind):
    for name, w in first_values(default_config(kind, init='naive')).items():
        if name in ('gain', 'bngain'):
            assert (w == 1).all()
        else:
            assert w.std() == pytest.approx(1, abs=3 / np.sqrt(w.size)), name


# ---- Layers

@pytest.mark.parametrize('name', CASES)
def test_nan_does_not_vanish_in_any_layer(name):
    case = CASES[name](rng(1), 4)
    for key, value in case.inputs.items():
        place = (case.fixed['X'].flat[0], 0) if key == 'C' else 0
        kept = value[place].copy()
        value[place] = np.nan
        assert np.isnan(case.forward()).any(), key
        value[place] = kept


def test_softmax_of_large_numbers_stays_finite():
    z, probs = np.array([1000., 999., -1000.]), *unset(3)
    m.softmax(z, probs)
    assert probs == pytest.approx([1 / (1 + np.exp(-1)), 1 / (1 + np.e), 0], abs=1e-15)


@pytest.mark.parametrize('dtype', [np.float32, np.float64])
@pytest.mark.parametrize('name', ACTIVATIONS)
def test_activations_keep_the_precision_of_their_input_and_stay_finite(name, dtype):
    x = np.concatenate([-np.geomspace(1e30, 1e-30, 99), [0], np.geomspace(1e-30, 1e30, 99)])
    with np.errstate(over='ignore'):    # u of GELU has x^3, and tanh of infinity is 1
        y, gate = m.ACTIVATIONS[name](x.astype(dtype)[None])
    assert y.dtype == dtype and np.isfinite(y).all()
    if gate is not None:
        assert gate.dtype == dtype and gate.min() >= 0 and gate.max() <= 1
    assert (y[0, x > 20] == (1 if name in ('tanh', 'sigmoid') else x[x > 20].astype(dtype))).all()


def test_sigmoid_of_large_numbers():
    assert m.sigmoid(np.array([[-1000., 0., 1000.]]))[0].tolist() == [[0, 0.5, 1]]


def test_cross_entropy_of_a_certain_but_wrong_prediction_is_finite():
    loss, probs = m.cross_entropy(np.array([[0., 1000.]]), np.array([0]))
    assert loss == 1000 and probs.tolist() == [[0, 1]]


# ---- The MLP

@pytest.mark.parametrize('dtype, tolerance', [(np.float32, 1e-5), (np.float64, 1e-13)])
@pytest.mark.parametrize('N', [2, 3, 32])
def test_the_mlp_in_layers_is_that_of_one_operation_at_a_time(N, dtype, tolerance):
    config = mlp_config(True, 'tanh')
    p, _ = random_parameters(config, rng(N), dtype)
    batch = mlp_batch_of(rng(1, N), N)
    loss, values = m.mlp_steps(p, *batch)
    gradients = backward.mlp_steps_backward(p, *batch, values)
    model = run(config, p, batch)
    assert loss.dtype == dtype
    assert model.loss() == pytest.approx(float(loss), rel=tolerance)
    for name in 'emb', 'hprebn', 'bnraw', 'bnvar_inv', 'hpreact', 'h', 'logits', 'probs':
        assert model.acts[name].dtype == dtype
        assert error(model.acts[name], values[name]) <= tolerance, name
    for name, g in model.g.items():
        assert g.dtype == dtype
        assert error(g, gradients[name], floor=1 if name == 'b1' else 0) <= tolerance, name


def test_mlp_steps_of_one_logit_far_above_the_others_is_finite():
    p, _ = random_parameters(mlp_config(True, 'tanh'), rng(1))
    p['b2'][3] = 1000
    X, _ = mlp_batch_of(rng(2), 4)
    with np.errstate(divide='ignore'):  # the logarithms of the others' probabilities
        assert m.mlp_steps(p, X, np.full(4, 3))[0] == 0


@pytest.mark.parametrize('statistics', [False, True])
@pytest.mark.parametrize('batchnorm', [True, False])
@pytest.mark.parametrize('act', ACTIVATIONS)
def test_mlp_is_the_plain_formula(act, batchnorm, statistics):
    config = mlp_config(batchnorm, act)
    p, flat = random_parameters(config, rng(1))
    batch = mlp_batch_of(rng(2), 6)
    given = {}
    if statistics and batchnorm:
        given = dict(bnmean=0.01 * rng(3).random(7), bnvar=0.001 * rng(4).random(7))
    loss, acts = m.mlp(config, p, batch, given)
    logits = plain_mlp(config, p, batch.X, given)
    assert error(acts['logits'], logits) <= 1e-13
    assert loss == pytest.approx(plain_loss(logits, batch.Y), rel=1e-13)


# ---- The GPT

def random_gpt(norm='rmsnorm', act='gelu', layers=2, heads=4, seed=1):
    config = gpt_config(norm, act, layers, heads)
    return config, random_parameters(config, rng(seed))[0]


@pytest.mark.parametrize('heads', [1, 4])
@pytest.mark.parametrize('act', ACTIVATIONS)
@pytest.mark.parametrize('norm', NORMS)
def test_gpt_is_the_plain_formula_on_words_of_one_character_to_the_full_context(norm, act, heads):
    config, p = random_gpt(norm, act, heads=heads)
    tree = gpt_batch_of(config, WORDS)
    masks = (rng(2).random((4, len(tree.X), 12)) >= 0.3) / 0.7
    assert sorted(map(len, WORDS))[::len(WORDS) - 1] == [1, config['context'] - 1]
    for mask in None, masks:
        loss, acts = m.gpt(config, p, tree, mask)
        logits = plain_gpt_batch(config, p, tree, mask)
        assert error(acts['logits'], logits) <= 1e-13
        assert loss == pytest.approx(plain_loss(logits, tree.Y), rel=1e-13)


def sums(config, p, words):
    """Loss and gradients of a batch, as sums over its predictions and not as means."""
    tree = gpt_batch_of(config, words)
    model, B = run(config, p, tree), len(tree.Y)
    return np.concatenate([[B * model.loss()], *(B * g.ravel() for g in model.g.values())])


@pytest.mark.parametrize('norm', NORMS)
@pytest.mark.parametrize('company', [['bagga'], ['d', 'fedfa', 'd'], ['abba', 'cab', 'cab', 'a']])
def test_loss_and_gradient_of_a_name_do_not_depend_on_the_others_in_its_batch(company, norm):
    config, p = random_gpt(norm)
    alone, others = sums(config, p, ['cab']), sums(config, p, company)
    for together in [*company, 'cab'], ['cab', *company]:
        assert error(sums(config, p, together) - others, alone) <= 1e-13


def logits_of(config, p, *words):
    return m.gpt(config, p, gpt_batch_of(config, words))[1]['logits']


@pytest.mark.parametrize('norm', NORMS)
def test_logits_of_a_name_do_not_depend_on_the_others_in_its_batch(norm):
    """Whether it shares no more than the beginning "" with them, or others are within it."""
    config, p = random_gpt(norm)
    alone = logits_of(config, p, 'cab')
    assert error(logits_of(config, p, 'bagga', 'cab', 'd')[6:10], alone) <= 1e-14
    assert error(logits_of(config, p, 'ca', 'cab', 'cabba')[3:7], alone) <= 1e-14
    assert error(logits_of(config, p, 'cab', 'cab')[4:], alone) <= 1e-14


def test_permuting_the_names_of_a_batch_changes_nothing_but_rounding():
    config, p = random_gpt()
    words = [*WORDS, 'abba', 'gag']
    for seed in range(3):
        permuted = [words[i] for i in rng(seed).permutation(len(words))]
        assert permuted != words
        assert error(sums(config, p, permuted), sums(config, p, words)) <= 1e-13


def test_no_prediction_depends_on_characters_to_come():
    config, p = random_gpt()
    one, two = logits_of(config, p, 'bagga'), logits_of(config, p, 'bagfe')
    assert (one[:4] == two[:4]).all()
    assert (one[4:] != two[4:]).any(1).all()
    together = logits_of(config, p, 'bagfe', 'bagga')
    assert (together == np.concatenate([two, one])).all()


# ---- Batches

WORD_LISTS = [['a'], ['ab', 'c', 'abc'], ['noor', 'a', 'noor', 'zoë'], ['', 'b', '', 'ba']]


def test_vocabulary_is_sorted_behind_the_boundary():
    assert m.make_vocabulary(['noor', 'zoë', '.b']) == '\0.bnorzë'


def test_encode_puts_boundaries_around_words_and_refuses_unknown_characters():
    assert m.encode(['ba', '', 'b'], '\0ab') == [[0, 2, 1, 0], [0, 0], [0, 2, 0]]
    with pytest.raises(KeyError, match='z'):
        m.encode(['ab', 'az'], '\0ab')
    with pytest.raises(KeyError):
        m.encode(['a\0b'], '\0ab')     # the boundary token is no character


@pytest.mark.parametrize('T', [1, 3, 8])
@pytest.mark.parametrize('words', WORD_LISTS[:3])
def test_mlp_batch_is_the_window_before_each_character(words, T):
    vocabulary = m.make_vocabulary(words)
    X, Y = [], []
    for word in words:
        ids = [0] * T + [vocabulary.index(character) for character in word] + [0]
        for place in range(T, len(ids)):
            X.append(ids[place - T:place])
            Y.append(ids[place])
    examples = m.mlp_examples(words, vocabulary, T)
    assert examples.tolist() == [[*x, y] for x, y in zip(X, Y, strict=True)]
    for chosen in np.arange(len(Y)), rng(1).integers(0, len(Y), 7):
        batch = m.mlp_batch(examples, chosen)
        assert batch.X.tolist() == np.array(X)[chosen].tolist()
        assert batch.Y.tolist() == np.array(Y)[chosen].tolist()
        assert batch.X.flags.c_contiguous and batch.Y.flags.c_contiguous    # for speed


def test_mlp_examples_of_the_docstring():
    assert m.mlp_examples(['ab'], '\0ab', 3).tolist() == [[0, 0, 0, 1], [0, 0, 1, 2], [0, 1, 2, 0]]


def test_the_tree_of_al_and_amy_is_that_in_the_comment_of_model_py():
    vocabulary = '\0almy'
    tree = m.gpt_batch(m.gpt_examples(['al', 'amy'], vocabulary, 16), [0, 1])
    rows = dict(re.findall(r'(?m)^#   (\w+) +(.+?)(?:    .*)?$', Path(m.__file__).read_text('utf-8')
                           .split('five nodes and seven predictions')[1].split('\nclass')[0]))
    written = {name: [vocabulary.index(part) if part in 'almy' else int(part)
                      for part in re.findall(r'\w+', re.sub('  [a-z]{3}.*', '', rows[name]))]
               for name in tree._fields}
    assert {name: array.tolist() for name, array in tree._asdict().items()} == written == dict(
        X=[0, 1, 2, 3, 4], position=[0, 1, 2, 2, 3],
        ancestors=[0, 0, 1, 0, 1, 2, 0, 1, 3, 0, 1, 3, 4],
        Y=[1, 2, 0, 1, 3, 4, 0], predicted_from=[0, 1, 2, 0, 1, 3, 4])


@pytest.mark.parametrize('words', WORD_LISTS)
def test_a_tree_has_a_node_for_each_beginning_and_all_that_follows(words):
    vocabulary = m.make_vocabulary(words)
    examples = m.gpt_examples(words, vocabulary, 8)
    assert [ids.tolist() for ids in examples] == m.encode(words, vocabulary)
    for chosen in np.arange(len(words)), rng(1).integers(0, len(words), 5):
        tree = m.gpt_batch(examples, chosen)
        paths = np.split(tree.ancestors, (tree.position + 1).cumsum())
        assert not len(paths.pop())
        assert [path[-1] for path in paths] == list(range(len(tree.X)))
        nodes = [''.join(vocabulary[tree.X[node]] for node in path) for path in paths]
        assert [len(node) - 1 for node in nodes] == tree.position.tolist()
        told = [(nodes[node], vocabulary[y])
                for node, y in zip(tree.predicted_from, tree.Y, strict=True)]
        whole = ['\0' + words[i] + '\0' for i in sorted(chosen)]
        assert told == [(word[:k], word[k]) for word in whole for k in range(1, len(word))]


def test_beginnings_that_sorted_words_have_in_common_are_one_node_each():
    words = sorted(names(2000))
    examples = m.gpt_examples(words, m.make_vocabulary(words), 16)
    for chosen in np.arange(2000), rng(1).permutation(2000)[:700]:
        beginnings = {words[i][:k] for i in chosen for k in range(len(words[i]) + 1)}
        assert len(m.gpt_batch(examples, chosen).X) == len(beginnings)


def test_the_gpt_takes_words_of_one_character_less_than_its_context():
    assert [len(ids) for ids in m.gpt_examples(['abc', 'b'], '\0abc', 4)] == [5, 3]
    with pytest.raises(ValueError, match='3 characters'):
        m.gpt_examples(['a', 'abcb', 'b'], '\0abc', 4)


# ---- Using a model

@pytest.mark.parametrize('dtype, tolerance', [(np.float32, 3e-7), (np.float64, 1e-12)])
def test_batchnorm_statistics_are_mean_and_unbiased_variance_over_all_examples(dtype, tolerance):
    words = names(1500)
    vocabulary = m.make_vocabulary(words)
    config = default_config('mlp', vocab_size=len(vocabulary))
    examples = m.mlp_examples(words, vocabulary, config['context'])
    assert len(examples) > 2 * 4096
    p, flat = random_parameters(config, rng(1), dtype)
    X = examples[:, :-1]
    hprebn = (p['C'][X].reshape(len(X), -1) @ p['W1'] + p['b1']).astype(np.float64)
    ours = train.batchnorm_statistics(p, examples)
    assert ours['bnmean'].dtype == ours['bnvar'].dtype == dtype
    assert error(ours['bnmean'], hprebn.mean(0)) <= tolerance
    assert error(ours['bnvar'], hprebn.var(0, ddof=1)) <= tolerance


def test_batchnorm_of_all_examples_at_once_is_that_by_their_statistics():
    words = names(300)
    vocabulary = m.make_vocabulary(words)
    config = default_config('mlp', vocab_size=len(vocabulary))
    examples = m.mlp_examples(words, vocabulary, config['context'])
    batch = m.mlp_batch(examples, np.arange(len(examples)))
    p, flat = random_parameters(config, rng(1))
    model = m.Model(config, vocabulary, p, train.batchnorm_statistics(p, examples))
    assert m.predict(model, batch)[0] == pytest.approx(m.mlp(config, p, batch)[0], rel=1e-12)


def random_model(kind):
    config = gpt_config('rmsnorm', 'gelu', 2, 4) if kind == 'gpt' else mlp_config(True, 'tanh')
    p, flat = random_parameters(config, rng(3))
    statistics = {}
    if kind == 'mlp':
        statistics = dict(bnmean=0.01 * rng(4).random(7), bnvar=0.001 * rng(5).random(7))
    return m.Model(config, VOCABULARY, p, statistics)


def next_logits(model, ids):
    """Of what comes after these ids, in plain NumPy."""
    if model.config['model'] == 'gpt':
        return plain_gpt(model.config, model.p, np.array([0, *ids]))[-1]
    X = np.array([[0] * 5 + ids])[:, -5:]
    return plain_mlp(model.config, model.p, X, model.statistics)[0]


@pytest.mark.parametrize('kind', ['mlp', 'gpt'])
def test_score_is_the_sum_of_logprobs_with_the_end(kind):
    model, words = random_model(kind), [*WORDS, 'a', 'a']
    direct = []
    for word in words:
        ids = [VOCABULARY.index(character) for character in word] + [0]
        z = [next_logits(model, ids[:t]) for t in range(len(ids))]
        direct.append(sum(z[t][i] - np.log(np.exp(z[t]).sum()) for t, i in enumerate(ids)))
    assert error(np.array([m.score(model, word) for word in words]), direct) <= 1e-13


def plain_choice(logits, u, temperature, top_k, top_p):
    """The definition for one row: rank, cut to k, cut to p of what is left, walk up to u."""
    ranked = sorted(range(len(logits)), key=lambda i: (-logits[i], i))
    if temperature == 0:
        return ranked[0]
    kept = ranked[:top_k or None]
    weights = [np.exp((logits[i] - logits[kept[0]]) / temperature) for i in kept]
    total, nucleus = sum(weights), len(kept)
    if 0 < top_p < 1:
        nucleus = next(k for k in range(1, len(kept) + 1) if sum(weights[:k]) >= top_p * total)
    kept, weights = kept[:nucleus], weights[:nucleus]
    reached = np.cumsum(weights) / sum(weights)
    return next(i for i, end in zip(kept, reached, strict=True) if u < end)


@pytest.mark.parametrize('temperature', [0, 0.3, 1., 2.5])
@pytest.mark.parametrize('top_k', [0, 1, 3, 11, 50])
@pytest.mark.parametrize('top_p', [0., 0.2, 0.7, 1.])
def test_choose_is_its_definition(temperature, top_k, top_p):
    logits, = normal(rng(1), (200, 11))
    u = rng(2).random(200)
    ours = m.choose(2 * logits, u, temperature, top_k, top_p)
    direct = [plain_choice(2 * row, v, temperature, top_k, top_p)
              for row, v in zip(logits, u, strict=True)]
    assert ours.tolist() == direct


def test_choose_takes_the_first_of_equals():
    logits = np.array([[1., 3., 3., 2.]] * 3)
    u = np.array([0., 0.5, 0.999])
    assert m.choose(logits, u, 0, 0, 1.).tolist() == [1, 1, 1]
    assert m.choose(logits, u, 1., 1, 1.).tolist() == [1, 1, 1]
    assert m.choose(logits, u, 1., 2, 1.).tolist() == [1, 2, 2]


def test_choose_takes_no_more_than_the_fewest_that_reach_top_p():
    chosen = m.choose(np.zeros((3, 4)), np.array([0., 0.5, 0.999]), 1., 0, 0.5)
    assert chosen.tolist() == [0, 1, 1]


def test_choose_adds_up_in_double_precision():
    logits = np.array([[0.1, 0.]] * 2, np.float32)
    first = 1 / (1 + np.exp(-float(logits[0, 0])))
    u = first * np.array([1 - 1e-10, 1 + 1e-10])
    assert m.choose(logits, u, 1., 0, 0.).tolist() == [0, 1]


@pytest.mark.parametrize('temperature', [0.5, 1., 2.])
def test_choose_chooses_as_often_as_the_softmax_says(temperature):
    logits, = normal(rng(1), 11)
    n = 10_000
    u = (np.arange(n) + 0.5) / n
    chosen = m.choose(np.tile(logits, (n, 1)), u, temperature, 0, 1.)
    probs = np.exp(logits / temperature) / np.exp(logits / temperature).sum()
    assert np.bincount(chosen, minlength=11) == pytest.approx(n * probs, abs=1.001)


def test_choose_never_chooses_what_is_excluded():
    logits = np.tile([-np.inf, 0., 1.], (100, 1))
    assert set(m.choose(logits, np.linspace(0, 0.9999, 100), 5., 0, 1.).tolist()) == {1, 2}


@pytest.mark.parametrize('kind', ['mlp', 'gpt'])
def test_greedy_names_follow_the_likeliest_character(kind):
    model = random_model(kind)
    for prefix in 'b', 'ca', 'fed':
        ids = [VOCABULARY.index(character) for character in prefix]
        while len(ids) <= 5 and (chosen := int(next_logits(model, ids).argmax())):
            ids.append(chosen)
        direct = [''.join(VOCABULARY[i] for i in ids)] if len(ids) <= 5 else []
        assert m.generate(model, 2, rng(1), 0, prefix=prefix, max_len=5) == direct * 2


@pytest.mark.parametrize('kind', ['mlp', 'gpt'])
def test_names_of_a_character_are_as_frequent_as_the_model_says_but_no_name_is_empty(kind):
    """The probability of the character, if not the end comes first, times that of the end."""
    model, n = random_model(kind), 20_000
    first = [VOCABULARY.index(name) for name in m.generate(model, n, rng(1), max_len=1)]
    probs = np.exp(next_logits(model, []))
    probs[0] = 0
    probs /= probs.sum()
    for i in range(1, 11):
        after = np.exp(next_logits(model, [i]))
        probs[i] *= after[0] / after.sum()
    counts = np.bincount(first, minlength=11)
    assert (np.abs(counts - n * probs) <= 4.5 * np.sqrt(n * probs * (1 - probs))).all()


@pytest.mark.parametrize('kind', ['mlp', 'gpt'])
@pytest.mark.parametrize('temperature, top_k, top_p', [(1., 0, 0.), (0.7, 4, 0.), (1.5, 0, 0.8)])
def test_each_name_grows_by_the_choices_of_its_own_random_numbers(
        kind, temperature, top_k, top_p):
    """One name at a time, in plain NumPy: names that grow together do not notice each other."""
    model, n, numbers = random_model(kind), 120, rng(7)
    if kind == 'mlp':
        model.p['b2'][0] += 1.5         # some names end in time,
    else:
        model.p['C'][:] *= 0.25         # and none is much likelier than all others
    u = [numbers.random(n) for _ in range(6)]
    direct = []
    for i in range(n):
        ids = []
        while len(ids) <= 5:
            logits = next_logits(model, ids).copy()
            if not ids:
                logits[0] = -np.inf
            chosen = plain_choice(logits, u[len(ids)][i], temperature, top_k, top_p)
            if chosen == 0:
                direct.append(''.join(VOCABULARY[j] for j in ids))
                break
            ids.append(chosen)
    assert m.generate(model, n, rng(7), temperature, top_k, top_p) == direct
    assert 5 < len(direct) < n and len(set(direct)) > 5


@pytest.mark.parametrize('kind, prefix, max_len, longest', [
    ('mlp', '', None, 5), ('mlp', 'cab', None, 8), ('mlp', 'cab', 4, 4), ('mlp', '', 12, 12),
    ('gpt', '', None, 5), ('gpt', 'cab', None, 5), ('gpt', 'cab', 4, 4),
    ('gpt', '', 30, 5), ('gpt', 'bagga', None, 5)])
def test_names_have_their_prefix_and_end_in_time(kind, prefix, max_len, longest):
    """By default after as many more characters as the longest word has; the GPT reads only 5."""
    model = random_model(kind)
    if kind == 'mlp':
        model.p['b2'][0] += 1           # a name that ends sooner or later
    else:
        model.p['C'][:] *= 0.25
    made = m.generate(model, 3000, rng(1), prefix=prefix, max_len=max_len)
    assert 0 < len(made) and all(name.startswith(prefix) and name for name in made)
    assert max(map(len, made)) == longest


def test_a_prefix_that_is_too_long_or_unknown_is_refused():
    for kind, prefix in ('mlp', 'cab'), ('gpt', 'cab'):
        with pytest.raises(ValueError, match='2 characters'):
            m.generate(random_model(kind), 3, rng(1), prefix=prefix, max_len=2)
        with pytest.raises(KeyError):
            m.generate(random_model(kind), 3, rng(1), prefix='?')
    with pytest.raises(ValueError):
        m.generate(random_model('gpt'), 3, rng(1), prefix='caccac')
    with pytest.raises(ValueError):
        m.score(random_model('gpt'), 'caccac')
    with pytest.raises(KeyError):
        m.score(random_model('mlp'), '?')


@pytest.mark.parametrize('kind', ['mlp', 'gpt'])
def test_names_grow_until_the_last_one_has_ended_and_no_further(kind, monkeypatch):
    likeliest = iter([[1, 1], [0, 2], [0]])     # after each step, for those that are growing

    def predict(model, batch):
        logits = np.zeros((len(batch.Y), 11))
        logits[np.flatnonzero(batch.Y == 0), next(likeliest)] = 1
        return 0, dict(logits=logits)
    monkeypatch.setattr(m, 'predict', predict)
    assert m.generate(random_model(kind), 2, rng(1), 0) == ['a', 'ab']


# ---- The programs

def test_model_py_prints_the_tree_the_shapes_and_the_first_losses(capsys):
    m.main()
    out = capsys.readouterr().out
    assert ' '.join(out.split()).find(
        'X 0 a l m y position 0 1 2 2 3 ancestors 0 0 1 0 1 2 0 1 3 0 1 3 4 '
        'Y a l 0 a m y 0 predicted_from 0 1 2 0 1 3 4 ') > 0
    assert 'mlp: 4,137 parameters' in out and 'gpt: 199,936 parameters' in out
    for name, shape in {**m.parameter_shapes(default_config('mlp')),
                        **m.parameter_shapes(default_config('gpt'))}.items():
        assert re.search(rf'(?m)^  {name} +{re.escape(str(shape))}$', out), name
    assert re.findall(r'hidden\D+(\d+)\} (\w+) +(\d+\.\d+)', out) == [
        ('64', 'naive', '15.37'), ('64', 'kaiming', '3.30'),
        ('100', 'naive', '16.85'), ('100', 'kaiming', '3.30')]


def test_backward_py_prints_how_much_of_the_gradient_comes_through_tanh(capsys):
    assert backward.main([]) == 0
    out = capsys.readouterr().out
    assert re.findall(r'hidden\D+(\d+)\} (\w+) +(\d+)%', out) == [
        ('64', 'naive', '15'), ('64', 'kaiming', '100'),
        ('100', 'naive', '41'), ('100', 'kaiming', '100')]


PROVE = """
import numpy as np, backward, model
rng = np.random.default_rng(1)
dtype = np.dtype('float64')
right = sum([backward.prove_layer(title, dtype, rng) for title in backward.LAYERS], [])
small_gpt = dict(model.GPT_DEFAULTS, embd=4, layers=1, heads=2)
for config in dict(model.MLP_DEFAULTS, hidden=4), small_gpt:
    config, batch = model.first_batch(config, 2, rng)
    right += backward.prove_model(config, batch, dtype, rng, 3)
assert len(right) > 30 and all(right)
"""


def test_all_programs_run_without_compilation(tmp_path):
    """Then kernels are plain Python, in which one can stop and look."""
    (tmp_path / 'w.txt').write_text('\n'.join(names(20)))
    few = ['--data', 'w.txt', '--embd', '4', '--steps', '3', '--batch', '4']
    for argv in (['model.py'], ['-c', PROVE], ['train.py', *few, '--hidden', '4'], ['sample.py'],
                 ['train.py', '--model', 'gpt', *few, '--layers', '1', '--heads', '2'],
                 ['sample.py', 'out/gpt.npz', '-n', '3'],
                 ['sample.py', '--score', 'ann']):
        root = Path(m.__file__).parent
        program = [str(root / argv[0]), *argv[1:]] if argv[0] != '-c' else argv
        done = subprocess.run(
            [sys.executable, *program], cwd=tmp_path, capture_output=True, text=True,
            env={**os.environ, 'NUMBA_DISABLE_JIT': '1', 'PYTHONPATH': str(root)})
        assert done.returncode == 0 and 'Traceback' not in done.stderr, done.stderr
        assert done.stdout
