import ast
import sys
from types import ModuleType

import pytest
from mutate import EXPLAINED, ROOT, TARGETS, Mutant, define, mutants

SOURCE = '''
def layer_backward(dy, x, n, dx, dC):
    """dy - 1."""
    dz = -dy.sum(0, keepdims=True) / (n - 1)    # (1, H)
    dx[:] = dz @ x.T
    for i in range(n):
        dx[i] += x[i]**2 if n > 0 else 0
    np.add.at(dC, x, dy)

def score(words, size):
    longest = max(map(len, words))
    longest = longest or size
    words = [word[:size].strip() for word in words if word in known and size > 1]
    for begin in range(size, longest, 2):
        print(f'{begin - 1}', np.zeros(n, dtype=kind))
    return words

# ---- The gradient check
def prove(x):
    return x + 1
'''


def changes():
    return {(mutant.before, mutant.after) for mutant in mutants('backward.py', SOURCE)}


COMPREHENSION = 'words = [word[:size].strip() for word in words if word in known and size > 1]'


@pytest.mark.parametrize('before, after', [
    ('dz = -dy.sum(0, keepdims=True) / (n - 1)', 'dz = -dy.sum(1, keepdims=True) / (n - 1)'),
    ('dz = -dy.sum(0, keepdims=True) / (n - 1)', 'dz = -dy.sum(0, keepdims=False) / (n - 1)'),
    ('dz = -dy.sum(0, keepdims=True) / (n - 1)', 'dz = -dy.sum(0, keepdims=True) / ((n))'),
    ('dz = -dy.sum(0, keepdims=True) / (n - 1)', 'dz = -dy.mean(0, keepdims=True) / (n - 1)'),
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
    ('np.add.at(dC, x, dy)', 'dC[x] += dy'),
    ('longest = max(map(len, words))', 'longest = min(map(len, words))'),
    ('longest = longest or size', 'longest = (size)'),
    ('longest = longest or size', 'longest = ((longest) and (size))'),
    ('longest = longest or size', 'pass'),
    (COMPREHENSION, COMPREHENSION.replace('[:size]', '[:]')),
    (COMPREHENSION, COMPREHENSION.replace('[:size]', '[:(size - 1)]')),
    (COMPREHENSION, COMPREHENSION.replace('.strip()', '')),
    (COMPREHENSION, COMPREHENSION.replace('word in known and size > 1', 'True')),
    (COMPREHENSION, COMPREHENSION.replace('word in known', '(word not in known)')),
    ('for begin in range(size, longest, 2):', 'for begin in range(size + 1, longest, 2):'),
    ('for begin in range(size, longest, 2):', 'for begin in range(size, longest - 1, 2):'),
    ("print(f'{begin - 1}', np.zeros(n, dtype=kind))", "print(f'{begin - 1}', np.zeros(n))")])
def test_a_small_mistake_of_each_kind_is_made(before, after):
    assert (before, after) in changes()


def test_mutants_are_of_what_stands_above_the_heading_and_no_docstring_or_message_only():
    found = list(mutants('backward.py', SOURCE))
    assert {mutant.function for mutant in found} == {'layer_backward', 'score'}
    assert min(mutant.line for mutant in found) == 4
    assert not any('begin + 1' in mutant.source for mutant in found)
    assert ('longest = max(map(len, words))', 'pass') not in changes()


@pytest.mark.parametrize('file', TARGETS)
def test_at_least_150_mutants_of_every_file_all_programs_and_all_different(file):
    source = (ROOT / file).read_text('utf-8')
    found = list(mutants(file, source))
    assert len({mutant.source for mutant in found} - {source}) == len(found) >= 150
    for mutant in found:
        function = mutant.source[mutant.source.index(f'def {mutant.function}('):]
        ast.parse(function.split('\n\n\n')[0])
    names = {node.name for node in ast.parse(source).body if isinstance(node, ast.FunctionDef)}
    mutated = {mutant.function for mutant in found}
    assert {'model.py': {'softmax', 'mlp', 'grow_tree', 'gpt', 'make_parameters', 'generate'},
            'backward.py': {name for name in names if name.endswith('_backward')} | {'gradient'},
            'train.py': {'adam', 'learning_rate', 'split', 'batches', 'dropout_masks', 'evaluate'}
            }[file] <= mutated <= names - {'main', 'prove', 'first_batch', 'save', 'work'}


def test_every_explanation_is_of_a_mutant():
    found = {f'{mutant.before} -> {mutant.after}' for file in TARGETS
             for mutant in mutants(file, (ROOT / file).read_text('utf-8'))}
    assert EXPLAINED.keys() <= found


def test_what_uses_a_mutated_function_is_defined_anew_and_nothing_else(monkeypatch):
    source = '\n'.join(['def one(): return 1', 'def two(): return one() + one()',
                        'TABLE = dict(two=two)', 'def other(): return 5'])
    module = ModuleType('layers')
    module.__file__ = 'layers.py'
    exec(source, module.__dict__)
    monkeypatch.setitem(sys.modules, 'layers', module)
    other = module.other
    define(Mutant('layers.py', 'one', 1, '', '', '', source.replace('return 1', 'return 2')))
    assert module.TABLE['two']() == module.two() == 4 and module.other is other
