"""Exercises: a copy of the project in which gradients are to be written, or a mistake to be found.

    python tests/exercise.py FOLDER                  every backward function is left out
    python tests/exercise.py FOLDER linear_backward tanh_backward        only these two
    python tests/exercise.py FOLDER Ex1              the MLP one operation at a time, all its lines
    python tests/exercise.py FOLDER dembcat          Ex1, only the lines from dembcat on
    python tests/exercise.py FOLDER --bug            all is there, with a mistake drawn at random
    python tests/exercise.py FOLDER --bug 3          the third mistake of tests/mistakes.py

FOLDER is new or empty. It takes less than a second. The students get FOLDER, which has no tests.

`python backward.py` in FOLDER tells what is right, what is WRONG and what is not written yet. Its
exit status is 0 if all gradients are right, otherwise 1. A function that is left out keeps its
docstring. Of Ex1 (mlp_steps_backward) all comments are kept, and each line becomes `dX = ...` with
the shape of dX: so lines that are written are checked while later ones are still missing.
"""
import argparse
import ast
import random
import re
import shutil
import sys
from pathlib import Path

from mistakes import MISTAKES, plant

ROOT = Path(__file__).resolve().parent.parent
COPIED = 'model.py', 'backward.py', 'train.py', 'sample.py', 'requirements.txt', 'README.md'
CHECK = '\n# ---- The gradient check'         # what stands above it computes gradients
EX1 = 'mlp_steps_backward'
COLUMN = 59                                   # where the comments of Ex1 begin


# ---- Leaving out

def functions(source):
    """The functions above the gradient check, by name, as nodes of the syntax tree."""
    above = ast.parse(source.split(CHECK)[0])
    return {node.name: node for node in above.body if isinstance(node, ast.FunctionDef)}


def ex1_lines(source):
    """(statement, name of the gradient that it computes) for the lines of Ex1, in their order."""
    body = functions(source)[EX1].body
    gradients = [ast.unparse(keyword.value) for keyword in body[-1].value.keywords]
    lines = []
    for statement in body[1:-1]:
        # ast.walk goes from the outside inwards: the first name is the one that is assigned or, in
        # np.add.at(dC, X, demb), filled.
        name = next(node.id for node in ast.walk(statement) if isinstance(node, ast.Name))
        if name in gradients:
            lines.append((statement, name))
    return lines


def leave_out(source, names):
    """The source of backward.py without these functions, and without Ex1 from these lines on.

    Two lines of Ex1 about one gradient become one, unless other lines stand between them.
    """
    new = source.splitlines(keepends=True)                 # a line that goes becomes ''
    left_out, before = EX1 in names, None
    for statement, name in ex1_lines(source):
        left_out = left_out or name in names
        if left_out:
            first, last = statement.lineno - 1, statement.end_lineno
            comment = new[last - 1][statement.end_col_offset:].strip()
            comment = re.sub(r'([2-9] of \d)', r'\1: with +=', comment)
            line = f'    {name} = ...'.ljust(COLUMN) + f'{comment}\n'
            new[first:last] = ['' if name == before else line, *[''] * (last - first - 1)]
        before = name
    for name, function in functions(source).items():
        if name in names and name != EX1:
            first, last = function.body[0].end_lineno, function.end_lineno
            line = "    raise NotImplementedError('not written yet')\n"
            new[first:last] = [line, *[''] * (last - first - 1)]
    return ''.join(new)


# ---- python tests/exercise.py

def copy_project(folder):
    """What a student needs, in a folder that is new or empty."""
    (folder / 'data').mkdir(parents=True)
    for name in (*COPIED, *(path.relative_to(ROOT) for path in ROOT.glob('data/*.*'))):
        shutil.copy(ROOT / name, folder / name)


NEXT = """  python backward.py --only NAME
there says what is right, WRONG or not written yet (--help has the names; without --only it is all).
  NUMBA_DISABLE_JIT=1 python backward.py --only NAME
does it in plain Python, where a wrong index is an error with its line. Compiled code would read or
write elsewhere in memory, or crash. dW, db, dgain, dbias and dC are arrays to be filled, so write
dW[:] = ..., as dW = ... fills nothing. The formulas are in the docstrings and in the derivative
reference at the end of README.md."""


def plant_unseen(folder, mistake):
    """Write the mistake into the copy; no comment moves, by which the line could be found."""
    path = folder / mistake.file
    before = path.read_text('utf-8').splitlines()
    plant(folder, mistake)
    lines = []
    for old, new in zip(before, path.read_text('utf-8').splitlines()):
        code, mark, comment = new.partition(' # ')
        lines.append(code.rstrip().ljust(old.find(' # ')) + mark + comment + '\n')
    path.write_text(''.join(lines), 'utf-8')


def main(argv=None):
    """Write the exercise and print what to do with it."""
    parser = argparse.ArgumentParser('exercise.py', description=__doc__.splitlines()[0])
    parser.add_argument('folder', metavar='FOLDER', type=Path, help='a new or empty folder')
    parser.add_argument('functions', metavar='FUNCTION', nargs='*',
                        help='what is left out: functions, Ex1, or a gradient of Ex1, which is '
                             'left out from there on (all functions that end in _backward)')
    parser.add_argument('--bug', metavar='N', type=int, nargs='?', const=0,
                        help='leave out nothing, but plant mistake N (one drawn at random)')
    args = parser.parse_args(argv)
    folder, source = args.folder, (ROOT / 'backward.py').read_text('utf-8')
    known, ex1 = functions(source), {EX1, *(gradient for _, gradient in ex1_lines(source))}
    names = [EX1 if name == 'Ex1' else name for name in args.functions]
    for name in names:
        if name not in {*known, *ex1}:
            parser.error(f'{name} cannot be left out: take Ex1, a gradient of Ex1 such as dC, or '
                         f'functions of {", ".join(known)}')
    if args.bug is not None and names:
        parser.error('with --bug nothing is left out: name no function')
    if args.bug not in (None, *range(len(MISTAKES) + 1)):
        parser.error(f'--bug {args.bug}: there are mistakes 1 to {len(MISTAKES)}')
    # Not left out unless named: add_at and sum_rows, parts of a layer; gradient, for both models.
    names = names or [name for name in known if name.endswith('_backward')]
    try:
        if folder.exists() and (not folder.is_dir() or any(folder.iterdir())):
            parser.error(f'{folder} is there already and is not an empty folder')
        copy_project(folder)
    except OSError as error:
        parser.error(f'{folder}: {error.strerror}')
    if args.bug is None:
        (folder / 'backward.py').write_text(leave_out(source, names), 'utf-8')
        print(f'In {folder}, backward.py is to be completed.')
    else:
        visible = [mistake for mistake in MISTAKES if mistake.file == 'backward.py']
        plant_unseen(folder, MISTAKES[args.bug - 1] if args.bug else random.choice(visible))
        print(f'In {folder}, one of {len(MISTAKES)} mistakes is planted.\nThe gradient check sees '
              f'{len(visible)} of them, but not those in model.py.')
    print(NEXT)
    if args.bug is None and ex1 & {*names}:
        print(f'Write {EX1} line after line: one that uses what is still ... is an error.')


if __name__ == '__main__':
    sys.exit(main())
