import ast

import pytest
from mutate import ROOT, mutants

SOURCE = '''
def layer_backward(dy, x, n, dx, dC):
    """dy - 1."""
    dz = -dy.sum(0, keepdims=True) / (n - 1)    # (1, H)
    dx[:] = dz @ x.T
    for i in range(n):
        dx[i] += x[i]**2 if n > 0 else 0
    np.add.at(dC, x, dy)

# ---- The gradient check
def prove(x):
    return x + 1
'''


def changes():
    return {(mutant.before, mutant.after) for mutant in mutants(SOURCE)}


@pytest.mark.parametrize('before, after', [
    ('dz = -dy.sum(0, keepdims=True) / (n - 1)', 'dz = -dy.sum(1, keepdims=True) / (n - 1)'),
    ('dz = -dy.sum(0, keepdims=True) / (n - 1)', 'dz = -dy.sum(0, keepdims=False) / (n - 1)'),
    ('dz = -dy.sum(0, keepdims=True) / (n - 1)', 'dz = -dy.sum(0, keepdims=True) / ((n))'),
    ('dz = -dy.sum(0, keepdims=True) / (n - 1)',
     'dz = (dy.sum(0, keepdims=True)) / (n - 1)'),
    ('dx[:] = dz @ x.T', 'dx[:] = dz @ x'),
    ('dx[:] = dz @ x.T', 'dx[:] = ((x.T) @ (dz))'),
    ('dx[:] = dz @ x.T', 'dx[:] += dz @ x.T'),
    ('dx[:] = dz @ x.T', 'pass'),
    ('for i in range(n):', 'for i in range(1, n):'),
    ('dx[i] += x[i]**2 if n > 0 else 0', 'dx[i] = x[i] ** 2 if n > 0 else 0'),
    ('dx[i] += x[i]**2 if n > 0 else 0', 'dx[i] -= x[i] ** 2 if n > 0 else 0'),
    ('dx[i] += x[i]**2 if n > 0 else 0', 'dx[i] += x[(i - 1)]**2 if n > 0 else 0'),
    ('dx[i] += x[i]**2 if n > 0 else 0', 'dx[i] += x[i]**3 if n > 0 else 0'),
    ('dx[i] += x[i]**2 if n > 0 else 0', 'dx[i] += x[i]**2 if (n >= 0) else 0'),
    ('np.add.at(dC, x, dy)', 'dC[x] += dy')])
def test_a_small_mistake_of_each_kind_is_made(before, after):
    assert (before, after) in changes()


def test_mutants_are_of_what_stands_above_the_check_and_no_docstring_only():
    assert {mutant.function for mutant in mutants(SOURCE)} == {'layer_backward'}
    assert min(mutant.line for mutant in mutants(SOURCE)) == 4


def test_at_least_150_mutants_of_every_gradient_all_programs_and_all_different():
    source = (ROOT / 'backward.py').read_text()
    found = list(mutants(source))
    assert len({mutant.source for mutant in found} - {source}) == len(found) >= 150
    for mutant in found:
        function = mutant.source[mutant.source.index(f'def {mutant.function}('):]
        ast.parse(function.split('\n\n\n')[0])
    assert {mutant.function for mutant in found} == {
        node.name for node in ast.parse(source).body
        if isinstance(node, ast.FunctionDef)} - {
            'slope_along', 'compare', 'prove_layer', 'small_random', 'prove_steps', 'prove_model',
            'prove', 'tanh_gradients', 'main'}
