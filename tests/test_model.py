from fractions import Fraction
from math import log, prod

import numpy as np
import pytest
from oracle import (
    ACTIVATIONS, CASES, NORMS, VOCABULARY, WORDS, error, gpt_batch_of, gpt_config, mlp_batch_of,
    mlp_config, normal, plain_gpt, plain_gpt_batch, plain_loss, plain_mlp, random_parameters,
    room, run, unset)

import backward
import model as m


def rng(*seed):
    return np.random.default_rng(seed)


def names(count):
    return m.read_lines(m.DATA)[0][:count]


# ---- The worked example: three characters, two numbers each, read at [2, 0, 2], and then comes 1

TABLE = np.array([[1., 0.], [0., 1.], [2., -1.]])
CONTEXT, TARGET = np.array([[2, 0, 2]]), np.array([1])
W = np.tile(np.eye(3), (2, 1))


def look_up(C):
    emb, = unset((1, 6))
    m.embedding(C, CONTEXT, emb)
    return emb.reshape(1, 3, 2)


def test_worked_example_forward():
    emb = look_up(TABLE)
    assert emb[0].tolist() == [[2, -1], [1, 0], [2, -1]]
    x = emb.reshape(1, 6)
    assert x[0].tolist() == [2, -1, 1, 0, 2, -1]
    logits, probs = unset((1, 3), (1, 3))
    m.linear(x, W, None, logits)
    assert logits[0].tolist() == [2, 1, 0]
    loss = m.cross_entropy(logits, TARGET, probs)
    assert probs[0].round(3).tolist() == [0.665, 0.245, 0.090]
    assert round(loss, 4) == 1.4076
    assert loss == pytest.approx(-log(probs[0, 1]), abs=1e-15)


def test_worked_example_backward():
    emb = look_up(TABLE)
    x = emb.reshape(1, 6)
    logits, probs, dlogits, dx, dW = unset((1, 3), (1, 3), (1, 3), (1, 6), (6, 3))
    m.linear(x, W, None, logits)
    m.cross_entropy(logits, TARGET, probs)
    backward.cross_entropy_backward(probs, TARGET, dlogits)
    assert dlogits[0].round(3).tolist() == [0.665, -0.755, 0.090]
    assert abs(dlogits.sum()) <= 1e-15
    backward.linear_backward(dlogits, x, W, dx, dW, None)
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
    before, after = unset((3, 2), (3, 2))
    m.linear(look_up(TABLE)[0], 3.5 * np.eye(2), None, before)
    m.linear(look_up(C)[0], 3.5 * np.eye(2), None, after)
    moved = after - before
    assert moved[[0, 2], 0] == pytest.approx([0.035, 0.035], abs=1e-14)
    assert np.count_nonzero(moved) == 2


# ---- Parameters

def default_config(kind, **choices):
    return {**m.defaults(m.FLAGS)[kind], 'model': kind, 'vocabulary': 27, 'longest': 15, **choices}


def sizes(config):
    return {name: prod(shape) for name, shape in m.PARAMETERS[config['model']](config).items()}


def test_mlp_has_4137_parameters():
    size = sizes(default_config('mlp'))
    assert size['C'] + size['W1'] + size['b1'] == 2254
    assert size['bngain'] + size['bnbias'] + size['W2'] + size['b2'] == 1883
    p = m.make_parameters(default_config('mlp'), rng(1))
    assert sum(size.values()) == sum(w.size for w in p.values()) == 4137


def test_mlp_without_batchnorm_lacks_gain_and_bias():
    assert sum(sizes(default_config('mlp', batchnorm=False)).values()) == 4137 - 2 * 64


def test_gpt_has_199936_parameters():
    size = sizes(default_config('gpt', context=16))
    assert size == dict(C=27 * 64, P=16 * 64, gain=9 * 64, Wqkv=4 * 64 * 192, Wo=4 * 64 * 64,
                        Wup=4 * 64 * 256, Wdown=4 * 256 * 64)
    assert sum(size.values()) == 199_936


def test_views_share_one_flat_vector_in_order():
    flat = np.arange(11.)
    arrays = m.views(dict(a=(2, 3), b=(4,)), flat)
    assert arrays['a'].tolist() == [[0, 1, 2], [3, 4, 5]]
    assert arrays['b'].tolist() == [6, 7, 8, 9]
    arrays['b'][0] = -1
    assert flat[6] == -1


def first_loss(config, seed):
    """Loss of some 1500 predictions by the first values of the parameters."""
    kind, words = config['model'], names(200)
    examples = m.EXAMPLES[kind](words, m.make_vocabulary(names(-1)), config['context'])
    batch = m.BATCH[kind](examples, np.arange(len(examples[1])))
    return run(config, m.make_parameters(config, rng(seed), np.float64), batch).loss()


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
    config, _, examples = m.own_examples(dict(model='gpt', embd=embd, layers=1), m.FLAGS)
    p = m.make_parameters(config, rng(1))
    loss, _ = m.predict(dict(config=config, p=p), m.gpt_batch(examples, np.arange(0, 29000, 999)))
    assert np.log(27) < loss < 5


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


@pytest.mark.parametrize('kind', ['mlp', 'gpt'])
def test_first_values_of_naive_are_all_of_spread_one_but_the_gains(kind):
    for name, w in first_values(default_config(kind, context=16, init='naive')).items():
        if name in ('gain', 'bngain'):
            assert (w == 1).all()
        else:
            assert w.std() == pytest.approx(1, abs=3 / np.sqrt(w.size)), name


# ---- Layers

@pytest.mark.parametrize('name', CASES)
def test_nan_does_not_vanish_in_any_layer(name):
    case = CASES[name](rng(1), 4)
    for key, value in case.inputs.items():
        place = 0 if name != 'embedding' else (case.fixed['X'][0, 0], 0)
        kept = value[place].copy()
        value[place] = np.nan
        assert np.isnan(case.forward()).any(), key
        value[place] = kept


def test_softmax_of_large_numbers_stays_finite_and_returns_the_logarithm_of_the_sum():
    z, probs = np.array([1000., 999., -1000.]), *unset(3)
    assert m.softmax(z, probs) == pytest.approx(1000 + np.log1p(np.exp(-1)), abs=1e-12)
    assert probs == pytest.approx([1 / (1 + np.exp(-1)), 1 / (1 + np.e), 0], abs=1e-15)


@pytest.mark.parametrize('dtype, tolerance', [(np.float32, 4e-7), (np.float64, 2e-15)])
def test_tanh_is_numpys_to_the_last_digits(dtype, tolerance):
    """Relative to tanh itself, so that small numbers count as well; odd, and 1 where it is flat."""
    x = np.concatenate([np.linspace(0, 25, 20001), np.geomspace(1e-30, 1, 2000), [1e30, np.inf]])
    x = x.astype(dtype)[None]
    y, negative = np.empty_like(x), np.empty_like(x)
    m.tanh(x, None, y)
    m.tanh(-x, None, negative)
    truth = np.tanh(x.astype(np.float64))
    assert (abs(y - truth) <= tolerance * truth).all()
    assert (negative == -y).all()
    assert (y[x > 20] == 1).all()


def test_tanh_is_lamberts_fraction_doubled_four_times():
    x = Fraction(3, 7)
    z, fraction = x / 16, Fraction(9)
    for odd in 7, 5, 3, 1:
        fraction = odd + z**2 / fraction
    y = z / fraction
    for _ in range(4):
        y = 2 * y / (1 + y**2)
    assert m.tanh_of.py_func(x) == y


@pytest.mark.filterwarnings('ignore:overflow')
def test_sigmoid_of_large_numbers_stays_finite():
    x, y = np.array([[-1000., 0., 1000.]]), *unset((1, 3))
    m.sigmoid(x, None, y)
    assert y.tolist() == [[0, 0.5, 1]]


def test_cross_entropy_of_a_certain_but_wrong_prediction_is_finite():
    logits, probs = np.array([[0., 1000.]]), *unset((1, 2))
    assert m.cross_entropy(logits, np.array([0]), probs) == 1000


# ---- The MLP

@pytest.mark.parametrize('dtype, tolerance', [(np.float32, 1e-5), (np.float64, 1e-13)])
@pytest.mark.parametrize('N', [2, 3, 32])
def test_fused_mlp_is_the_column(N, dtype, tolerance):
    config = mlp_config(True, 'tanh')
    p, flat = random_parameters(config, rng(N), dtype)
    X, Y = mlp_batch_of(rng(1, N), N)
    loss, steps = m.mlp_steps(p, X, Y)
    d = backward.mlp_steps_backward(p, X, Y, steps)
    model = run(config, p, (X, Y))
    assert loss.dtype == dtype
    assert model.loss() == pytest.approx(float(loss), rel=tolerance)
    for name in 'emb', 'hprebn', 'hpreact', 'h', 'logits', 'probs':
        assert model.a[name].dtype == dtype
        assert error(model.a[name], steps[name]) <= tolerance, name
        if name != 'probs':             # within cross_entropy its gradient is never formed
            assert error(model.d[name], d[name].reshape(model.d[name].shape)) <= tolerance, name
    for name, g in model.g.items():
        assert g.dtype == dtype
        assert error(g, d[name], floor=1 if name == 'b1' else 0) <= tolerance, name


@pytest.mark.parametrize('statistics', [False, True])
@pytest.mark.parametrize('batchnorm', [True, False])
@pytest.mark.parametrize('act', ACTIVATIONS)
def test_mlp_is_the_plain_formula(act, batchnorm, statistics):
    config = mlp_config(batchnorm, act)
    p, flat = random_parameters(config, rng(1))
    X, Y = mlp_batch_of(rng(2), 6)
    given = {}
    if statistics and batchnorm:
        given = dict(bnmean=0.01 * rng(3).random(7), bnvar=0.001 * rng(4).random(7))
    a = room(m.mlp_activations(config, 6))
    loss = m.mlp(config, p, (X, Y), a, given)
    logits = plain_mlp(config, p, X, given)
    assert error(a['logits'], logits) <= 1e-13
    assert loss == pytest.approx(plain_loss(logits, Y), rel=1e-13)


# ---- The GPT

def random_gpt(norm='rmsnorm', act='gelu', layers=2, heads=4, seed=1):
    config = gpt_config(norm, act, layers, heads)
    return config, random_parameters(config, rng(seed))[0]


@pytest.mark.parametrize('heads', [1, 4])
@pytest.mark.parametrize('act', ACTIVATIONS)
@pytest.mark.parametrize('norm', NORMS)
def test_gpt_is_the_plain_formula_on_words_of_one_character_to_the_full_context(norm, act, heads):
    config, p = random_gpt(norm, act, heads=heads)
    batch = gpt_batch_of(config, WORDS)
    masks = (rng(2).random((4, len(batch[0]), 12)) >= 0.3) / 0.7
    assert sorted(map(len, WORDS))[::len(WORDS) - 1] == [1, config['context'] - 1]
    for mask in None, masks:
        model = run(config, p, batch, mask)
        logits = plain_gpt_batch(config, p, batch, mask)
        assert error(model.a['logits'], logits) <= 1e-13
        assert model.loss() == pytest.approx(plain_loss(logits, batch[1]), rel=1e-13)


def sums(config, p, words):
    """Loss and gradients of a batch, as sums over its predictions and not as means."""
    batch = gpt_batch_of(config, words)
    model, B = run(config, p, batch), len(batch[1])
    return np.concatenate([[B * model.loss()], *(B * g.ravel() for g in model.g.values())])


@pytest.mark.parametrize('norm', NORMS)
@pytest.mark.parametrize('company', [['bagga'], ['d', 'fedfa', 'd'], ['abba', 'cab', 'cab', 'a']])
def test_loss_and_gradient_of_a_name_do_not_depend_on_the_others_in_its_batch(company, norm):
    config, p = random_gpt(norm)
    alone, others = sums(config, p, ['cab']), sums(config, p, company)
    for together in [*company, 'cab'], ['cab', *company]:
        assert error(sums(config, p, together) - others, alone) <= 1e-13


def test_logits_of_a_name_do_not_depend_on_the_others_in_its_batch():
    config, p = random_gpt()
    alone = run(config, p, gpt_batch_of(config, ['cab'])).a['logits']
    together = run(config, p, gpt_batch_of(config, ['bagga', 'cab', 'd'])).a['logits']
    assert error(together[6:10], alone) <= 1e-14


def test_permuting_the_names_of_a_batch_changes_nothing_but_rounding():
    config, p = random_gpt()
    words = [*WORDS, 'abba', 'gag']
    for seed in range(3):
        permuted = [words[i] for i in rng(seed).permutation(len(words))]
        assert permuted != words
        assert error(sums(config, p, permuted), sums(config, p, words)) <= 1e-13


def test_no_prediction_depends_on_characters_to_come():
    config, p = random_gpt()
    one = run(config, p, gpt_batch_of(config, ['bagga'])).a['logits']
    two = run(config, p, gpt_batch_of(config, ['bagfe'])).a['logits']
    assert (one[:4] == two[:4]).all()
    assert (one[4:] != two[4:]).any(1).all()


@pytest.mark.parametrize('norm', NORMS)
@pytest.mark.parametrize('bits', [[1] * 6, [2, 4], [3, 1, 2]])
def test_memory_gives_the_logits_of_the_full_forward(bits, norm):
    """Three words of the full context are read together, bit by bit."""
    config, p = random_gpt(norm)
    model = dict(config=config, p=p)
    X, Y, t, path, at = gpt_batch_of(config, ['bagfe', 'bagga', 'fedfa'])
    loss, full = m.predict(model, (X, Y, t, path, at))
    memory, paths = np.full((2, len(X), 36), np.nan), np.split(path, (t + 1).cumsum()[:-1])
    begin = 0
    for bit in bits:
        now = np.flatnonzero((begin <= t) & (t < begin + bit))
        next_ones = np.isin(at, now)
        loss, part = m.predict(
            model, (X[now], Y[next_ones], t[now], np.concatenate([paths[row] for row in now]),
                    np.searchsorted(now, at[next_ones])), memory)
        assert error(part['logits'], full['logits'][next_ones]) <= 1e-14
        begin += bit


# ---- Batches

WORD_LISTS = [['a'], ['ab', 'c', 'abc'], ['noor', 'a', 'noor', 'zoë'], ['', 'b', '', 'ba']]


def test_vocabulary_is_sorted_behind_the_boundary():
    assert m.make_vocabulary(['noor', 'zoë', '.b']) == '\0.bnorzë'


@pytest.mark.parametrize('T', [1, 3, 8])
@pytest.mark.parametrize('words', WORD_LISTS[:3])
def test_mlp_batch_is_the_window_before_each_character(words, T):
    vocabulary, config = m.make_vocabulary(words), dict(context=T)
    X, Y = [], []
    for word in words:
        ids = [0] * T + [vocabulary.index(character) for character in word] + [0]
        for place in range(T, len(ids)):
            X.append(ids[place - T:place])
            Y.append(ids[place])
    examples = m.mlp_examples(words, vocabulary, config['context'])
    assert len(examples[1]) == len(Y)
    for chosen in np.arange(len(Y)), rng(1).integers(0, len(Y), 7), slice(1, 4):
        ours = m.mlp_batch(examples, chosen)
        assert ours[0].tolist() == np.array(X)[chosen].tolist()
        assert ours[1].tolist() == np.array(Y)[chosen].tolist()


@pytest.mark.parametrize('words', WORD_LISTS)
def test_gpt_batch_has_a_row_for_each_beginning_and_all_that_follows(words):
    vocabulary = m.make_vocabulary(words)
    examples = m.gpt_examples(words, vocabulary, 8)
    assert len(examples[1]) == len(words)
    for chosen in np.arange(len(words)), rng(1).integers(0, len(words), 5):
        X, Y, t, path, at = m.gpt_batch(examples, chosen)
        paths = np.split(path, (t + 1).cumsum())
        assert not len(paths.pop())
        assert [seen[-1] for seen in paths] == list(range(len(X)))
        rows = [''.join(vocabulary[X[row, 0]] for row in seen) for seen in paths]
        assert list(map(len, rows)) == (t + 1).tolist()
        told = [(rows[row], vocabulary[y]) for row, y in zip(at, Y, strict=True)]
        whole = ['\0' + words[i] + '\0' for i in chosen]
        assert told == [(word[:k], word[k]) for word in whole for k in range(1, len(word))]


def test_beginnings_that_sorted_words_have_in_common_are_one_row_each():
    words = sorted(names(2000))
    batch = m.gpt_batch(m.gpt_examples(words, m.make_vocabulary(words), 16), np.arange(2000))
    assert len(batch[0]) == len({word[:k] for word in words for k in range(len(word) + 1)})


# ---- Using a model

@pytest.mark.parametrize('dtype, tolerance', [(np.float32, 3e-7), (np.float64, 1e-12)])
def test_batchnorm_statistics_are_mean_and_unbiased_variance_over_all_examples(dtype, tolerance):
    words = names(1500)
    vocabulary = m.make_vocabulary(words)
    config = default_config('mlp', vocabulary=len(vocabulary))
    examples = m.mlp_examples(words, vocabulary, config['context'])
    assert len(examples[1]) > 2 * 4096
    p, flat = random_parameters(config, rng(1), dtype)
    X, Y = m.mlp_batch(examples, slice(None))
    hprebn = (p['C'][X].reshape(len(X), -1) @ p['W1'] + p['b1']).astype(np.float64)
    ours = m.batchnorm_statistics(p, examples)
    assert ours['bnmean'].dtype == ours['bnvar'].dtype == dtype
    assert error(ours['bnmean'], hprebn.mean(0)) <= tolerance
    assert error(ours['bnvar'], hprebn.var(0, ddof=1)) <= tolerance


def test_batchnorm_of_all_examples_at_once_is_that_by_their_statistics():
    words = names(300)
    vocabulary = m.make_vocabulary(words)
    config = default_config('mlp', vocabulary=len(vocabulary))
    examples = m.mlp_examples(words, vocabulary, config['context'])
    batch = m.mlp_batch(examples, slice(None))
    p, flat = random_parameters(config, rng(1))
    model = dict(config=config, p=p, statistics=m.batchnorm_statistics(p, examples))
    assert m.predict(model, batch)[0] == pytest.approx(run(config, p, batch).loss(), rel=1e-12)


def random_model(kind):
    config = gpt_config('rmsnorm', 'gelu', 2, 4) if kind == 'gpt' else mlp_config(True, 'tanh')
    p, flat = random_parameters(config, rng(3))
    statistics = {}
    if kind == 'mlp':
        statistics = dict(bnmean=0.01 * rng(4).random(7), bnvar=0.001 * rng(5).random(7))
    return dict(config=config, vocabulary=VOCABULARY, p=p, statistics=statistics)


def next_logits(model, ids):
    """Of what comes after these ids, in plain NumPy."""
    config, p = model['config'], model['p']
    if config['model'] == 'gpt':
        return plain_gpt(config, p, np.array([0, *ids]))[-1]
    X = np.array([[0] * 5 + ids])[:, -5:]
    return plain_mlp(config, p, X, model['statistics'])[0]


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


def without_memory(predict):
    """predict, but with each name read from its beginning again in every call."""
    ids = {}

    def full(model, batch, memory=None):
        X, Y, t, path, at = batch
        ends = (t + 1).cumsum()
        ids.update(zip(path[ends - 1].tolist(), X[:, 0].tolist(), strict=True))
        X = np.array([[ids[row]] for row in path.tolist()])
        each = [np.arange(n + 1) for n in t]
        own = [end - n - 1 + np.arange(k + 1) for end, n in zip(ends, t) for k in range(n + 1)]
        loss, a = predict(model, (
            X, X[ends - 1, 0], np.concatenate(each), np.concatenate(own), ends[at] - 1))
        return loss, a
    return full


@pytest.mark.parametrize('prefix', ['', 'fed'])
@pytest.mark.parametrize('temperature', [0, 1.])
def test_sampling_with_memory_gives_the_names_of_sampling_without(
        monkeypatch, temperature, prefix):
    model = random_model('gpt')
    cached = m.generate(model, 50, rng(1), temperature, prefix=prefix)
    monkeypatch.setattr(m, 'predict', without_memory(m.predict))
    assert m.generate(model, 50, rng(1), temperature, prefix=prefix) == cached
    assert temperature == 0 or len(set(cached)) > 5


@pytest.mark.parametrize('kind', ['mlp', 'gpt'])
def test_greedy_names_follow_the_likeliest_character(kind):
    model = random_model(kind)
    for prefix in 'b', 'ca', 'fed':
        ids = [VOCABULARY.index(character) for character in prefix]
        while len(ids) < 5 and (chosen := int(next_logits(model, ids).argmax())):
            ids.append(chosen)
        direct = ''.join(VOCABULARY[i] for i in ids)
        assert m.generate(model, 2, rng(1), 0, prefix=prefix, max_len=5) == [direct] * 2


@pytest.mark.parametrize('kind', ['mlp', 'gpt'])
def test_first_characters_are_as_frequent_as_the_model_says_but_no_name_is_empty(kind):
    model, n = random_model(kind), 20_000
    first = [VOCABULARY.index(name[0]) for name in m.generate(model, n, rng(1), max_len=1)]
    probs = np.exp(next_logits(model, []))
    probs[0] = 0
    probs /= probs.sum()
    counts = np.bincount(first, minlength=11)
    assert (np.abs(counts - n * probs) <= 4.5 * np.sqrt(n * probs * (1 - probs))).all()


@pytest.mark.parametrize('module', [m, backward])
def test_a_short_context_shows_and_proves_names_that_fit(run, module):
    """A longer name would be looked up behind the end of the table of positions."""
    _, _, (_, _, lengths) = m.own_examples(dict(model='gpt', context=3), m.FLAGS)
    assert len(lengths) >= 32 and lengths.max() == 3
    assert run(module, '--model', 'gpt', '--context', '3').status == 0


@pytest.mark.parametrize('module, flags', [
    (m, ['--context', '1']), (backward, ['--context', '1']),
    (backward, ['--embd', '2', '--heads', '1'])])
def test_what_leaves_nothing_to_show_or_prove_is_refused(run, module, flags):
    result = run(module, '--model', 'gpt', *flags)
    assert (result.status, result.out) == (2, '') and flags[0] in result.err
