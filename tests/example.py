"""The numbers of the lectures on the embedding table, computed here, with the lectures' beside.

    python tests/example.py

Part 1 is the worked example that is small enough to do by hand. Part 2 is the end of the way back
in the MLP, the five steps from hprebn to C. Part 3 has three losses: that of even guesses, that of
a naive initialization, and one that only the layer gets right. `here` is what the functions of this
project give. `document` is what the lectures say, or what a rule that they state demands of the
same data. The exit status is 1 if a number is another one. It takes two seconds, and a few more the
first time, because Numba compiles the inner loops.
"""
import re
import string
import sys
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
sys.path.insert(0, str(ROOT))

import model as m
import backward

import numpy as np

LETTERS = '.' + string.ascii_lowercase          # the boundary token is shown as a dot
NUMBER = re.compile(r'-?\d+(?:,\d{3})*(?:\.\d+)?|inf')
agreeing = []           # True or False for each number of the document that was shown


def heading(title):
    print(f'\n{title}\n{"":25}{"here":<38}document')


def show(name, value, expected=''):
    """Print a value beside the text that the document has for it, if it has one.

    A text is compared as it is. Of an array or a list, the numbers take the places of those in the
    expected text, rounded to as many digits.
    """
    here, ours, theirs = value, [value], [expected]
    if not isinstance(value, str):
        theirs = NUMBER.findall(expected)
        digits = [len(number.partition('.')[2]) for number in theirs]
        ours = [f'{round(float(number), d) + 0.:,.{d}f}'        # + 0. makes 0 of -0
                for number, d in zip(np.ravel(value), digits, strict=True)]
        rest = iter(ours)
        here = NUMBER.sub(lambda _: next(rest), expected)
    right = [a == b for a, b in zip(ours, theirs) if expected]
    agreeing.extend(right)
    print(f'  {name:<23}{here:<38}{expected}{"" if all(right) else "  WRONG"}'.rstrip())


def different(a, b):
    """Which elements differ by more than rounding; NaN differs from everything."""
    return ~(abs(a - b) <= 1e-10)


def characters(chosen):
    """The characters of the rows of C for which `chosen` (27,) is true."""
    return ''.join(character for character, yes in zip(LETTERS, chosen) if yes)


# ---- Part 1

def worked_example():
    heading('1. Three characters, two numbers each: [2, 0, 2] was read, and 1 is what follows')
    C = np.array([[1., 0.], [0., 1.], [2., -1.]])               # (3, 2)
    W = np.tile(np.eye(3), (2, 1))                              # (6, 3)
    X, Y = np.array([[2, 0, 2]]), np.array([1])                 # (1, 3) (1,)

    print('The lookup copies three rows of C and lays them side by side.')
    x = m.embedding(C, X)                                       # (1, 6)
    emb = x.reshape(1, 3, 2)                                    # (1, 3, 2)
    show('emb', emb, '[2, -1] [1, 0] [2, -1]')
    show('shapes of emb, emb[0]', emb.shape + emb[0].shape, '(1, 3, 2) (3, 2)')
    show('x', x, '2 -1 1 0 2 -1')
    print('The same as a matrix product: C is the weight matrix of the first layer.')
    onehot = np.eye(3)[X[0]]                                    # (3, 3)
    show('onehot', onehot, '[0, 0, 1] [1, 0, 0] [0, 0, 1]')
    show('onehot @ C', m.linear(onehot, C), '[2, -1] [1, 0] [2, -1]')

    print('Forward, from x to the loss.')
    logits = m.linear(x, W)                                     # (1, 3)
    loss, probs = m.cross_entropy(logits, Y)                    # () (1, 3)
    show('logits = x @ W', logits, '2 1 0')
    show('probs', probs, '0.665 0.245 0.090')
    show('loss', [probs[0, 1], loss], '-ln(0.245) = 1.4076')

    print('Backward, from the loss to emb. From dx to demb only the shape changes.')
    dlogits = backward.cross_entropy_backward(probs, Y)         # (1, 3)
    dx = backward.linear_backward(dlogits, x, W, np.empty_like(W))      # (1, 6)
    demb = dx.reshape(emb.shape)                                # (1, 3, 2)
    show('dlogits', dlogits, '0.665 -0.755 0.090')
    show('sum of dlogits', dlogits.sum(), '0.0000000000')
    show('shapes of dlogits, W.T', dlogits.shape + W.T.shape, '(1, 3) @ (3, 6)')
    show('dx', dx, '0.665 -0.755 0.090 0.665 -0.755 0.090')
    for t, expected in enumerate(['0.665 -0.755', '0.090 0.665', '-0.755 0.090']):
        show(f'demb[{t}]', demb[0, t], expected)

    print('Back to C: row 0 was copied once, row 1 never, and row 2 twice, so it has two shares.')
    dC = np.zeros_like(C)                                       # (3, 2)
    backward.embedding_backward(dx, X, dC)                      # (3, 2)
    for v, expected in enumerate(['0.090 0.665', '0.000 0.000', '-0.090 -0.665']):
        show(f'dC[{v}]', dC[v], expected)
    show('demb[0] + demb[2]', demb[0, 0] + demb[0, 2], '-0.090 -0.665')

    print('The derivatives of emb by C[0,0], C[0,1], C[1,0] ... C[2,1]: 1 where one was copied.')
    moved = [m.embedding(C + np.eye(1, 6, cell).reshape(3, 2), X) - x for cell in range(6)]
    selection = np.concatenate(moved).T                         # (6, 6)
    for cell, expected in enumerate(['0 0 0 0 1 0', '0 0 0 0 0 1', '1 0 0 0 0 0', '0 1 0 0 0 0',
                                     '0 0 0 0 1 0', '0 0 0 0 0 1']):
        show(f'emb[{cell // 2},{cell % 2}]', selection[cell], expected)
    print('They are switches for the gradients that arrive, so dC is a matrix product too.')
    show('dC[2,0]', [demb[0, 0, 0], selection[0, 4], demb[0, 2, 0], selection[4, 4], dC[2, 0]],
         '0.665 * 1 + -0.755 * 1 = -0.090')
    show('selection.T @ demb', selection.T @ dx[0], '0.090 0.665 0.000 0.000 -0.090 -0.665')
    show('onehot.T @ demb', onehot.T @ demb[0], '0.090 0.665 0.000 0.000 -0.090 -0.665')

    print('C[2,0] goes from 2.0 to 2.01. Both copies go along. The slope of the loss is dC[2,0].')
    nudged, times = C.copy(), 3.5 * np.eye(2)                   # (3, 2) (2, 2)
    nudged[2, 0] = 2.01
    x_after = m.embedding(nudged, X)                            # (1, 6)
    loss_after, _ = m.cross_entropy(m.linear(x_after, W), Y)    # () (1, 3)
    show('emb[:,0] before', x[0, ::2], '2.00 1.00 2.00')
    show('emb[:,0] after', x_after[0, ::2], '2.01 1.00 2.01')
    show('its derivative', (x_after - x)[0, ::2] / 0.01, '1.00 0.00 1.00')
    show('that of 3.5 * C[2,0]', (m.linear(nudged, times) - m.linear(C, times))[2, 0] / 0.01, '3.5')
    show('loss before, after', f'{loss:.6f}, {loss_after:.6f}')
    show('slope', (loss_after - loss) / 0.01, '-0.090')
    show('dC[2,0] by hand', dC[2, 0], '-0.090')


# ---- Part 2

def scatter(X, demb, V):
    """dC (V,E) in four ways that are right, and in two that are wrong, by name."""
    loop, add_at, layer, line, assignment = np.zeros((5, V, demb.shape[2]))
    for k in range(X.shape[0]):
        for j in range(X.shape[1]):
            ix = X[k, j]
            loop[ix] += demb[k, j]
            assignment[ix] = demb[k, j]
    np.add.at(add_at, X, demb)
    backward.embedding_backward(demb.reshape(len(X), -1), X, layer)
    product = np.eye(V)[X.ravel()].T @ demb.reshape(X.size, -1)         # (V, E)
    line[X] += demb
    return ({'dC[ix] += demb[k, j]': loop, 'np.add.at(dC, X, demb)': add_at,
             'embedding_backward': layer, 'onehot.T @ demb': product},
            {'dC[X] += demb': line, 'dC[ix] = demb[k, j]': assignment})


def last_five_steps(config, p, many):
    heading('2. The last five steps of the way back, in a batch of 32 predictions of the MLP')
    X, Y = many.X[:32], many.Y[:32]                             # (32, 3) (32,)
    _, values = m.mlp_steps(p, X, Y)
    g = backward.mlp_steps_backward(p, X, Y, values)
    C, W1, b1, rng = p['C'], p['W1'], p['b1'], np.random.default_rng(2)
    emb, embcat, hprebn, dhprebn = values['emb'], values['embcat'], values['hprebn'], g['hprebn']
    dembcat, dW1, db1, demb, dC = g['embcat'], g['W1'], g['b1'], g['emb'], g['C']
    by_layers = {name: np.empty_like(w) for name, w in p.items()}
    backward.gradient(config, p, m.MLPBatch(X, Y), by_layers)

    def show_slope(dw, name, w, X):
        """The slope of the loss if w, which is p[name], moves along a line; and that by dw."""
        line = rng.standard_normal(w.shape)
        above, below = (m.mlp_steps({**p, name: w + step * line}, X, Y)[0]
                        for step in (1e-5, -1e-5))
        by_hand = round((dw * line).sum(), 6) + 0.              # + 0. makes 0 of -0
        show('slope by differences', (above - below) / 2e-5, f'{by_hand:.6f}')

    print('Forward: emb = C[X], embcat is emb in another shape, hprebn = embcat @ W1 + b1.')
    show('shapes of X, emb', X.shape + emb.shape, '(32, 3) -> (32, 3, 10)')
    show('of embcat, hprebn', embcat.shape + hprebn.shape, '(32, 30) -> (32, 64)')
    last, total = W1.size + b1.size + C.size, sum(w.size for w in p.values())
    show('W1, b1 and C', [W1.size, b1.size, C.size, last], '1,920 + 64 + 270 = 2,254')
    show('all parameters', [total - last, last, total], '1,883 + 2,254 = 4,137')
    show('gradients by layers', sum(different(by_layers[name], g[name]).sum() for name in p),
         '0 numbers differ')

    print('Step 1: dembcat = dhprebn @ W1.T')
    show('shapes', dhprebn.shape + W1.T.shape + dembcat.shape, '(32, 64) @ (64, 30) -> (32, 30)')
    lookups = np.arange(96).reshape(32, 3)                      # each from a row of its own
    show_slope(dembcat.reshape(96, 10), 'C', embcat.reshape(96, 10), lookups)
    print('Step 2: dW1 = embcat.T @ dhprebn')
    show('shapes', embcat.T.shape + dhprebn.shape + dW1.shape, '(30, 32) @ (32, 64) -> (30, 64)')
    show_slope(dW1, 'W1', W1, X)
    print('Step 3: db1 = dhprebn.sum(0), which is zero, because batch norm subtracts the mean.')
    show('shapes', dhprebn.shape + db1.shape, '(32, 64) -> (64,)')
    show_slope(db1, 'b1', b1, X)

    print('Step 4: demb = dembcat.reshape(emb.shape). Numbers are regrouped, and none is copied.')
    show('[g0, g1, ... g8]', np.arange(9).reshape(3, 3), '[0, 1, 2] [3, 4, 5] [6, 7, 8]')
    show('shapes', dembcat.shape + demb.shape, '(32, 30) -> (32, 3, 10)')
    show('how many numbers', [dembcat.size, demb.size], '960 = 960')
    by_hand = np.stack([dembcat[:, j*10:j*10 + 10] for j in range(3)], 1)       # (32, 3, 10)
    show('with offsets by hand', different(demb, by_hand).sum(), '0 numbers differ')
    show('emb, embcat share', str(np.shares_memory(emb, embcat)), 'True')
    show('demb, dembcat share', str(np.shares_memory(demb, dembcat)), 'True')

    print('Step 5: a row of dC is a sum. Common rows are fetched a dozen times, e not as often.')
    fetched = np.bincount(X.ravel(), minlength=27)              # (27,)
    mean = np.bincount(many.X.ravel(), minlength=27) / 1000     # (27,)
    most = np.argsort(-fetched, kind='stable')[:6]              # (6,)
    show('lookups, predictions', [X.size, Y.size], '96 and 32')
    show('lookups of a row', [X.size, len(C), X.size / len(C)], '96 / 27 = 3.6')
    show('most fetched', ', '.join(f'{LETTERS[row]} {fetched[row]}' for row in most))
    show('a, in 1,000 batches', mean[1], '12 on average')
    show('e, in 1,000 batches', f'{mean[5]:.0f} on average')

    print('X = [[0, 5, 13], [5, 13, 13]] with gradients 1 to 6: row 13 gets 3 + 5 + 6, not only 6.')
    little = np.array([[0, 5, 13], [5, 13, 13]])                # (2, 3)
    show('rows 0, 5, 13', np.bincount(little.ravel())[[0, 5, 13]], '1, 2, 3 times')
    right, wrong = scatter(little, np.arange(1., 7.).reshape(2, 3, 1), 14)
    for name, ours in right.items():
        show(name, ours[[0, 5, 13]], '1 6 14')
    for name, ours in wrong.items():
        show(name, ours[[0, 5, 13]], '1 4 6')
    print('The real batch: the wrong lines are wrong in every row that was fetched more than once.')
    right, wrong = scatter(X, demb, 27)
    show_slope(dC, 'C', C, X)
    for name, ours in right.items():
        show(name, different(ours, dC).any(1).sum(), '0 rows wrong')
    for name, ours in wrong.items():
        rows = different(ours, dC).any(1)                       # (27,)
        show(name, rows.sum(), f'{(fetched > 1).sum()} rows wrong')
        show('  wrong', characters(rows), characters(fetched > 1))
        show('  right', characters(~rows), characters(fetched <= 1))

    print('A row that was never fetched has the gradient 0. From ones_like it would be 1.')
    show('rows with a gradient', characters(dC.any(1)), characters(fetched > 0))
    show('rows of zeros', (dC == 0).all(1).sum(), f'{(fetched == 0).sum()}')
    ones = np.ones_like(C)                                      # (27, 10)
    np.add.at(ones, X, demb)
    show('from ones_like', [different(ones, dC).sum(), (ones - dC).mean()],
         '270 numbers differ, by 1.0000')


# ---- Part 3

def three_losses(config, p, many):
    heading('3. Three losses')
    print('Even guesses among 27 characters, and the first loss of 1,000 naive models.')
    show('even guesses', m.cross_entropy(np.zeros((1, 27)), np.array([0]))[0], '3.30')
    naive = dict(config, embd=2, hidden=100, init='naive', batchnorm=False)
    rng = np.random.default_rng(1)
    batches = [m.MLPBatch(many.X[i:i + 32], many.Y[i:i + 32]) for i in range(0, 32000, 32)]
    losses = [m.mlp(naive, m.make_parameters(naive, rng), batch)[0] for batch in batches]
    show('naive models', np.mean(losses), '17 on average')

    print('One logit is 200 above the rest, whose probabilities are rounded to zero in float32.')
    p = {**p, 'b2': 200. * (np.arange(27) == 2)}                # b, which is no target in the batch
    p32 = {name: w.astype(np.float32) for name, w in p.items()}
    exact, _ = m.mlp_steps(p, *batches[0])
    with np.errstate(divide='ignore', invalid='ignore'):        # log(0), and the division by it
        apart, values = m.mlp_steps(p32, *batches[0])
        g = backward.mlp_steps_backward(p32, *batches[0], values)
    fused, acts = m.mlp(config, p32, batches[0])
    dlogits = backward.cross_entropy_backward(acts['probs'], batches[0].Y)      # (32, 27)
    show('taken apart, float64', f'{exact:.2f}')
    show('taken apart, float32', apart, 'inf')
    show('fused, float32', fused, f'{exact:.2f}')
    show('dlogits taken apart', f'{np.isfinite(g["logits"]).sum()} of {dlogits.size} are finite')
    show('dlogits fused', [np.isfinite(dlogits).sum(), dlogits.size], '864 of 864 are finite')


# ---- python tests/example.py

def main():
    """Print all parts; returns 1 if a number does not agree, else 0."""
    agreeing.clear()
    rng = np.random.default_rng(0)
    config, many = m.first_batch(m.MLP_DEFAULTS, 32000, rng)    # 1,000 batches of 32
    p = m.make_parameters(config, rng, np.float64)
    worked_example()
    last_five_steps(config, p, many)
    three_losses(config, p, many)
    print(f'\n{sum(agreeing)} of {len(agreeing)} numbers agree with the document')
    return int(not all(agreeing))


if __name__ == '__main__':
    sys.exit(main())
