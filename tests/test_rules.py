"""The house rules, read off the source; each rule is shown a source that breaks it, too.

A shape comment is checked by running: the functions of model.py and backward.py are rebuilt with
a look at the array after each assignment, and with their kernels as plain Python.
"""
import ast
import builtins
import functools
import io
import re
import subprocess
import sys
import tokenize
import types
from itertools import zip_longest
from pathlib import Path

import numpy as np
import pytest

ROOT = Path(__file__).parent.parent
FILES = 'model', 'backward', 'train', 'sample'
SOURCES = {name: (ROOT / f'{name}.py').read_text() for name in FILES}
TOP_LEVEL = {'README.md', 'requirements.txt', 'model.py', 'backward.py', 'train.py', 'sample.py',
             'data', 'tests', '.ci', '.gitignore', 'pyproject.toml'}


@functools.cache
def functions(source):
    return [node for node in ast.parse(source).body if isinstance(node, ast.FunctionDef)]


def parameters(function):
    return [arg.arg for arg in function.args.args]


def is_kernel(function):
    return any('kernel' in ast.unparse(decorator) for decorator in function.decorator_list)


def tracked():
    """Paths in the repository; a copy without one has no tracked files."""
    try:
        listed = subprocess.run(['git', 'ls-files', '-z'], cwd=ROOT, capture_output=True, text=True)
    except FileNotFoundError:
        pytest.skip('git is not installed')
    if listed.returncode:
        pytest.skip('not a git repository')
    return [path for path in listed.stdout.split('\0') if path]


# ---- Every layer has its backward

# Functions in the sections of the layers that are only a part of one, and have no backward.
PARTS = 'add_bias', 'add_at', 'sum_rows'


def layers(source):
    """(section, function) of all layers in order; the function is a node of the syntax tree."""
    headings = {number: line for number, line in enumerate(source.splitlines(), 1)
                if line.startswith('# ----')}
    found = [(headings[max(number for number in headings if number < function.lineno)], function)
             for function in functions(source) if function.name not in PARTS]
    return [(heading, function) for heading, function in found if '- Layers of' in heading]


def order(source):
    return [(heading, function.name.removesuffix('_backward'))
            for heading, function in layers(source)]


# Names of what is returned that stand in no return statement: that of the one result of a layer is
# y, or the name that mlp() gives to it.
RESULTS = dict(embedding={'emb'})


def returned_names(source):
    """{layer: the names of what it returns}; all functions in a table return the same."""
    tree, found = ast.parse(source), {}
    for function in functions(source):
        results = [node.value for node in ast.walk(function) if isinstance(node, ast.Return)]
        elements = [element for result in results for element in getattr(result, 'elts', [result])]
        names = {re.sub(r'\.reshape\(.*\)$', '', ast.unparse(element)) for element in elements}
        found[function.name] = names | RESULTS.get(function.name, {'y'})
    for node in tree.body:
        if isinstance(node, ast.Assign) and ast.unparse(node.value).startswith('dict('):
            table = [ast.unparse(keyword.value) for keyword in node.value.keywords]
            alike = set().union(*(found.get(name, ()) for name in table))
            found.update({name: alike for name in table})
    return found


def misnamed_arguments(forward, backward):
    """Arguments of X_backward that are no argument or result of X, and no gradient of one."""
    known = {function.name: {*parameters(function), *returned_names(forward)[function.name]}
             for _, function in layers(forward)}
    return [f'{function.name}: {name}' for _, function in layers(backward)
            for name in parameters(function)
            if not {name, name.removeprefix('d')} & known[function.name.removesuffix('_backward')]]


def test_every_layer_has_its_backward_in_the_same_order():
    assert order(SOURCES['model']) == order(SOURCES['backward'])
    assert {heading for heading, _ in order(SOURCES['model'])} == {
        '# ---- Layers of the MLP', '# ---- Layers of the GPT'}
    assert len(order(SOURCES['model'])) >= 14
    assert all(function.name.endswith('_backward') for _, function in layers(SOURCES['backward']))


def test_arguments_of_a_backward_are_those_of_its_layer_its_results_and_their_gradients():
    assert misnamed_arguments(SOURCES['model'], SOURCES['backward']) == []


LAYERS = """
# ---- Layers of the MLP
def embedding(C, X): return C[X]
def add_bias(y, b): pass
def linear(x, W): return x @ W
def tanh(x): return np.tanh(x), None
def gelu(x): return x * gate, gate
ACTIVATIONS = dict(tanh=tanh, gelu=gelu)
# ---- Layers of the GPT
def attention(qkv): return ctx.reshape(N, E), weights
# ---- First values
def views(): pass
"""
BACKWARD = """
# ---- Layers of the MLP
def embedding_backward(demb, X, dC): pass
def linear_backward(dy, x, W, dW): pass
def tanh_backward(dy, x, y, gate): pass
def gelu_backward(dy, x, y, gate): pass
# ---- Layers of the GPT
def attention_backward(dctx, qkv, weights): pass
"""


def test_a_missing_backward_and_two_out_of_order_are_caught():
    assert order(LAYERS) == order(BACKWARD)
    assert len(order(LAYERS)) == 5
    lines = BACKWARD.splitlines()
    for changed in ([*lines[:3], *lines[4:]], [*lines[:3], lines[4], lines[3], *lines[5:]],
                    [*lines[:3], lines[3], *lines[3:]], [*lines[:6], lines[7], lines[6]]):
        assert order('\n'.join(changed)) != order(LAYERS)


@pytest.mark.parametrize('old, new, fault', [
    ('demb', 'dout', 'embedding_backward: dout'), ('dctx', 'dy2', 'attention_backward: dy2'),
    ('gate): pass\n# ', 's): pass\n# ', 'gelu_backward: s'),
    ('dW', 'db', 'linear_backward: db')])
def test_a_misnamed_argument_is_caught(old, new, fault):
    assert misnamed_arguments(LAYERS, BACKWARD) == []
    assert misnamed_arguments(LAYERS, BACKWARD.replace(old, new)) == [fault]


# ---- What backward takes apart is what forward has put together

def collected(function):
    """The names in each dict(...) of a function."""
    return [[keyword.arg for keyword in node.keywords] for node in ast.walk(function)
            if isinstance(node, ast.Call) and ast.unparse(node.func) == 'dict']


def taken_apart(function):
    """The names that each .values() of a function is taken apart into."""
    return [[ast.unparse(name) for name in node.targets[0].elts] for node in ast.walk(function)
            if isinstance(node, ast.Assign) and isinstance(node.targets[0], ast.Tuple)
            and ast.unparse(node.value).endswith('.values()')]


def misordered_values(forward, backward):
    """What X_backward takes apart in another order, or by other names, than X has returned it.

    None of this is noticed when it runs, where two arrays have the same shape.
    """
    faults, layer = [], {function.name: function for function in functions(forward)}
    for function in functions(backward):
        if taken_apart(function):
            twin = layer[function.name.removesuffix('_backward')]
            faults += [f'{twin.name}: {name}' for name in misnamed_keywords(twin)]
            if sorted(taken_apart(function)) != sorted(collected(twin)):
                faults.append(function.name)
    return faults


def misnamed_keywords(function, prefix=''):
    """Keywords of the dicts in a function, name=value, whose value is not (prefix and) the name."""
    return [keyword.arg for node in ast.walk(function)
            if isinstance(node, ast.Call) and ast.unparse(node.func) == 'dict'
            for keyword in node.keywords if ast.unparse(keyword.value) != prefix + keyword.arg]


def test_what_backward_takes_apart_is_what_forward_has_put_together():
    assert misordered_values(SOURCES['model'], SOURCES['backward']) == []
    apart = {function.name: list(map(len, taken_apart(function)))
             for function in functions(SOURCES['backward']) if taken_apart(function)}
    assert apart.keys() == {'mlp_steps_backward', 'mlp_backward', 'gpt_backward'}
    assert len(apart['gpt_backward']) == 2
    assert min(map(min, apart.values())) >= 5


TOGETHER = """
def f(x):
    rows.append(dict(y=y, z=z))
    return 0, dict(rows=rows, u=u)
"""
APART = """
def f_backward(d):
    rows, u = d.values()
    for row in rows:
        y, z = row.values()
"""


@pytest.mark.parametrize('old, new, fault', [
    ('y, z =', 'z, y =', 'f_backward'), ('y, z =', 'y, w =', 'f_backward'),
    ('u = d', 'u, v = d', 'f_backward'), ('rows, u =', '_, u =', 'f_backward'),
    ('z=z', 'z=y', 'f: z'), ('rows=rows, u=u', 'u=u, rows=rows', 'f_backward')])
def test_values_in_another_order_or_by_another_name_are_caught(old, new, fault):
    assert misordered_values(TOGETHER, APART) == []
    assert misordered_values(TOGETHER.replace(old, new), APART.replace(old, new)) == [fault]


# ---- Watching functions run

def targets(statement):
    """What a statement assigns, as expressions, and whether its line must name their shape."""
    if isinstance(statement, (ast.AugAssign, ast.AnnAssign)):
        return [statement.target], True
    if not isinstance(statement, ast.Assign):
        return [], False
    target, value = statement.targets[0], ast.unparse(statement.value)
    if isinstance(target, ast.Tuple):   # nothing is computed where something is taken apart,
        given = isinstance(statement.value, ast.GeneratorExp) or value.endswith('.values()')
    else:                               # and in x = ... if x is None else x
        given = value.endswith(f'else {ast.unparse(target)}')
    return [element for target in statement.targets
            for element in getattr(target, 'elts', [target])], not given


def watched_body(statements, function):
    """The statements, with a look at what each of them assigns, fills or returns."""
    result = []
    for statement in statements:
        inner = getattr(statement, 'name', function)
        for field in 'body', 'orelse', 'finalbody':
            if getattr(statement, field, None):
                setattr(statement, field, watched_body(getattr(statement, field), inner))
        for handler in getattr(statement, 'handlers', ()):
            handler.body = watched_body(handler.body, function)
        assigned, required = targets(statement)
        where = f'{function!r}, {statement.end_lineno}, locals()'
        if assigned:
            names = [ast.unparse(target) for target in assigned]
            result += [statement, *ast.parse(
                f'watch.assigned({where}, {names}, [{", ".join(names)}], {required})').body]
        elif isinstance(statement, ast.Expr) and isinstance(statement.value, ast.Call):
            call = statement.value
            arguments = ', '.join(map(ast.unparse, [call.func, *call.args, *call.keywords]))
            result += ast.parse(f'watch.called({where}, {arguments})').body
        elif isinstance(statement, ast.Return) and statement.value:
            names = [*map(ast.unparse, getattr(statement.value, 'elts', [statement.value]))]
            result += [ast.Return(ast.parse(
                f'watch.returned({where}, {names}, {ast.unparse(statement.value)})').body[0].value)]
        else:
            result.append(statement)
    return result


def watched_tree(source):
    tree = ast.parse(source)
    for function in tree.body:
        if isinstance(function, ast.FunctionDef):
            if is_kernel(function):
                function.decorator_list = []
            entered = ast.parse(f'watch.entered({function.name!r}, locals())').body
            function.body = entered + watched_body(function.body, function.name)
    return ast.fix_missing_locations(tree)


def shape_comments(source):
    """{line: shapes} for the comments at the end of a line that begin with one or more shapes.

    After `else:` they are those of the line below, which has no room for them.
    """
    comments = {}
    for token in tokenize.generate_tokens(io.StringIO(source).readline):
        if token.type == tokenize.COMMENT:
            shapes = re.match(r'#((?: *\((?:[^()]*,[^()]*)?\))+)', token.string)
            code = token.line[:token.start[1]].strip()
            if shapes and code:
                comments[token.start[0] + code.endswith(':')] = re.findall(r'\(.*?\)', shapes[1])
    return comments


def shape_of(value):
    """() for a number, None for what is neither number nor array."""
    return np.shape(value) if isinstance(value, (np.ndarray, np.number, int, float)) else None


# Letters that a layer binds by one of its arguments, whatever it is used for.
BOUND_BY = dict(
    embedding=('X', 'NT'), embedding_backward=('dC', 'VE'), linear=('W', 'IO'),
    linear_backward=('W', 'IO'), cross_entropy=('logits', 'NV'), subtract_largest=('logits', 'NV'),
    cross_entropy_backward=('probs', 'NV'))

NO_SHAPE = 'no shape in a comment'


class Watch:
    """Modules rebuilt from sources to report, and what they have reported."""

    def __init__(self, sources):
        self.comments = {name: shape_comments(source) for name, source in sources.items()}
        self.spans = {name: functions(source) for name, source in sources.items()}
        self.files = {function.name: name for name, spans in self.spans.items()
                      for function in spans}
        self.letters, self.faults, self.seen, self.shapes, self.modules = {}, {}, set(), {}, {}
        before = {name: sys.modules.get(name) for name in sources}
        try:
            for name, source in sources.items():
                module = self.modules[name] = sys.modules[name] = types.ModuleType(name)
                module.watch, module.__file__ = self, str(ROOT / f'{name}.py')
                exec(compile(watched_tree(source), f'{name}.py', 'exec'), module.__dict__)
        finally:
            for name, module in before.items():
                sys.modules.pop(name)
                if module:
                    sys.modules[name] = module

    def fault(self, function, line, text):
        self.faults[self.files.get(function), line, text] = None

    def note(self, function, name, shape):
        """Remember that a name of a function, or what it has returned, had this shape."""
        self.shapes.setdefault((function, name), set()).add(shape)

    def expected(self, function, line, scope):
        """The shapes in the comment of a line, or [] if it has none."""
        file = self.files.get(function)
        letters, shapes = dict(self.letters), []
        if function in BOUND_BY:
            name, bound = BOUND_BY[function]
            letters.update(zip_longest(bound, scope[name].shape, fillvalue=1))
        for shape in self.comments.get(file, {}).get(line, []):
            self.seen.add((file, line))
            try:
                shapes.append(eval(shape, {}, letters))
            except NameError as error:
                self.fault(function, line, f'{shape}: {error}')
        return shapes

    def compare(self, function, line, scope, names, values, required):
        """Compare the shapes of values with those in the comment: one for all, or one for each."""
        shapes = [shape_of(value) for value in values]
        if not any(shape is not None for shape in shapes):
            return                      # as masks without dropout: there is no array
        expected = self.expected(function, line, scope)
        if not expected and required and any(shapes):
            self.fault(function, line, f'{", ".join(names)}: {NO_SHAPE}')
        if len(expected) > 1 and len(expected) != len(shapes):
            self.fault(function, line, f'{len(expected)} shapes for {len(shapes)} values')
        for name, shape, wanted in zip(names, shapes, expected * len(shapes)):
            if shape not in (None, wanted):
                self.fault(function, line, f'{name}: {wanted} in the comment, {shape}')

    def entered(self, function, scope):
        for name, value in scope.items():
            self.note(function, name, shape_of(value))

    def assigned(self, function, line, scope, names, values, required):
        for name, value in zip(names, values):
            if name.isidentifier():
                self.note(function, name, shape_of(value))
        self.compare(function, line, scope, names, values, required)

    def called(self, function, line, scope, callee, *args, **keywords):
        """Call what returns nothing; the arrays that it has changed are those that it fills."""
        arrays = [arg for arg in (*args, *keywords.values()) if isinstance(arg, np.ndarray)]
        before = [array.tobytes() for array in arrays]
        callee(*args, **keywords)
        filled = [array for array, old in zip(arrays, before) if array.tobytes() != old]
        self.compare(function, line, scope, ['filled'] * len(filled), filled, True)

    def returned(self, function, line, scope, names, value):
        values = value if isinstance(value, tuple) else (value,)
        self.note(function, 'return', shape_of(values[0]))
        name, reshaped, _ = names[0].partition('.reshape(')
        if reshaped and not function.endswith('_backward'):
            self.note(function, name, shape_of(values[0]))      # the shape that callers see
        self.compare(function, line, scope, names * len(values), values, False)
        return value


def shape_faults(watch, checked, required):
    """The faults in the checked functions, whose shape comments must all have been reached.

    Only the required ones must have a comment wherever they compute an array.
    """
    faults = [f'{file}.py:{line} {text}' for file, line, text in watch.faults
              if name_of(watch, file, line) in (required if NO_SHAPE in text else checked)]
    faults += [f'{file}.py:{line} not reached' for file in watch.comments
               for line in watch.comments[file]
               if (file, line) not in watch.seen and name_of(watch, file, line) in checked]
    return faults


def name_of(watch, file, line):
    """The function at module level that a line belongs to."""
    return next((function.name for function in watch.spans[file]
                 if function.lineno <= line <= function.end_lineno), None)


def field_faults(source, batch, letters):
    """Fields of a NamedTuple whose array has not the shape in the comment at the field."""
    comments = shape_comments(source)
    lines = {field.target.id: field.lineno for node in ast.parse(source).body
             if isinstance(node, ast.ClassDef) and node.name == type(batch).__name__
             for field in node.body if isinstance(field, ast.AnnAssign)}
    return [name for name, array in batch._asdict().items()
            if [array.shape] != [eval(shape, {}, letters) for shape in comments[lines[name]]]]


# ---- Both models, all sizes different

MLP_SIZES = dict(V=11, T=3, E=4, H=7, N=9, n=9, growing=9)
GPT_SIZES = dict(V=13, T=7, E=9, H=36, L=2, A=3, N=6, S=15, B=8)


def some(shapes, rng):
    """Parameters, and room for their gradients in which everything that is filled changes."""
    return ({name: rng.standard_normal(shape) for name, shape in shapes.items()},
            {name: np.full(shape, np.nan) for name, shape in shapes.items()})


def watch_mlp(watch, model, backward, train, rng):
    V, T, E, H, N, n, _ = MLP_SIZES.values()
    watch.letters = MLP_SIZES
    words = ['abcdefghij', 'jihgfedcba']
    config = dict(model='mlp', vocab_size=V, context=T, embd=E, hidden=H)
    examples = model.mlp_examples(words, model.make_vocabulary(words), T)
    watch.batches = [(model.mlp_batch(examples, rng.permutation(len(examples))[:N]), MLP_SIZES)]
    batch = watch.batches[0][0]
    for batchnorm in False, True:
        for act in model.ACTIVATIONS:
            config.update(act=act, batchnorm=batchnorm)
            p, g = some(model.parameter_shapes(config), rng)
            loss, acts = model.mlp(config, p, batch)
            backward.mlp_backward(config, p, batch, acts, g)
    watch.letters = {**MLP_SIZES, 'N': 4096}
    statistics = train.batchnorm_statistics(p, np.resize(examples, (4096, T + 1)))
    watch.letters = MLP_SIZES
    model.mlp(config, p, batch, statistics)
    config['longest'] = 0               # only the first character, in which all n words grow
    model.generate(model.Model(config, '\0abcdefghij', p, statistics), n, rng)
    loss, values = model.mlp_steps(p, *batch)
    return p, values, backward.mlp_steps_backward(p, *batch, values)


def watch_gpt(watch, model, backward, rng):
    V, T, E, H, L, A, N, S, B = GPT_SIZES.values()
    watch.letters = GPT_SIZES
    words = ['ab', '', 'cde', 'fghijkl'[:T - 1]]
    config = dict(model='gpt', vocab_size=V, context=T, embd=E, layers=L, heads=A)
    examples = model.gpt_examples(words, '\0abcdefghijkl', T)
    tree = model.gpt_batch(examples, np.arange(3))      # of 'ab', '' and 'cde': '' is shared
    watch.batches.append((tree, GPT_SIZES))
    for norm in model.NORMS:
        for act in model.ACTIVATIONS:
            for masks in None, 2 * rng.integers(0, 2, (2*L, N, E)):
                config.update(norm=norm, act=act)
                p, g = some(model.parameter_shapes(config), rng)
                loss, acts = model.gpt(config, p, tree, masks)
                backward.gpt_backward(config, p, tree, acts, g, masks)
    watch.letters = dict(n=B, V=V)
    model.choose(acts['logits'], rng.random(B), 1., 3, 0.9)


def watch_optimizers(watch, train, rng):
    watch.letters = dict(size=5)
    for optimizer in train.OPTIMIZERS.values():
        optimizer(*rng.random((2, 5)), rng.random((2, 5)), 0.1, 3)


@pytest.fixture(scope='module')
def watch():
    watch = Watch({name: SOURCES[name] for name in ('model', 'backward', 'train')})
    model, backward, train = watch.modules.values()
    watch.steps = watch_mlp(watch, model, backward, train, np.random.default_rng(1))
    watch_gpt(watch, model, backward, np.random.default_rng(2))
    watch_optimizers(watch, train, np.random.default_rng(3))
    return watch


ALSO_CHECKED = ('mlp_batch', 'choose', 'generate', 'batchnorm_statistics', 'adam',
                'momentum', 'sgd')


def test_every_array_assignment_carries_the_shape_of_its_array(watch):
    forward = [function.name for _, function in layers(SOURCES['model'])]
    backward = [function.name for function in functions(SOURCES['backward'])
                if function.name.endswith('_backward')]
    kernels = {function.name for spans in watch.spans.values() for function in spans
               if is_kernel(function)}  # in which most assignments are of single numbers
    required = {'mlp_steps', 'mlp', 'gpt', *forward, *backward} - kernels
    assert shape_faults(watch, {*required, *kernels, *ALSO_CHECKED}, required) == []


def test_the_fields_of_a_batch_have_the_shapes_in_their_comments(watch):
    assert [field_faults(SOURCES['model'], *batch) for batch in watch.batches] == [[], []]
    tree, letters = watch.batches[1]
    assert field_faults(SOURCES['model'], tree, {**letters, 'S': 14}) == ['ancestors']


SNIPPET = """
import numpy as np
def double(x, y):
    np.add(x, x, out=y)     # (N, E)
def f(x, y):
    z = x.sum(0)            # (E,)
    z[:2] += 1              # (2,)  why
    u, v = x.T, x.T.copy()  # (E, N)
    double(x, y)            # (N, E)
    if len(x) > 9:
        a = b = None
    else:                   # (N,) () (E, N)
        a, b, c = g(x)
    n = len(x)
    return x * n            # (N, E)
def g(x):
    return x[:, 0], 1., x.T # (N,) () (E, N)
"""


def snippet_faults(source):
    watch = Watch({'snippet': source})
    watch.letters = dict(N=3, E=5)
    watch.modules['snippet'].f(np.ones((3, 5)), np.ones((3, 5)))
    return shape_faults(watch, ['f', 'g'], ['f'])


@pytest.mark.parametrize('old, new, fault', [
    ('(E,)', '(N,)', 'z: (3,) in the comment, (5,)'),
    ('(2,)', '(E,)', 'z[:2]: (5,) in the comment, (2,)'),
    ('  # (2,)  why', '  # why', 'z[:2]: no shape in a comment'),
    ('x.T.copy()', 'x.copy()', 'v: (5, 3) in the comment, (3, 5)'),
    ('y)            # (N, E)', 'y)            # (E, N)', 'filled: (5, 3) in the comment, (3, 5)'),
    ('y)            # (N, E)', 'y)', 'filled: no shape in a comment'),
    ('n = len(x)', 'n = len(x)              # (N,)', 'n: (3,) in the comment, ()'),
    ('(E,)', '(K,)', "(K,): name 'K' is not defined"),
    ('n = len(x)', 'n = [x]; n = 2          # (N,)', 'n: (3,) in the comment, ()'),
    ('n = len(x)', 'n = 2\n    k = [x]                 # (N,)', 'not reached'),
    ('n = len(x)', 'n = 3\n    if not len(x):\n        x = 2*x             # (N, E)',
     'not reached'),
    ('n = len(x)', 'n = 2\n    np.exp(y, out=y)', 'filled: no shape in a comment'),
    ('else:                   # (N,) () (E, N)', 'else:', 'a, b, c: no shape in a comment'),
    ('else:                   # (N,) ()', 'else:                   # () (N,)',
     'a: () in the comment, (3,)'),
    ('else:                   # (N,) ()', 'else:                   # (N,)',
     '2 shapes for 3 values'),
    ('1., x.T # (N,)', '2., x   # (N,)', 'x: (5, 3) in the comment, (3, 5)'),
    ('x * n            # (N, E)', 'x * n            # (E, N)',
     'x * n: (5, 3) in the comment, (3, 5)')])
def test_a_wrong_and_a_missing_shape_are_caught(old, new, fault):
    assert snippet_faults(SNIPPET) == []
    assert SNIPPET.count(old) >= 1
    assert any(found.endswith(fault) for found in snippet_faults(SNIPPET.replace(old, new, 1)))


# ---- d + a name is the gradient of what it names

def gradient_faults(values, gradients):
    """Of two dicts of arrays: whose gradient is missing, has no value, or has another shape."""
    return sorted(values.keys() ^ gradients.keys()) + [
        name for name in values.keys() & gradients.keys()
        if values[name].shape != gradients[name].shape]


def misnamed_gradients(source):
    """Keywords of dicts in backward functions, name=dname, whose two names do not agree."""
    return [name for function in functions(source) if function.name.endswith('_backward')
            for name in misnamed_keywords(function, 'd')]


def local_faults(watch):
    """Names in X_backward, d + a name in X, that had a shape which that name never had.

    What X_backward returns is the gradient of the first argument of X.
    """
    first = {function.name: parameters(function)[:1] for spans in watch.spans.values()
             for function in spans}
    faults = []
    for (function, name), shapes in watch.shapes.items():
        layer = function.removesuffix('_backward')
        if function != layer:
            names = first[layer] if name == 'return' else [name[1:]] if name[0] == 'd' else []
            faults += [f'{function}: {name}' for named in names if (layer, named) in watch.shapes
                       and not shapes - {None} <= watch.shapes[layer, named]]
    return faults


def test_the_steps_give_a_gradient_of_the_same_shape_for_every_value(watch):
    p, values, gradients = watch.steps
    assert gradient_faults({**p, **values}, gradients) == []
    assert misnamed_gradients(SOURCES['backward']) == []


def test_gradients_within_a_function_have_the_shapes_of_what_they_are_named_for(watch):
    assert local_faults(watch) == []
    named = [name for function, name in watch.shapes if function.endswith('_backward')
             and (function.removesuffix('_backward'), name[1:]) in watch.shapes]
    assert len(named) > 30
    returning = [function for (function, name), shapes in watch.shapes.items()
                 if function.endswith('_backward') and name == 'return' and shapes != {None}]
    assert len(returning) >= 12


def test_a_gradient_of_another_shape_is_caught():
    x, row = np.ones((3, 5)), np.ones((1, 5))
    assert gradient_faults(dict(x=x, row=row), dict(x=x, row=row)) == []
    assert gradient_faults(dict(x=x, row=row), dict(x=x, row=row[0])) == ['row']
    assert gradient_faults(dict(x=x, row=row), dict(x=x)) == ['row']
    assert misnamed_gradients('def f_backward():\n    return dict(x=dx, y=dz)') == ['y']


@pytest.mark.parametrize('line, fault', [
    ('dx = dz + 0', ['f_backward: dx']), ('return dz + 0', ['f_backward: return']),
    ('return np.zeros((3, 5))', [])])
def test_a_local_gradient_of_another_shape_is_caught(line, fault):
    watch = Watch({'snippet': f"""
import numpy as np
def f(x):
    z = x.sum(0)
    return z
def f_backward(dz):
    {line}
"""})
    watch.modules['snippet'].f(np.ones((3, 5)))
    watch.modules['snippet'].f_backward(np.ones(5))
    assert local_faults(watch) == fault


# ---- Reading from top to bottom

def bindings(statements):
    """{name: first line that binds it} of some statements, what is inside functions left out."""
    found, others = {}, set()

    def visit(node):
        names = []
        if isinstance(node, (ast.Nonlocal, ast.Global)):
            others.update(node.names)
        if isinstance(node, (ast.FunctionDef, ast.ClassDef)):
            names = [node.name]
        elif isinstance(node, (ast.Import, ast.ImportFrom)):
            names = [(alias.asname or alias.name).split('.')[0] for alias in node.names]
        elif isinstance(node, ast.Name) and isinstance(node.ctx, ast.Store):
            names = [node.id]
        elif isinstance(node, ast.ExceptHandler) and node.name:
            names = [node.name]
        for name in names:
            found[name] = min(node.lineno, found.get(name, node.lineno))
        if not isinstance(node, (ast.FunctionDef, ast.ClassDef, ast.Lambda, *COMPREHENSIONS)):
            for child in ast.iter_child_nodes(node):
                visit(child)

    for statement in statements:
        visit(statement)
    return {name: line for name, line in found.items() if name not in others}


COMPREHENSIONS = ast.ListComp, ast.SetComp, ast.DictComp, ast.GeneratorExp


def names_above_definition(source):
    """(name, line) of each use above the first line that binds the name.

    What a function takes from around it must stand above the function, not only above the call.
    """
    faults = []

    def visit(node, scopes):
        """A scope is what it binds, and the line of the function in it that we are in, if any."""
        children = ast.iter_child_nodes(node)
        if isinstance(node, (ast.FunctionDef, ast.Lambda)):
            children = node.body if isinstance(node.body, list) else [node.body]
            own = {**bindings(children), **{arg.arg: 0 for arg in ast.walk(node.args)
                                            if isinstance(arg, ast.arg)}}
            for child in *node.args.defaults, *getattr(node, 'decorator_list', ()):
                visit(child, scopes)
            scopes = [(names, line or node.lineno) for names, line in scopes] + [(own, None)]
        elif isinstance(node, COMPREHENSIONS):
            own = {name.id: 0 for generator in node.generators
                   for name in ast.walk(generator.target) if isinstance(name, ast.Name)}
            scopes = [*scopes, (own, None)]
        elif isinstance(node, ast.Name) and isinstance(node.ctx, ast.Load):
            found = next((scope for scope in reversed(scopes) if node.id in scope[0]), None)
            if found and found[0][node.id] > (found[1] or node.lineno):
                faults.append((node.id, node.lineno))
        for child in children:
            visit(child, scopes)

    tree = ast.parse(source)
    visit(tree, [(bindings(tree.body), None)])
    return faults


@pytest.mark.parametrize('name', SOURCES)
def test_no_name_is_used_above_its_definition(name):
    assert names_above_definition(SOURCES[name]) == []


@pytest.mark.parametrize('source, fault', [
    ('def f():\n    return g()\ndef g():\n    pass', [('g', 2)]),
    ('def f():\n    return TABLE[0]\nTABLE = [f]', [('TABLE', 2)]),
    ('def f():\n    def g():\n        return x\n    x = 1\n    return g', [('x', 3)]),
    ('x = [y for i in range(3)]\ny = 1', [('y', 1)]),
    ('def f():\n    for i in range(2):\n        print(x)\n        x = i', [('x', 3)]),
    ('class C:\n    def f(self):\n        return D\nclass D:\n    pass', [('D', 3)]),
    ('def g(n):\n    return g(n - 1)\ndef f():\n    x = 1\n    return g(sum(x for x in [x]))', [])])
def test_a_name_above_its_definition_is_caught(source, fault):
    assert names_above_definition(source) == fault


# ---- Imports, and what Numba's cache does not see

LIBRARIES = {'numpy', 'numba', 'tqdm'}
ONE_WAY = dict(model=set(), backward={'model'}, train={'model', 'backward'},
               sample={'model', 'train'})


def imports(tree):
    """(name, module) for all that is imported within a syntax tree."""
    found = []
    for node in ast.walk(tree):
        if isinstance(node, ast.Import):
            found += [(alias.asname or alias.name, alias.name) for alias in node.names]
        elif isinstance(node, ast.ImportFrom):
            module = '.' * node.level + (node.module or '')
            found += [(alias.asname or alias.name, module) for alias in node.names]
    return found


def import_faults(name, source):
    """What a file may not import, or not where it does; matplotlib only within one function."""
    allowed = set(sys.stdlib_module_names) | LIBRARIES | ONE_WAY[name]
    drawing = [function for function in functions(source)
               if any(module.split('.')[0] == 'matplotlib' for _, module in imports(function))]
    inside = imports(drawing[0]) if len(drawing) == 1 else []
    return [module for alias, module in imports(ast.parse(source))
            if module.split('.')[0] not in allowed
            and not (module.split('.')[0] == 'matplotlib' and (alias, module) in inside)]


@pytest.mark.parametrize('name', SOURCES)
def test_imports_run_one_way_and_bring_nothing_else(name):
    assert import_faults(name, SOURCES[name]) == []
    assert {module for _, module in imports(ast.parse(SOURCES[name]))} & {*FILES} == ONE_WAY[name]


@pytest.mark.parametrize('name, source, fault', [
    ('model', 'import json, numpy as np', []),
    ('model', 'import backward', ['backward']),
    ('backward', 'from train import train_step', ['train']),
    ('sample', 'import train', []),
    ('sample', 'from backward import gradient', ['backward']),
    ('train', 'import model\nimport backward', []),
    ('train', 'def f():\n    import sample', ['sample']),
    ('train', 'import torch.nn', ['torch.nn']),
    ('train', 'from . import model', ['.']),
    ('train', 'import matplotlib', ['matplotlib']),
    ('train', 'def plot():\n    from matplotlib.figure import Figure', []),
    ('train', 'def f():\n    import matplotlib\ndef g():\n    import matplotlib',
     ['matplotlib', 'matplotlib']),
    ('train', 'import matplotlib as a\ndef f():\n    import matplotlib', ['matplotlib']),
    ('train', 'def f():\n    import scipy', ['scipy'])])
def test_a_wrong_import_is_caught(name, source, fault):
    assert import_faults(name, source) == fault


def kernel_faults(source):
    """Names in kernels that are neither local, nor builtin, nor of math, NumPy or a kernel here.

    A kernel on disk is compiled anew when its own file changes. It keeps the values that global
    names had, and the kernels of other files as they were.
    """
    tree = ast.parse(source)
    kernels = {function.name: function for function in functions(source) if is_kernel(function)}
    known = {alias for alias, module in imports(tree) if module in ('math', 'numpy')} | {*kernels}
    known |= {*dir(builtins)} - bindings(tree.body).keys()
    return [f'{name}: {node.id}' for name, function in kernels.items()
            for statement in function.body for node in ast.walk(statement)
            if isinstance(node, ast.Name) and isinstance(node.ctx, ast.Load)
            and node.id not in {*parameters(function), *bindings(function.body), *known}]


@pytest.mark.parametrize('name', SOURCES)
def test_kernels_read_nothing_that_can_change_behind_the_back_of_the_cache(name):
    assert kernel_faults(SOURCES[name]) == []


@pytest.mark.parametrize('line, fault', [
    ('y = sqrt(x) + np.float32(len(np.zeros(3)))\n    return helper(y)', []),
    ('return A * x', ['f: A']), ('return GELU_C * x', ['f: GELU_C']),
    ('return softmax(x)', ['f: softmax']), ('return m.softmax(x)', ['f: m']),
    ('return max(x, 1)', ['f: max']), ('return plain(x)', ['f: plain'])])
def test_a_kernel_that_reads_a_global_value_or_another_file_is_caught(line, fault):
    assert kernel_faults(f"""
import numpy as np
import model as m
from math import sqrt
from model import GELU_C, kernel, softmax
A = 2
max = sqrt
def plain(x): return x
@kernel
def helper(x): return x
@kernel
def f(x):
    {line}
""") == fault


# ---- Size and place

def long_lines(source):
    return [number for number, line in enumerate(source.splitlines(), 1) if len(line) > 100]


def test_no_line_is_longer_than_100_characters():
    faults = {path: long_lines((ROOT / path).read_text()) for path in tracked()
              if path.endswith('.py') and (ROOT / path).exists()}
    assert {path: lines for path, lines in faults.items() if lines} == {}


def test_a_long_line_is_caught():
    assert long_lines('x\n' + 100 * 'x' + '\n' + 101 * 'x') == [3]


def test_the_four_files_do_not_grow():
    """Whoever raises a number says in the commit what it bought."""
    lines = {name: len(source.splitlines()) for name, source in SOURCES.items()}
    assert sum(lines.values()) <= 2270
    assert lines['model'] <= 620


def test_the_top_level_holds_only_what_is_allowed():
    assert {path.split('/')[0] for path in tracked()} - TOP_LEVEL == set()
