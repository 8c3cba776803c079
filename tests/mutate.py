"""Mutation: would the fast tests notice a mistake in model.py, backward.py or train.py?

    python tests/mutate.py                 try every mutant; exit status 1 if under 97 % are killed
    python tests/mutate.py train.py        only the mutants of this file, or of several
    python tests/mutate.py --list          print the mutants and try none
    python tests/mutate.py --only TEXT     only those with TEXT in their line of the list
    python tests/mutate.py --tests FILE    by other tests than those of TARGETS

On two cores each file takes some ten minutes.

A mutant is one of these files with one small mistake, put at a place that the syntax tree gives: of
every function named in TARGETS every sum, product, sign, constant, index, axis, loop bound,
condition, call and statement is taken. Left out is only what Python itself refuses: the first
definition of a local name is not deleted and not turned into +=. Some mutants are programs as right
as the original. They are tried and count like all others.

A mutant is killed if a test fails or crashes, or takes far longer than it should.
The tests run in a copy of the project: once as it is, which compiles the kernels, and then for each
mutant in a fork of this process. There the mutated function is defined anew, and so is everything
in its file that uses it; of these functions the kernels are plain Python, so that nothing is
compiled for a mutant, and an index out of bounds is an IndexError. Before any mutant, the tests
have to pass in a fork in which all functions of the file are defined anew without a mistake.
"""
import argparse
import ast
import contextlib
import linecache
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
REQUIRED = 0.97
AT_ONCE = 2


class Target(NamedTuple):
    end: str            # the mutants are of the functions above this heading,
    left_out: tuple     # but for these;
    tests: tuple        # they are tried by these tests


# Left out are tests that start programs, for which there is no mutant, and tests of other things.
PROOF = ('the_proof or place_of_a_mistake or not_written_yet or error_of_the_compiler or '
         'py_prints or without_compilation')
SLOW = ('spawn or fork or signal or killed or any_file or any_bytes or locale or terminal or '
        'picture or diverges or filters or death or is_left or test_from or by_heart or '
        'counting_py or on_the_names')
TARGETS = {
    'model.py': Target('\n# ---- python model.py', (), (
        'tests/test_model.py', 'tests/test_backward.py', '-k', f'not ({PROOF})')),
    'backward.py': Target('\n# ---- The gradient check', (), (
        'tests/test_backward.py', '-k', f'not ({PROOF})')),
    'train.py': Target('\n# ---- Checkpoints', ('log', 'command', 'work', 'start_processes'), (
        'tests/test_train.py', 'tests/test_data_reading.py', 'tests/test_counting.py',
        'tests/test_kill.py', '-k', f'not ({SLOW})'))}

# Survivors that were looked into: 'before -> after' and why no test can kill it.
SHIFT = 'zero but for rounding: the same shift of a whole row of logits changes no loss'
UNKNOWN = 'to NumPy any negative size is the one that is not given'
LARGER = 'there is more room, and what is larger is not read'
LAST_FIRST = 'the rows are added in another order, beginning with the last'
VECTOR = 'a vector is its own transpose, and the product of two has no order'
OVERWRITTEN = 'all values are overwritten, or added to zeros'
EXPLAINED = {
    # model.py
    'return np.array(rows).reshape(-1, T + 1) -> return np.array(rows).reshape(-2, T + 1)': UNKNOWN,
    'embcat = emb.reshape(N, -1) -> embcat = emb.reshape(N, -2)': UNKNOWN,
    'return C.take(X, 0).reshape(len(X), -1) -> return C.take(X, 0).reshape(len(X), -2)': UNKNOWN,
    'y[i, j] += b[j] -> y[(i - 1), j] += b[j]': LAST_FIRST,
    'mean[j] += x[i, j] -> mean[j] += x[(i - 1), j]': LAST_FIRST,
    'N, S, B, start, start_before = 0, 0, 0, 0, 0 -> N, S, B, start, start_before = 0, 0, 0, 0, 1':
        'the first word shares nothing, so that start_before is not read',
    'probs[j] /= total -> probs[(j - 1)] /= total': 'each is divided once, the last one first',
    'shared = start > 0 -> shared = start > 1':
        'a word has two ids at least, its two boundary tokens: so start is 0, or 2 and more',
    'score = qkv.dtype.type(0) -> score = qkv.dtype.type(1)':
        'the same shift of all scores of a row changes no weight',
    'parts = np.split(flat, np.cumsum(sizes)[:-1]) -> parts = np.split(flat, np.cumsum(sizes)[:])':
        'one more part, which is empty and gets no name',
    'p = views(shapes, np.zeros(sum(map(prod, shapes.values())), dtype)) -> '
    'p = views(shapes, np.ones(sum(map(prod, shapes.values())), dtype))': OVERWRITTEN,
    "w[:] = 1 if name in ('gain', 'bngain') else std * rng.standard_normal(w.shape) -> "
    "w[:] += 1 if name in ('gain', 'bngain') else std * rng.standard_normal(w.shape)": OVERWRITTEN,
    'weights = np.exp((z - z[:, :1]) / max(temperature, 1e-9)) -> '
    'weights = np.exp((z - z[:, :1]) / max(temperature, 2e-09))':
        'both leave only the likeliest, unless two logits differ by less than 1e-7',
    'logits[:, 0] = -np.inf -> logits[:, 0] += -np.inf': 'a number minus infinity is the same',
    # backward.py
    'dlogprobs[np.arange(N), Y] = -1 / N -> dlogprobs[np.arange(N), Y] += -1 / N': OVERWRITTEN,
    'dlogits = dnorm_logits.copy() -> dlogits = dnorm_logits':
        f'what is added to dlogits afterwards is {SHIFT}',
    'dlogit_maxes = -dnorm_logits.sum(1, keepdims=True) -> '
    'dlogit_maxes = (dnorm_logits.sum(1, keepdims=True))': SHIFT,
    'dlogit_maxes = -dnorm_logits.sum(1, keepdims=True) -> '
    'dlogit_maxes = -dnorm_logits.mean(1, keepdims=True)': SHIFT,
    'dlogits[np.arange(N), logits.argmax(1)] += dlogit_maxes[:, 0] -> '
    'dlogits[np.arange(N), logits.argmax(1)] -= dlogit_maxes[:, 0]': SHIFT,
    'dlogits[np.arange(N), logits.argmax(1)] += dlogit_maxes[:, 0] -> pass': SHIFT,
    'db1 = dhprebn.sum(0) -> db1 = dhprebn.mean(0)': 'zero but for rounding, as b1 cancels',
    'add_at(dC, X.reshape(-1), demb.reshape(-1, dC.shape[1])) -> '
    'add_at(dC, X.reshape(-2), demb.reshape(-1, dC.shape[1]))': UNKNOWN,
    'add_at(dC, X.reshape(-1), demb.reshape(-1, dC.shape[1])) -> '
    'add_at(dC, X.reshape(-1), demb.reshape(-2, dC.shape[1]))': UNKNOWN,
    'db[j] += dy[i, j] -> db[j] += dy[(i - 1), j]': LAST_FIRST,
    'dbias[j] += dy[i, j] -> dbias[j] += dy[(i - 1), j]': LAST_FIRST,
    'masks = [1] * (2*L) if masks is None else masks -> '
    'masks = [1] * (3*L) if masks is None else masks': LARGER,
    # train.py
    'return words[:end1] or words, words[end1:end2] or words, words[end2:] or words -> '
    'return words[:end1] or words, words[end1:end2] or words, (words[end2:])':
        'what is left for test is never empty',
    'known, distinct = set(train), len(set(words)) -> known, distinct = (train), len(set(words))':
        'a set is only faster than a list',
    'yield m.gpt_batch(examples, np.array_split(chosen, shards)[k]) -> '
    'yield m.gpt_batch(examples, np.array_split(chosen, shards)[(k - 1)])':
        'each process takes the shard of another one',
    "kept = rng.random((2*config['layers'], N, config['embd']), np.float32) >= config['dropout']"
    " -> kept = (rng.random((2 * config['layers'], N, config['embd']), np.float32) > "
    "config['dropout'])": 'hardly any random number is exactly the rate',
    'if connections: -> if True:': 'the only process has the weight 1',
    'loss, dw = weights @ losses, weights @ flat_g -> '
    'loss, dw = ((losses) @ (weights)), weights @ flat_g': VECTOR,
    'loss, dw = weights @ losses, weights @ flat_g -> '
    'loss, dw = (weights).T @ losses, weights @ flat_g': VECTOR,
    'loss, dw = weights @ losses, weights @ flat_g -> '
    'loss, dw = weights @ losses, (weights).T @ flat_g': VECTOR,
    "if config['weight_decay']: -> if True:": 'a decay of 0 is a factor of 1',
    **{"size = 4096 if model.config['model'] == 'mlp' else 64 -> " + after: 'only the speed differs'
       for after in ("size = (4096)", "size = (64)",
                     "size = 4097 if model.config['model'] == 'mlp' else 64",
                     "size = 4096 if (model.config['model'] != 'mlp') else 64",
                     "size = 4096 if model.config['model'] == 'mlp' else 65")}}


# ---- Mutants

class Mutant(NamedTuple):
    file: str
    function: str
    line: int
    kind: str
    before: str
    after: str
    source: str

    def __str__(self):
        return f'{self.file}:{self.line} {self.kind}: {self.before} -> {self.after}'


OTHER_OPERATOR = {ast.Add: '-', ast.Sub: '+', ast.Mult: '/', ast.Div: '*', ast.FloorDiv: '*'}
OTHER_COMPARISONS = {ast.Gt: ('>=', '<'), ast.GtE: ('>', '<='), ast.Lt: ('<=', '>'),
                     ast.LtE: ('<', '>='), ast.Is: ('is not',), ast.IsNot: ('is',),
                     ast.Eq: ('!=',), ast.NotEq: ('==',), ast.In: ('not in',),
                     ast.NotIn: ('in',)}
OTHER_FUNCTION = {'np.zeros_like': 'np.ones_like', 'np.ones_like': 'np.zeros_like',
                  'np.zeros': 'np.ones', 'max': 'min', 'min': 'max', 'np.maximum': 'np.minimum'}
OTHER_METHOD = {'sum': 'mean', 'mean': 'sum', 'max': 'min'}
FUNCTIONS_DROPPED = 'reversed', 'sorted', 'set', 'int', 'sqrt', 'exp', 'log', 'np.sqrt', 'np.exp', \
    'np.log', 'np.tanh', 'np.sort'
METHODS_DROPPED = 'copy', 'astype', 'replace', 'strip', 'removeprefix'
COUNTS = 'n', 'N', 'V', 'E', 'A', 'T', 'L', 'H', 'size'
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
    return str(value + 1 if isinstance(value, int) else 2 * value or 1.)


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
    if isinstance(node, ast.BoolOp):
        first, last = f'({text(node.values[0])})', f'({text(node.values[-1])})'
        yield 'condition', f"({first} {'or' if isinstance(node.op, ast.And) else 'and'} {last})"
        yield 'condition dropped', first
        yield 'condition dropped', last
    if isinstance(node, ast.IfExp):
        yield 'branch dropped', f'({text(node.body)})'
        yield 'branch dropped', f'({text(node.orelse)})'
    if isinstance(parent, ast.comprehension) and node in parent.ifs:
        yield 'condition dropped', 'True'
    if isinstance(parent, ast.Slice) and not isinstance(node, ast.Constant):
        yield 'bound dropped', ''
    if isinstance(node, ast.Name) and isinstance(node.ctx, ast.Load):
        less = f'({node.id} - 1)'
        in_product = isinstance(parent, (ast.BinOp, ast.Call)) and node.id in COUNTS
        if isinstance(parent, ast.Subscript) and parent.slice is node or in_product or \
                isinstance(parent, (ast.Tuple, ast.Slice)):
            yield 'off by one', less
    if isinstance(node, ast.Call):
        yield from call_changes(node)


def call_changes(node):
    name, arguments = ast.unparse(node.func), [ast.unparse(argument) for argument in node.args]
    keywords = [ast.unparse(keyword) for keyword in node.keywords]
    of, _, method = name.rpartition('.')
    if name == 'range':
        *begin, end = arguments[:2]
        rest = ''.join(f', {step}' for step in arguments[2:])
        yield 'loop bound', f"range({begin[0] + ' + ' if begin else ''}1, {end}{rest})"
        yield 'loop bound', f"range({begin[0] if begin else 0}, {end} - 1{rest})"
    if name in FUNCTIONS_DROPPED and arguments:
        yield 'call dropped', f'({arguments[0]})'
    if method in METHODS_DROPPED and of:
        yield 'call dropped', of
    if name in OTHER_FUNCTION:
        yield 'other function', f"{OTHER_FUNCTION[name]}({', '.join(arguments + keywords)})"
    elif method in OTHER_METHOD and of:
        yield 'other function', f"{of}.{OTHER_METHOD[method]}({', '.join(arguments + keywords)})"
    if name in PRODUCTS:
        swapped = [*arguments[1::-1], *arguments[2:], *keywords]
        yield 'operands swapped', f"{name}({', '.join(swapped)})"
    if name.endswith('_backward') or name == 'divmod':
        swapped = [*arguments[1::-1], *arguments[2:]]
        yield 'arguments swapped', f"{name}({', '.join(swapped)})"
    if name == 'np.where':
        yield 'operands swapped', f'np.where({arguments[0]}, {arguments[2]}, {arguments[1]})'
    for keyword in node.keywords:
        if keyword.arg and name != 'dict' and not isinstance(keyword.value, ast.Constant):
            rest = [ast.unparse(each) for each in node.keywords if each is not keyword]
            yield 'argument dropped', f"{name}({', '.join(arguments + rest)})"


def statement_changes(node, defined):
    """(kind, new text) for each small mistake in a statement as a whole.

    defined has the local names that statements above it define.
    """
    text = ast.unparse
    if isinstance(node, ast.AugAssign):
        target, value, kind = text(node.target), text(node.value), type(node.op)
        yield 'added: set', f'{target} = {value}'
        if kind in OTHER_OPERATOR:
            yield 'operator', f'{target} {OTHER_OPERATOR[kind]}= {value}'
    if isinstance(node, ast.Assign) and isinstance(node.targets[0], ast.Subscript):
        yield 'set: added', f'{text(node.targets[0])} += {text(node.value)}'
    if isinstance(node, ast.Expr) and isinstance(node.value, ast.Call):
        if text(node.value.func) == 'np.add.at':
            array, index, value = map(text, node.value.args)
            yield 'repeated index', f'{array}[{index}] += {value}'
    if isinstance(node, ast.If):
        yield 'condition dropped', f'if True:{inside(node)}'
    if not isinstance(node, ast.Return) and assigned(node) <= defined:
        yield 'statement deleted', 'pass'


def assigned(node):
    """The names that an assignment or the definition of a function defines."""
    if isinstance(node, ast.FunctionDef):
        return {node.name}
    targets = node.targets if isinstance(node, ast.Assign) else []
    return {each.id for target in targets for each in ast.walk(target)
            if isinstance(each, ast.Name) and isinstance(each.ctx, ast.Store)}


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


def mutants(file, source):
    """Every mutant of every function above the heading of its file, in the order of the source."""
    seen, target = {source}, TARGETS[file]
    for function in ast.parse(source.partition(target.end)[0]).body:
        if not isinstance(function, ast.FunctionDef) or function.name in target.left_out:
            continue
        pairs = [(child, parent) for statement in function.body for parent in ast.walk(statement)
                 for child in ast.iter_child_nodes(parent)]
        pairs += [(statement, function) for statement in function.body]
        # Up to Python 3.11 what is inside of an f-string has no place in the source.
        messages = [node for node, _ in pairs if isinstance(node, ast.JoinedStr)]
        messages = {node for message in messages for node in ast.walk(message)}
        defined = {each.arg for each in function.args.args}
        for node, parent in sorted(pairs, key=lambda pair: getattr(pair[0], 'lineno', 0)):
            if isinstance(node, ast.stmt):
                if ast.get_docstring(function) and node is function.body[0]:
                    continue
                changes = statement_changes(node, defined)
            elif isinstance(node, ast.expr) and node not in messages:
                changes = expression_changes(node, parent)
            else:
                continue
            for kind, text in changes:
                mutated = replaced(source, node, text)
                if mutated not in seen:
                    seen.add(mutated)
                    before, after = first_difference(source, mutated, node.lineno)
                    yield Mutant(file, function.name, node.lineno, kind, before, after, mutated)
            defined |= assigned(node)


# ---- Trying them

class Mutation:
    """A pytest plugin: runs the collected tests as they are, then once more for each mutant."""

    def __init__(self, file, mutants):
        self.control = Mutant(file, '', 0, '', '', '', (ROOT / file).read_text('utf-8'))
        self.mutants, self.failed, self.survivors = mutants, None, []

    def pytest_runtestloop(self, session):
        self.failed, seconds = [], {}
        for item, following in in_order(session.items):
            begun = time.process_time()
            if not passes(item, following):
                self.failed.append(item.nodeid)
            seconds[item] = time.process_time() - begun
        if not self.failed and not list(survivors([self.control], seconds)):
            self.failed = ['one of them without compilation']
        if not self.failed:
            for mutant in survivors(self.mutants, seconds):
                self.survivors.append(mutant)
                reason = EXPLAINED.get(f'{mutant.before} -> {mutant.after}', 'NOT EXPLAINED')
                print(mutant, reason, sep='\n    ', file=sys.__stdout__, flush=True)
        return True


def in_order(items):
    return zip(items, [*items[1:], None])


def passes(item, following):
    from _pytest.runner import runtestprotocol
    return not any(report.failed for report in runtestprotocol(item, False, following))


def define(mutant):
    """Define anew the mutated function, and all in its file that uses it; or all, without a name.

    A file is read from top to bottom: what uses a name stands below its definition.
    """
    module = sys.modules[mutant.file.removesuffix('.py')]
    module.kernel = lambda function: function
    body, changed = ast.parse(mutant.source).body, []
    names = {mutant.function or getattr(node, 'name', '') for node in body}
    for node in body:
        used = {each.id for each in ast.walk(node) if isinstance(each, ast.Name)}
        defined = assigned(node)
        if defined and (used | defined) & names:
            changed.append(node)
            names |= defined
    lines = mutant.source.splitlines(keepends=True)
    linecache.cache[module.__file__] = len(mutant.source), None, lines, module.__file__
    exec(compile(ast.Module(changed, []), module.__file__, 'exec'), module.__dict__)


def start(mutant, seconds):
    """Try a mutant in a fork, by the tests with the name of its function first; returns its id.

    seconds has the processor time that each test takes without a mutant.
    """
    child = os.fork()
    if child:
        return child
    killed = True
    try:
        limit = int(10 + 10 * sum(seconds.values()))       # for processes of a test, too
        resource.setrlimit(resource.RLIMIT_CPU, (limit, limit))
        signal.alarm(2 * limit)         # by the clock: its processes may wait for each other
        define(mutant)
        stem = mutant.function.partition('_backward')[0]
        items = sorted(seconds, key=lambda item: (stem not in item.name, seconds[item]))
        for item, following in in_order(items):
            signal.setitimer(signal.ITIMER_PROF, 10 + 10 * seconds[item])
            signal.alarm(int(60 + 20 * seconds[item]))     # processes may wait for each other
            if not passes(item, following):
                break
        else:
            killed = False
    finally:
        os._exit(killed)


def survivors(mutants, seconds):
    """Try all mutants, AT_ONCE of them at a time; yields those that no test kills."""
    waiting, running = list(mutants), {}
    try:
        while waiting or running:
            while waiting and len(running) < AT_ONCE:
                mutant = waiting.pop(0)
                running[start(mutant, seconds)] = mutant
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


def try_mutants(file, found, tests):
    """The tests that fail without any mutant, None if there are no tests; and the survivors."""
    mutation = Mutation(file, found)
    with tempfile.TemporaryDirectory() as folder:
        copy_project(Path(folder))
        os.chdir(folder)
        sys.path.insert(0, folder)
        import pytest
        with open(os.devnull, 'w') as nothing, contextlib.redirect_stdout(nothing):
            pytest.main(['-q', '-p', 'no:cacheprovider', '-p', 'no:faulthandler', '--tb=native',
                         '--capture=sys', f'--basetemp={folder}/tmp', '-o',
                         'tmp_path_retention_policy=none', *tests], plugins=[mutation])
        os.chdir(ROOT)
    return mutation.failed, mutation.survivors


def report(file, args):
    """Try the mutants of a file, or list them; returns 1 if too few are killed."""
    begun = time.perf_counter()
    found = [mutant for mutant in mutants(file, (ROOT / file).read_text('utf-8'))
             if args.only in str(mutant)]
    if args.list:
        print(*found, f'{file}: {len(found)} mutants', sep='\n')
        return 0
    failed, survived = try_mutants(file, found, args.tests or TARGETS[file].tests)
    if failed != []:
        print('without any mutant these fail:', *failed or ['the tests did not run'], sep='\n    ')
        return 1
    killed = len(found) - len(survived)
    print(f'{file}: {len(found)} mutants, {killed} killed ({killed / max(len(found), 1):.1%}), '
          f'{len(survived)} survived, {time.perf_counter() - begun:.0f} s')
    return int(killed < REQUIRED * len(found))


def main():
    parser = argparse.ArgumentParser('mutate.py', description=__doc__.splitlines()[0])
    parser.add_argument('files', nargs='*', metavar='FILE', help=f"of {', '.join(TARGETS)} (all)")
    parser.add_argument('--list', action='store_true', help='print the mutants and try none')
    parser.add_argument('--only', metavar='TEXT', default='', help='only those with TEXT in them')
    parser.add_argument('--tests', metavar='FILE', nargs='+', help='by these tests')
    args, status = parser.parse_args(), 0
    for file in args.files or TARGETS:
        if os.fork() == 0:              # each file has a process, which imports its own copy
            return report(file, args)
        status |= os.waitstatus_to_exitcode(os.wait()[1])
    return status


if __name__ == '__main__':
    sys.exit(main())
