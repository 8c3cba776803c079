"""Mutation: would the fast tests notice a mistake in backward.py?

    python tests/mutate.py                 try every mutant; exit status 1 if under 97 % are killed
    python tests/mutate.py --list          print the mutants and try none
    python tests/mutate.py --only TEXT     only those with TEXT in their line of the list
    python tests/mutate.py --tests FILE    by other tests than tests/test_backward.py

It takes some two minutes on two cores.

A mutant is backward.py with one small mistake, put at a place that the syntax tree gives: of every
function above the gradient check every sum, product, sign, constant, index, axis, loop bound,
comparison and statement is taken. Left out is only what Python itself refuses: the first definition
of a local name is not deleted and not turned into +=. Some mutants are programs as right as the
original. They are tried and count like all others.

A mutant is killed if a test fails or crashes, or if all of them take ten times the processor time
that they should. The tests run in a copy of the project: once as it is, which compiles the kernels
of model.py, and then for each mutant in a fork of this process whose module backward is executed
anew. The kernels of backward.py are plain Python throughout: nothing is compiled for a mutant, and
an index out of bounds is an IndexError.
"""
import argparse
import ast
import contextlib
import os
import resource
import shutil
import signal
import sys
import tempfile
import time
from pathlib import Path
from typing import NamedTuple

ROOT = Path(__file__).resolve().parent.parent
TESTS = 'tests/test_backward.py',
REQUIRED = 0.97
AT_ONCE = 2
CHECK = '\n# ---- The gradient check'         # what stands above it computes gradients

# Survivors that were looked into: 'before -> after' and why no test can kill it.
SHIFT = 'zero but for rounding: the same shift of a whole row of logits changes no loss'
UNKNOWN = 'to NumPy any negative size is the one that is not given'
LARGER = 'there is more room, and what is larger is not read'
EXPLAINED = {
    'dlogprobs[np.arange(N), Y] = -1 / N -> dlogprobs[np.arange(N), Y] += -1 / N':
        'adds to zeros, once for each row',
    'dlogits = dnorm_logits.copy() -> dlogits = dnorm_logits':
        f'what is added to dlogits afterwards is {SHIFT}',
    'dlogit_maxes = -dnorm_logits.sum(1, keepdims=True) -> '
    'dlogit_maxes = (dnorm_logits.sum(1, keepdims=True))': SHIFT,
    'dlogits[np.arange(N), logits.argmax(1)] += dlogit_maxes[:, 0] -> '
    'dlogits[np.arange(N), logits.argmax(1)] -= dlogit_maxes[:, 0]': SHIFT,
    'dlogits[np.arange(N), logits.argmax(1)] += dlogit_maxes[:, 0] -> pass': SHIFT,
    'add_at(dC, X.reshape(-1), demb.reshape(-1, dC.shape[1])) -> '
    'add_at(dC, X.reshape(-2), demb.reshape(-1, dC.shape[1]))': UNKNOWN,
    'add_at(dC, X.reshape(-1), demb.reshape(-1, dC.shape[1])) -> '
    'add_at(dC, X.reshape(-1), demb.reshape(-2, dC.shape[1]))': UNKNOWN,
    'db[j] += dy[i, j] -> db[j] += dy[(i - 1), j]':
        'the rows are added in another order, beginning with the last',
    'dbias[j] += dy[i, j] -> dbias[j] += dy[(i - 1), j]':
        'the rows are added in another order, beginning with the last',
    'scratch = np.empty((2, position.max() + 1), qkv.dtype) -> '
    'scratch = np.empty((3, position.max() + 1), qkv.dtype)': LARGER,
    'scratch = np.empty((2, position.max() + 1), qkv.dtype) -> '
    'scratch = np.empty((2, position.max() + 2), qkv.dtype)': LARGER,
    'dweight, dscores = scratch[0, :len(seen)], scratch[1, :len(seen)] -> '
    'dweight, dscores = scratch[1, :len(seen)], scratch[1, :len(seen)]':
        'softmax_backward does not read an element again that it has filled',
    'masks = [1] * (2*L) if masks is None else masks -> '
    'masks = [1] * (3*L) if masks is None else masks':
        'the list is longer, and what is longer is not read'}


# ---- Mutants

class Mutant(NamedTuple):
    function: str
    line: int
    kind: str
    before: str
    after: str
    source: str

    def __str__(self):
        return f'backward.py:{self.line} {self.kind}: {self.before} -> {self.after}'


OTHER_OPERATOR = {ast.Add: '-', ast.Sub: '+', ast.Mult: '/', ast.Div: '*', ast.FloorDiv: '*'}
OTHER_COMPARISONS = {ast.Gt: ('>=', '<'), ast.GtE: ('>', '<='), ast.Lt: ('<=', '>'),
                     ast.LtE: ('<', '>='), ast.Is: ('is not',), ast.IsNot: ('is',),
                     ast.Eq: ('!=',), ast.NotEq: ('==',)}
OTHER_FUNCTION = {'np.zeros_like': 'np.ones_like', 'np.ones_like': 'np.zeros_like',
                  'np.zeros': 'np.ones'}
COUNTS = 'n', 'N', 'V', 'E', 'A'
PRODUCTS = 'np.dot', 'np.matmul'
REDUCTIONS = 'sum', 'mean', 'max', 'argmax', 'cumsum'


def other_constant(node, parent):
    value = node.value
    if isinstance(parent, ast.keyword) and isinstance(value, bool):
        return str(not value)
    if isinstance(value, bool) or not isinstance(value, (int, float)):
        return None
    axis = isinstance(parent, ast.Call) and isinstance(parent.func, ast.Attribute) \
        and parent.func.attr in REDUCTIONS
    if axis or isinstance(parent, ast.keyword) and parent.arg == 'axis':
        return str(1 - value)
    return str(value + 1 if isinstance(value, int) else 2 * value)


def product_operands(node):
    """The two operands of a matrix product, or nothing."""
    if isinstance(node, ast.BinOp) and isinstance(node.op, ast.MatMult):
        return [node.left, node.right]
    if isinstance(node, ast.Call) and ast.unparse(node.func) in PRODUCTS:
        return node.args[:2]
    return []


def expression_changes(node, parent):
    """(kind, new text) for each small mistake in an expression."""
    text = ast.unparse
    if isinstance(node, ast.BinOp):
        left, right = f'({text(node.left)})', f'({text(node.right)})'
        kind = type(node.op)
        if kind in (ast.Add, ast.Sub):
            yield 'term dropped', left
            yield 'term dropped', right if kind is ast.Add else f'(-{right})'
        if kind in (ast.Mult, ast.Div, ast.FloorDiv, ast.Pow):
            yield 'factor dropped', left
        if kind is ast.Mult:
            yield 'factor dropped', right
        if kind in OTHER_OPERATOR:
            yield 'operator', f'({left} {OTHER_OPERATOR[kind]} {right})'
        if kind is ast.MatMult:
            yield 'operands swapped', f'({right} @ {left})'
    if isinstance(node, ast.UnaryOp) and isinstance(node.op, (ast.USub, ast.Not)):
        yield 'sign', f'({text(node.operand)})'
    if isinstance(node, ast.Constant):
        other = other_constant(node, parent)
        if other is not None:
            yield 'constant', other
    if isinstance(node, ast.Attribute) and node.attr == 'T':
        yield 'transposed', text(node.value)
    if node in product_operands(parent) and not text(node).endswith('.T'):
        yield 'transposed', f'({text(node)}).T'
    if isinstance(node, ast.Compare):
        for other in OTHER_COMPARISONS[type(node.ops[0])]:
            yield 'comparison', f'({text(node.left)} {other} {text(node.comparators[0])})'
    if isinstance(node, ast.IfExp):
        yield 'branch dropped', f'({text(node.body)})'
        yield 'branch dropped', f'({text(node.orelse)})'
    if isinstance(node, ast.Name) and isinstance(node.ctx, ast.Load):
        less = f'({node.id} - 1)'
        in_product = isinstance(parent, (ast.BinOp, ast.Call)) and node.id in COUNTS
        if isinstance(parent, ast.Subscript) and parent.slice is node or in_product or \
                isinstance(parent, ast.Tuple):
            yield 'off by one', less
    if isinstance(node, ast.Call):
        yield from call_changes(node)


def call_changes(node):
    name, arguments = ast.unparse(node.func), [ast.unparse(argument) for argument in node.args]
    keywords = [ast.unparse(keyword) for keyword in node.keywords]
    if name == 'range':
        yield 'loop bound', f'range(1, {arguments[0]})'
        yield 'loop bound', f'range({arguments[0]} - 1)'
    if name in ('reversed', 'sqrt'):
        yield 'call dropped', f'({arguments[0]})'
    if name in OTHER_FUNCTION:
        yield 'other function', f"{OTHER_FUNCTION[name]}({', '.join(arguments + keywords)})"
    if name in PRODUCTS:
        swapped = [*arguments[1::-1], *arguments[2:], *keywords]
        yield 'operands swapped', f"{name}({', '.join(swapped)})"
    if name.endswith('_backward'):
        swapped = [*arguments[1::-1], *arguments[2:]]
        yield 'arguments swapped', f"{name}({', '.join(swapped)})"
    if name == 'np.where':
        yield 'operands swapped', f'np.where({arguments[0]}, {arguments[2]}, {arguments[1]})'
    if name.endswith('.copy'):
        yield 'copy dropped', name.removesuffix('.copy')


def statement_changes(node):
    """(kind, new text) for each small mistake in a statement as a whole."""
    text = ast.unparse
    if isinstance(node, ast.AugAssign):
        target, value, kind = text(node.target), text(node.value), type(node.op)
        yield 'added: set', f'{target} = {value}'
        yield 'operator', f'{target} {OTHER_OPERATOR[kind]}= {value}'
    if isinstance(node, ast.Assign) and isinstance(node.targets[0], ast.Subscript):
        yield 'set: added', f'{text(node.targets[0])} += {text(node.value)}'
    local = isinstance(node, ast.Assign) and not isinstance(node.targets[0], ast.Subscript)
    if isinstance(node, ast.Expr) and isinstance(node.value, ast.Call):
        if text(node.value.func) == 'np.add.at':
            array, index, value = map(text, node.value.args)
            yield 'repeated index', f'{array}[{index}] += {value}'
    if isinstance(node, ast.If):
        yield 'condition dropped', f'if True:{inside(node)}'
    if not isinstance(node, ast.Return) and not local:
        yield 'statement deleted', 'pass'


def inside(node):
    """The body of an if, to follow its colon; what else it has, too."""
    indent = ' ' * node.col_offset
    lines = ast.unparse(node).splitlines()[1:]
    return ''.join(f'\n{indent}{line}' for line in lines)


def replaced(source, node, text):
    """The source with another text in the place of a node; columns are counted in bytes."""
    lines = source.encode().splitlines(keepends=True)
    first, last = node.lineno - 1, node.end_lineno - 1
    begin, end = lines[first][:node.col_offset], lines[last][node.end_col_offset:]
    return b''.join([*lines[:first], begin, text.encode(), end, *lines[last + 1:]]).decode()


def first_difference(source, mutated, line):
    """The line that differs, before and after, without its comment."""
    pairs = zip(source.splitlines()[line - 1:], mutated.splitlines()[line - 1:])
    changed = next(pair for pair in pairs if pair[0] != pair[1])
    return [text.partition('  #')[0].strip() for text in changed]


def mutants(source):
    """Every mutant of every function above the gradient check, in the order of the source."""
    seen = {source}
    for function in ast.parse(source.partition(CHECK)[0]).body:
        if not isinstance(function, ast.FunctionDef):
            continue
        pairs = [(child, parent) for statement in function.body for parent in ast.walk(statement)
                 for child in ast.iter_child_nodes(parent)]
        pairs += [(statement, function) for statement in function.body]
        for node, parent in sorted(pairs, key=lambda pair: getattr(pair[0], 'lineno', 0)):
            if isinstance(node, ast.stmt):
                if ast.get_docstring(function) and node is function.body[0]:
                    continue
                changes = statement_changes(node)
            elif isinstance(node, ast.expr):
                changes = expression_changes(node, parent)
            else:
                continue
            for kind, text in changes:
                mutated = replaced(source, node, text)
                if mutated not in seen:
                    seen.add(mutated)
                    before, after = first_difference(source, mutated, node.lineno)
                    yield Mutant(function.name, node.lineno, kind, before, after, mutated)


# ---- Trying them

class Mutation:
    """A pytest plugin: runs the collected tests as they are, then once more for each mutant."""

    def __init__(self, mutants):
        self.mutants, self.failed, self.survivors = mutants, None, []

    def pytest_runtestloop(self, session):
        self.failed = [item.nodeid for item, following in in_order(session.items)
                       if not passes(item, following)]
        if not self.failed:
            seconds = int(10 + 10 * time.process_time())
            control = Mutant('', 0, '', '', '', (ROOT / 'backward.py').read_text())
            if not list(survivors([control], session.items, seconds)):
                self.failed = ['all of them once more, in a fork']
                return True
            for mutant in survivors(self.mutants, session.items, seconds):
                self.survivors.append(mutant)
                reason = EXPLAINED.get(f'{mutant.before} -> {mutant.after}', 'NOT EXPLAINED')
                print(mutant, reason, sep='\n    ', file=sys.__stdout__, flush=True)
        return True


def in_order(items):
    return zip(items, [*items[1:], None])


def passes(item, following):
    from _pytest.runner import runtestprotocol
    return not any(report.failed for report in runtestprotocol(item, False, following))


def start(mutant, items, seconds):
    """Try a mutant in a fork, by the tests with the name of its function first; returns its id."""
    child = os.fork()
    if child:
        return child
    killed = True
    try:
        resource.setrlimit(resource.RLIMIT_CPU, (seconds, seconds))
        exec(compile(mutant.source, 'backward.py', 'exec'), sys.modules['backward'].__dict__)
        stem = mutant.function.partition('_backward')[0]
        items = sorted(items, key=lambda item: stem not in item.name)
        killed = not all(passes(item, following) for item, following in in_order(items))
    finally:
        os._exit(killed)


def survivors(mutants, items, seconds):
    """Try all mutants, AT_ONCE of them at a time; yields those that no test kills."""
    waiting, running = list(mutants), {}
    try:
        while waiting or running:
            while waiting and len(running) < AT_ONCE:
                mutant = waiting.pop(0)
                running[start(mutant, items, seconds)] = mutant
            child, status = os.wait()
            mutant = running.pop(child)
            if sys.stderr.isatty():
                print(f'\r{len(waiting) + len(running)} left ', end='', file=sys.stderr, flush=True)
            if status == 0:
                yield mutant
    finally:
        for child in running:
            os.kill(child, signal.SIGKILL)
            os.waitpid(child, 0)


def copy_project(folder):
    """What the tests need, so that nothing is compiled or written where the project is."""
    for name in 'model.py', 'backward.py', 'train.py', 'sample.py', 'pyproject.toml':
        shutil.copy2(ROOT / name, folder)
    for name in 'data', 'tests':
        shutil.copytree(ROOT / name, folder / name)


def try_mutants(found, tests):
    """The tests that fail without any mutant, None if there are no tests; and the survivors."""
    mutation = Mutation(found)
    with tempfile.TemporaryDirectory() as folder:
        copy_project(Path(folder))
        os.chdir(folder)
        sys.path.insert(0, folder)
        import model
        model.kernel = lambda function: function
        import pytest
        with open(os.devnull, 'w') as nothing, contextlib.redirect_stdout(nothing):
            pytest.main(['-q', '-p', 'no:cacheprovider', '--capture=sys', '--tb=native', *tests],
                        plugins=[mutation])
        os.chdir(ROOT)
    return mutation.failed, mutation.survivors


def main():
    parser = argparse.ArgumentParser('mutate.py', description=__doc__.splitlines()[0])
    parser.add_argument('--list', action='store_true', help='print the mutants and try none')
    parser.add_argument('--only', metavar='TEXT', default='', help='only those with TEXT in them')
    parser.add_argument('--tests', metavar='FILE', nargs='+', default=TESTS, help='by these tests')
    args = parser.parse_args()
    found = [mutant for mutant in mutants((ROOT / 'backward.py').read_text())
             if args.only in str(mutant)]
    if args.list:
        print(*found, f'{len(found)} mutants', sep='\n')
        return 0
    failed, survived = try_mutants(found, args.tests)
    if failed != []:
        print('without any mutant these fail:', *failed or ['the tests did not run'], sep='\n    ')
        return 1
    killed = len(found) - len(survived)
    print(f'{len(found)} mutants, {killed} killed ({killed / max(len(found), 1):.1%}), '
          f'{len(survived)} survived')
    return int(killed < REQUIRED * len(found))


if __name__ == '__main__':
    sys.exit(main())
